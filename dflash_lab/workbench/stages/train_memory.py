"""What the memory room is told of a training run, and the anchors it plans where none are given.

The loop holds more than a step: rows on their way, noise, gradients from row to row, a live target, shards.
Anchors that were planned once are kept in the stage's folder, for a run that goes on needs the same ones.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dflash_lab import files
from dflash_lab.errors import InputError, StoreError, UnsupportedTarget

if TYPE_CHECKING:
    import torch

    from dflash_lab.workbench.stages.memory_sweep import MemorySweepParams
    from dflash_lab.workbench.stages.train_drafter import TrainDrafterParams

PLANNED = "anchors.json"
_SPARE = 0.005  # of the budget, beside the planner's own margin: what is free moves a little
logger = logging.getLogger(__name__)


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
    from dflash_lab.memory.shapes import target_shape
    from dflash_lab.models.load import choose_device
    from dflash_lab.models.source import load_config
    from dflash_lab.workbench.stages import train_setup

    device = choose_device(params.device)
    dtype = train_setup.drafter_dtype(params, device)
    config = load_config(params.target)
    store: Any = train_setup.open_bare(params) if params.source == "store" else None
    drafter = train_setup.drafter_config(params, store)
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
    sizes: dict[str, Any] = dict(context=params.context_tokens, cuda=device.type == "cuda", **options)
    budget_gib = _least_budget_gib(params, device, config, drafter)
    found = training_fits(config, drafter, budget_gib, anchors=8, margin=MARGIN + _SPARE, **sizes)
    anchors = min(found.largest_anchors, params.context_tokens - 1)
    if not anchors:  # refused with advice, or forced to the least
        clear_training(config, drafter, budget_gib, anchors=8, force=params.ignore_memory, **sizes)
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
    from dflash_lab.workbench.stages.train_gpu_processes import placed, target_account

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
