"""Costs and expected speed-ups."""

from __future__ import annotations

import polars as pl
import pytest
from drafters import random_drafter
from support.wording import refused

from dflash_lab.acceptance.evaluate import measure_costs
from dflash_lab.acceptance.results import Costs, at, operating_points, round_ms, speedup
from dflash_lab.errors import InputError


def test_interpolation_holds_the_slope_beyond_the_last_size():
    table = {1: 10.0, 8: 17.0, 16: 33.0}
    assert at(table, 1) == 10
    assert at(table, 4.5) == pytest.approx(13.5)
    assert at(table, 24) == pytest.approx(49)
    assert at({1: 5.0}, 100) == 5
    assert at({}, 3) == 0


def test_speedup_is_tau_over_cost():
    costs = Costs(step={1: 10.0, 8: 10.0, 72: 20.0}, draft={8: 2.0}, build={64: 1.0})
    assert speedup(costs, 4.0, 8) == pytest.approx(4 * 10 / 12)
    assert speedup(costs, 6.0, 8, budget=64) == pytest.approx(6 * 10 / 23)
    hybrid = Costs(costs.step, costs.draft, costs.build, replay=True)
    assert round_ms(hybrid, 4.0, 8) == pytest.approx(22)
    assert round_ms(hybrid, 8.0, 8) == pytest.approx(12)  # all accepted: nothing to run again
    with refused(InputError):
        speedup(Costs({1: 0.0}, {}, {}), 2.0, 8)


def test_best_operating_point_moves_with_the_costs():
    taus = pl.DataFrame({"block_size": [4, 16, 16], "budget": [0, 0, 256], "tau": [2.5, 4.0, 6.0]})
    wide_is_free = operating_points(Costs.typed(step_ms=10, step_ms_per_token=0.0, draft_ms=1), taus)
    assert wide_is_free["budget"][0] == 256
    wide_is_dear = operating_points(Costs.typed(step_ms=10, step_ms_per_token=2.0, draft_ms=1), taus)
    assert (wide_is_dear["block_size"][0], wide_is_dear["budget"][0]) == (4, 0)
    assert wide_is_dear["speedup"].is_sorted(descending=True)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_measured_costs_have_every_size(loaded, kind):
    target = loaded(kind)
    frame = measure_costs(
        target,
        random_drafter(target),
        widths=[1, 4],
        block_sizes=[2, 6],
        budgets=[16],
        context_tokens=12,
        repeats=2,
    )
    assert frame.select("what", "size").rows() == [
        ("step", 1),
        ("step", 4),
        ("draft", 2),
        ("draft", 6),
        ("build", 16),
    ]
    assert (frame["ms"] > 0).all()
    costs = Costs.from_frame(frame)
    assert costs.step[4] > 0 and costs.build[16] > 0
