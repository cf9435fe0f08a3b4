"""What parameters mean for extraction and training: shapes, settings, placement, and the memory that is
asked for before they start.
"""

from __future__ import annotations

import concurrent.futures
import logging
import math
import multiprocessing
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_lab import files
from dflash_lab.errors import InputError, StoreError, UnsupportedTarget

if TYPE_CHECKING:
    import torch

    from dflash_lab.drafter.config import DrafterConfig
    from dflash_lab.drafter.live import LiveItems, SampleItems
    from dflash_lab.drafter.objective import TrainSettings
    from dflash_lab.drafter.rows import PackedRows
    from dflash_lab.extraction.store import FeatureStore
    from dflash_lab.models.load import TargetHead
    from dflash_lab.progress import ProgressCallback
    from dflash_lab.stages.memory_sweep import MemorySweepParams
    from dflash_lab.stages.train_drafter import TrainDrafterParams

    States = FeatureStore | SampleItems
    from dflash_lab.memory.account import Account
    from dflash_lab.memory.gate import Clearance, GpuProcess, NotPredicted
    from dflash_lab.stages.extract import ExtractParams

# ----------------------------------------------------------------------------------------------------
# From the stage's flat parameters to what the training room is told.


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
    from dflash_lab.extraction.manifest import trial_of

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


# ----------------------------------------------------------------------------------------------------
# Where training would run, checked before a target is loaded or a slot is made: the GPUs that were named,
# and the memory of a pipeline's queue.


GIB = 2**30
SHARED = Path("/dev/shm")  # where a CPU's slots lie; a full one kills with SIGBUS, without a word


def check_placement(params: TrainDrafterParams) -> None:
    """`InputError` for GPUs that this machine lacks, and for a head's GPU where there is none."""
    heads = {"head": "the frozen head", "target_head_gpu": "the target's logits"}
    import torch

    from dflash_lab.models.load import choose_device

    if choose_device(params.device).type != "cuda":
        for name, what in heads.items():
            if getattr(params, name) >= 0:
                raise InputError(
                    f"train_drafter: {name} = {getattr(params, name)} names a GPU for {what}, but this "
                    f"trains on a CPU. Leave {name} at -1."
                )
        return
    count = torch.cuda.device_count()
    for name in ("targets", "drafters", *heads):
        given = getattr(params, name)
        if max([given] if isinstance(given, int) else given, default=-1) >= count:
            raise InputError(
                f"train_drafter: {name} = {given}, but this machine shows {count} GPUs, numbered from 0."
            )
    if params.gpus > count:
        raise InputError(f"train_drafter: gpus = {params.gpus}, but this machine shows {count}.")
    if len(set(params.targets)) < len(params.targets):
        logger.warning("targets = %s: a GPU named twice holds two targets, which share it", params.targets)


def queue_row_bytes(params: TrainDrafterParams, taps: int, width: int) -> int:
    """Bytes of one row's slot: bf16 states of `taps` layers and the final ones, [context_tokens, width]
    each.
    """
    return params.context_tokens * (taps + 1) * width * 2


