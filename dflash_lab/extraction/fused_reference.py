"""What each fused kernel must equal, in plain torch and float32 inside. Shapes: T = B * L rows, N columns of
a merged projection, D a head's width; `rows` is always [T, N].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """Return x / rms(x) * (offset + weight) for x [T, H]."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * (offset + weight.float())).to(x.dtype)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """Return x + y and its RMS norm."""
    total = x + y
    return total, rms_norm(total, weight, eps, offset)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up for gate_up [T, 2 I] = (gate, up)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(gate_up.dtype)


def conv_silu(
    rows: Tensor, start: int, weight: Tensor, batch: int, heads: int, width: int, normalise: bool
) -> Tensor:
    """Depthwise causal convolution over the sequence, SiLU, and for q and k an L2 norm a head (eps 1e-6
    inside the root).

    Columns start .. start + heads * width of `rows` are convolved with `weight` [heads * width, taps]; a
    sequence starts with zeros before it. Returns [B, L, heads, width].
    """
    x = rows[:, start : start + heads * width].view(batch, -1, heads * width).transpose(1, 2).float()
    taps = weight.shape[-1]
    x = F.silu(F.conv1d(F.pad(x, (taps - 1, 0)), weight.float()[:, None, :], groups=heads * width))
    x = x.transpose(1, 2).reshape(batch, -1, heads, width)
    if normalise:
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    return x.to(rows.dtype)


@dataclass(frozen=True)
class Gates:
    """Where the raw gates of a delta net stand in its projection: columns of b and a, and the
    decay's parameters [heads].
    """

    beta_at: int
    alpha_at: int
    a_log: Tensor
    dt_bias: Tensor


def delta_gates(rows: Tensor, gates: Gates, batch: int, chunk: int) -> tuple[Tensor, Tensor]:
    """Return the decay and the write strength sigmoid(b), [B, L, heads] float32 each.

    Decay: log2 of exp(-exp(A_log) softplus(a + dt_bias)), summed from the start of each chunk of `chunk`
    positions.
    """
    heads = gates.a_log.shape[0]
    b = rows[:, gates.beta_at : gates.beta_at + heads].float().view(batch, -1, heads)
    a = rows[:, gates.alpha_at : gates.alpha_at + heads].float().view(batch, -1, heads)
    decay = -gates.a_log.float().exp() * F.softplus(a + gates.dt_bias.float()) / math.log(2)
    return torch.cat([part.cumsum(dim=1) for part in decay.split(chunk, dim=1)], dim=1), b.sigmoid()


def delta_rule(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, gates: Gates) -> Tensor:
    """The gated delta rule one step at a time: S = S decay; S += k (beta (v - S^T k))^T; o = S^T q / sqrt(D).

    q, k [B, L, heads, D] already normalised, v [B, L, value heads, DV]; a query head serves consecutive value
    heads.
    Source: Yang et al., Gated Delta Networks (2024), equation 10.
    """
    batch, length, heads, width = q.shape
    log_decay, beta = delta_gates(rows, gates, batch, chunk=1)
    decay, repeats = log_decay.exp2(), v.shape[2] // heads
    q = q.repeat_interleave(repeats, dim=2).float() * width**-0.5
    k, values = k.repeat_interleave(repeats, dim=2).float(), v.float()
    state = q.new_zeros(batch, v.shape[2], width, v.shape[3])
    out = torch.empty_like(values)
    for t in range(length):
        state = state * decay[:, t, :, None, None]
        change = beta[:, t, :, None] * (values[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + k[:, t, :, :, None] * change[:, :, None, :]
        out[:, t] = torch.einsum("bhkv,bhk->bhv", state, q[:, t])
    return out.to(v.dtype)


def gated_rms_norm(x: Tensor, rows: Tensor, gate_at: int, weight: Tensor, eps: float) -> Tensor:
    """Return weight * x / rms(x) * silu(gate) a head: x [B, L, heads, D], gate in columns of `rows`; [T,
    heads * D].
    """
    heads, width = x.shape[-2:]
    gate = rows[:, gate_at : gate_at + heads * width].float()
    wide = x.reshape(-1, heads, width).float()
    wide = weight.float() * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps))
    return (wide.flatten(1) * F.silu(gate)).to(rows.dtype)


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
    """RMS norm a head (none without `weight`) and rotate the first cos.shape[-1] of its values by position.

    Head h lies in columns start + h * stride; cos, sin [B or 1, L, R] hold both halves. Returns [B, L, heads,
    D].
    """
    batch = rows.shape[0] // cos.shape[1]
    columns = [rows[:, start + head * stride : start + head * stride + width] for head in range(heads)]
    x = torch.stack(columns, dim=1).float()
    if weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (offset + weight.float())
    x = x.view(batch, -1, heads, width)
    rotary = cos.shape[-1]
    first, second = x[..., : rotary // 2], x[..., rotary // 2 : rotary]
    turned = torch.cat((-second, first), dim=-1)
    cos, sin = cos.float()[:, :, None, :], sin.float()[:, :, None, :]
    return torch.cat((x[..., :rotary] * cos + turned * sin, x[..., rotary:]), dim=-1).to(rows.dtype)


def sigmoid_gate(x: Tensor, rows: Tensor, start: int, stride: int) -> Tensor:
    """Return x * sigmoid(gate): x [B, L, heads, D], gate of head h in columns start + h * stride; [T, heads *
    D].
    """
    heads, width = x.shape[-2:]
    gates = [rows[:, start + head * stride : start + head * stride + width] for head in range(heads)]
    return (
        (x.reshape(-1, heads, width).float() * torch.stack(gates, dim=1).float().sigmoid())
        .flatten(1)
        .to(rows.dtype)
    )
