"""Triton kernels of the fused layers, imported only where Triton is. Each equals the function of its name in
`fused_reference`. All are bound by memory: read once, write once, float32 in between, rounded at the end.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_lab.extraction.fused_reference import Gates

# Over rows: norms, SwiGLU, output gates -------------------------------------------------------------------


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
    """`x` [T, H] contiguous."""
    out, block = torch.empty_like(x), triton.next_power_of_2(x.shape[1])
    _rms_norm[(x.shape[0],)](
        x, x, x, weight, out, x.shape[1], eps, offset, ADD=False, BLOCK=block, num_warps=_warps(block)
    )
    return out


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """`x`, `y` [T, H] contiguous."""
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
    """`gate_up` [T, 2 I], each row contiguous."""
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
    """`x` [B, L, heads, D] and `rows` [T, N] contiguous."""
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
    """`rows` [T, N] contiguous; `x` [B, L, heads, D] is made so."""
    heads, width = x.shape[-2:]
    count = rows.shape[0]
    x, out = x.contiguous(), rows.new_empty(count, heads * width)
    block = 16
    _sigmoid_gate[(triton.cdiv(count, block), heads)](
        x, rows, out, count, rows.shape[1], start, stride, heads, width,
        ROWS=block, WIDTH=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return out


# Along the sequence: the causal convolution, running gates, head norm with rotary angles -----------------


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
    """`rows` [T, N] contiguous, `weight` [heads * width, taps] contiguous."""
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
    """`rows` [T, N] contiguous; `chunk` is a power of two."""
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
    """`rows` [T, N] contiguous; `cos` and `sin` share strides, the last one 1."""
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


# The gated delta rule by flash-linear-attention's kernels -------------------------------------------------
#
# The library's entry point normalises q and k and sums the decay in kernels that are compiled anew for each
# batch size (a second or two, hundreds of times in a long run). Both are done here, in the convolution and in
# `delta_gates`, and the three chunk kernels are called directly. They are internals: with a version other
# than 0.6 the entry point is used.


CHUNK = 64


def delta_rule(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, gates: Gates) -> Tensor:
    """`q`, `k`, `v` contiguous."""
    return (_chunked if _knows_internals() else _by_entry_point)(q, k, v, rows, gates)


@functools.cache
def _knows_internals() -> bool:
    return importlib.metadata.version("fla-core").startswith("0.6.")


def _chunked(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, gates: Gates) -> Tensor:
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h
    from fla.ops.common.chunk_o import chunk_fwd_o
    from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra

    decay, beta = delta_gates(rows, gates, q.shape[0], CHUNK)
    w, u, _ = chunk_gated_delta_rule_fwd_intra(k=k, v=v, g=decay, beta=beta, chunk_size=CHUNK)
    states, values, _ = chunk_gated_delta_rule_fwd_h(k=k, w=w, u=u, g=decay, chunk_size=CHUNK)
    del w, u, _  # a batch's peak comes about here
    return chunk_fwd_o(q=q, k=k, v=values, h=states, g=decay, scale=q.shape[-1] ** -0.5, chunk_size=CHUNK)


def _by_entry_point(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, gates: Gates) -> Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    decay, beta = delta_gates(rows, gates, q.shape[0], chunk=1)
    out: Any = chunk_gated_delta_rule(q, k, v, g=decay * math.log(2), beta=beta, output_final_state=False)
    return out[0]
