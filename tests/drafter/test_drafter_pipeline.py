"""What a pipeline's timings say: how busy each side was, and which one the other waits for."""

from __future__ import annotations

import polars as pl
import pytest

from dflash_lab.drafter.pipeline import TIMING_SCHEMA, summary


def timings(
    worker: str, waited_ms: list[float], *, seconds: float, depth=None, forward_ms=None
) -> pl.DataFrame:
    """Rows of one worker, evenly over `seconds`."""
    count = len(waited_ms)
    rows = [
        (worker, turn, 100 + seconds * turn / (count - 1), waited, depth, forward_ms)
        for turn, waited in enumerate(waited_ms)
    ]
    return pl.DataFrame(rows, schema=TIMING_SCHEMA, orient="row")


@pytest.mark.parametrize(
    ("drafter_ms", "target_ms", "busy", "target_busy", "limit"),
    [(1000.0, 0.0, 60.0, 100.0, "targets"), (10.0, 500.0, 99.6, 80.0, "drafters")],
)
def test_the_side_that_the_other_waits_for_is_the_limit(drafter_ms, target_ms, busy, target_busy, limit):
    frame = pl.concat(
        [
            timings("drafter-0", [drafter_ms] * 4, seconds=10, depth=1),
            timings("drafter-1", [drafter_ms] * 4, seconds=10, depth=3),
            timings("target-0", [target_ms] * 4, seconds=10, forward_ms=40.0),
            timings("target-1", [target_ms] * 4, seconds=10, forward_ms=60.0),
        ]
    )
    found = summary(frame, {"drafter-0": 10.0, "drafter-1": 10.0})
    assert found["drafter_busy_pct"] == pytest.approx(busy)
    assert found["target_busy_pct"] == pytest.approx(target_busy)
    assert found["limit"] == limit
    assert found["queue_depth"] == 2 and found["target_forward_ms"] == 50
