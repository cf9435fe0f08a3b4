"""Extraction and training ask the memory room before they start, and say afterwards how right its answer was.

A run that is predicted not to fit does not start, unless `force` is set. A target whose memory is not
understood starts without an answer, and the log says so: only measuring can tell.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dflash_lab.errors import InputError, UnsupportedTarget

if TYPE_CHECKING:
    import torch

    from dflash_lab.drafter.config import DrafterConfig
    from dflash_lab.memory.gate import Clearance
    from dflash_lab.workbench.stages.extract import ExtractParams
    from dflash_lab.workbench.stages.train_drafter import TrainDrafterParams

logger = logging.getLogger(__name__)


def ask_extraction(
    params: ExtractParams,
    config: Any,
    device: torch.device,
    *,
    tap_ids: list[int],
    longest: int,
    fused: bool | None = None,
    budget_gib: float = 0.0,
) -> Clearance | None:
    """Clear the worst batch that the budgets allow of samples up to `longest` tokens; `DoesNotFit` if it is
    not.

    `fused` None takes it that every layer will be fused where any can be; `budget_gib` 0 what is free now.
    """
    from dflash_lab.extraction.loop import BUFFERS
    from dflash_lab.memory.gate import clear_extraction
    from dflash_lab.memory.planner import device_budget_gib
    from dflash_lab.target.loading import choose_dtype

    cuda = device.type == "cuda"
    try:
        return clear_extraction(
            config,
            budget_gib or device_budget_gib(device),
            tap_ids=tap_ids,
            longest=longest,
            dtype=str(choose_dtype(params.dtype, config)).removeprefix("torch."),
            store_final=params.store_final,
            kernels="fla" if cuda and not params.allow_slow_kernels else "torch",
            fused=cuda and params.fast != "off" if fused is None else fused,
            in_flight=BUFFERS if cuda else 0,
            token_budget=params.token_budget,
            max_batch=params.max_batch,
            cuda=cuda,
            force=params.force,
        )
    except UnsupportedTarget as error:
        logger.warning("started without a prediction of its memory: %s", error)
        return None


def extraction_budgets(params: ExtractParams, cleared: Clearance | None) -> tuple[int, int]:
    """Return token budget and rows a batch: those given, or with `token_budget` 0 the planner's."""
    if params.token_budget:
        return params.token_budget, params.max_batch
    if cleared is None:
        raise InputError(
            "token_budget=0 asks the memory planner, and the memory of this target is not understood. "
            "Give the padded tokens of a batch, such as token_budget=16384."
        )
    return cleared.token_budget, cleared.max_batch


def ask_training(
    params: TrainDrafterParams, config: Any, drafter: DrafterConfig, device: torch.device, dtype: torch.dtype
) -> Clearance | None:
    """Clear a training step on `device` with the states read from a store; `DoesNotFit` if it is not.

    None also for sharded training (`fsdp`), of which no account is known.
    """
    from dflash_lab.memory.gate import clear_training
    from dflash_lab.memory.planner import device_budget_gib, expandable_segments

    if params.processes > 1 and params.parallel == "fsdp":
        logger.info("the memory of sharded training is not predicted")
        return None
    try:
        return clear_training(
            config,
            drafter,
            device_budget_gib(device),
            anchors=params.anchors,
            context=params.context_tokens,
            cuda=device.type == "cuda",
            force=params.force,
            dtype=str(dtype).removeprefix("torch."),
            soft_targets=bool(
                params.soft_weight
                or params.tv_weight
                or params.lk_weight
                or (params.length_weight and params.acceptance == "overlap")
            ),
            checkpointing="layers" if params.gradient_checkpointing else "none",
            optimizer=_optimizer(params),
            expandable=expandable_segments(),
        )
    except UnsupportedTarget as error:
        logger.warning("started without a prediction of its memory: %s", error)
        return None


def memory_figures(cleared: Clearance | None, device: torch.device) -> dict[str, float | int]:
    """Return predicted and measured peak for the run's result, and whether it was started by force."""
    from dflash_lab.memory.gate import outcome

    return {} if cleared is None else {**outcome(cleared, device), "memory_forced": int(cleared.forced)}


def _optimizer(params: TrainDrafterParams) -> str:
    if params.offload:
        return "cpu-offload"
    if params.optimizer == "muon":
        return "muon"
    return "adamw8bit" if params.moments == "int8" else "adamw"
