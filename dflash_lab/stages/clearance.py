"""Extraction and training ask the memory room before they start, and say afterwards how right its answer was.
What is predicted not to fit does not start, unless `ignore_memory` is set.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import multiprocessing
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_lab import files, machine
from dflash_lab.drafter.live import unpackable
from dflash_lab.drafter.rows import DEPTH
from dflash_lab.errors import InputError, StoreError, UnsupportedTarget
from dflash_lab.extraction.loop import BUFFERS
from dflash_lab.memory.account import OUTSIDE_TORCH, Account
from dflash_lab.memory.advice import advise
from dflash_lab.memory.gate import (
    Clearance,
    GpuProcess,
    NotPredicted,
    clear_devices,
    clear_extraction,
    clear_training,
    outcome,
)
from dflash_lab.memory.planner import MARGIN, expandable_segments, training_fits
from dflash_lab.memory.shapes import GIB, ExtractionSetup, TrainingSetup, target_shape
from dflash_lab.memory.training import head_process, predict_training, target_head_process, target_process
from dflash_lab.models.load import choose_dtype
from dflash_lab.models.spans import Span
from dflash_lab.stages.training_inputs import TrainingInputs, optimizer_of, placed

if TYPE_CHECKING:
    import torch

    from dflash_lab.stages.extract import ExtractParams

logger = logging.getLogger(__name__)
SNAPSHOT = "memory_snapshot.json"  # beside failure.json: what was live when a request was refused
PLANNED = "anchors.json"  # in the stage's folder: a run that goes on needs the anchors it began with
SHARED = Path("/dev/shm")  # where a CPU's slots lie; a full one kills with SIGBUS, without a word
_SPARE = 0.005  # of the budget, beside the planner's own margin: what is free moves a little


# Extraction ------------------------------------------------------------------------------------------------


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
            budget_gib or machine.device_budget_gib(device),
            token_budget=params.token_budget,
            max_batch=params.max_batch,
            cuda=cuda,
            force=params.ignore_memory,
        )
    except UnsupportedTarget as error:
        return _unpredicted(error)


def extraction_budgets(params: ExtractParams, cleared: Clearance | NotPredicted) -> tuple[int, int]:
    """Return token budget and rows a batch: those given, or with `token_budget` 0 the planner's."""
    if params.token_budget:
        return params.token_budget, params.max_batch
    if not isinstance(cleared, Clearance):
        raise InputError(
            f"token_budget=0 asks the memory planner, which has no answer: {cleared.reason} "
            "Give the padded tokens of a batch, such as token_budget=16384."
        )
    return cleared.token_budget, cleared.max_batch


def memory_figures(cleared: Clearance | NotPredicted, device: torch.device) -> dict[str, float | int | str]:
    """Return predicted and measured peak for the run's result, and whether it was started by force; or why
    nothing was predicted.
    """
    if isinstance(cleared, NotPredicted):
        return {"memory_not_predicted": cleared.reason}
    return {**outcome(cleared, device), "memory_forced": int(cleared.forced)}


def _unpredicted(error: UnsupportedTarget) -> NotPredicted:
    # Only measuring can tell of a target whose memory is not understood: it starts without an answer.
    logger.warning("started without a prediction of its memory: %s", error)
    return NotPredicted(str(error))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Training in this process ----------------------------------------------------------------------------------


def ask_training(
    inputs: TrainingInputs, *, rows: str = "", budget_gib: float = 0.0
) -> Clearance | NotPredicted:
    """Clear a training step on the inputs' device as the loop makes it; `DoesNotFit` if it is not.

    `rows`: how a live target runs its rows (packed | padded), empty as it is expected to. `budget_gib` 0 is
    what is free now.
    """
    params, device = inputs.params, inputs.device
    try:
        return clear_training(
            inputs.target,
            inputs.drafter,
            _setup(inputs, setup_options(inputs, rows=rows)),
            budget_gib or machine.device_budget_gib(device),
            cuda=device.type == "cuda",
            force=params.ignore_memory,
        )
    except UnsupportedTarget as error:
        return _unpredicted(error)


def _setup(inputs: TrainingInputs, options: dict[str, Any]) -> TrainingSetup:
    params, size = inputs.params, inputs.drafter.block_size
    anchors = params.anchors or 8  # 0: to be planned, from the least that is worth a run
    return TrainingSetup(anchors=anchors, context=params.context_tokens, block_size=size, **options)


