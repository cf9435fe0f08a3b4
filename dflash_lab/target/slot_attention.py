"""Attention of one new token a row over a static cache in which every row has its own length.

Rows of a cache are slots: a row's keys and values at positions after its own are leftovers of whoever had the
slot before, and are never read. On CUDA one Triton program a (row, key head) streams exactly the keys that
the row has, for all query heads that share them, so nothing is repeated for grouped queries and padding costs
nothing; elsewhere the same rule is a boolean mask of scaled_dot_product_attention.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache

NAME = "dflash_slots"  # under which transformers' models find `attend`


class SlotCache(Cache):
    """Keys and values of R slots, `width` positions each, written in place at `positions` [R]."""

    def __init__(self, rows: int, width: int, positions: Tensor) -> None:
        super().__init__(layers=[])
        self.width, self.positions = width, positions
        self.rows = torch.arange(rows, device=positions.device)
        self.keys: dict[int, Tensor] = {}  # layer -> [R, nkv, width, d]
        self.values: dict[int, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one token a row, [R, nkv, 1, d], and return the layer's whole cache."""
        if layer_idx not in self.keys:
            for store, states in ((self.keys, key_states), (self.values, value_states)):
                rows, heads, _, size = states.shape
                # zeros: what a row has not written yet is multiplied by 0, and must not be NaN
                store[layer_idx] = states.new_zeros(rows, heads, self.width, size)
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys[self.rows, :, self.positions] = key_states[:, :, 0]
        values[self.rows, :, self.positions] = value_states[:, :, 0]
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions a slot has room for; rows have their own lengths, in `positions`."""
        return self.width


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    position_ids: Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [R, nq, 1, d] over key and value [R, nkv, W, d] up to each row's position; returns [R, 1, nq,
    d].
    """
    rows, heads, _, size = query.shape
    scale = size**-0.5 if scaling is None else scaling
    positions = position_ids[:, 0]  # [R]
    if query.is_cuda and size >= 16 and size & (size - 1) == 0:
        from dflash_lab.target.slot_kernels import attend_slots

        return attend_slots(query[:, :, 0].contiguous(), key, value, positions, scale)[:, None], None
    grouped = query.view(rows, key.shape[1], -1, size)  # query heads that share a key head stand together
    seen = torch.arange(key.shape[2], device=key.device) <= positions[:, None]
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=seen[:, None, None], scale=scale)
    return out.reshape(rows, 1, heads, size), None


AttentionInterface.register(NAME, attend)
