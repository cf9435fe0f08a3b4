"""From the stage's flat parameters to what the training room is told."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_lab.errors import InputError

if TYPE_CHECKING:
    import torch

    from dflash_lab.drafter.config import DrafterConfig
    from dflash_lab.drafter.live import LiveItems, SampleItems
    from dflash_lab.drafter.objective import TrainSettings
    from dflash_lab.drafter.rows import PackedRows
    from dflash_lab.extraction.store import FeatureStore
    from dflash_lab.models.load import TargetHead
    from dflash_lab.workbench.progress import ProgressCallback
    from dflash_lab.workbench.stages.memory_sweep import MemorySweepParams
    from dflash_lab.workbench.stages.train_drafter import TrainDrafterParams

    States = FeatureStore | SampleItems

logger = logging.getLogger(__name__)


def drafter_dtype(params: TrainDrafterParams, device: torch.device) -> torch.dtype:
    """The type of the drafter's weights: bfloat16 on CUDA and float32 elsewhere, unless given."""
    import torch

    name = params.drafter_dtype
    return getattr(torch, ("bfloat16" if device.type == "cuda" else "float32") if name == "auto" else name)


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

    from dflash_lab.models.load import load_head

    place = torch.device("cuda", params.head) if device.type == "cuda" and params.head >= 0 else device
    return load_head(params.target, device=place, dtype=dtype, seed=params.seed)


def open_live(params: TrainDrafterParams, device: torch.device) -> LiveItems:
    """The samples and the target on `device` that makes their states."""
    from dflash_lab.drafter.live import LiveItems
    from dflash_lab.models.load import load_target

    target = load_target(params.target, device=device, dtype=params.dtype, seed=params.seed)
    if target.is_hybrid:
        from dflash_lab.extraction.fused_layers import speed_up

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
    from dflash_lab.models.source import load_config

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


def check_states(params: TrainDrafterParams, progress: ProgressCallback | None) -> None:
    """Tell what is wrong with the store or the samples; a store's bytes are read where that is wanted."""
    from dflash_lab.extraction.checks import check_parts
    from dflash_lab.extraction.store import trial_of

    states = open_bare(params)
    if params.source != "store":
        return
    if total := trial_of(params.store_path):
        logger.info("the store holds %d of %d samples, a trial (max_samples of extract)", len(states), total)
    if params.check_store:
        check_parts(params.store_path, progress)


def live_taps(params: TrainDrafterParams) -> list[int]:
    """The layers a live target is tapped at."""
    from dflash_lab.models.hooks import default_tap_ids
    from dflash_lab.models.source import load_config

    return params.tap_ids or default_tap_ids(load_config(params.target).num_hidden_layers)


def drafter_config(params: TrainDrafterParams, states: Any) -> DrafterConfig:
    """The drafter's shape, from parameters, target and the taps of a store (`states`; live, none is
    needed).
    """
    from dflash_lab.data.samples import occurs
    from dflash_lab.drafter.config import DrafterConfig, resolve_mask_token_id
    from dflash_lab.models.source import identify, load_config, load_tokenizer, resolve

    target = load_config(params.target)
    tokenizer = None if params.target.startswith("random:") else load_tokenizer(params.target)
    samples = params.rendered()[:1]

    def occurring(token: int) -> bool:
        return any(path.exists() and occurs(path, token) for path in samples)

    mask, why = resolve_mask_token_id(
        target.vocab_size, explicit=params.mask_token_id, tokenizer=tokenizer, occurs=occurring
    )
    logger.info("masked slots hold token %d: %s", mask, why)
    if params.mask_token_id >= 0 and occurring(mask):
        logger.warning("mask_token_id=%d occurs in the samples: a masked slot looks like that token", mask)
    if params.source == "store":
        weights = identify(resolve(params.target), seed=params.seed)["weights"]
        states.check_made_by(params.target, weights, target.hidden_size)
    return DrafterConfig.from_target(
        target,
        mask_token_id=mask,
        num_layers=params.num_layers,
        block_size=params.block_size,
        tap_ids=states.tap_ids if params.source == "store" else live_taps(params),
        sliding_layers=tuple(params.sliding_layers),
        sliding_window=params.sliding_window,
        **own_shape(params),
    )


def check_room(params: TrainDrafterParams, config: DrafterConfig, dtype: torch.dtype) -> None:
    """Hold what a run leaves against the disks, before anything is loaded: the drafter, beside which an
    earlier one stays until it is whole, and where training begins anew its best weights and a checkpoint
    (weights, fp32 masters and two moments). Raises an `InputError` when it does not fit.
    """
    import shutil

    from dflash_lab.drafter.checkpoint import newest

    weights = config.parameter_count * dtype.itemsize
    state = config.parameter_count * (4 + 2 * (1 if params.moments == "int8" else 4))
    begun = newest(params.folder / "run" / "checkpoints") is not None
    needs = {params.folder: 0 if begun else 2 * weights + state}
    needs[params.fresh_drafter] = weights
    by_disk: dict[int, int] = {}
    for folder, bytes_needed in needs.items():
        disk = folder.stat().st_dev
        by_disk[disk] = by_disk.get(disk, 0) + bytes_needed
        free = shutil.disk_usage(folder).free
        if by_disk[disk] > free:
            stands = params.drafter_path.exists()
            earlier = " An earlier drafter stays until it is whole." if stands else ""
            raise InputError(
                f"{folder}: the drafter and the checkpoints of its training take "
                f"{by_disk[disk] / 2**30:,.1f} GiB, {free / 2**30:,.1f} GiB are free.{earlier} "
                "Free space, or give run_dir or drafter on another disk."
            )


def own_shape(params: TrainDrafterParams | MemorySweepParams) -> dict[str, Any]:
    """The drafter's sizes that the parameters give, None for the target's, and what makes it a DFlash 2."""
    names = ("num_heads", "num_kv_heads", "head_dim", "intermediate_size")
    # As DFlash 2 was released: bidirectional in every layer, the convolutions being causal.
    dflash2: dict[str, Any] = dict(
        conv_kernel_size=2, conv_group_size=16, selector_rank=256, selector_top_k=16, is_causal=False
    )
    return {name: getattr(params, name) or None for name in names} | (dflash2 if params.dflash2 else {})


def train_settings(params: TrainDrafterParams, items: States, config: DrafterConfig) -> TrainSettings:
    """The training room's settings; `epochs` become steps by counting the packed rows, `min_steps` at
    least: a few dozen chats are one row, and six passes over it six steps.
    """
    import numpy as np

    from dflash_lab.drafter.loss_terms import LossConfig
    from dflash_lab.drafter.objective import TrainSettings
    from dflash_lab.drafter.optim import OptimizerConfig
    from dflash_lab.drafter.rows import PackedRows

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
        steps = max(1, params.min_steps, math.ceil(params.epochs * rows / (params.accumulate * params.world)))
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
            lk_decay=params.lk_decay,
            length_weight=params.length_weight,
            acceptance=params.acceptance,  # type: ignore[arg-type]
            label_source=params.labels,  # type: ignore[arg-type]
            weighting="dpace" if params.weighting == "dpace" else "given",
            dpace_alpha=params.dpace_alpha,
        ),
        optimizer=OptimizerConfig(
            kind=params.optimizer,
            lr=params.lr,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
            muon_lr=params.muon_lr,
            muon_momentum=params.muon_momentum,
            muon_weight_decay=params.muon_weight_decay,
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
    from dflash_lab.drafter.checkpoint import differences, newest, saved_setup

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
