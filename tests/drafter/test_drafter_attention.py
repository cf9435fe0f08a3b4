"""One visibility rule, three ways: by brute force, as dense masks, and as flex_attention's mask_mod."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_drafters import relative_error
from support.wording import refused

from dflash_lab.drafter.attention import (
    dense_attend,
    dense_mask,
    flex_attend,
    key_bounds,
    make_attends,
    mask_mod,
    row_layout,
    touched_tiles,
)
from dflash_lab.drafter.config import LayerMask
from dflash_lab.errors import InputError

MASKS = [LayerMask(causal, window) for causal in (False, True) for window in (None, 1, 3, 50)]


@st.composite
def layouts(draw):
    size = draw(st.integers(2, 5))
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    anchors = [sorted(draw(st.sets(st.integers(0, n - 1), max_size=3))) for n in lengths]
    return lengths, anchors, size


def brute_force(lengths, anchors, size, mask):
    """[A*B, S + A*B] straight from the definition."""
    blocks = [(d, a) for d, found in enumerate(anchors) for a in found]
    keys = [("context", d, p) for d, n in enumerate(lengths) for p in range(n)]
    keys += [("block", i, k) for i in range(len(blocks)) for k in range(size)]
    seen = torch.zeros(len(blocks) * size, len(keys), dtype=torch.bool)
    for i, (document, anchor) in enumerate(blocks):
        for k in range(size):
            t = anchor + k
            for column, (kind, owner, place) in enumerate(keys):
                if kind == "context":
                    visible = owner == document and place < anchor
                    p = place
                else:
                    visible = owner == i and not (mask.causal and place > k)
                    p = anchor + place
                if mask.window is not None:
                    visible = visible and abs(t - p) < mask.window
                seen[i * size + k, column] = visible
    return seen


@settings(max_examples=40, deadline=None)
@given(layouts(), st.sampled_from(MASKS))
def test_masks_follow_the_definition(shape, mask):
    lengths, anchors, size = shape
    layout = row_layout(anchors, lengths, size)
    wanted = brute_force(lengths, anchors, size, mask)
    rows, columns = wanted.shape
    if rows == 0:
        return
    q, k = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    assert torch.equal(mask_mod(key_bounds(layout, mask))(torch.tensor(0), torch.tensor(0), q, k), wanted)
    context = sum(lengths)
    for segment in layout.segments:
        blocks = slice(segment.block_start * size, segment.block_stop * size)
        part = torch.cat(
            [
                wanted[blocks, segment.context_start : segment.context_stop],
                wanted[blocks, context + blocks.start : context + blocks.stop],
            ],
            1,
        )
        assert torch.equal(dense_mask(layout, mask, segment), part)


@settings(max_examples=40, deadline=None)
@given(layouts(), st.sampled_from(MASKS), st.sampled_from([2, 3, 8]))
def test_tiles_are_seen_or_full_as_their_pairs_are(shape, mask, tile):
    lengths, anchors, size = shape
    pairs = brute_force(lengths, anchors, size, mask)
    if not len(pairs):
        return
    seen, full = touched_tiles(key_bounds(row_layout(anchors, lengths, size), mask), pairs.shape[1], tile)
    for query in range(seen.shape[0]):
        for key in range(seen.shape[1]):
            columns = slice(key * tile, (key + 1) * tile)
            part = pairs[query * tile : (query + 1) * tile, columns]
            assert bool(seen[query, key]) == bool(part.any())
            context = columns.stop <= sum(lengths)
            assert bool(full[query, key]) == bool(context and part.all())


def test_most_tiles_of_a_training_row_are_full_or_left_out():
    """1,024 blocks of 24 over 8,192 tokens: work is what is visible and a tenth more."""
    generator = torch.Generator().manual_seed(0)
    anchors = (torch.randperm(8190, generator=generator)[:1024] + 1).sort().values
    layout = row_layout([anchors.tolist()], [8192], 24)
    for mask in (LayerMask(False, None), LayerMask(True, 2048)):
        bounds = key_bounds(layout, mask)
        seen, full = touched_tiles(bounds, 8192 + 1024 * 24)
        low, high, first, last = bounds
        visible = int((high - low).sum() + (last - first).sum())
        assert int(seen.sum()) * 128 * 128 < (1.15 if mask.window is None else 1.35) * visible
        assert (seen & ~full).sum(1).max() <= 6


def tensors(blocks, size, context, seed=0, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(blocks, size, heads, 16) for heads in (4, 2, 2)] + [(context, 2, 16)] * 2
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


@pytest.mark.parametrize("attends", [dense_attend, flex_attend])
@pytest.mark.parametrize("mask", [LayerMask(False, None), LayerMask(True, 3)])
def test_both_paths_equal_attention_written_out(mask, attends):
    anchors, lengths = [[1, 4], [], [0, 7, 8]], [6, 5, 9]
    q, kb, vb, kc, vc = tensors(5, 4, 20)
    seen = brute_force(lengths, anchors, 4, mask)
    k = torch.cat([kc, kb.flatten(0, 1)]).repeat_interleave(2, 1)
    v = torch.cat([vc, vb.flatten(0, 1)]).repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", q.flatten(0, 1), k) / 16**0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    wanted = torch.einsum("hqk,khd->qhd", weights, v).unflatten(0, (5, 4))
    with torch.no_grad():
        found = attends(row_layout(anchors, lengths, 4))(mask)(q, kb, vb, kc, vc)
    assert relative_error(found, wanted) < 1e-6


@pytest.mark.parametrize(("anchors", "path"), [([1], "flash"), ([3, 1], "dense"), ([9], "dense")], ids=str)
def test_unsorted_and_outside_anchors_and_unknown_paths_are_refused(anchors, path):
    with refused(InputError):
        make_attends(row_layout([anchors], [9], 2), path)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [LayerMask(False, None), LayerMask(True, 60)])
def test_flex_equals_dense_on_cuda_with_gradients(mask, dtype):
    layout = row_layout([[1, 40, 90], [2, 150]], [128, 256], 16).map(lambda t: t.cuda())
    results = []
    for attends in (dense_attend(layout), flex_attend(layout)):
        inputs = [t.requires_grad_() for t in tensors(5, 16, 384, dtype=dtype, device="cuda")]
        out = attends(mask)(*inputs)
        out.float().square().sum().backward()
        results.append([out, *(t.grad for t in inputs)])
    for dense, flex in zip(*results, strict=True):
        assert relative_error(flex, dense) < (1e-4 if dtype == torch.float32 else 3e-2)