def setup_options(inputs: TrainingInputs, *, rows: str = "") -> dict[str, Any]:
    """Return the fields of `TrainingSetup` that the inputs say; `rows` as in `ask_training`.

    The loop holds more than a step: rows on their way, noise, gradients from row to row, a live target,
    shards.
    """
    params, device = inputs.params, inputs.device
    cuda = device.type == "cuda"
    together = params.source == "live" and not params.target_gpus  # the target is in the training process
    sharded = params.world > 1 and params.parallel == "fsdp"
    tied, tau = target_shape(inputs.target).tied, params.tau_samples > 0
    slots = params.queue_rows * len(params.target_gpus)
    # Of a store: what lies ready, one on its way there, and on CUDA one until its kernels have passed.
    stored = params.grad_accum_steps - 1 + DEPTH + 1 + cuda
    options: dict[str, Any] = dict(
        dtype=_name(inputs.dtype),
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
        gradients_kept=params.grad_accum_steps > 1 or (params.world > 1 and not sharded),
        rows_ahead=stored if params.source == "store" else slots,
        final_states=inputs.final_states,
        noise=params.noise_std > 0,
        head_elsewhere=cuda and params.head_gpu not in (-1, device.index or 0),
        target_logits_elsewhere=params.target_head_gpu >= 0,
        # Where the embedding, the live target or the measure of tau holds the whole head, no slice is saved.
        vocabulary_shards=params.world if params.head_parallel and not (tied or together or tau) else 1,
    )
    return options | (_target_options(inputs, rows) if together else {})


def _target_options(inputs: TrainingInputs, rows: str) -> dict[str, Any]:
    """Return the fields of `TrainingSetup` that say how a live target on the device makes its rows."""
    cuda, shape = inputs.device.type == "cuda", target_shape(inputs.target)
    dtype = choose_dtype(inputs.params.dtype, inputs.target)
    packed = rows == "packed" if rows else not unpackable([*map(Span, shape.layer_types)], dtype, cuda)
    return dict(
        placement="same device",
        target_dtype=_name(dtype),
        recorded=cuda and packed and shape.experts is None,
        expandable=expandable_segments(),
    )


# What a plan of an earlier version had not been asked: neither was possible then.
_ASKED_BEFORE = {"target_logits_elsewhere": False, "vocabulary_shards": 1}


def with_anchors(inputs: TrainingInputs) -> TrainingInputs:
    """Return the inputs with the planner's most anchors where the parameters say 0.

    Planned for the device that trains, of several the one with the least memory; `InputError` where the
    planner has no answer or not even 8 anchors fit.
    """
    params = inputs.params
    if params.anchors:
        return inputs
    try:
        options = setup_options(inputs)
    except UnsupportedTarget as error:
        raise InputError(
            f"anchors=0 asks the memory planner, which has no answer: {error} Give the blocks of a row, such "
            "as anchors=512."
        ) from error
    asked = {
        "target": params.target,
        "context": params.context_tokens,
        "drafter": inputs.drafter.to_json(),
        **options,
    }
    path = params.folder / PLANNED
    if path.exists() and not params.force:
        planned = files.read_json(path)
        anchors = planned.get("anchors") if isinstance(planned, dict) else None
        if type(anchors) is not int or anchors < 1:
            raise StoreError(f"{path}: no planned anchors. Put the file back, or remove it to plan again.")
        if {**_ASKED_BEFORE, **(planned.get("asked") or {})} == asked:
            return dataclasses.replace(inputs, params=params.changed(anchors=anchors))
    setup = _setup(inputs, options)
    cuda, budget_gib = inputs.device.type == "cuda", _least_budget_gib(inputs)
    margin = MARGIN + _SPARE
    found = training_fits(inputs.target, inputs.drafter, setup, budget_gib, margin=margin, cuda=cuda)
    anchors = min(found.largest_anchors, params.context_tokens - 1)
    if not anchors:  # refused with advice, or forced to the least
        force = params.ignore_memory
        clear_training(inputs.target, inputs.drafter, setup, budget_gib, force=force, cuda=cuda)
        anchors = min(8, params.context_tokens - 1)
    logger.info("anchors = %d: the most that %.2f GiB are predicted to hold", anchors, budget_gib)
    params.folder.mkdir(parents=True, exist_ok=True)
    files.write_json(path, {"asked": asked, "anchors": anchors, "budget_gib": round(budget_gib, 3)})
    return dataclasses.replace(inputs, params=params.changed(anchors=anchors))


def _least_budget_gib(inputs: TrainingInputs) -> float:
    """Return the GiB that each training process may take, of the device with the least; what targets hold
    there is left to them.
    """
    params, device = inputs.params, inputs.device
    beside: dict[int, float] = {}
    for number in params.target_gpus:
        account = _target_account(dataclasses.replace(inputs, device=placed(device, number)))
        beside[number] = beside.get(number, 0.0) + account.peak_gib / (1 - MARGIN)
    if device.type == "cpu":
        return (machine.device_budget_gib(device) - sum(beside.values())) / params.world
    if params.world == 1 and not params.drafter_gpus:
        return machine.device_budget_gib(device)
    numbers = params.drafter_gpus or range(params.gpus)
    free = min(machine.device_budget_gib(f"cuda:{number}") - beside.get(number, 0.0) for number in numbers)
    # A process of its own opens a context there beside this one's, and NCCL takes as much again.
    return free - 2 * OUTSIDE_TORCH / GIB


