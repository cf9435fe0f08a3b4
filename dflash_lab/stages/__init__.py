"""The six stages in order, found by name: `extract.py` has ExtractParams, run_extract and ExtractResult.

A stage is imported only when it is asked for, so that listing them stays instant.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dflash_lab.errors import InputError, near

if TYPE_CHECKING:
    from dflash_lab.params import StageParams

PURPOSES = {
    "prepare": "turn conversations into tokenised samples with a loss mask",
    "dataset_stats": "show how long the samples are and what batching them would waste",
    "extract": "run the samples through the target once and store its tapped states",
    "memory_sweep": "predict and measure what fits into memory",
    "train_drafter": "train a drafter on the stored states",
    "acceptance": "decode with the drafter and measure how much of it the target accepts",
}
STAGES = tuple(PURPOSES)
LEAVES = {  # in the run's folder, for later stages to read
    "prepare": ("samples.parquet",),
    "extract": ("store",),
    "train_drafter": ("drafter",),
}


def stage_module(stage: str) -> ModuleType:
    """Import a stage's module; an `InputError` names the near match of an unknown one."""
    if stage not in STAGES:
        raise InputError(f"unknown stage {stage[:80]!r}{near(stage, STAGES)}. Stages: {', '.join(STAGES)}.")
    return importlib.import_module(f"dflash_lab.stages.{stage}")


def _camel(stage: str) -> str:
    return "".join(word.capitalize() for word in stage.split("_"))


def params_class(stage: str) -> type[StageParams]:
    """Return the stage's parameter class."""
    return getattr(stage_module(stage), f"{_camel(stage)}Params")


def run_function(stage: str) -> Callable[..., Any]:
    """Return `run_<stage>(params, progress) -> <Stage>Result`."""
    return getattr(stage_module(stage), f"run_{stage}")


def result_class(stage: str) -> Any:
    """Return the stage's result class, whose `load(folder)` re-reads a finished result."""
    return getattr(stage_module(stage), f"{_camel(stage)}Result")