def check_queue(params: TrainDrafterParams, device: torch.device, taps: int, width: int) -> None:
    """`InputError` if the slots of a drafter do not fit the memory that is free where they lie: its
    `device`, or this machine's shared memory (of all drafters together).
    """
    from dflash_lab.machine import device_budget_gib
    from dflash_lab.memory.planner import MARGIN

    each = queue_row_bytes(params, taps, width) * len(params.targets)  # a row of every target's
    where, free_gib = f"on {device}", device_budget_gib(device)
    if device.type == "cpu":
        each *= len(params.drafters)
        if SHARED.is_dir() and shutil.disk_usage(SHARED).free / GIB < free_gib:
            where, free_gib = f"in {SHARED}", shutil.disk_usage(SHARED).free / GIB
    usable_gib = free_gib * (1 - MARGIN)
    if params.queue_rows * each / GIB <= usable_gib:
        return
    most = int(usable_gib * GIB // each)
    instead = f"Give queue_rows = {most}" if most else "Give fewer context_tokens, targets or tap_ids"
    raise InputError(
        f"train_drafter: {params.queue_rows} queue_rows of {params.context_tokens:,} tokens from "
        f"{len(params.targets)} targets are predicted to need {params.queue_rows * each / GIB:.2f} GiB "
        f"{where}, the budget is {free_gib:.2f} GiB ({100 * MARGIN:.0f}% kept free). {instead}."
    )


# ----------------------------------------------------------------------------------------------------
# What the memory room is told of a training run, and the anchors it plans where none are given.
#
# The loop holds more than a step: rows on their way, noise, gradients from row to row, a live target,
# shards. Anchors that were planned once are kept in the stage's folder, for a run that goes on needs the
# same ones.


PLANNED = "anchors.json"
_SPARE = 0.005  # of the budget, beside the planner's own margin: what is free moves a little


def setup_options(
    params: TrainDrafterParams,
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
    *,
    final_states: bool = False,
    rows: str = "",
) -> dict[str, Any]:
    """Return the fields of `TrainingSetup` that these parameters say; see `clearance.ask_training`."""
    from dflash_lab.drafter.rows import DEPTH
    from dflash_lab.memory.planner import expandable_segments
    from dflash_lab.memory.shapes import target_shape

    cuda, name = device.type == "cuda", _name(dtype)
    together = params.source == "live" and not params.targets  # the target is in the training process
    sharded = params.world > 1 and params.parallel == "fsdp"
    tied, tau = target_shape(config).tied, params.tau_samples > 0
    slots = params.queue_rows * len(params.targets)
    # Of a store: what lies ready, one on its way there, and on CUDA one until its kernels have passed.
    stored = params.accumulate - 1 + DEPTH + 1 + cuda
    options: dict[str, Any] = dict(
        dtype=name,
        soft_targets=bool(
            params.soft_weight
            or params.tv_weight
            or params.lk_weight
            or (params.length_weight and params.acceptance == "overlap")
        ),
        checkpointing="layers" if params.gradient_checkpointing else "none",
        optimizer=optimizer_of(params),
        expandable=expandable_segments(),
        compiled=params.compile and cuda,
        shards=params.world if sharded else 1,
        data_parallel=1 if sharded else params.world,
        gradients_kept=params.accumulate > 1 or (params.world > 1 and not sharded),
        rows_ahead=stored if params.source == "store" else slots,
        final_states=final_states or params.source == "live",
        noise=params.noise_std > 0,
        head_elsewhere=cuda and params.head not in (-1, device.index or 0),
        target_logits_elsewhere=params.target_head_gpu >= 0,
        # Where the embedding, the live target or the measure of tau holds the whole head, no slice is saved.
        vocabulary_shards=params.world if params.head_parallel and not (tied or together or tau) else 1,
    )
    if together:
        options |= target_options(params, config, device, rows)
    return options


def target_options(
    params: TrainDrafterParams, config: Any, device: torch.device, rows: str = ""
) -> dict[str, Any]:
    """Return the fields of `TrainingSetup` that say how a live target on `device` makes its rows."""
    from dflash_lab.drafter.live import unpackable
    from dflash_lab.memory.planner import expandable_segments
    from dflash_lab.memory.shapes import target_shape
    from dflash_lab.models.load import choose_dtype
    from dflash_lab.models.spans import Span

    cuda, dtype, shape = device.type == "cuda", choose_dtype(params.dtype, config), target_shape(config)
    packed = rows == "packed" if rows else not unpackable([*map(Span, shape.layer_types)], dtype, cuda)
    return dict(
        placement="same device",
        target_dtype=_name(dtype),
        recorded=cuda and packed and shape.experts is None,
        expandable=expandable_segments(),
    )


def with_anchors(params: TrainDrafterParams) -> TrainDrafterParams:
    """Return the parameters with the planner's most anchors where they say 0.

    Planned for the device that trains, of several the one with the least memory; `InputError` where the
    planner has no answer or not even 8 anchors fit.
    """
    if params.anchors:
        return params
    from dflash_lab.memory.gate import clear_training
    from dflash_lab.memory.planner import MARGIN, training_fits
    from dflash_lab.memory.shapes import TrainingSetup, target_shape
    from dflash_lab.models.load import choose_device
    from dflash_lab.models.source import load_config

    device = choose_device(params.device)
    dtype = drafter_dtype(params, device)
    config = load_config(params.target)
    store: Any = open_bare(params) if params.source == "store" else None
    drafter = drafter_config(params, store)
    try:
        options = setup_options(
            params, config, device, dtype, final_states=store is not None and store.has_final
        )
        target_shape(config)
    except UnsupportedTarget as error:
        raise InputError(
            f"anchors=0 asks the memory planner, which has no answer: {error} Give the blocks of a row, such "
            "as anchors=512."
        ) from error
    asked = {
        "target": params.target,
        "context": params.context_tokens,
        "drafter": drafter.to_json(),
        **options,
    }
    path = params.folder / PLANNED
    if path.exists() and not params.force:
        planned = files.read_json(path)
        anchors = planned.get("anchors") if isinstance(planned, dict) else None
        if type(anchors) is not int or anchors < 1:
            raise StoreError(f"{path}: no planned anchors. Put the file back, or remove it to plan again.")
        if planned.get("asked") == asked:
            return params.changed(anchors=anchors)
    setup = TrainingSetup(anchors=8, context=params.context_tokens, block_size=drafter.block_size, **options)
    cuda, budget_gib = device.type == "cuda", _least_budget_gib(params, device, config, drafter)
    found = training_fits(config, drafter, setup, budget_gib, margin=MARGIN + _SPARE, cuda=cuda)
    anchors = min(found.largest_anchors, params.context_tokens - 1)
    if not anchors:  # refused with advice, or forced to the least
        clear_training(config, drafter, setup, budget_gib, force=params.ignore_memory, cuda=cuda)
        anchors = min(8, params.context_tokens - 1)
    logger.info("anchors = %d: the most that %.2f GiB are predicted to hold", anchors, budget_gib)
    params.folder.mkdir(parents=True, exist_ok=True)
    files.write_json(path, {"asked": asked, "anchors": anchors, "budget_gib": round(budget_gib, 3)})
    return params.changed(anchors=anchors)


def _least_budget_gib(params: TrainDrafterParams, device: torch.device, config: Any, drafter: Any) -> float:
    """Return the GiB that each training process may take, of the device with the least; what targets hold
    there is left to them.
    """
    from dflash_lab.machine import device_budget_gib
    from dflash_lab.memory.account import OUTSIDE_TORCH
    from dflash_lab.memory.planner import MARGIN

    beside: dict[int, float] = {}
    for number in params.targets:
        account = target_account(params, config, drafter, placed(device, number))
        beside[number] = beside.get(number, 0.0) + account.peak_gib / (1 - MARGIN)
    if device.type == "cpu":
        return (device_budget_gib(device) - sum(beside.values())) / params.world
    if params.world == 1 and not params.drafters:
        return device_budget_gib(device)
    numbers = params.drafters or range(params.gpus)
    free_gib = min(device_budget_gib(f"cuda:{number}") - beside.get(number, 0.0) for number in numbers)
    # A process of its own opens a context there beside this one's, and NCCL takes as much again.
    return free_gib - 2 * OUTSIDE_TORCH / 2**30


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def optimizer_of(params: TrainDrafterParams | MemorySweepParams) -> str:
    """Return the memory room's name of the optimizer that these parameters choose."""
    if params.offload:
        return "cpu-offload"
    if params.optimizer == "muon":
        return "muon"
    return "adamw8bit" if params.moments == "int8" else "adamw"


# ----------------------------------------------------------------------------------------------------
# What the processes of a run hold, device by device, asked before any of them starts.
#
# Targets make rows on their GPUs, drafters train on theirs, and a frozen head may lie on one of its own; a
# GPU may be named for several. Once one of them has loaded, what is free says nothing about the others any
# more. Each process writes afterwards what it held beside what was predicted.


def clear_processes(params: TrainDrafterParams) -> None:
    """`DoesNotFit` where a GPU of the run is predicted to be named for more than it holds, unless
    forced; a target whose memory is not understood is told in the log.
    """
    from dflash_lab.memory.gate import clear_devices

    try:
        found = gpu_processes(params)
    except UnsupportedTarget as error:
        logger.warning("started without a prediction of its memory: %s", error)
        return
    here = params.world == 1 and not params.targets  # what this process holds unused is its own to take
    budgets_gib = free_gib(sorted({process.device for process in found}), here=here)
    over = clear_devices(found, budgets_gib, force=params.ignore_memory)
    for process in found:
        words = "too much together with the others, forced" if process.device in over else "cleared"
        logger.info(
            "%s on %s: %.2f GiB predicted, %s", process.name, process.device, process.peak / 2**30, words
        )


def gpu_processes(params: TrainDrafterParams) -> list[GpuProcess]:
    """Return what each process of the run is predicted to hold, on each device that it uses."""
    from dflash_lab.memory.account import OUTSIDE_TORCH
    from dflash_lab.memory.advice import advise
    from dflash_lab.memory.gate import GpuProcess
    from dflash_lab.memory.shapes import TrainingSetup, target_shape
    from dflash_lab.memory.training import head_process, predict_training, target_head_process
    from dflash_lab.models.load import choose_device
    from dflash_lab.models.source import load_config

    store = open_bare(params) if params.source == "store" else None
    config, drafter = load_config(params.target), drafter_config(params, store)
    shape, home = target_shape(config), choose_device(params.device)
    cuda, final = home.type == "cuda", bool(getattr(store, "has_final", False))
    gpus = params.drafters or (range(params.gpus) if params.gpus > 1 else [home.index or 0])
    found = []
    for number, gpu in enumerate(gpus):
        device = placed(home, gpu)
        dtype = drafter_dtype(params, device)
        options = setup_options(params, config, device, dtype, final_states=final)
        setup = TrainingSetup(
            anchors=params.anchors, context=params.context_tokens, block_size=drafter.block_size, **options
        )
        found.append(
            GpuProcess(
                f"drafter-{number}",
                str(device),
                predict_training(shape, drafter, setup, cuda=cuda),
                partial(advise, shape, setup, drafter=drafter, cuda=cuda),
                OUTSIDE_TORCH if cuda and len(gpus) > 1 else 0,  # NCCL's buffers
            )
        )
        if setup.head_elsewhere:
            account = head_process(shape, drafter, setup, cuda=cuda)
            found.append(GpuProcess(f"head of drafter-{number}", str(placed(home, params.head)), account))
        if params.target_head_gpu >= 0:
            account = target_head_process(shape, setup, cuda=cuda)
            where = str(placed(home, params.target_head_gpu))
            found.append(GpuProcess(f"target's head of drafter-{number}", where, account))
    for number, gpu in enumerate(params.targets):
        device = placed(home, gpu)
        found.append(
            GpuProcess(f"target-{number}", str(device), target_account(params, config, drafter, device))
        )
    return found


def target_account(
    params: TrainDrafterParams, config: Any, drafter: DrafterConfig, device: torch.device, rows: str = ""
) -> Account:
    """Return the account of a target's process; `rows`: see `clearance.ask_training`."""
    from dflash_lab.memory.shapes import TrainingSetup, target_shape
    from dflash_lab.memory.training import target_process

    setup = TrainingSetup(
        anchors=1,
        context=params.context_tokens,
        block_size=drafter.block_size,
        **target_options(params, config, device, rows),
    )
    return target_process(target_shape(config), drafter, setup, cuda=device.type == "cuda")


def target_figures(
    params: TrainDrafterParams, config: Any, device: torch.device, rows: str
) -> dict[str, float]:
    """Return what a target's process was predicted to hold, as it ran its rows, and what it held."""
    from dflash_lab.memory.gate import Clearance, outcome

    try:
        account = target_account(params, config, drafter_config(params, None), device, rows)
    except UnsupportedTarget:
        return {}  # told before it started
    return outcome(Clearance(account, 0.0, params.ignore_memory), device)


def free_gib(devices: list[str], *, here: bool) -> dict[str, float]:
    """Return what is free on `devices` for processes still to start, or for this one (`here`); where GPUs are
    not for this one, another process looks, whose context ends with it.
    """
    if here or devices == ["cpu"]:
        return _free_gib(devices)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_free_gib, devices).result()


