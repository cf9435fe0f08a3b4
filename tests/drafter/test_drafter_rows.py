"""Packed rows: what may start a block and in fair shares, every sample once, documents apart, padding without
effect, prefetch that ends.
"""

from __future__ import annotations

import dataclasses
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_drafters import relative_error, tiny_config, tiny_drafter, tiny_head, tiny_items
from support.wording import refused

from dflash_lab.data.samples import FeatureItem
from dflash_lab.drafter.attention import row_layout
from dflash_lab.drafter.loss_terms import LossConfig
from dflash_lab.drafter.objective import Objective, TrainSettings, add_noise
from dflash_lab.drafter.rows import (
    PackedRows,
    decay_weights,
    draw_anchors,
    pack,
    plan_rows,
    prefetch,
    seeded,
    stream_seed,
    without_bad_states,
)
from dflash_lab.errors import InputError


def source(pad=False, context=64, anchors=10, **changes):
    items = tiny_items(12, heldout=0, **changes)
    return items, PackedRows(
        items, range(len(items)), tiny_config(), context_tokens=context, anchors=anchors, seed=0, pad=pad
    )


def cost(drafter, row, loss):
    chosen = TrainSettings(
        max_steps=1, context_tokens=64, anchors=10, loss=loss, gamma=4.0, denominator="mask"
    )
    return Objective(tiny_head(), drafter.config, chosen)(
        drafter, drafter, row, row.taps.float(), teacher=True
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(2, 80))
def test_plan_holds_every_sample_once_within_the_budget(lengths, budget):
    rows = plan_rows(lengths, budget, torch.Generator().manual_seed(0))
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    for row in rows:
        assert len(row) == 1 or sum(min(lengths[i], budget) for i in row) <= budget


@settings(max_examples=60, deadline=None)
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


def test_epochs_differ_and_rows_repeat():
    items, rows = source()
    again = PackedRows(items, range(12), tiny_config(), context_tokens=64, anchors=10, seed=0)
    first = rows.row(0, 1)
    for other in (rows.row(0, 1), again.row(0, 1)):
        assert other.hashes == first.hashes and torch.equal(other.layout.anchors, first.layout.anchors)
    epochs = [[rows.row(e, i) for i in range(rows.count(e))] for e in (0, 1)]
    together = [{frozenset(r.hashes) for r in epoch} for epoch in epochs]
    assert together[0] != together[1]
    for epoch in epochs:
        assert sorted(h for row in epoch for h in row.hashes) == sorted(item.hash for item in items)


def test_anchors_are_drawn_anew_each_epoch_and_sorted():
    items = tiny_items(1, heldout=0, low=60, high=61)
    rows = PackedRows(items, [0], tiny_config(), context_tokens=64, anchors=10, seed=0)
    drawn = [rows.row(epoch, 0).layout.anchors.tolist() for epoch in range(4)]
    assert len({tuple(anchors) for anchors in drawn}) == 4  # the same document each time
    assert all(anchors == sorted(anchors) and len(set(anchors)) == 10 for anchors in drawn)
    other = PackedRows(items, [0], tiny_config(), context_tokens=64, anchors=10, seed=1)
    assert other.row(0, 0).layout.anchors.tolist() != drawn[0]


def test_a_row_is_its_documents_side_by_side():
    items, rows = source()
    by_hash = {item.hash: item for item in items}
    row, start = rows.row(0, 0), 0
    for digest, segment in zip(row.hashes, row.layout.segments, strict=True):
        item = by_hash[digest]
        assert (segment.context_start, segment.context_stop) == (start, start + len(item))
        assert torch.equal(row.taps[start : start + len(item)], item.taps)
        assert torch.equal(row.final[start : start + len(item)], item.final)
        start += len(item)
    assert row.tokens == start and row.blocks == len(row.block_ids) == 10
    assert (row.block_ids[:, 1:] == tiny_config().mask_token_id).all()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=9),
    st.integers(1, 40),
    st.integers(2, 6),
)
def test_a_row_packed_at_once_is_one_packed_by_its_documents(documents, anchors, size):
    """The same draws, labels and layout as when each document is worked on by itself."""
    config = dataclasses.replace(tiny_config(), block_size=size)
    items = [
        FeatureItem(f"{i:032x}", torch.arange(len(d)).int() + 7 * i, (torch.tensor(d) > 0).byte(),
                    torch.zeros(len(d), 0), None, False)
        for i, d in enumerate(documents)
    ]  # fmt: skip
    row = pack(items, config, 25, anchors, torch.Generator().manual_seed(len(documents)))
    wanted = packed_by_documents(items, size, 25, anchors, torch.Generator().manual_seed(len(documents)))
    layout, labels, counted = wanted
    for name in ("anchors", "starts", "positions"):
        assert torch.equal(getattr(row.layout, name), getattr(layout, name))
    assert row.layout.segments == layout.segments and row.layout.block_size == size
    assert torch.equal(row.labels, labels) and torch.equal(row.slot_mask, counted)
    before = (layout.anchors[:, None] + torch.arange(size) - 1).clamp(0, row.tokens - 1)
    assert torch.equal(row.target_rows, before)
    assert torch.equal(row.block_ids[:, 0], row.input_ids[layout.anchors])


