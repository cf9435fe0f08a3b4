"""Triton kernels over rows: norms, SwiGLU, output gates. Each equals the function of the same name in
`reference`.

All are bound by memory: read once, write once, float32 in between, one rounding at the end.
Imported only where Triton is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(x, y, total, weight, out, width, eps, offset, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    live = at < width
    value = tl.load(x + row + at, mask=live, other=0.0)
    kind = value.dtype
    value = value.to(tl.float32)
    if ADD:
        value = (value + tl.load(y + row + at, mask=live, other=0.0).to(tl.float32)).to(kind)
        tl.store(total + row + at, value, mask=live)
        value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    gain = tl.load(weight + at, mask=live, other=0.0).to(tl.float32) + offset
    tl.store(out + row + at, (value * scale * gain).to(kind), mask=live)


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """See `reference.rms_norm`. x [T, H] contiguous."""
    out, block = torch.empty_like(x), triton.next_power_of_2(x.shape[1])
    _rms_norm[(x.shape[0],)](
        x, x, x, weight, out, x.shape[1], eps, offset, ADD=False, BLOCK=block, num_warps=_warps(block)
    )
    return out


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """See `reference.add_rms_norm`. x, y [T, H] contiguous."""
    total, out, block = torch.empty_like(x), torch.empty_like(x), triton.next_power_of_2(x.shape[1])
    _rms_norm[(x.shape[0],)](
        x, y, total, weight, out, x.shape[1], eps, offset, ADD=True, BLOCK=block, num_warps=_warps(block)
    )
    return total, out


@triton.jit
def _swiglu(gate_up, out, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < width
    gate = tl.load(gate_up + row * stride + at, mask=live, other=0.0)
    up = tl.load(gate_up + row * stride + width + at, mask=live, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    tl.store(out + row * width + at, (wide * tl.sigmoid(wide) * up).to(gate.dtype), mask=live)


def swiglu(gate_up: Tensor) -> Tensor:
    """See `reference.swiglu`. gate_up [T, 2 I], each row contiguous."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    block = next(
        (size for size in (2048, 1024) if width % size == 0), min(1024, triton.next_power_of_2(width))
    )
    _swiglu[(rows, triton.cdiv(width, block))](
        gate_up, out, width, gate_up.stride(0), BLOCK=block, num_warps=max(1, block // 512)
    )
    return out


@triton.jit
def _gated_rms_norm(
    x, rows, weight, out, count, columns, gate_at, heads, width, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    head = tl.program_id(1)
    at = tl.arange(0, WIDTH)[None, :]
    live = (row < count) & (at < width)
    place = (row * heads + head) * width + at
    value = tl.load(x + place, mask=live, other=0.0)
    wide = value.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, axis=1)[:, None] / width + eps)
    wide *= tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32)
    gate = tl.load(rows + row * columns + gate_at + head * width + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + place, (wide * gate * tl.sigmoid(gate)).to(value.dtype), mask=live)


def gated_rms_norm(x: Tensor, rows: Tensor, gate_at: int, weight: Tensor, eps: float) -> Tensor:
    """See `reference.gated_rms_norm`. x [B, L, heads, D] and rows [T, N] contiguous."""
    heads, width = x.shape[-2:]
    count = rows.shape[0]
    out = rows.new_empty(count, heads * width)
    block = 32
    _gated_rms_norm[(triton.cdiv(count, block), heads)](
        x, rows, weight, out, count, rows.shape[1], gate_at, heads, width, eps,
        ROWS=block, WIDTH=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _sigmoid_gate(
    x, rows, out, count, columns, start, stride, heads, width, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    head = tl.program_id(1)
    at = tl.arange(0, WIDTH)[None, :]
    live = (row < count) & (at < width)
    place = (row * heads + head) * width + at
    value = tl.load(x + place, mask=live, other=0.0)
    gate = tl.load(rows + row * columns + start + head * stride + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + place, (value.to(tl.float32) * tl.sigmoid(gate)).to(value.dtype), mask=live)


def sigmoid_gate(x: Tensor, rows: Tensor, start: int, stride: int) -> Tensor:
    """See `reference.sigmoid_gate`. rows [T, N] contiguous; x [B, L, heads, D] is made so."""
    heads, width = x.shape[-2:]
    count = rows.shape[0]
    x, out = x.contiguous(), rows.new_empty(count, heads * width)
    block = 16
    _sigmoid_gate[(triton.cdiv(count, block), heads)](
        x, rows, out, count, rows.shape[1], start, stride, heads, width,
        ROWS=block, WIDTH=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return out
