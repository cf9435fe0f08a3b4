"""Plans: every sample exactly once, no batch above its limits, and the padding and time that are promised."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.wording import check_wording, refused

from dflash_lab.data.batching import (
    BATCH_TOKENS,
    POLICIES,
    WASTE_PCT,
    Limits,
    balance_shards,
    explore,
    fit_batches,
    plan_batches,
    plan_by,
    policy_waste,
    predicted_cost,
    round_up,
)
from dflash_lab.data.lengths import synthetic_lengths
from dflash_lab.errors import InputError

REAL = Path(__file__).parent / "lengths_public_chat.parquet"
LENGTHS = st.lists(st.integers(1, 5000), max_size=200).map(lambda values: np.array(values, np.int64))


@pytest.fixture(scope="module")
def chats():
    """Lengths [100,000] as public chats have them."""
    real = pl.read_parquet(REAL)["length"].to_numpy()
    return synthetic_lengths(real, 100_000, mean=335, longest=4096)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 20_000), st.integers(1, 64), st.integers(0, 400), st.sampled_from([1, 64]))
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
    assert plan.over_budget == sum(round_up(lengths, chunk) > budget)
    padded = sum(len(batch) * int(lengths[batch].max()) for batch in plan.batches)
    assert plan.padded_tokens == padded and plan.real_tokens == lengths.sum()
    assert plan.waste_pct == pytest.approx(100 * (1 - lengths.sum() / padded) if padded else 0)
    if len(lengths):
        assert plan.longest[0] == lengths.max()


@pytest.mark.parametrize(
    ("lengths", "limits"),
    [
        ([3, 0], {}),
        ([3.5], {}),
        ([[1]], {}),
        *(([3], {name: 0}) for name in ("token_budget", "max_batch", "chunk")),
        *(([3], {"max_batch": wrong}) for wrong in (-1, 1.5, float("nan"), True)),
    ],
)
def test_wrong_lengths_and_limits_are_named(lengths, limits):
    with refused(InputError):
        plan_batches(np.array(lengths), **{"token_budget": 100, "max_batch": 4, **limits})


def test_a_plan_is_shown_in_a_line_and_run_in_a_loop():
    lengths = np.array([7, 60, 9, 31, 8, 33, 58, 12, 30, 10])
    plan = plan_batches(lengths, token_budget=128, max_batch=5)
    assert [lengths[batch].tolist() for batch in plan] == [[60, 58], [33, 31, 30], [12, 10, 9, 8, 7]]
    check_wording(repr(plan))


def test_sorting_wider_and_by_more_policies_wastes_less(chats):
    limits = {"token_budget": 32768, "max_batch": 512, "chunk": 64}
    wide, narrow = (plan_batches(chats, window=window, **limits) for window in (32768, 8192))
    assert wide.waste_pct <= 1 and narrow.waste_pct <= 3
    table = policy_waste(chats, Limits())
    wastes = table["waste_pct"].to_list()
    assert wastes == sorted(wastes, reverse=True)
    assert wastes[0] > 50 and 5 < wastes[1] < 20 and wastes[-1] < 0.5
    assert table["batches"][0] == 3125


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1e6), max_size=200), st.integers(1, 9))
def test_shards_differ_by_at_most_one_item(costs, shards):
    assigned = balance_shards(np.array(costs), shards)
    assert assigned.shape == (len(costs),) and set(assigned.tolist()) <= set(range(shards))
    loads = np.bincount(assigned, weights=costs, minlength=shards) if costs else np.zeros(shards)
    assert loads.max() - loads.min() <= max(costs, default=0) * (1 + 1e-9) + 1e-6


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=60), st.integers(1, 5), st.randoms())
def test_with_keys_a_shard_does_not_depend_on_the_order(costs, shards, random):
    keys = np.array([f"{index:04d}" for index in range(len(costs))])
    moved = list(range(len(costs)))
    random.shuffle(moved)
    before = balance_shards(np.array(costs), shards, keys=keys)
    after = balance_shards(np.array(costs)[moved], shards, keys=keys[moved])
    assert dict(zip(keys, before, strict=True)) == dict(zip(keys[moved], after, strict=True))


@pytest.mark.parametrize(
    ("costs", "shards"), [([float("nan")], 2), ([float("inf")], 2), ([-1.0], 2), ([1.0], 0)]
)
def test_costs_that_have_no_sum_are_refused(costs, shards):
    with refused(InputError):
        balance_shards(np.array(costs), shards)


def test_predicted_cost_counts_chunks_and_attention():
    assert predicted_cost(np.array([1, 64, 65]), chunk=64).tolist() == [64, 64, 128]
    assert predicted_cost(np.array([10]), attention_per_token=0.1).tolist() == [20]


def test_a_few_dozen_chats_are_several_batches_with_little_padding():
    lengths = np.random.default_rng(0).integers(20, 170, 57)
    fitted = fit_batches(lengths, token_budget=16384, max_batch=512)
    assert len(fitted.asked) == 1 and fitted.asked.waste_pct > 35
    assert len(fitted.plan) > 3 and fitted.plan.waste_pct < 15
    assert fitted.plan.token_budget < 4096
    check_wording(fitted.lowered)


@pytest.mark.parametrize("budget, chunk", [(16384, 1), (32768, 64)])
def test_a_large_data_set_keeps_its_budget_and_its_batches(chats, budget, chunk):
    given = dict(token_budget=budget, max_batch=512, window=32768, chunk=chunk)
    fitted, plain = fit_batches(chats, **given), plan_batches(chats, **given)
    assert fitted.plan is fitted.asked and fitted.lowered == ""
    assert fitted.plan.token_budget == budget and np.array_equal(fitted.plan.offsets, plain.offsets)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 40_000), st.integers(1, 64), st.sampled_from([1, 64]))
def test_a_lowered_budget_is_never_dearer_and_no_batch_grows(lengths, budget, rows, chunk):
    fitted = fit_batches(lengths, token_budget=budget, max_batch=rows, chunk=chunk)
    plan, asked = fitted.plan, fitted.asked
    assert sorted(plan.order.tolist()) == list(range(len(lengths)))
    assert plan.padded_tokens <= asked.padded_tokens
    dear = plan.padded_tokens + BATCH_TOKENS * len(plan)
    assert dear <= asked.padded_tokens + BATCH_TOKENS * len(asked)
    assert plan.costs.max(initial=0) <= asked.costs.max(initial=0)
    assert bool(fitted.lowered) == (plan.token_budget < budget)
    if asked.waste_pct <= WASTE_PCT:
        assert plan is asked
        return
    while (budget := budget // 2) > BATCH_TOKENS:  # cut no finer than pays: a batch costs something too
        other = plan_batches(lengths, token_budget=budget, max_batch=rows, chunk=chunk)
        assert dear <= other.padded_tokens + BATCH_TOKENS * len(other)


def test_fixed_policy_is_counted_by_hand():
    table = policy_waste(np.array([1, 2, 3, 4]), Limits(fixed_batch=4, token_budget=8, max_batch=8))
    assert table["padded_tokens"][0] == 16 and table["waste_pct"][0] == pytest.approx(37.5)
    assert policy_waste(np.array([], np.int32), Limits())["batches"].to_list() == [0] * len(POLICIES)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 900), max_size=100), st.sampled_from(list(POLICIES)), st.integers(1, 40))
def test_every_policy_uses_every_sample_once(lengths, name, rows):
    plan = plan_by(name, np.array(lengths, np.int32), Limits(2048, rows, rows, seed=3))
    assert sorted(plan.order.tolist()) == list(range(len(lengths)))
    assert plan.sizes.sum() == len(lengths) and plan.sizes.max(initial=0) <= rows
    for batch, longest in zip(plan.batches, plan.longest, strict=True):
        assert longest == max(lengths[index] for index in batch)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 900), min_size=1, max_size=100), st.integers(0, 1000))
def test_the_explorer_drops_or_truncates(lengths, limit):
    lengths = np.array(lengths)
    over = lengths > limit if limit else np.zeros(len(lengths), bool)
    drop = explore(lengths, max_length=limit)
    assert (drop.kept, drop.dropped, drop.truncated) == ((~over).sum(), over.sum(), 0)
    assert drop.tokens == lengths[~over].sum()
    cut = explore(lengths, max_length=limit, over_long="truncate")
    assert (cut.kept, cut.dropped, cut.truncated) == (len(lengths), 0, over.sum())
    assert cut.tokens == (np.minimum(lengths, limit) if limit else lengths).sum()


def test_hours_count_padded_tokens():
    found = explore(np.array([100, 50]), max_length=0, limits=Limits(token_budget=200), tokens_per_s=1.0)
    assert found.hours == pytest.approx(200 / 3600) and found.waste_pct == pytest.approx(25)


@pytest.mark.parametrize(
    "wrong", [{"policy": "sort al"}, {"over_long": "keep"}, {"max_length": -1}, {"tokens_per_s": 0.0}]
)
def test_unknown_names_and_values_are_refused_by_the_explorer(wrong):
    with refused(InputError):
        explore(np.array([1]), **{"max_length": 0, **wrong})


def test_a_policy_is_added_by_registering(monkeypatch):
    monkeypatch.setitem(POLICIES, "mine", POLICIES["sort all"])
    assert explore(np.array([1, 2]), max_length=0, policy="mine").kept == 2
