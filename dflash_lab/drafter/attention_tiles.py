"""The block mask of a packed row for flex_attention, from intervals instead of from all pairs.

Every slot sees two intervals of keys: part of its document's context, and part of its own block. Whether a
tile of 128 keys is touched or filled by an interval is two comparisons, so the mask of 24,576 slots over
32,768 keys costs a table of slots by tiles, not one of slots by keys. Anchors are sorted: the slots of a tile
see nearly the same context, and all but a few of the tiles they see are full, where the kernel masks nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dflash_lab.drafter.attention import BlockLayout
from dflash_lab.drafter.config import LayerMask

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
