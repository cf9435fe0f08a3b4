"""tau as published: averages, last-round conventions, intervals."""

from __future__ import annotations

import numpy as np
import pytest
from support.wording import refused

from dflash_lab.acceptance.results import bootstrap, compare, summarize
from dflash_lab.errors import InputError


def test_mean_over_answers_differs_from_pooled_and_conventions_differ_in_the_last_round():
    tau = summarize([[4, 4, 1], [2] * 9 + [1], []], [[4, 4, 3], [2] * 9 + [2], []])
    assert tau.answers == 2
    assert tau.rounds == 13
    assert tau.mean == pytest.approx((3 + 1.9) / 2)
    assert tau.pooled == pytest.approx(28 / 13)
    assert tau.overshoot == pytest.approx((11 / 3 + 2) / 2)
    assert tau.histogram.tolist() == [0, 0, 10, 1, 2]
    with refused(InputError):
        summarize([[], []])


def test_bootstrap_covers_the_true_mean_about_as_often_as_it_says():
    generator = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        interval = bootstrap(generator.exponential(2.0, size=60), seed=trial)
        hits += interval.low <= 2.0 <= interval.high
    assert 0.88 <= hits / 200 <= 0.99


def test_paired_comparison_is_sharper_than_two_separate_intervals():
    generator = np.random.default_rng(1)
    first = generator.normal(3, 1, 50)
    second = first + generator.normal(0.1, 0.05, 50)
    paired = compare(first, second)
    assert paired.interval.low > 0
    assert bootstrap(first).high > bootstrap(second).low
    with refused(InputError):
        compare(first, second[:-1])


def test_paired_comparison_leaves_out_answers_without_a_round():
    paired = compare(np.asarray([2.0, np.nan, 3.0]), np.asarray([2.5, 1.0, 3.5]))
    assert paired.answers == 2 and paired.difference == pytest.approx(0.5)
    with refused(InputError):
        compare(np.asarray([np.nan]), np.asarray([2.0]))
