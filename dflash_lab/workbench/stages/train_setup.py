"""From the stage's flat parameters to what the training room is told."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_lab import files
from dflash_lab.errors import InputError
from dflash_lab.workbench.stages.clearance import SNAPSHOT
from dflash_lab.workbench.stages.train_probe import tau_probe

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from dflash_lab.drafter.config import DrafterConfig
    from dflash_lab.drafter.live import LiveItems, SampleItems
    from dflash_lab.drafter.model import Drafter
    from dflash_lab.drafter.rows import PackedRows
    from dflash_lab.drafter.settings import TrainSettings
    from dflash_lab.drafter.trainer import TrainReport
    from dflash_lab.extraction.store import FeatureStore
    from dflash_lab.memory.gate import Clearance, NotPredicted
    from dflash_lab.target.head import TargetHead
    from dflash_lab.workbench.stages.train_drafter import TrainDrafterParams

    States = FeatureStore | SampleItems

MEMORY = "memory.json"  # of the first process: predicted and measured peak, how a live target runs its rows
logger = logging.getLogger(__name__)


def train_here(
    params: TrainDrafterParams, progress: Any = None, open_with: Callable[..., Any] | None = None
) -> TrainReport:
    """Load states (or the target that makes them), the ends of the target and the drafter, and train in this
    process, perhaps one of several. `open_with` replaces `open_states`.
    """
    import torch

    from dflash_lab.drafter.live import LiveItems
    from dflash_lab.drafter.parallel import join
    from dflash_lab.drafter.state import setup
    from dflash_lab.drafter.train import train
    from dflash_lab.memory.gate import explained
    from dflash_lab.memory.planner import device_budget_gib
    from dflash_lab.target.loading import choose_device
    from dflash_lab.target.sources import load_config
    from dflash_lab.workbench.stages.clearance import ask_training, memory_figures

    group, device = join(params.parallel, choose_device(params.device))
    if params.attention == "flex" and device.type != "cuda":
        raise InputError(
            f"train_drafter: attention='flex' needs CUDA for its backward pass, and this trains on {device}. "
            "Give attention='auto'."
        )
    dtype = drafter_dtype(params, device)
    if params.compile and device.type == "cuda":
        torch.compiler.reset()  # shapes of earlier runs of this process count against the compiler's limit
    target, free_gib = load_config(params.target), device_budget_gib(device)
    store = open_bare(params) if params.source == "store" else None
    config = drafter_config(params, store)
    final = bool(getattr(store, "has_final", False))

    def ask(rows: str = "") -> Clearance | NotPredicted:
        return ask_training(
            params, target, config, device, dtype, final_states=final, rows=rows, budget_gib=free_gib
        )

    cleared = ask()  # before anything is loaded
    sizes = {
        "anchors": params.anchors, "block_size": config.block_size, "context": params.context_tokens,
        "hidden": config.hidden_size, "vocabulary": config.vocab_size, "taps": len(config.tap_ids),
        "intermediate": config.intermediate_size,
    }  # fmt: skip
    watch: dict[str, Any] = dict(device=device, snapshot=params.folder / snapshot_name(group))
    with explained(cleared, sizes, **watch):
        items, head = (open_with or open_states)(params, device, dtype)
        drafter = first_drafter(params, config, head, device, dtype)
    if isinstance(items, LiveItems):
        cleared = ask(items.forward.path)
    settings = train_settings(params, items, config)
    run, source = params.folder / "run", source_of(params, items)
    if group.rank == 0:
        lengths = items.lengths[~items.heldout].tolist()
        now = setup(settings, drafter, lengths, group.world, source)
        set_aside_other_run(run, now, anew=params.force)
    group.barrier()
    probe = tau_probe(params, items, head) if params.tau_samples else None
    with explained(cleared, sizes, **watch):
        report = train(
            items,
            head,
            drafter,
            settings,
            folder=run,
            probe=probe,
            on_progress=progress,
            group=group,
            source=source,
        )
    if group.rank == 0:
        figures: dict[str, Any] = memory_figures(cleared, device)
        if isinstance(items, LiveItems):
            figures["live_rows"] = items.forward.way
        files.write_json(params.folder / MEMORY, figures)
    return report


def snapshot_name(group: Any) -> str:
    """The file of a process's last refused request; of one process, simply that."""
    path = Path(SNAPSHOT)
    return path.name if group.world == 1 else f"{path.stem}-{group.rank}{path.suffix}"


def drafter_dtype(params: TrainDrafterParams, device: torch.device) -> torch.dtype:
    """The type of the drafter's weights: bfloat16 on CUDA and float32 elsewhere, unless given."""
    import torch

    name = params.drafter_dtype
    return getattr(torch, ("bfloat16" if device.type == "cuda" else "float32") if name == "auto" else name)