def packed_by_documents(items, size, context, total, generator):
    """Layout, labels and counted slots, by small torch operations on each document."""
    valid, drawn, labels, counted = [], [], [], []
    for item in items:
        on = item.loss_mask[:context].bool()
        places = on[:-1] & on[1:]
        places[:1] = False
        valid.append(places.nonzero()[:, 0])
    counts = torch.tensor([len(places) for places in valid], dtype=torch.float64)
    available = int(counts.sum())
    if available > total:
        ends = counts.cumsum(0) * total / available + torch.rand(1, generator=generator, dtype=torch.float64)
        ends[-1] = total + ends[-1] % 1
        for places, share in zip(valid, ends.floor().diff(prepend=torch.zeros(1)).long().tolist()):
            order = torch.randperm(len(places), generator=generator)[:share]
            drawn.append(places[order].sort().values)
    else:
        drawn = valid
    for item, anchors in zip(items, drawn, strict=True):
        ids, on = item.input_ids[:context].long(), item.loss_mask[:context].bool()
        where = anchors[:, None] + torch.arange(size)
        inside = where < len(ids)
        where = where.clamp(max=len(ids) - 1)
        labels.append(torch.where(inside, ids[where], 0))
        runs = (inside & on[where])[:, 1:].long().cumprod(dim=1).bool()
        counted.append(torch.cat([torch.zeros_like(runs[:, :1]), runs], dim=1))
    lengths = [min(len(item), context) for item in items]
    layout = row_layout([anchors.tolist() for anchors in drawn], lengths, size)
    return layout, torch.cat(labels), torch.cat(counted)


def test_padding_changes_no_loss_and_no_gradient():
    _, plain = source()
    _, padded = source(pad=True)
    results = []
    for rows in (plain, padded):
        row = rows.row(0, 2)
        drafter = tiny_drafter()
        found = cost(drafter, row, LossConfig(soft_weight=0.5))
        found.total.backward()
        results.append((found, torch.cat([p.grad.flatten() for p in drafter.parameters()])))
    assert padded.row(0, 2).taps.shape[0] == 64 and padded.row(0, 2).block_ids.shape[0] == 10
    assert results[1][0].total.item() == pytest.approx(results[0][0].total.item(), rel=1e-6)
    assert int(results[1][0].denominator) == int(results[0][0].denominator)
    assert relative_error(results[1][1], results[0][1]) < 1e-5


@pytest.mark.parametrize("pad", [False, True])
def test_a_document_that_is_not_a_number_costs_nothing_and_its_neighbours_what_they_cost(pad):
    _, rows = source(pad=pad)
    row = next(row for row in (rows.row(0, i) for i in range(9)) if len(row.hashes) > 2)
    _, part, *_ = row.layout.segments
    assert part.block_stop > part.block_start
    taps, final = row.taps.clone(), row.final.clone()
    taps[part.context_start + 1, 5], final[part.context_stop - 1] = float("nan"), float("-inf")
    same, none = without_bad_states(row)
    assert same is row and none == []
    for spoilt in ({"taps": taps}, {"final": final}):
        sound, hashes = without_bad_states(dataclasses.replace(row, **spoilt))
        assert hashes == [row.hashes[1]]
        left = row.slot_mask.clone()
        left[part.block_start : part.block_stop] = False
        wanted = cost(tiny_drafter(), dataclasses.replace(row, slot_mask=left), LossConfig(soft_weight=0.3))
        found = cost(tiny_drafter(), sound, LossConfig(soft_weight=0.3))
        assert found.total.item() == pytest.approx(wanted.total.item()) and wanted.total.item() > 0


def test_padding_where_blocks_are_missing():
    _, rows = source(pad=True, anchors=200)
    row = rows.row(0, 0)
    assert row.blocks < 200 == row.block_ids.shape[0] == row.slot_mask.shape[0]
    assert not row.slot_mask[row.blocks :].any()
    with torch.no_grad():
        hidden = tiny_drafter()(tiny_head().embed(row.block_ids), row.taps.float(), row.layout)
    assert hidden.shape[0] == 200 and torch.isfinite(hidden).all()


def test_over_long_samples_are_cut_and_counted():
    _, rows = source(context=16)
    assert rows.cut > 0 and all(rows.row(0, i).tokens <= 16 for i in range(rows.count(0)))


def test_noise_is_uniform_within_its_bounds_and_seeded():
    taps = torch.zeros(400, 50)
    noisy = add_noise(taps, 0.05, torch.Generator().manual_seed(1))
    assert float(noisy.abs().max()) <= 0.05
    assert float(noisy.std()) == pytest.approx(0.05 / 3**0.5, rel=0.02)
    assert torch.equal(noisy, add_noise(taps, 0.05, torch.Generator().manual_seed(1)))


def test_prefetch_keeps_order_raises_what_the_source_raises_and_ends_its_thread():
    def failing():
        yield 1
        yield 2
        raise RuntimeError("disk gone")

    stream = prefetch(failing())
    assert [next(stream), next(stream)] == [1, 2]
    with pytest.raises(RuntimeError, match="disk gone"):
        next(stream)
    assert list(prefetch(range(5))) == [0, 1, 2, 3, 4]
    endless = prefetch(iter(int, 1), depth=1)
    next(endless)
    endless.close()
    deadline = time.monotonic() + 5
    while any(t.name == "row-prefetch" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(t.name == "row-prefetch" for t in threading.enumerate())


def test_decay():
    assert decay_weights(5, 2.0).tolist() == pytest.approx([0.0, 1.0, 0.60653, 0.36788, 0.22313], abs=1e-5)
    assert decay_weights(3, 0.0).tolist() == [0.0, 1.0, 1.0]


def test_streams_depend_on_their_parts_alone():
    assert torch.equal(torch.rand(3, generator=seeded("a", 1, 2)), torch.rand(3, generator=seeded("a", 1, 2)))
    seeds = {
        stream_seed(*parts) for parts in (("a", 1, 2), ("a", 2, 1), ("b", 1, 2), ("a", 12), ("a", "1", 2))
    }
    assert len(seeds) == 5


def test_sizes_are_checked():
    items = tiny_items(3, heldout=0)
    with refused(InputError):
        PackedRows(items, range(3), tiny_config(), context_tokens=64, anchors=0, seed=0)