# Training in several processes -----------------------------------------------------------------------------
# Targets make rows on their GPUs, drafters train on theirs, a frozen head may lie on one of its own; a GPU
# may be named for several. They are asked for together, before any starts: once one has loaded, what is free
# says nothing about the others any more.


def clear_processes(inputs: TrainingInputs) -> None:
    """`DoesNotFit` where a GPU of the run is predicted to be named for more than it holds, unless
    forced; a target whose memory is not understood is told in the log.
    """
    params = inputs.params
    try:
        found = gpu_processes(inputs)
    except UnsupportedTarget as error:
        _unpredicted(error)
        return
    here = params.world == 1 and not params.target_gpus  # what this process holds unused is its own to take
    budgets_gib = free_gib(sorted({process.device for process in found}), here=here)
    over = clear_devices(found, budgets_gib, force=params.ignore_memory)
    for process in found:
        words = "too much together with the others, forced" if process.device in over else "cleared"
        logger.info(
            "%s on %s: %.2f GiB predicted, %s", process.name, process.device, process.peak / GIB, words
        )


def gpu_processes(inputs: TrainingInputs) -> list[GpuProcess]:
    """Return what each process of the run is predicted to hold, on each device that it uses."""
    params, home, drafter = inputs.params, inputs.device, inputs.drafter
    shape, cuda = target_shape(inputs.target), home.type == "cuda"
    gpus = params.drafter_gpus or (range(params.gpus) if params.gpus > 1 else [home.index or 0])
    found = []
    for number, gpu in enumerate(gpus):
        device = placed(home, gpu)
        setup = _setup(inputs, setup_options(dataclasses.replace(inputs, device=device)))
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
            where = str(placed(home, params.head_gpu))
            found.append(GpuProcess(f"head of drafter-{number}", where, account))
        if params.target_head_gpu >= 0:
            account = target_head_process(shape, setup, cuda=cuda)
            where = str(placed(home, params.target_head_gpu))
            found.append(GpuProcess(f"target's head of drafter-{number}", where, account))
    for number, gpu in enumerate(params.target_gpus):
        device = placed(home, gpu)
        account = _target_account(dataclasses.replace(inputs, device=device))
        found.append(GpuProcess(f"target-{number}", str(device), account))
    return found


def _target_account(inputs: TrainingInputs, rows: str = "") -> Account:
    """Return the account of a target's process on the inputs' device; `rows` as in `ask_training`."""
    setup = dataclasses.replace(_setup(inputs, _target_options(inputs, rows)), anchors=1)
    return target_process(
        target_shape(inputs.target), inputs.drafter, setup, cuda=inputs.device.type == "cuda"
    )


def target_figures(inputs: TrainingInputs, rows: str) -> dict[str, float]:
    """Return what a target's process was predicted to hold, as it ran its rows, and what it held."""
    try:
        account = _target_account(inputs, rows)
    except UnsupportedTarget:
        return {}  # told before it started
    return outcome(Clearance(account, 0.0, inputs.params.ignore_memory), inputs.device)


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
    return {device: machine.device_budget_gib(device) for device in devices}


def queue_row_bytes(inputs: TrainingInputs) -> int:
    """Bytes of one row's slot: bf16 states of the taps and the final ones, [context_tokens, hidden] each."""
    states = len(inputs.drafter.tap_ids) + 1
    return inputs.params.context_tokens * states * inputs.drafter.hidden_size * 2


def check_queue(inputs: TrainingInputs) -> None:
    """`InputError` if the slots of a drafter do not fit the memory that is free where they lie: its device,
    or this machine's shared memory (of all drafters together).
    """
    params, device = inputs.params, inputs.device
    each = queue_row_bytes(inputs) * len(params.target_gpus)  # a row of every target's
    where, free = f"on {device}", machine.device_budget_gib(device)
    if device.type == "cpu":
        each *= len(params.drafter_gpus)
        if SHARED.is_dir() and shutil.disk_usage(SHARED).free / GIB < free:
            where, free = f"in {SHARED}", shutil.disk_usage(SHARED).free / GIB
    usable_gib = free * (1 - MARGIN)
    if params.queue_rows * each / GIB <= usable_gib:
        return
    most = int(usable_gib * GIB // each)
    instead = f"Give queue_rows = {most}" if most else "Give fewer context_tokens, target_gpus or tap_ids"
    raise InputError(
        f"train_drafter: {params.queue_rows} queue_rows of {params.context_tokens:,} tokens from "
        f"{len(params.target_gpus)} targets are predicted to need {params.queue_rows * each / GIB:.2f} GiB "
        f"{where}, the budget is {free:.2f} GiB ({100 * MARGIN:.0f}% kept free). {instead}."
    )
