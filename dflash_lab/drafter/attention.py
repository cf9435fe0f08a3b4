"""Which tokens a block sees, and attention over them: one rule, and two ways to compute it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_lab.drafter.config import LayerMask
from dflash_lab.errors import InputError

# The rule: a block at anchor a sees the context strictly before a in its own document (the target has not run
# on the anchor yet) and its own slots, never another block. In a sliding layer of window W the query at
# position t = a + k keeps keys p with t - p < W. Since a document is contiguous in its row, the visible
# context of a slot is one interval of row indices; every mask below is that interval plus the own block.


# attend(q [A,B,nq,d], k_block [A,B,nkv,d], v_block, k_context [S,nkv,d], v_context) -> [A,B,nq,d]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Attends = Callable[[LayerMask], Attend]  # of a row: one for each kind of layer

# Rows of fewer than 128 slots would get the decoding kernel, which has no configuration for some group sizes.
_KERNEL = {"FORCE_USE_FLEX_ATTENTION": True}


@dataclass(frozen=True)
class Segment:
    """A document of a row: its context is rows [context_start, context_stop), its blocks [block_start,
    block_stop).
    """

    context_start: int
    context_stop: int
    block_start: int
    block_stop: int


@dataclass(frozen=True)
class BlockLayout:
    """Where A blocks of B slots stand in a row of S context tokens. Blocks are sorted by anchor."""

    anchors: Tensor  # [A] row index of each anchor
    starts: Tensor  # [A] row index of the first token of the anchor's document
    positions: Tensor  # [S] position of each context token in its own document
    segments: tuple[Segment, ...]  # on the host, so that the dense path never waits for the device
    block_size: int

    @property
    def slot_positions(self) -> Tensor:
        """[A, B] position of every slot in its document: a + k."""
        return (self.anchors - self.starts)[:, None] + self._slots

    def visible(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Return (low [A, B], high [A]): slot k of block i sees context row indices low[i, k] <= p <
        high[i].
        """
        low = self.starts[:, None].expand(-1, self.block_size)
        if window is not None:  # t - p < W, both counted in row indices of one document
            low = torch.maximum(low, self.anchors[:, None] + self._slots - window + 1)
        return low, self.anchors

    def map(self, change: Callable[[Tensor], Tensor]) -> BlockLayout:
        """Apply `change`, such as a copy to a device, to the index tensors."""
        return replace(
            self, anchors=change(self.anchors), starts=change(self.starts), positions=change(self.positions)
        )

    @property
    def _slots(self) -> Tensor:
        return torch.arange(self.block_size, device=self.anchors.device)


def row_layout(anchors: Sequence[Sequence[int]], lengths: Sequence[int], block_size: int) -> BlockLayout:
    """Lay out a packed row: document d has `lengths[d]` tokens and blocks at positions `anchors[d]`
    (sorted).
    """
    rows, starts, positions, segments = [], [], [], []
    offset = blocks = 0
    for document, length in zip(anchors, lengths, strict=True):
        if list(document) != sorted(document) or (
            len(document) and not 0 <= document[0] <= document[-1] < length
        ):
            raise InputError(f"anchors {list(document)[:8]} must be sorted and lie in 0..{length - 1}.")
        rows += [offset + int(a) for a in document]
        starts += [offset] * len(document)
        positions.append(torch.arange(length))
        segments.append(Segment(offset, offset + length, blocks, blocks + len(document)))
        offset += length
        blocks += len(document)
    return BlockLayout(
        torch.tensor(rows, dtype=torch.long),
        torch.tensor(starts, dtype=torch.long),
        torch.cat(positions) if positions else torch.zeros(0, dtype=torch.long),
        tuple(segments),
        block_size,
    )


def next_block(length: int, block_size: int, device: torch.device | str = "cpu") -> BlockLayout:
    """Layout of decoding: one block whose anchor follows `length` cached context tokens."""
    return BlockLayout(
        torch.full((1,), length, device=device),
        torch.zeros(1, dtype=torch.long, device=device),
        torch.arange(length, device=device),
        (Segment(0, length, 0, 1),),
        block_size,
    )


def block_mask(block_size: int, mask: LayerMask, device: torch.device | str = "cpu") -> Tensor:
    """[B, B] bool, query x key: which slots of its own block a slot sees."""
    slots = torch.arange(block_size, device=device)
    ahead = slots[None, :] - slots[:, None]  # key - query
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if mask.causal:
        seen &= ahead <= 0
    if mask.window is not None:
        seen &= ahead.abs() < mask.window
    return seen


