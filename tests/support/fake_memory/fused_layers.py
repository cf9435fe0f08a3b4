"""Run extraction's fused layers on fake tensors: the real `FusedLayer`s with operations that allocate what
the CUDA kernels allocate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from support.fake_memory.tracker import LabelledTensors
from torch import Tensor

from dflash_lab.extraction import fused_layers
from dflash_lab.extraction.fused_layers import Ops
from dflash_lab.extraction.fused_reference import Gates
from dflash_lab.memory.shapes import CHUNK


def _rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return torch.empty_like(x)


def _add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _swiglu(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


def _conv_silu(
    rows: Tensor, start: int, weight: Tensor, batch: int, heads: int, width: int, normalise: bool
) -> Tensor:
    return rows.new_empty(batch, rows.shape[0] // batch, heads, width)


def _delta_rule(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, gates: Gates) -> Tensor:
    """As `extraction.kernels.delta_rule` with flash-linear-attention 0.6 calls its kernels."""
    batch, length, heads, width = v.shape
    decay = torch.empty(batch, length, heads, dtype=torch.float32, device=v.device)
    beta = torch.empty_like(decay)
    solved = k.new_empty(batch, length, heads, CHUNK)
    w, u = k.new_empty(batch, length, heads, k.shape[-1]), torch.empty_like(v)
    states = k.new_empty(batch, -(-length // CHUNK), heads, k.shape[-1], width)
    values = torch.empty_like(u)
    del solved, w, u
    out = torch.empty_like(values)
    del decay, beta, states, values
    return out


def _gated_rms_norm(x: Tensor, rows: Tensor, gate_at: int, weight: Tensor, eps: float) -> Tensor:
    return rows.new_empty(rows.shape[0], x.shape[-2] * x.shape[-1])


def _norm_rope(
    rows: Tensor, start: int, stride: int, heads: int, width: int, cos: Tensor, *_rest: Any
) -> Tensor:
    return rows.new_empty(rows.shape[0] // cos.shape[1], cos.shape[1], heads, width)


def _sigmoid_gate(x: Tensor, rows: Tensor, start: int, stride: int) -> Tensor:
    x = x.contiguous()
    return rows.new_empty(rows.shape[0], x.shape[-2] * x.shape[-1])


COUNTING = Ops(
    "counting",
    rms_norm=_rms_norm,
    add_rms_norm=_add_rms_norm,
    swiglu=_swiglu,
    conv_silu=_conv_silu,
    delta_rule=_delta_rule,
    gated_rms_norm=_gated_rms_norm,
    norm_rope=_norm_rope,
    sigmoid_gate=_sigmoid_gate,
)


class _Labelled:
    """A mixer or feed-forward whose tensors are counted under a label."""

    def __init__(self, inner: Any, label: str, tracker: LabelledTensors) -> None:
        self._inner, self._label, self._tracker = inner, label, tracker

    def __call__(self, *args: Any) -> Tensor:
        with self._tracker.scope(self._label):
            return self._inner(*args)

    def add_to(self, *args: Any) -> Tensor:
        with self._tracker.scope(self._label):
            return self._inner.add_to(*args)


def fuse(model: Any, tracker: LabelledTensors, *, plain: Sequence[int] = ()) -> None:
    """Give the layers of a fake decoder their fused forward; those that have none, and those at the places
    `plain`, keep their plain one.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    def norm(module: Any, name: str) -> fused_layers.Norm:
        return fused_layers.Norm(module.weight.detach(), 1e-6, 0.0)

    body = getattr(model, "model", model)
    with unset_fake_temporarily(), mock.patch.object(fused_layers, "read_norm", norm), torch.no_grad():
        for place, layer in enumerate(body.layers):
            if place in plain:
                continue
            try:
                fused: Any = fused_layers.FusedLayer(layer, COUNTING)
            except fused_layers.NotUnderstood:
                continue
            fused.prepare()
            linear = isinstance(fused.mixer, fused_layers.FusedDeltaNet)
            fused.mixer = _Labelled(fused.mixer, "gated delta net" if linear else "attention", tracker)
            fused.mlp = _Labelled(fused.mlp, "MLP", tracker)
            layer.forward = fused
