"""How an evaluation's numbers are made: tau as published, intervals, costs, expected speed-ups."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from drafters import random_drafter
from support.wording import refused

from dflash_lab.acceptance.evaluate import measure_costs, token_class
from dflash_lab.acceptance.results import (
    Costs,
    at,
    bootstrap,
    compare,
    operating_points,
    round_ms,
    speedup,
    summarize,
)
from dflash_lab.errors import InputError


def test_mean_over_answers_differs_from_pooled_and_conventions_differ_in_the_last_round():
    tau = summarize([[4, 4, 1], [2] * 9 + [1], []], [[4, 4, 3], [2] * 9 + [2], []])
    assert (tau.answers, tau.rounds) == (2, 13)
    assert tau.mean == pytest.approx((3 + 1.9) / 2)
    assert tau.pooled == pytest.approx(28 / 13)
    assert tau.overshoot == pytest.approx((11 / 3 + 2) / 2)
    assert tau.histogram.tolist() == [0, 0, 10, 1, 2]
    with refused(InputError):
        summarize([[], []])


def test_bootstrap_covers_the_true_mean_about_as_often_as_it_says():
    generator = np.random.default_rng(0)
    hits = 0
    for trial in range(100):
        interval = bootstrap(generator.exponential(2.0, size=60), seed=trial)
        hits += interval.low <= 2.0 <= interval.high
    assert 86 <= hits <= 99


def test_paired_comparison_is_sharper_and_leaves_out_answers_without_a_round():
    generator = np.random.default_rng(1)
    first = generator.normal(3, 1, 50)
    second = first + generator.normal(0.1, 0.05, 50)
    assert compare(first, second).interval.low > 0 and bootstrap(first).high > bootstrap(second).low
    paired = compare(np.asarray([2.0, np.nan, 3.0]), np.asarray([2.5, 1.0, 3.5]))
    assert paired.answers == 2 and paired.difference == pytest.approx(0.5)
    for wrong in ((first, second[:-1]), (np.asarray([np.nan]), np.asarray([2.0]))):
        with refused(InputError):
            compare(*wrong)


def test_interpolation_holds_the_slope_beyond_the_last_size():
    table = {1: 10.0, 8: 17.0, 16: 33.0}
    assert [at(table, size) for size in (1, 4.5, 24)] == pytest.approx([10, 13.5, 49])
    assert at({1: 5.0}, 100) == 5 and at({}, 3) == 0


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
    sizes = {"widths": [1, 4], "block_sizes": [2, 6], "budgets": [16], "context_tokens": 12, "repeats": 2}
    frame = measure_costs(loaded(kind), random_drafter(loaded(kind)), **sizes)
    wanted = [("step", 1), ("step", 4), ("draft", 2), ("draft", 6), ("build", 16)]
    assert frame.select("what", "size").rows() == wanted and (frame["ms"] > 0).all()
    costs = Costs.from_frame(frame)
    assert costs.step[4] > 0 and costs.build[16] > 0


def test_token_classes():
    texts = ("\n\n", "  ", "<|im_end|>", " 12", " word", "ing", "):")
    kinds = ("line break", "space", "special", "number", "word start", "word piece", "punctuation")
    assert tuple(map(token_class, texts)) == kinds
