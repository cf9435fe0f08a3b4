"""Triton kernels that look along the sequence or at positions: the causal convolution, and head norm with
rotary angles.

Each equals the function of the same name in `reference`. Imported only where Triton is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_lab.extraction.fast.reference import Gates


@triton.jit
def _conv_silu(
    rows, weight, out, length, columns, start, heads, width,
    TAPS: tl.constexpr, NORMALISE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    # One program: ROWS positions of one sequence and one head, so that the L2 norm stays inside it.
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = tl.arange(0, WIDTH)[None, :]
    channel = head * width + at
    total = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        source = place - (TAPS - 1 - tap)
        live = (source >= 0) & (source < length) & (at < width)
        x = tl.load(rows + (sequence * length + source) * columns + start + channel, mask=live, other=0.0)
        gain = tl.load(weight + channel * TAPS + tap, mask=at < width, other=0.0)
        total += x.to(tl.float32) * gain.to(tl.float32)
    total *= tl.sigmoid(total)
    if NORMALISE:
        total *= tl.rsqrt(tl.sum(total * total, axis=1)[:, None] + 1e-6)
    target = ((sequence * length + place) * heads + head) * width + at
    tl.store(out + target, total.to(out.dtype.element_ty), mask=(place < length) & (at < width))


def conv_silu(
    rows: Tensor, start: int, weight: Tensor, batch: int, heads: int, width: int, normalise: bool
) -> Tensor:
    """See `reference.conv_silu`. rows [T, N] contiguous, weight [heads * width, taps] contiguous."""
    length = rows.shape[0] // batch
    out = rows.new_empty(batch, length, heads, width)
    block = 32
    _conv_silu[(triton.cdiv(length, block), heads, batch)](
        rows, weight, out, length, rows.shape[1], start, heads, width,
        TAPS=weight.shape[-1], NORMALISE=normalise,
        ROWS=block, WIDTH=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _delta_gates(
    rows, a_log, dt_bias, decay, beta, length, columns, beta_at, alpha_at, heads,
    CHUNK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    # One program: one chunk of one sequence, so that the running sum stays inside it.
    place = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)[:, None]
    row = tl.program_id(1).to(tl.int64) * length + place
    head = tl.arange(0, HEADS)[None, :]
    live = (place < length) & (head < heads)
    b = tl.load(rows + row * columns + beta_at + head, mask=live, other=0.0).to(tl.float32)
    a = tl.load(rows + row * columns + alpha_at + head, mask=live, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log + head, mask=head < heads, other=0.0).to(tl.float32))
    a += tl.load(dt_bias + head, mask=head < heads, other=0.0).to(tl.float32)
    softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))  # as torch: linear above 20
    step = tl.where(live, -rate * softplus * 1.4426950408889634, 0.0)
    tl.store(decay + row * heads + head, tl.cumsum(step, axis=0), mask=live)
    tl.store(beta + row * heads + head, tl.sigmoid(b), mask=live)


def delta_gates(rows: Tensor, gates: Gates, batch: int, chunk: int) -> tuple[Tensor, Tensor]:
    """See `reference.delta_gates`. rows [T, N] contiguous; chunk is a power of two."""
    heads, length = gates.a_log.shape[0], rows.shape[0] // batch
    decay = torch.empty(batch, length, heads, dtype=torch.float32, device=rows.device)
    beta = torch.empty_like(decay)
    _delta_gates[(triton.cdiv(length, chunk), batch)](
        rows, gates.a_log, gates.dt_bias, decay, beta,
        length, rows.shape[1], gates.beta_at, gates.alpha_at, heads,
        CHUNK=chunk, HEADS=triton.next_power_of_2(heads), num_warps=4,
    )  # fmt: skip
    return decay, beta


@triton.jit
def _norm_rope(
    rows, cos, sin, weight, out, length, columns, start, stride, heads, width, rotary,
    batch_stride, place_stride, eps, offset, NORM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = tl.arange(0, WIDTH)[None, :]
    half = rotary // 2
    partner = tl.where(at < half, at + half, at - half)  # the value that this one turns with
    turning = at < rotary
    live = (place < length) & (at < width)
    base = rows + (sequence * length + place) * columns + start + head * stride
    x = tl.load(base + at, mask=live, other=0.0).to(tl.float32)
    other = tl.load(base + partner, mask=live & turning, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1)[:, None] / width + eps)
        x *= scale * (tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32) + offset)
        other *= scale * (tl.load(weight + partner, mask=turning, other=0.0).to(tl.float32) + offset)
    angle = sequence * batch_stride + place * place_stride + at
    c = tl.load(cos + angle, mask=live & turning, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=live & turning, other=0.0).to(tl.float32)
    x = tl.where(turning, x * c + tl.where(at < half, -other, other) * s, x)
    target = ((sequence * length + place) * heads + head) * width + at
    tl.store(out + target, x.to(out.dtype.element_ty), mask=live)


def norm_rope(
    rows: Tensor,
    start: int,
    stride: int,
    heads: int,
    width: int,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
) -> Tensor:
    """See `reference.norm_rope`. rows [T, N] contiguous; cos and sin share strides, the last one 1."""
    length, rotary = cos.shape[1], cos.shape[-1]
    batch = rows.shape[0] // length
    if sin.stride() != cos.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    out = rows.new_empty(batch, length, heads, width)
    block = 16
    _norm_rope[(triton.cdiv(length, block), heads, batch)](
        rows, cos, sin, rows if weight is None else weight, out,
        length, rows.shape[1], start, stride, heads, width, rotary,
        cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1), eps, offset,
        NORM=weight is not None, ROWS=block, WIDTH=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return out
