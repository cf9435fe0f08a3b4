"""Anchors and slots: what may start a block, fair shares, labels, prefix validity, streams that depend on
place alone.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_lab.drafter.rows import (
    decay_weights,
    draw_anchors,
    seeded,
    slot_labels,
    stream_seed,
    valid_anchors,
)

masks = st.lists(st.integers(0, 1), min_size=1, max_size=40)


@given(masks)
def test_an_anchor_is_a_response_token_before_a_response_token(mask):
    wanted = [a for a in range(1, len(mask) - 1) if mask[a] and mask[a + 1]]
    assert valid_anchors(torch.tensor(mask, dtype=torch.uint8)).tolist() == wanted


@given(st.lists(st.lists(st.integers(0, 1), max_size=9), min_size=1, max_size=6))
def test_no_anchor_looks_across_documents(documents):
    """Empty documents and those of one token included."""
    starts = np.cumsum([0, *map(len, documents)])[:-1]
    row = torch.tensor([on for mask in documents for on in mask], dtype=torch.uint8)
    wanted = [
        int(start) + a
        for start, mask in zip(starts, documents, strict=True)
        for a in range(1, len(mask) - 1)
        if mask[a] and mask[a + 1]
    ]
    assert valid_anchors(row, starts).tolist() == wanted


@settings(max_examples=60)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(1, 60), st.integers(0, 1000))
def test_shares_are_proportional_distinct_sorted_and_complete(counts, total, seed):
    drawn = shared_out(counts, total, seed)
    available = sum(counts)
    assert sum(map(len, drawn)) == min(total, available)
    for found, count in zip(drawn, counts, strict=True):
        assert found == sorted(set(found)) and set(found) <= set(range(count))
        if total < available:
            assert abs(len(found) - total * count / available) <= 1


def shared_out(counts, total, seed):
    """Places drawn in each document, counted from its own first valid position."""
    places = draw_anchors(np.array(counts), total, torch.Generator().manual_seed(seed))
    ends = np.cumsum(counts)
    return [[int(p) - end + n for p in places if end - n <= p < end] for n, end in zip(counts, ends.tolist())]


def test_short_documents_get_their_turn_and_every_position_its_chance():
    counts = torch.zeros(100)
    short = 0
    for seed in range(400):
        drawn = shared_out([100, 1, 99], 20, seed)
        counts[drawn[0]] += 1
        short += len(drawn[1])
    assert short == pytest.approx(400 * 20 / 200, abs=20)  # 40 expected
    assert counts.mean() == pytest.approx(40, abs=2) and counts.min() > 15 and counts.max() < 70


@given(masks.filter(lambda mask: len(mask) > 2), st.integers(2, 6), st.data())
def test_labels_are_the_data_and_slots_count_up_to_the_first_gap(mask, size, data):
    length = len(mask)
    anchors = np.array(sorted(data.draw(st.sets(st.integers(0, length - 1), min_size=1, max_size=4))))
    ids = torch.arange(length) + 100
    ends = np.full(len(anchors), length)
    labels, valid = slot_labels(ids, torch.tensor(mask, dtype=torch.uint8), anchors, ends, size)
    for i, a in enumerate(anchors.tolist()):
        assert not valid[i, 0]
        alive = True
        for k in range(size):
            assert int(labels[i, k]) == (100 + a + k if a + k < length else 0)
            if k:
                alive = alive and a + k < length and bool(mask[a + k])
                assert bool(valid[i, k]) == alive


def test_decay():
    assert decay_weights(5, 2.0).tolist() == pytest.approx([0.0, 1.0, 0.60653, 0.36788, 0.22313], abs=1e-5)
    assert decay_weights(3, 0.0).tolist() == [0.0, 1.0, 1.0]


def test_streams_depend_on_their_parts_alone():
    assert torch.equal(torch.rand(3, generator=seeded("a", 1, 2)), torch.rand(3, generator=seeded("a", 1, 2)))
    seeds = {
        stream_seed(*parts) for parts in (("a", 1, 2), ("a", 2, 1), ("b", 1, 2), ("a", 12), ("a", "1", 2))
    }
    assert len(seeds) == 5
