"""Where training would run, checked before a target is loaded or a slot is made: the GPUs that were named,
and the memory of a pipeline's queue.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_lab.errors import InputError

if TYPE_CHECKING:
    import torch

    from dflash_lab.workbench.stages.train_drafter import TrainDrafterParams

GIB = 2**30
SHARED = Path("/dev/shm")  # where a CPU's slots lie; a full one kills with SIGBUS, without a word
logger = logging.getLogger(__name__)


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
