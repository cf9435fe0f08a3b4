"""Extraction and training ask the memory room before they start, and say afterwards how right its answer was.

A run that is predicted not to fit does not start, unless `ignore_memory` is set. A target whose memory is not
understood starts without an answer, and log and result say why: only measuring can tell.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dflash_lab.errors import InputError, UnsupportedTarget

if TYPE_CHECKING:
    import torch

    from dflash_lab.drafter.config import DrafterConfig
    from dflash_lab.memory.gate import Clearance, NotPredicted
    from dflash_lab.workbench.stages.extract import ExtractParams
    from dflash_lab.workbench.stages.train_drafter import TrainDrafterParams

SNAPSHOT = "memory_snapshot.json"  # beside failure.json: what was live when a request was refused
logger = logging.getLogger(__name__)


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
    from dflash_lab.models.load import choose_dtype

    cuda = device.type == "cuda"
    layers: dict[str, Any] = dict(
        dtype=str(choose_dtype(params.dtype, config)).removeprefix("torch."),
        kernels="fla" if cuda and not params.allow_slow_kernels else "torch",
        fused=cuda and params.fast != "off",
    )
    try:
        return clear_extraction(
            config,
            budget_gib or device_budget_gib(device),
            tap_ids=tap_ids,
            longest=longest,
            store_final=params.store_final,
            plain_layers=plain_layers,
            in_flight=BUFFERS if cuda else 0,
            token_budget=params.token_budget,
            max_batch=params.max_batch,
            cuda=cuda,
            force=params.ignore_memory,
            **layers,
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
    from dflash_lab.workbench.stages.train_memory import setup_options

    try:
        options = setup_options(params, config, device, dtype, final_states=final_states, rows=rows)
        return clear_training(
            config,
            drafter,
            budget_gib or device_budget_gib(device),
            anchors=params.anchors,
            context=params.context_tokens,
            cuda=device.type == "cuda",
            force=params.ignore_memory,
            **options,
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