def first_drafter(
    params: TrainDrafterParams,
    config: DrafterConfig,
    head: TargetHead,
    device: torch.device,
    dtype: torch.dtype,
) -> Drafter:
    """The drafter before its first step, drawn or read, compiled on CUDA if asked for."""
    import torch

    from dflash_lab.drafter.checkpoint import load_checkpoint
    from dflash_lab.drafter.model import Drafter

    if params.start_from:
        drafter = load_checkpoint(params.start_from, device, dtype)
        if drafter.config != config:
            raise InputError(f"{params.start_from} is a drafter of another shape than these parameters say.")
    else:
        with torch.device("meta"):  # a billion weights are drawn once, not first as torch's layers would
            empty = Drafter(config)
        empty.to_empty(device="cpu").initialize(torch.Generator().manual_seed(params.seed))
        drafter = empty.to(device, dtype)
        drafter.fit_to_head(head.weight)
    drafter.gradient_checkpointing = params.gradient_checkpointing
    if params.compile and device.type == "cuda":
        drafter.compile_layers()
    return drafter


def open_states(
    params: TrainDrafterParams, device: torch.device, dtype: torch.dtype
) -> tuple[FeatureStore | LiveItems, TargetHead]:
    """The feature store, or the samples and the live target on `device`; and the target's head."""
    if params.source == "store":
        from dflash_lab.extraction.store import open_store

        return open_store(params.store_path), load_ends(params, device, dtype)
    items = open_live(params, device)
    if items.target.dtype == dtype and params.head < 0:
        return items, items.target.head
    return items, load_ends(params, device, dtype)


def load_ends(params: TrainDrafterParams, device: torch.device, dtype: torch.dtype) -> TargetHead:
    """The target's embedding, final norm and head: on the drafter's `device`, or on the GPU that was named
    for them.
    """
    import torch

    from dflash_lab.target.loading import load_head

    place = torch.device("cuda", params.head) if device.type == "cuda" and params.head >= 0 else device
    return load_head(params.target, device=place, dtype=dtype, seed=params.seed)


def open_live(params: TrainDrafterParams, device: torch.device) -> LiveItems:
    """The samples and the target on `device` that makes their states."""
    from dflash_lab.drafter.live import LiveItems
    from dflash_lab.target.loading import load_target

    target = load_target(params.target, device=device, dtype=params.dtype, seed=params.seed)
    if target.is_hybrid:
        from dflash_lab.extraction.fast.apply import speed_up

        speed_up(target, "auto")
    return LiveItems(
        params.samples_path,
        target,
        tap_ids=live_taps(params),
        context_tokens=params.context_tokens,
        compile=params.compile_target and target.device.type == "cuda",
    )


def packed_rows(params: TrainDrafterParams, items: LiveItems) -> tuple[PackedRows, PackedRows | None]:
    """The rows that the training loop draws from these parameters, and the held-out ones if there are any."""
    import numpy as np

    from dflash_lab.drafter.rows import PackedRows

    config, pad = drafter_config(params, items), items.target.device.type == "cuda"
    sizes = dict(context_tokens=params.context_tokens, anchors=params.anchors, seed=params.seed)
    train, heldout = np.flatnonzero(~items.heldout), np.flatnonzero(items.heldout)
    rows = PackedRows(items, train, config, pad=pad, **sizes)
    return rows, PackedRows(items, heldout, config, pad=pad, **sizes) if len(heldout) else None


def open_bare(params: TrainDrafterParams) -> States:
    """What rows are planned from, without a target: the store, or the samples alone, which are checked."""
    from dflash_lab.drafter.live import SampleItems
    from dflash_lab.extraction.store import open_store
    from dflash_lab.target.sources import load_config

    if params.source == "store":
        return open_store(params.store_path)
    config = load_config(params.target)
    items = SampleItems(params.samples_path, config.hidden_size, live_taps(params))
    items.check_vocabulary(config.vocab_size)
    if items.heldout.all():
        raise InputError(
            f"{params.samples_path}: every sample is held out, none is left to train on. Run prepare with "
            "more conversations or a smaller heldout_fraction."
        )
    return items


def live_taps(params: TrainDrafterParams) -> list[int]:
    """The layers a live target is tapped at."""
    from dflash_lab.target.sources import load_config
    from dflash_lab.target.taps import default_tap_ids

    return params.tap_ids or default_tap_ids(load_config(params.target).num_hidden_layers)