def _free_gib(devices: list[str]) -> dict[str, float]:
    from dflash_lab.machine import device_budget_gib

    return {device: device_budget_gib(device) for device in devices}


def placed(device: torch.device, number: int) -> torch.device:
    """Return GPU `number`, or the CPU where the run is on one."""
    import torch

    return torch.device("cuda", number) if device.type == "cuda" else device


# ----------------------------------------------------------------------------------------------------
# Extraction and training ask the memory room before they start, and say afterwards how right its answer
# was.
#
# A run that is predicted not to fit does not start, unless `ignore_memory` is set. A target whose memory is
# not understood starts without an answer, and log and result say why: only measuring can tell.


SNAPSHOT = "memory_snapshot.json"  # beside failure.json: what was live when a request was refused


def ask_extraction(
    params: ExtractParams,
    config: Any,
    device: torch.device,
    *,
    tap_ids: list[int],
    longest: int,
    plain_layers: Sequence[int] = (),
    budget_gib: float = 0.0,
) -> Clearance | NotPredicted:
    """Clear the worst batch that the budgets allow of samples up to `longest` tokens; `DoesNotFit` if it is
    not.

    Every layer but `plain_layers` is taken to be fused where any can be; `budget_gib` 0 is what is free now.
    """
    from dflash_lab.extraction.loop import BUFFERS
    from dflash_lab.machine import device_budget_gib
    from dflash_lab.memory.gate import clear_extraction
    from dflash_lab.memory.shapes import ExtractionSetup
    from dflash_lab.models.load import choose_dtype

    cuda = device.type == "cuda"
    setup = ExtractionSetup(
        batch=1,
        length=longest,
        tap_ids=tuple(tap_ids),
        dtype=_name(choose_dtype(params.dtype, config)),
        store_final=params.store_final,
        kernels="fla" if cuda and not params.allow_slow_kernels else "torch",
        fused=cuda and params.fast != "off",
        plain_layers=tuple(plain_layers),
        in_flight=BUFFERS if cuda else 0,
    )
    try:
        return clear_extraction(
            config,
            setup,
            budget_gib or device_budget_gib(device),
            token_budget=params.token_budget,
            max_batch=params.max_batch,
            cuda=cuda,
            force=params.ignore_memory,
        )
    except UnsupportedTarget as error:
        return _unpredicted(error)


