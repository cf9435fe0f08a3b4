"""Plans: every sample exactly once, no batch above its budget, and the padding and time that are promised."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.wording import refused

from dflash_lab.data.batching import balance_shards, plan_batches, predicted_cost, round_up
from dflash_lab.data.lengths import synthetic_lengths
from dflash_lab.errors import InputError

REAL = Path(__file__).parent / "lengths_public_chat.parquet"

lengths_strategy = st.lists(st.integers(1, 5000), max_size=300).map(lambda values: np.array(values, np.int32))


@settings(max_examples=200, deadline=None)
@given(
    lengths=lengths_strategy,
    budget=st.integers(1, 20_000),
    rows=st.integers(1, 64),
    window=st.integers(0, 400),
    chunk=st.sampled_from([1, 64]),
)
def test_every_sample_once_and_no_batch_above_its_limits(lengths, budget, rows, window, chunk):
    plan = plan_batches(lengths, token_budget=budget, max_batch=rows, window=window, chunk=chunk)
    assert sorted(index for batch in plan for index in batch) == list(range(len(lengths)))
    assert len(plan.batches) == len(plan)
    windows = [set(batch // window if window else batch * 0) for batch in plan.batches]
    assert all(len(seen) == 1 for seen in windows)
    for batch, longest, cost in zip(plan.batches, plan.longest, plan.costs, strict=True):
        assert longest == lengths[batch].max() == lengths[batch[0]]
        assert 1 <= len(batch) <= rows
        assert cost == len(batch) * round_up(longest, chunk)
        assert cost <= budget or len(batch) == 1
    assert plan.over_budget == sum(round_up(np.asarray(lengths), chunk) > budget)
    padded = sum(len(batch) * int(lengths[batch].max()) for batch in plan.batches)
    assert plan.padded_tokens == padded and plan.real_tokens == lengths.sum()
    assert plan.waste_pct == pytest.approx(100 * (1 - lengths.sum() / padded) if padded else 0)
    if len(lengths):
        assert plan.longest[0] == lengths.max()


@pytest.mark.parametrize(
    ("lengths", "options", "word"),
    [
        ([3, 0], {}, "sample 1 has length 0"),
        ([3.5], {}, "whole numbers"),
        ([[1]], {}, "one dimension"),
        ([1], {"token_budget": 0}, "token_budget=0"),
        ([1], {"max_batch": 0}, "max_batch=0"),
        ([1], {"chunk": 0}, "chunk=0"),
    ],
)
def test_bad_input_is_named(lengths, options, word):
    with refused(InputError):
        plan_batches(np.array(lengths), **{"token_budget": 100, "max_batch": 4, **options})


def test_padding_and_time_on_913_000_lengths():
    real = pl.read_parquet(REAL)["length"].to_numpy()
    lengths = synthetic_lengths(real, 913_000, mean=335, longest=4096)
    start = time.perf_counter()
    wide = plan_batches(lengths, token_budget=32768, max_batch=512, window=32768, chunk=64)
    seconds = time.perf_counter() - start
    narrow = plan_batches(lengths, token_budget=32768, max_batch=512, window=8192, chunk=64)
    assert wide.waste_pct <= 1 and narrow.waste_pct <= 3
    assert seconds <= 5
    assert np.array_equal(np.sort(wide.order), np.arange(913_000))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1e6), max_size=200), st.integers(1, 9))
def test_shards_differ_by_at_most_one_item(costs, shards):
    assigned = balance_shards(np.array(costs), shards)
    assert assigned.shape == (len(costs),) and set(assigned.tolist()) <= set(range(shards))
    loads = np.bincount(assigned, weights=costs, minlength=shards) if costs else np.zeros(shards)
    assert loads.max() - loads.min() <= max(costs, default=0) * (1 + 1e-9) + 1e-6


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=60), st.integers(1, 5), st.randoms())
def test_with_keys_a_shard_does_not_depend_on_the_order(costs, shards, random):
    keys = np.array([f"{index:04d}" for index in range(len(costs))])
    moved = list(range(len(costs)))
    random.shuffle(moved)
    before = balance_shards(np.array(costs), shards, keys=keys)
    after = balance_shards(np.array(costs)[moved], shards, keys=keys[moved])
    assert dict(zip(keys, before, strict=True)) == dict(zip(keys[moved], after, strict=True))


def test_balance_refuses_what_it_cannot_sum():
    for costs in ([float("nan")], [float("inf")], [-1.0]):
        with refused(InputError):
            balance_shards(np.array(costs), 2)
    with refused(InputError):
        balance_shards(np.array([1.0]), 0)


def test_predicted_cost_counts_chunks_and_attention():
    assert predicted_cost(np.array([1, 64, 65]), chunk=64).tolist() == [64, 64, 128]
    assert predicted_cost(np.array([10]), attention_per_token=0.1).tolist() == [20]


def test_a_plan_is_shown_in_a_line_and_run_in_a_loop():
    lengths = np.array([7, 60, 9, 31, 8, 33, 58, 12, 30, 10])
    plan = plan_batches(lengths, token_budget=128, max_batch=5)
    assert [lengths[batch].tolist() for batch in plan] == [[60, 58], [33, 31, 30], [12, 10, 9, 8, 7]]
    shown = f"10 samples in 3 batches of at most 128 tokens, {plan.waste_pct:.1f} % padding"
    assert shown in repr(plan) and "array" not in repr(plan)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, float("nan"), True])
@pytest.mark.parametrize("name", ["token_budget", "max_batch", "chunk"])
def test_limits_are_whole_numbers(name, wrong):
    limits = {"token_budget": 8, "max_batch": 2, name: wrong}
    with refused(InputError):
        plan_batches(np.array([3, 4]), **limits)
