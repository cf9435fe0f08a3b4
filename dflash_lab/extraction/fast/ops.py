"""Which implementation of the fused operations a device gets: Triton and flash-linear-attention, or plain
torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_lab.errors import InputError
from dflash_lab.extraction.fast import reference


@dataclass(frozen=True)
class Ops:
    """The operations by name; signatures as in `reference`."""

    name: str
    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    swiglu: Callable[..., Tensor]
    conv_silu: Callable[..., Tensor]
    delta_rule: Callable[..., Tensor] | None
    gated_rms_norm: Callable[..., Tensor]
    norm_rope: Callable[..., Tensor]
    sigmoid_gate: Callable[..., Tensor]


def reference_ops() -> Ops:
    """Plain torch: to test the layers' wiring, not for speed."""
    names = [field for field in Ops.__dataclass_fields__ if field != "name"]
    return Ops("reference", **{name: getattr(reference, name) for name in names})


def triton_ops() -> Ops:
    """Triton kernels, and the delta rule of flash-linear-attention (None where that is not installed)."""
    if importlib.util.find_spec("triton") is None:
        raise InputError("fast kernels need Triton, which is not installed here. Use fast=off.")
    from dflash_lab.extraction.fast import kernels, kernels_sequence

    delta_rule: Callable[..., Tensor] | None = None
    if importlib.util.find_spec("fla") is not None:
        from dflash_lab.extraction.fast import delta_rule as chunked

        delta_rule = chunked.delta_rule
    return Ops(
        "triton",
        rms_norm=kernels.rms_norm,
        add_rms_norm=kernels.add_rms_norm,
        swiglu=kernels.swiglu,
        conv_silu=kernels_sequence.conv_silu,
        delta_rule=delta_rule,
        gated_rms_norm=kernels.gated_rms_norm,
        norm_rope=kernels_sequence.norm_rope,
        sigmoid_gate=kernels.sigmoid_gate,
    )


def ops_for(device: torch.device) -> Ops | None:
    """Return the fused operations of a device, or None where there are none."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    return triton_ops()
