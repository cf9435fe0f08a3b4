"""Are the memory predictions right? The first part of `memory.py`, which runs it and writes its figures.

A point is a batch or a step: predicted by formulas, and measured. Every row keeps both raw, so that an
account that was mended later can be judged on the same measurements without a device (`memory.py --again`).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from memory_runs import Clock, kernels, load

from dflash_lab.drafter import attention
from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.extraction.fused_layers import skip_tuning, speed_up
from dflash_lab.memory.account import Account, predict_extraction
from dflash_lab.memory.measure import (
    TrainingStep,
    clean,
    count_forward,
    forward_once,
    measure_cuda,
    training_parts,
)
from dflash_lab.memory.shapes import ExtractionSetup, TrainingSetup, target_shape
from dflash_lab.memory.training import predict_training
from dflash_lab.models.hooks import default_tap_ids
from dflash_lab.models.source import load_config

DRAFTERS: dict[str, dict[str, Any]] = {  # in the order measured
    "random:qwen3.6-27b": {"num_layers": 5, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    "random:smollm2-135m": {"num_layers": 3},
    "random:qwen3-8b": {"num_layers": 5},
}
# batch x length: short and wide, long and narrow, around whole chunks of 64, and the middle.
GRID = [
    (1, 64), (1, 335), (4, 335), (64, 335), (64, 65), (256, 16), (512, 8), (512, 48), (128, 128), (1, 4096),
    (4, 4096), (6, 2731), (2, 8192),
]  # fmt: skip
PLAIN_GRID = [(16, 335), (64, 64), (512, 8), (3, 4096)]  # with transformers' own layers
SMALL_GRID = [(batch, length) for batch in (1, 2, 5) for length in (16, 64, 65, 200)]
SHAPES = [(512, 16, 4096), (192, 24, 2048)]  # anchors, block, context; attention compiles once for each
CHUNKS = (256, 1024, 4096)
Setup = ExtractionSetup | TrainingSetup


@dataclass(frozen=True)
class Task:
    """A point to predict and to measure."""

    target: str
    setup: Setup

    @property
    def what(self) -> str:
        return "extraction" if isinstance(self.setup, ExtractionSetup) else "training"

    @property
    def key(self) -> str:
        """The same task in every file."""
        return f"{self.what} {self.target} {json.dumps(asdict(self.setup), sort_keys=True)}"

    def __str__(self) -> str:
        if isinstance(self.setup, ExtractionSetup):
            layers = "fused" if self.setup.fused else "plain"
            return f"{self.target} {self.setup.batch} x {self.setup.length}, {layers} layers"
        soft = "soft" if self.setup.soft_targets else "hard"
        size = f"{self.setup.anchors} x {self.setup.block_size}"
        return f"{self.target} {size}, chunk {self.setup.chunk}, {soft}"


def drafter_of(name: str, block: int) -> DrafterConfig:
    """The drafter that is measured for a target."""
    return DrafterConfig.from_target(load_config(name), mask_token_id=0, block_size=block, **DRAFTERS[name])


def tasks(name: str, *, cuda: bool, smoke: bool = False) -> list[Task]:
    """Every point of a target in the order measured: plain layers, fused ones, training steps."""
    taps = tuple(default_tap_ids(load_config(name).num_hidden_layers))
    if not cuda:
        small = ExtractionSetup(batch=1, length=1, tap_ids=taps, dtype="float32", kernels=kernels())
        return [Task(name, replace(small, batch=batch, length=length)) for batch, length in SMALL_GRID]
    grid = ExtractionSetup(batch=1, length=1, tap_ids=taps, kernels="fla")
    batches: list[Setup] = [
        replace(grid, batch=batch, length=length, fused=fused)
        for fused, points in ((False, PLAIN_GRID), (True, GRID))
        for batch, length in (points[:2] if smoke else points)
    ]
    steps: list[Setup] = [
        TrainingSetup(anchors=anchors, context=context, block_size=block, chunk=chunk, soft_targets=soft)
        for anchors, block, context in (SHAPES[:1] if smoke or "smollm2" in name else SHAPES)
        for soft in (True, False)
        for chunk in (CHUNKS[:2] if smoke else CHUNKS)
    ]
    return [Task(name, setup) for setup in batches + steps]


def analytic(task: Task, cuda: bool) -> Account:
    """The account by formulas."""
    shape, setup = target_shape(load_config(task.target)), task.setup
    if isinstance(setup, ExtractionSetup):
        return predict_extraction(shape, setup, cuda=cuda)
    return predict_training(shape, drafter_of(task.target, setup.block_size), setup, cuda=cuda)


def measure(wanted: list[Task], device: torch.device, clock: Clock) -> Iterator[tuple[Task, dict[str, Any]]]:
    """Measure tasks of one target in order, one kind after another; ends early when time is up."""
    extraction = [task for task in wanted if isinstance(task.setup, ExtractionSetup)]
    if extraction:
        yield from _measure_extraction(extraction, device, clock)
        clean(device)
    steps: dict[tuple[int, int, int], list[Task]] = {}
    for task in wanted:
        if isinstance(task.setup, TrainingSetup):
            size = (task.setup.anchors, task.setup.block_size, task.setup.context)
            steps.setdefault(size, []).append(task)
    for group in steps.values():
        if clock.left() < 0:
            return
        yield from _measure_training(group, device, clock)
        clean(device)


def _measure_extraction(
    wanted: list[Task], device: torch.device, clock: Clock
) -> Iterator[tuple[Task, dict[str, Any]]]:
    first: Any = wanted[0].setup
    target = load(wanted[0].target, device, first.tap_ids[-1], first.dtype)
    fused = False
    skip_tuning()
    for task in wanted:
        setup: Any = task.setup
        if clock.left() < 0:
            return
        if setup.fused and not fused:
            fused = bool(speed_up(target, "on"))
        if device.type != "cuda":
            found = count_forward(target, setup)
            yield task, {"allocated": found.allocated, "static": found.static, "out_of_memory": False}
            continue
        yield task, _plain(measure_cuda(partial(forward_once, target, setup), device), device)


def _measure_training(
    wanted: list[Task], device: torch.device, clock: Clock
) -> Iterator[tuple[Task, dict[str, Any]]]:
    """Weights, optimizer and the row stand there before a step."""
    first: Any = wanted[0].setup
    shape = target_shape(load_config(wanted[0].target))
    torch.compiler.reset()
    attention._compiled_flex.cache_clear()
    model, head, row = training_parts(shape, drafter_of(wanted[0].target, first.block_size), first, device)
    for task in wanted:
        if clock.left() < 0:
            return
        setup: Any = task.setup
        step = TrainingStep(model, head, row if setup.soft_targets else replace(row, final=None), setup)
        yield task, _plain(measure_cuda(step.run, device), device)
        del step


def _plain(found: Any, device: torch.device) -> dict[str, Any]:
    clean(device)
    names = ("allocated", "reserved", "static", "outside", "out_of_memory", "seconds")
    return {name: getattr(found, name) for name in names}


def row_of(task: Task, measured: Mapping[str, Any], cuda: bool) -> dict[str, Any]:
    """One raw row: the task, what was predicted, what was measured."""
    formulas = analytic(task, cuda)
    return {
        "what": task.what, "target": task.target, "setup": asdict(task.setup),
        "measured": dict(measured),
        "analytic": {"terms": dict(formulas.terms), "live": formulas.live, "static": formulas.static,
                     "moment": formulas.moment},
    }  # fmt: skip


def task_of(row: Mapping[str, Any]) -> Task:
    """The task of a stored row."""
    kind = ExtractionSetup if row["what"] == "extraction" else TrainingSetup
    return Task(row["target"], kind(**row["setup"]))


def brought(row: Mapping[str, Any], kind: str) -> int:
    """Bytes that the batch or step brings, as predicted (`analytic`) or `measured`.

    Inputs that lie there before a training step are left out on both sides.
    """
    found = row[kind]
    if kind == "measured":
        return found["allocated"] - found["static"]
    given = ("captured states", "target final states") if row["what"] == "training" else ()
    return found["live"] - found["static"] - sum(found["terms"].get(name, 0) for name in given)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors over all points, and those of each target's extraction and training."""
    measured = [row for row in rows if not row["measured"]["out_of_memory"]]
    groups = {}
    for key in sorted({_group(row) for row in measured}):
        mine = [row for row in measured if _group(row) == key]
        groups[key] = {"points": len(mine), **_error_figures(mine)}
    return {"figures": {"points": len(measured), **_error_figures(measured)}, "groups": groups}


def _group(row: Mapping[str, Any]) -> str:
    return f"{row['what']} {row['target']}"


def _error_figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    errors = [abs(100 * (brought(row, "analytic") / brought(row, "measured") - 1)) for row in rows]
    median, worst = (statistics.median(errors), max(errors)) if errors else (0.0, 0.0)
    return {"median_error_pct": round(median, 3), "worst_error_pct": round(worst, 3)}
