"""How a state row becomes bytes: `bf16` exact (the default), `fp8` and `int8` with one scale a row and tap.

A residual stream has a few channels hundreds of times larger than the rest. A row scaled to int8 spends its
255 steps on those; e4m3 spends its bits on the exponent and keeps about 2.6 % everywhere. Both halve the
store; `benchmarks/extraction.py` measures what each loses. Scales are float32, [rows, taps].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_lab.errors import InputError, near

_TOP = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


@dataclass(frozen=True)
class Codec:
    """A storage type. `scaled` codecs keep max|row| / top beside the codes."""

    name: str
    dtype: torch.dtype
    scaled: bool

    def encode(self, states: Tensor, codes: Tensor, scale: Tensor | None) -> None:
        """Write `states` [T, H] (any float dtype) into `codes` [T, H] (a view) and `scale` [T]."""
        if scale is None:
            codes.copy_(states)
            return
        top = _TOP[self.dtype]
        step = states.abs().amax(dim=-1).float().clamp_min(torch.finfo(torch.float32).tiny) / top
        scale.copy_(step)
        scaled = states.float() / step[:, None]
        if self.dtype is torch.int8:
            scaled = scaled.round_()
        codes.copy_(scaled.clamp_(-top, top).to(self.dtype))

    def decode(self, codes: Tensor, scale: Tensor | None) -> Tensor:
        """Return bf16 states [T, K*H] from `codes` [T, K*H] and `scale` [T, K]."""
        if scale is None:
            return codes
        rows, taps = scale.shape
        return (codes.float().view(rows, taps, -1) * scale[:, :, None]).to(torch.bfloat16).view(rows, -1)


CODECS = {
    codec.name: codec
    for codec in (
        Codec("bf16", torch.bfloat16, False),
        Codec("fp8", torch.float8_e4m3fn, True),
        Codec("int8", torch.int8, True),
    )
}


def find_codec(name: str) -> Codec:
    """Return a codec by name; `InputError` lists the known ones."""
    if name not in CODECS:
        raise InputError(f"storage={name!r}{near(name, CODECS)}: choose one of {', '.join(CODECS)}.")
    return CODECS[name]