def drafter_config(params: TrainDrafterParams, states: Any) -> DrafterConfig:
    """The drafter's shape, from parameters, target and the taps of a store (`states`; live, none is
    needed).
    """
    from dflash_lab.drafter.config import DrafterConfig, resolve_mask_token_id
    from dflash_lab.target.identity import identify
    from dflash_lab.target.sources import load_config, load_tokenizer, resolve

    target = load_config(params.target)
    tokenizer = None if params.target.startswith("random:") else load_tokenizer(params.target)
    mask, why = resolve_mask_token_id(target.vocab_size, explicit=params.mask_token_id, tokenizer=tokenizer)
    logger.info("masked slots hold token %d: %s", mask, why)
    if params.source == "store":
        weights = identify(resolve(params.target), seed=params.seed)["weights"]
        states.check_made_by(params.target, weights, target.hidden_size)
    # As DFlash 2 was released: bidirectional in every layer, the convolutions being causal.
    second: dict[str, Any] = dict(
        conv_kernel_size=2, conv_group_size=16, selector_rank=256, selector_top_k=16, is_causal=False
    )
    shape = {
        n: getattr(params, n) or None for n in ("num_heads", "num_kv_heads", "head_dim", "intermediate_size")
    }
    return DrafterConfig.from_target(
        target,
        mask_token_id=mask,
        num_layers=params.num_layers,
        block_size=params.block_size,
        tap_ids=states.tap_ids if params.source == "store" else live_taps(params),
        sliding_layers=tuple(params.sliding_layers),
        sliding_window=params.sliding_window,
        **shape,
        **(second if params.second else {}),
    )


def train_settings(params: TrainDrafterParams, items: States, config: DrafterConfig) -> TrainSettings:
    """The training room's settings; `epochs` become steps by counting the packed rows."""
    import numpy as np

    from dflash_lab.drafter.loss.config import LossConfig
    from dflash_lab.drafter.optimizer import OptimizerConfig
    from dflash_lab.drafter.rows import PackedRows
    from dflash_lab.drafter.settings import TrainSettings

    steps = params.max_steps
    if not steps:
        rows = PackedRows(
            items,
            np.flatnonzero(~items.heldout),
            config,
            context_tokens=params.context_tokens,
            anchors=params.anchors,
            seed=params.seed,
        ).count(0)
        steps = max(1, math.ceil(params.epochs * rows / (params.accumulate * params.world)))
    same = (
        "context_tokens anchors accumulate selector_weight gamma denominator noise_std warmup floor "
        "clip_norm log_every eval_every eval_rows checkpoint_every keep max_bad_steps explode_factor "
        "time_limit_s attention seed"
    )
    return TrainSettings(
        max_steps=steps,
        loss=LossConfig(
            hard_weight=params.hard_weight,
            soft_weight=params.soft_weight,
            temperature=params.temperature,
            cap_weight=params.cap_weight,
            tv_weight=params.tv_weight,
            lk_weight=params.lk_weight,
            length_weight=params.length_weight,
            acceptance=params.acceptance,  # type: ignore[arg-type]
            label_source=params.labels,  # type: ignore[arg-type]
            weighting="dpace" if params.weighting == "dpace" else "given",
            dpace_alpha=params.dpace_alpha,
        ),
        optimizer=OptimizerConfig(
            kind=params.optimizer,
            lr=params.lr,
            weight_decay=params.weight_decay,
            muon_lr=params.muon_lr,
            moments=params.moments,
            offload=params.offload,
        ),
        **{name: getattr(params, name) for name in same.split()},
    )


def source_of(params: TrainDrafterParams, states: Any) -> dict[str, Any]:
    """Where states and first weights come from: the identity of the store, or of samples and target; and the
    checkpoint started from.
    """
    from dflash_lab.drafter.checkpoint import WEIGHTS
    from dflash_lab.files import checksum

    first = checksum(Path(params.start_from) / WEIGHTS) if params.start_from else f"seed {params.seed}"
    if params.source == "live":
        return {"live": states.source(), "first_weights": first}
    return {"store": states.manifest, "first_weights": first}


def set_aside_other_run(run: Path, setup: dict[str, Any], *, anew: bool) -> None:
    """Rename a run of another setup, or a finished one when `anew`, to `run-1`, `run-2`, ...: nothing is
    lost.
    """
    from dflash_lab.drafter.state import differences, newest, saved_setup

    saved, last = saved_setup(run), newest(run / "checkpoints")
    if saved is None or last is None:
        return
    changed = differences(saved, setup)
    finished = last.name == f"step-{setup['settings']['max_steps']:08d}"
    if not changed and not (anew and finished):
        return
    number = 1
    while (other := run.with_name(f"{run.name}-{number}")).exists():
        number += 1
    run.rename(other)
    why = "; ".join(changed[:4]) or "finished, and force is set"
    logger.info("the earlier run (%s) is kept as %s", why, other)
