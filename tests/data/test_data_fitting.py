"""Budgets that padding lowers: a small data set is not one batch of padding, a large one keeps its plan."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_lab.data.batching import BATCH_TOKENS, WASTE_PCT, fit_batches, plan_batches
from dflash_lab.data.lengths import synthetic_lengths

REAL = Path(__file__).parent / "lengths_public_chat.parquet"
CHATS = np.random.default_rng(0).integers(20, 170, 57)  # a few dozen short chats


def test_a_few_dozen_chats_are_several_batches_with_little_padding():
    fitted = fit_batches(CHATS, token_budget=16384, max_batch=512)
    assert len(fitted.asked) == 1 and fitted.asked.waste_pct > 35
    assert len(fitted.plan) > 3 and fitted.plan.waste_pct < 15
    assert fitted.plan.token_budget < 4096
    for number in ("16,384", f"{fitted.plan.token_budget:,}", f"{len(fitted.plan)} batches", "57 samples"):
        assert number in fitted.lowered
    assert f"{fitted.asked.waste_pct:.0f} % padding" in fitted.lowered and "one batch" in fitted.lowered


@pytest.mark.parametrize("budget, chunk", [(16384, 1), (32768, 64)])
def test_a_large_data_set_keeps_its_budget_and_its_batches(budget, chunk):
    real = pl.read_parquet(REAL)["length"].to_numpy()
    lengths = synthetic_lengths(real, 100_000, mean=335, longest=4096)
    given = dict(token_budget=budget, max_batch=512, window=32768, chunk=chunk)
    fitted, plain = fit_batches(lengths, **given), plan_batches(lengths, **given)
    assert fitted.plan is fitted.asked and fitted.lowered == ""
    assert fitted.plan.token_budget == budget and np.array_equal(fitted.plan.offsets, plain.offsets)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5000), max_size=200).map(lambda values: np.array(values, np.int64)),
    budget=st.integers(1, 40_000),
    rows=st.integers(1, 64),
    chunk=st.sampled_from([1, 64]),
)
def test_a_lowered_budget_is_never_dearer_and_no_batch_grows(lengths, budget, rows, chunk):
    fitted = fit_batches(lengths, token_budget=budget, max_batch=rows, chunk=chunk)
    plan, asked = fitted.plan, fitted.asked
    assert sorted(plan.order.tolist()) == list(range(len(lengths)))
    assert plan.padded_tokens <= asked.padded_tokens
    assert plan.padded_tokens + BATCH_TOKENS * len(plan) <= asked.padded_tokens + BATCH_TOKENS * len(asked)
    assert plan.costs.max(initial=0) <= asked.costs.max(initial=0)
    assert bool(fitted.lowered) == (plan.token_budget < budget)
    if asked.waste_pct <= WASTE_PCT:
        assert plan is asked
        return
    while (budget := budget // 2) > BATCH_TOKENS:  # cut no finer than pays: a batch costs something too
        other = plan_batches(lengths, token_budget=budget, max_batch=rows, chunk=chunk)
        assert plan.padded_tokens + BATCH_TOKENS * len(plan) <= other.padded_tokens + BATCH_TOKENS * len(
            other
        )