def extraction_budgets(params: ExtractParams, cleared: Clearance | NotPredicted) -> tuple[int, int]:
    """Return token budget and rows a batch: those given, or with `token_budget` 0 the planner's."""
    from dflash_lab.memory.gate import Clearance

    if params.token_budget:
        return params.token_budget, params.max_batch
    if not isinstance(cleared, Clearance):
        raise InputError(
            f"token_budget=0 asks the memory planner, which has no answer: {cleared.reason} "
            "Give the padded tokens of a batch, such as token_budget=16384."
        )
    return cleared.token_budget, cleared.max_batch


def ask_training(
    params: TrainDrafterParams,
    config: Any,
    drafter: DrafterConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    final_states: bool = False,
    rows: str = "",
    budget_gib: float = 0.0,
) -> Clearance | NotPredicted:
    """Clear a training step on `device` as the loop makes it; `DoesNotFit` if it is not.

    `final_states`: rows of the store hold the target's final states. `rows`: how a live target runs its rows
    (packed | padded), empty as it is expected to. `budget_gib` 0 is what is free now.
    """
    from dflash_lab.machine import device_budget_gib
    from dflash_lab.memory.gate import clear_training
    from dflash_lab.memory.shapes import TrainingSetup

    try:
        options = setup_options(params, config, device, dtype, final_states=final_states, rows=rows)
        setup = TrainingSetup(
            anchors=params.anchors, context=params.context_tokens, block_size=drafter.block_size, **options
        )
        return clear_training(
            config,
            drafter,
            setup,
            budget_gib or device_budget_gib(device),
            cuda=device.type == "cuda",
            force=params.ignore_memory,
        )
    except UnsupportedTarget as error:
        return _unpredicted(error)


def memory_figures(cleared: Clearance | NotPredicted, device: torch.device) -> dict[str, float | int | str]:
    """Return predicted and measured peak for the run's result, and whether it was started by force; or why
    nothing was predicted.
    """
    from dflash_lab.memory.gate import NotPredicted, outcome

    if isinstance(cleared, NotPredicted):
        return {"memory_not_predicted": cleared.reason}
    return {**outcome(cleared, device), "memory_forced": int(cleared.forced)}


def _unpredicted(error: UnsupportedTarget) -> NotPredicted:
    from dflash_lab.memory.gate import NotPredicted

    logger.warning("started without a prediction of its memory: %s", error)
    return NotPredicted(str(error))