def dense_mask(layout: BlockLayout, mask: LayerMask, segment: Segment) -> Tensor:
    """[n*B, S_d + n*B] bool for one document's n blocks: its context columns, then its blocks' columns."""
    device, size = layout.anchors.device, layout.block_size
    here = slice(segment.block_start, segment.block_stop)
    low, high = layout.visible(mask.window)
    low, high = low[here], high[here]
    blocks = segment.block_stop - segment.block_start
    p = torch.arange(segment.context_start, segment.context_stop, device=device)
    context = (p >= low[..., None]) & (p < high[:, None, None])  # [n, B, S_d]
    same = torch.eye(blocks, dtype=torch.bool, device=device)[:, None, :, None]
    own = (same & block_mask(size, mask, device)[None, :, None]).reshape(blocks, size, blocks * size)
    return torch.cat([context, own], dim=-1).flatten(0, 1)


def dense_attend(layout: BlockLayout) -> Attends:
    """Attention a document at a time with a boolean mask: exact everywhere, the path of CPUs and decoding.

    Anchors are sorted, so a document's blocks and its context are both slices, and nothing is computed across
    documents. Masks are built once a layer kind and shared by layers.
    """
    masks: dict[tuple[LayerMask, Segment], Tensor | None] = {}

    def mask_of(mask: LayerMask, segment: Segment) -> Tensor | None:
        key = (mask, segment)
        if key not in masks:
            found = dense_mask(layout, mask, segment)
            masks[key] = None if bool(layout.anchors.device.type == "cpu" and found.all()) else found
        return masks[key]

    @torch.compiler.disable
    def attend(mask: LayerMask, q: Tensor, kb: Tensor, vb: Tensor, kc: Tensor, vc: Tensor) -> Tensor:
        outputs = []
        for segment in layout.segments:
            here = slice(segment.block_start, segment.block_stop)
            if segment.block_start == segment.block_stop:
                continue
            context = slice(segment.context_start, segment.context_stop)
            k = torch.cat([kc[context], kb[here].flatten(0, 1)]).transpose(0, 1)  # [nkv, S_d + n*B, d]
            v = torch.cat([vc[context], vb[here].flatten(0, 1)]).transpose(0, 1)
            query = q[here].flatten(0, 1).transpose(0, 1)  # [nq, n*B, d]
            if q.is_cuda and len(query) != len(k):  # fused kernels take grouped heads only without a mask
                k, v = (x.repeat_interleave(len(query) // len(k), dim=0) for x in (k, v))
            out = F.scaled_dot_product_attention(
                query[None],
                k[None],
                v[None],
                attn_mask=mask_of(mask, segment),
                enable_gqa=len(query) != len(k),
            )
            outputs.append(out[0].transpose(0, 1).unflatten(0, (-1, layout.block_size)))
        return torch.cat(outputs)

    return lambda mask: partial(attend, mask)


def flex_attend(layout: BlockLayout) -> Attends:
    """Attention over the whole row with block masks (one a layer kind): the path of CUDA training. Rows of
    one shape compile once.

    What it returns may be called inside a compiled layer, whose graph then holds the attention too; outside
    one, on CUDA, the kernel is compiled on its own.
    """
    masks: dict[LayerMask, Any] = {}

    def attends(mask: LayerMask) -> Attend:
        if mask not in masks:
            masks[mask] = tile_mask(layout, mask)
        return partial(_flex, block_mask=masks[mask])

    return attends


def _flex(q: Tensor, kb: Tensor, vb: Tensor, kc: Tensor, vc: Tensor, *, block_mask: Any) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    apart = q.is_cuda and not torch.compiler.is_compiling()
    flex = _compiled_flex() if apart else flex_attention
    k = torch.cat([kc, kb.flatten(0, 1)]).transpose(0, 1)[None]  # [1, nkv, S + A*B, d]
    v = torch.cat([vc, vb.flatten(0, 1)]).transpose(0, 1)[None]
    query = q.flatten(0, 1).transpose(0, 1)[None]
    grouped = q.shape[2] != kb.shape[2]
    out = flex(query, k, v, block_mask=block_mask, enable_gqa=grouped, kernel_options=_KERNEL)
    return out[0].transpose(0, 1).unflatten(0, q.shape[:2])


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def make_attends(layout: BlockLayout, path: str = "auto") -> Attends:
    """Pick `dense` or `flex`; `auto` is flex for training rows on CUDA, dense otherwise.

    Inside a compiled layer dense attention is one graph break: it walks over the row's documents.
    """
    if path == "auto":
        path = "flex" if layout.anchors.is_cuda and layout.anchors.shape[0] > 1 else "dense"
    if path == "dense":
        return dense_attend(layout)
    if path == "flex":
        return flex_attend(layout)
    raise InputError(f"attention = {path!r}: choose 'auto', 'dense' or 'flex'.")


# The block mask for flex_attention, from intervals instead of from all pairs --------------------------------
# Whether a tile of 128 keys is touched or filled by an interval is two comparisons, so the mask of 24,576
# slots over 32,768 keys costs a table of slots by tiles, not one of slots by keys. Anchors are sorted: the
# slots of a tile see nearly the same context, and all but a few of the tiles they see are full, where the
# kernel masks nothing.


TILE = 128  # queries and keys of a tile, flex_attention's own default

Bounds = tuple[Tensor, Tensor, Tensor, Tensor]


def key_bounds(layout: BlockLayout, mask: LayerMask) -> Bounds:
    """int32 [A*B] each: slot q sees keys low <= p < high of the context and first <= p < last of the blocks,
    whose keys follow the S context keys.
    """
    low, high = layout.visible(mask.window)
    size, context, device = layout.block_size, layout.positions.shape[0], low.device
    slots = torch.arange(size, device=device)
    first, last = torch.zeros_like(slots), torch.full_like(slots, size)
    if mask.causal:
        last = slots + 1
    if mask.window is not None:
        first = (slots - mask.window + 1).clamp_min(0)
        last = torch.minimum(last, slots + mask.window)
    start = context + size * torch.arange(layout.anchors.shape[0], device=device)[:, None]
    bounds = (low, high[:, None].expand_as(low), start + first, start + last)
    low, high, first, last = (bound.int().reshape(-1) for bound in bounds)
    return low, high, first, last


def mask_mod(bounds: Bounds) -> Callable[..., Tensor]:
    """flex_attention's question whether `query` sees `key`, over [A*B] x [S + A*B]."""
    low, high, first, last = bounds

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        context = (key >= low[query]) & (key < high[query])
        return context | ((key >= first[query]) & (key < last[query]))

    return visible


def touched_tiles(bounds: Bounds, keys: int, tile: int = TILE) -> tuple[Tensor, Tensor]:
    """(seen, full) bool [query tiles, key tiles]: some pair of the tile is visible; all pairs are, and are
    context.
    """
    low, high, first, last = (_tiled(bound, tile)[..., None] for bound in bounds)  # [tiles, tile, 1]
    begin = torch.arange(0, keys, tile, device=low.device, dtype=torch.int32)
    end = begin + tile

    def touch(start: Tensor, stop: Tensor) -> Tensor:
        return ((start < end) & (stop > begin) & (start < stop)).any(1)

    full = ((low <= begin) & (high >= end)).all(1)
    return touch(low, high) | touch(first, last), full


def tile_mask(layout: BlockLayout, mask: LayerMask) -> Any:
    """The BlockMask of one kind of layer. Its shapes depend on those of the row alone."""
    from torch.nn.attention.flex_attention import BlockMask

    bounds = key_bounds(layout, mask)
    queries = bounds[0].shape[0]
    keys = layout.positions.shape[0] + queries
    seen, full = touched_tiles(bounds, keys)
    return BlockMask.from_kv_blocks(
        *_listed(seen & ~full),
        *_listed(full),
        BLOCK_SIZE=TILE,
        mask_mod=mask_mod(bounds),
        seq_lengths=(queries, keys),
    )


def _tiled(values: Tensor, tile: int) -> Tensor:
    """[n] -> [tiles, tile]; the last value stands for the missing ones, so that they change nothing."""
    missing = -len(values) % tile
    return torch.cat([values, values[-1:].expand(missing)]).view(-1, tile)


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(count [1, 1, q], indices [1, 1, q, k]) of the chosen key tiles of every query tile, in order."""
    order = chosen.int().argsort(dim=1, descending=True, stable=True)
    return chosen.sum(1, dtype=torch.int32)[None, None], order.int()[None, None]
