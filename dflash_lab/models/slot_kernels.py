"""The Triton kernel of `generate.attend`: one token a row over a cache whose rows have their own lengths."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _attend(
    q, k, v, positions, out, scale, width,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Softmax attention of the GROUP query heads of one (row, key head), online over tiles of keys."""
    program = tl.program_id(0)
    length = tl.load(positions + program // HEADS) + 1
    cache = program.to(tl.int64) * width * D
    member, column, step = tl.arange(0, PADDED), tl.arange(0, D), tl.arange(0, TILE)
    place = (program * GROUP + member)[:, None] * D + column[None, :]
    query = tl.load(q + place, mask=member[:, None] < GROUP, other=0.0)
    peak = tl.full([PADDED], -float("inf"), tl.float32)
    mass = tl.zeros([PADDED], tl.float32)
    total = tl.zeros([PADDED, D], tl.float32)
    for start in range(0, length, TILE):
        at = start + step
        seen = at < length
        tile = cache + at[:, None] * D + column[None, :]
        key = tl.load(k + tile, mask=seen[:, None], other=0.0)
        value = tl.load(v + tile, mask=seen[:, None], other=0.0)
        if EXACT:
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        else:
            score = tl.dot(query, tl.trans(key)) * scale
        score = tl.where(seen[None, :], score, -float("inf"))
        higher = tl.maximum(peak, tl.max(score, axis=1))  # finite: position 0 is always seen
        share = tl.exp(score - higher[:, None])
        shrink = tl.exp(peak - higher)
        if EXACT:
            total = total * shrink[:, None] + tl.dot(share, value, input_precision="ieee")
        else:
            total = total * shrink[:, None] + tl.dot(share.to(value.dtype), value)
        mass = mass * shrink + tl.sum(share, axis=1)
        peak = higher
    result = total / mass[:, None]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=member[:, None] < GROUP)


def attend_slots(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float) -> Tensor:
    """query [R, nq, d] over keys and values [R, nkv, W, d], positions [R] int64 -> [R, nq, d]."""
    rows, heads, size = query.shape
    key_heads, width = keys.shape[1:3]
    group = heads // key_heads
    out = torch.empty_like(query)
    _attend[(rows * key_heads,)](
        query, keys, values, positions, out, scale, width,
        HEADS=key_heads, GROUP=group, PADDED=max(16, triton.next_power_of_2(group)), D=size, TILE=64,
        EXACT=query.dtype == torch.float32, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
