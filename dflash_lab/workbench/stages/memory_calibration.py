"""Calibrations of a run: fitted by `memory_sweep` where enough was measured, found again by every stage.

They lie in `<run_dir>/memory_sweep/`, one for extraction and one for training steps. What `extract` and
`train_drafter` would run must be what was measured (target, device, dtype, kernels, version of torch); they
say in log and result which it was, or why the formulas stand alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from shutil import copy2
from typing import TYPE_CHECKING, Any

import polars as pl

if TYPE_CHECKING:
    from dflash_lab.memory.calibrated import Basis
    from dflash_lab.memory.fit import Point
    from dflash_lab.memory.setups import ExtractionSetup, TrainingSetup
    from dflash_lab.workbench.params import StageParams
    from dflash_lab.workbench.stages.memory_sweep import MemorySweepParams, Scene

LEAST = 9  # points of different sizes for a fit: three to six to fit on, the others to judge by
logger = logging.getLogger(__name__)


def extraction_basis(params: StageParams, config: Any, setup: ExtractionSetup, device: Any) -> Basis:
    """Return what the prediction of an extraction as `setup` rests on."""
    from dflash_lab.memory.calibrated import device_name, extraction_scope
    from dflash_lab.memory.shapes import target_shape

    return _find(
        _path(params, "extraction"),
        lambda: extraction_scope(target_shape(config), setup, device_name(device)),
    )


def training_basis(
    params: StageParams, config: Any, drafter: Any, setup: TrainingSetup, device: Any
) -> Basis:
    """Return what the prediction of a training step as `setup` rests on."""
    import torch

    from dflash_lab.memory.calibrated import Basis, device_name, training_scope
    from dflash_lab.memory.shapes import target_shape

    path = _path(params, "training")
    if torch.device(device).type == "cpu" and not path.exists():
        return Basis("formulas alone: training steps are not measured on a CPU")
    return _find(path, lambda: training_scope(target_shape(config), drafter, setup, device_name(device)))


def _find(path: Path, scope: Callable[[], dict[str, str]]) -> Basis:
    from dflash_lab.memory.calibrated import Basis, find_calibration

    if not path.exists():
        return Basis(f"formulas alone: nothing was measured in this run (memory_sweep leaves {path.name})")
    return find_calibration(path, scope())


def calibrate(params: MemorySweepParams, found: Scene, points: pl.DataFrame, steps: pl.DataFrame) -> None:
    """Fit what was measured and keep it for this run's stages; an earlier one stays where too little was."""
    from dataclasses import replace

    from dflash_lab.memory.calibrated import device_name, extraction_scope, training_scope
    from dflash_lab.memory.fit import Point

    device = device_name(found.device)
    batches = [
        Point(replace(found.extraction, batch=row["batch"], length=row["length"]), *_bytes(row))
        for row in _largest(points, "batch", "length")
    ]
    _keep(params, "extraction", batches, extraction_scope(found.shape, found.extraction, device))
    if not found.cuda:
        return  # no steps are measured there
    step = found.measured_step
    anchors = [
        Point(replace(step, anchors=row["anchors"], block_size=row["block_size"]), *_bytes(row))
        for row in _largest(steps, "anchors", "block_size")
    ]
    _keep(params, "training", anchors, training_scope(found.shape, found.drafter, step, device))


def _largest(measured: pl.DataFrame, *size: str) -> list[dict[str, Any]]:
    """One row a size, of several orders the one that took most: a fit is judged on sizes it has not seen."""
    kept = measured.filter((pl.col("measured_moving") > 0) & ~pl.col("out_of_memory"))
    return kept.sort("measured_moving", descending=True).unique(size, keep="first").to_dicts()


def _bytes(row: dict[str, Any]) -> tuple[int, int]:
    return row["analytic_moving"], row["measured_moving"]


def _keep(params: MemorySweepParams, what: str, points: list[Point], scope: dict[str, str]) -> None:
    from dflash_lab.memory.fit import fit

    if len(points) < LEAST:
        logger.info("%s: no calibration from %d measured sizes, it takes %d", what, len(points), LEAST)
        return
    found, path = fit(points, scope=scope), _path(params, what)
    if found.worst_error_pct <= found.formulas_worst_error_pct:
        found.save(path)
        return
    path.unlink(missing_ok=True)
    words = "no calibration, for the formulas are closer to the points held out"
    errors = (found.formulas_worst_error_pct, found.worst_error_pct)
    logger.info("%s: %s: at worst %.1f%%, fitted %.1f%%", what, words, *errors)


def take_earlier(params: MemorySweepParams) -> None:
    """Put the run's earlier calibrations among what a sweep makes: they stay where too little is measured."""
    for path in params.calibrations:
        if path.exists() and params.fresh.exists():
            copy2(path, params.fresh / path.name)


def _path(params: StageParams, what: str) -> Path:
    """Where a calibration is: of a sweep that is running among what it makes, else in the run's."""
    sweeping = params.stage == "memory_sweep" and params.fresh.exists()
    folder = params.fresh if sweeping else params.run_folder / "memory_sweep"
    return folder / f"calibration-{what}.json"
