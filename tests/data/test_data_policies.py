"""Policies: counted by hand, ordered as measured elsewhere, and the explorer's numbers against a plain
count."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.wording import refused

from dflash_lab.data.batching import POLICIES, Limits, explore, plan_by, policy_waste
from dflash_lab.data.lengths import synthetic_lengths
from dflash_lab.errors import InputError

REAL = Path(__file__).parent / "lengths_public_chat.parquet"


def test_policies_waste_less_the_more_they_sort():
    real = pl.read_parquet(REAL)["length"].to_numpy()
    table = policy_waste(synthetic_lengths(real, 100_000, mean=335, longest=4096), Limits())
    wastes = table["waste_pct"].to_list()
    assert wastes == sorted(wastes, reverse=True)
    assert wastes[0] > 50 and 5 < wastes[1] < 20 and wastes[-1] < 0.5
    assert table["batches"][0] == 3125


def test_fixed_policy_is_counted_by_hand():
    table = policy_waste(np.array([1, 2, 3, 4]), Limits(fixed_batch=4, token_budget=8, max_batch=8))
    assert table["padded_tokens"][0] == 16 and table["waste_pct"][0] == pytest.approx(37.5)
    assert policy_waste(np.array([], np.int32), Limits())["batches"].to_list() == [0] * len(POLICIES)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 900), max_size=150), st.sampled_from(list(POLICIES)), st.integers(1, 40))
def test_every_policy_uses_every_sample_once(lengths, name, rows):
    plan = plan_by(name, np.array(lengths, np.int32), Limits(2048, rows, rows, seed=3))
    assert sorted(plan.order.tolist()) == list(range(len(lengths)))
    assert plan.sizes.sum() == len(lengths) and plan.sizes.max(initial=0) <= rows
    for batch, longest in zip(plan.batches, plan.longest, strict=True):
        assert longest == max(lengths[index] for index in batch)


@settings(max_examples=60, deadline=None)
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
    assert found.hours == pytest.approx(200 / 3600)
    assert found.waste_pct == pytest.approx(25)


def test_unknown_names_and_values_are_refused(monkeypatch):
    with refused(InputError):
        explore(np.array([1]), max_length=0, policy="sort al")
    for options in ({"over_long": "keep"}, {"max_length": -1}, {"tokens_per_s": 0.0}):
        with pytest.raises(InputError):
            explore(np.array([1]), **{"max_length": 0, **options})
    monkeypatch.setitem(POLICIES, "mine", POLICIES["sort all"])
    assert explore(np.array([1, 2]), max_length=0, policy="mine").kept == 2
