"""The drafter's memory in decoding: context keys and values of every layer, and nothing of past blocks.
Block keys and values live for one call, so a rejected draft leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from dflash_lab.drafter.attention import BlockLayout, dense_attend, next_block
from dflash_lab.drafter.model import ContextKeys, Drafter
from dflash_lab.errors import InputError


def run_blocks(
    drafter: Drafter,
    embeddings: Tensor,
    layout: BlockLayout,
    contexts: Iterable[ContextKeys],
    visible_shift: int = 0,
) -> Tensor:
    """Hidden states [A, B, H] of blocks, from raw embedding rows [A, B, H] and each layer's context keys.

    visible_shift: let blocks see that many more context positions than those before their anchor, and stand
    where they stood (a diagnosis).
    """
    attends = dense_attend(
        replace(layout, anchors=layout.anchors + visible_shift) if visible_shift else layout
    )
    h = drafter.scaled(embeddings).to(drafter.fc.weight.dtype)
    angles = drafter.angles(layout.slot_positions, h.dtype)
    for layer, context in zip(drafter.blocks(), contexts, strict=True):
        h = layer(h, angles, context, attends(layer.mask))
    return drafter.norm(h)


class DraftCache:
    """Context of one sequence for one drafter; `length` positions 0 .. length-1 are in it.

    A verify round commits some positions and brings their tapped states; `extend` appends them, `block`
    drafts after them.
    """

    def __init__(self, drafter: Drafter, capacity_tokens: int = 256) -> None:
        config = drafter.config
        self.drafter = drafter
        self.length = 0
        weight = drafter.fc.weight
        shape = (2, config.num_layers, capacity_tokens, config.num_kv_heads, config.head_dim)
        self._store = torch.zeros(shape, device=weight.device, dtype=weight.dtype)  # keys, values

    @torch.no_grad()
    def extend(self, taps: Tensor) -> None:
        """Append the tapped states [n, K*H] of the next n committed positions."""
        count = taps.shape[0]
        self._reserve(self.length + count)
        ctx = self.drafter.context(taps.to(self._store.dtype))
        positions = torch.arange(self.length, self.length + count, device=ctx.device)
        angles = self.drafter.angles(positions, ctx.dtype)
        for index, layer in enumerate(self.drafter.blocks()):
            k, v = layer.self_attn.keys_values(ctx, angles)
            self._store[0, index, self.length : self.length + count] = k
            self._store[1, index, self.length : self.length + count] = v
        self.length += count

    def crop(self, length: int) -> None:
        """Keep positions 0 .. length-1 only."""
        if not 0 <= length <= self.length:
            raise InputError(f"crop({length}): the cache holds {self.length} positions.")
        self.length = length

    @torch.no_grad()
    def block(self, embeddings: Tensor) -> Tensor:
        """Hidden states [B, H] of a block whose anchor stands at position `length`; embeddings [B, H] are raw
        rows.
        """
        layout = next_block(self.length, embeddings.shape[0], embeddings.device)
        return self.blocks(embeddings[None], layout)[0]

    @torch.no_grad()
    def blocks(self, embeddings: Tensor, layout: BlockLayout, visible_shift: int = 0) -> Tensor:
        """The same of the blocks of `layout`, [A, B, H]; see `run_blocks`."""
        keys, values = self._store[:, :, : self.length]
        return run_blocks(self.drafter, embeddings, layout, map(ContextKeys, keys, values), visible_shift)

    def _reserve(self, length: int) -> None:
        capacity = self._store.shape[2]
        if length > capacity:
            grown = list(self._store.shape)
            grown[2] = max(length, 2 * capacity)
            store = self._store.new_zeros(grown)
            store[:, :, : self.length] = self._store[:, :, : self.length]
            self._store = store
