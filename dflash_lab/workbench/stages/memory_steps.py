"""The grid of training steps in `memory_sweep`: anchors x block size, predicted, and on CUDA measured.

The step that is measured is the training loop's own: real drafter, loss and optimizer, a head and an
embedding of the target's shape without its values. Its layers are plain, which can be counted on fake
tensors, or compiled (`compile_steps`), which cannot, and takes a minute more a shape. On a CPU the loop takes
other paths (dense attention, widened products), so a measurement there would say nothing about a device, and
none is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_lab.workbench.stages.memory_sweep import MemorySweepParams, Scene


def step_points(
    params: MemorySweepParams, found: Scene, progress: Callable[..., None]
) -> list[dict[str, Any]]:
    """Return a row (STEP_SCHEMA) a grid point; on CUDA one each that it was measured in, rising and falling
    sizes as `orders` say, until time is up.
    """
    from dataclasses import replace

    from dflash_lab.memory.measure import measure_training
    from dflash_lab.memory.training_account import training_account
    from dflash_lab.workbench.stages.memory_points import POINTS_SHARE
    from dflash_lab.workbench.stages.memory_tables import counted_step, predicted_columns

    grid = [(a, b) for a in sorted(set(params.step_anchors)) for b in sorted(set(params.step_blocks))]
    rows, points = [], []
    for number, (anchors, block) in enumerate(grid):
        progress("training steps", number, len(grid))
        setup = replace(found.measured_step, anchors=anchors, block_size=block)
        drafter = replace(found.drafter, block_size=block)
        analytic = training_account(found.shape, drafter, setup, cuda=found.cuda)
        fake = counted_step(found, drafter, setup)
        columns = predicted_columns(analytic, fake)
        rows.append({"anchors": anchors, "block_size": block, **columns})
        points.append((setup, drafter))
    progress("training steps", len(grid), len(grid))
    if not (params.measure and found.cuda):
        return rows
    deadline = time.monotonic() + (1 - POINTS_SHARE) * params.measure_s
    measured = []
    for order in params.orders:
        sizes = sorted(range(len(grid)), key=lambda at: points[at][0].rows, reverse=order == "falling")
        for number, at in enumerate(sizes):
            progress(f"measuring steps, {order} sizes", number, len(sizes))
            if time.monotonic() >= deadline:
                break
            setup, drafter = points[at]
            outcome = measure_training(found.shape, drafter, setup, found.device)
            measured.append({**rows[at], "order": order, **outcome})
        progress(f"measuring steps, {order} sizes", len(sizes), len(sizes))
    done = {(row["anchors"], row["block_size"]) for row in measured}
    return [*measured, *(row for row in rows if (row["anchors"], row["block_size"]) not in done)]
