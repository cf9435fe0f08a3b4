"""The grid of extraction batches in `memory_sweep`: batch x length, predicted, and measured on the target
itself.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dflash_lab.workbench.progress import duration

if TYPE_CHECKING:
    from dflash_lab.workbench.stages.memory_sweep import MemorySweepParams, Scene

logger = logging.getLogger(__name__)
POINTS_SHARE = 0.6  # of the time to measure for, where training steps are measured too


def predict_points(
    params: MemorySweepParams, found: Scene, progress: Callable[..., None]
) -> list[dict[str, Any]]:
    """Return a row a grid point with the analytic account and the fake-tensor count."""
    from dataclasses import replace

    from dflash_lab.memory.cached import fake_extraction
    from dflash_lab.memory.extraction_account import extraction_account
    from dflash_lab.workbench.stages.memory_tables import predicted_columns

    lengths = sorted(set(params.lengths))
    grid = [(batch, length) for batch in sorted(set(params.batches)) for length in lengths]
    rows = []
    for number, (batch, length) in enumerate(grid):
        progress("predicting", number, len(grid))
        setup = replace(found.extraction, batch=batch, length=length)
        analytic = extraction_account(found.shape, setup, cuda=found.cuda)
        fake = fake_extraction(found.config, setup)
        rows.append({"batch": batch, "length": length, **predicted_columns(analytic, fake)})
    progress("predicting", len(grid), len(grid))
    return rows


def measure_points(
    params: MemorySweepParams,
    found: Scene,
    rows: list[dict[str, Any]],
    progress: Callable[..., None],
    *,
    each: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Load the target and fill in what was measured; `each` is called with all rows whenever some are new.

    On CUDA points are measured until the time is up, on a CPU, where the largest takes some hundred times as
    long as the smallest, as long as the next one is expected to fit into it.

    A target whose weights alone do not fit is a result too: every point is marked as out of memory. Raises
    what `progress` raises between points, so a stop takes effect there.
    """
    from dataclasses import replace

    from dflash_lab.extraction.fast.apply import skip_tuning, speed_up
    from dflash_lab.memory.crash import requested_bytes
    from dflash_lab.memory.measure import attempt, measure_extraction
    from dflash_lab.target.loading import load_target

    last = found.extraction.last_layer(found.shape.layers)
    how: dict[str, Any] = dict(
        device=params.device,
        dtype=params.dtype,
        seed=params.seed,
        last_layer=None if last == found.shape.layers - 1 else last,
        with_head=False,
        allow_slow_kernels=params.allow_slow_kernels,
    )
    loaded: list[Any] = []
    if message := attempt(lambda: loaded.append(load_target(params.target, **how))):
        logger.warning("no point is measured, for the target's weights do not fit: %s", message)
        lacking = {"out_of_memory": True, "order": params.orders[0]}
        refused = [{**row, **lacking, "failed_gib": requested_bytes(message) / 2**30} for row in rows]
        each(refused)
        return refused
    target = loaded.pop()
    measured = [dict(row) for row in rows]
    with contextlib.ExitStack() as afterwards:
        if found.extraction.fused:
            afterwards.callback(skip_tuning())
            speed_up(target, "auto")
        allowed_s = params.measure_s * (POINTS_SHARE if found.cuda else 1.0)
        deadline = time.monotonic() + allowed_s
        # On a CPU counts are the same in any order, and small points say how long a large one would take.
        for order in params.orders if found.cuda else ("rising",):
            sizes = sorted(rows, key=_tokens, reverse=order == "falling")
            what, count = f"measuring, {order} sizes, for {allowed_s:.0f} s", 0
            for row in sizes:
                left_s = max(0.0, deadline - time.monotonic())
                progress(
                    what, count, len(sizes), batch=row["batch"], length=row["length"], left_s=round(left_s)
                )
                if not left_s or (not found.cuda and expected_seconds(measured, row) > left_s):
                    break
                setup = replace(found.extraction, batch=row["batch"], length=row["length"])
                outcome = measure_extraction(target, setup)
                new = {**row, "order": order, **outcome}
                same = [i for i, old in enumerate(measured) if _is(old, row) and old["order"] in ("", order)]
                if same:
                    measured[same[0]] = new
                else:
                    measured.append(new)
                each(measured)
                count += 1
            progress(what, len(sizes), len(sizes), measured=count)
    return measured


def expected_seconds(rows: list[dict[str, Any]], row: dict[str, Any]) -> float:
    """Return how long `row` should take to measure by those of `rows` that were: as long a token as the
    largest among them that is no larger; 0 as long as none was.
    """
    known = sorted((_tokens(one), one["seconds"]) for one in rows if one.get("seconds"))
    below = [one for one in known if one[0] <= _tokens(row)] or known[:1]
    return below[-1][1] * _tokens(row) / below[-1][0] if below else 0.0


def not_measured(measure_s: float, rows: list[dict[str, Any]]) -> str:
    """Say which points the time did not suffice for, and what to type for them; empty if it sufficed."""
    done = [row for row in rows if row["order"]]
    left = sorted((row for row in rows if not row["order"]), key=_tokens)
    if not left:
        return ""
    took = sum(row.get("seconds") or 0.0 for row in done)
    expected = [expected_seconds(rows, row) for row in left]
    named = [f"{row['batch']} x {row['length']:,} (about {duration(s)})" for row, s in zip(left, expected)]
    which = named[0] if len(left) == 1 else f"{named[0]} to {named[-1]}"
    enough = math.ceil(1.2 * (took + sum(expected)) / 10) * 10
    return (
        f"{len(left)} of {len(rows)} points, {which}: no time was left of the {measure_s:g} s given, of "
        f"which the other {len(done)} took {took:.0f}; they are predicted. "
        f"For all: -p measure_s {enough} -p force True"
    )


def _tokens(row: dict[str, Any]) -> int:
    return row["batch"] * row["length"]


def _is(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (one["batch"], one["length"]) == (other["batch"], other["length"])
