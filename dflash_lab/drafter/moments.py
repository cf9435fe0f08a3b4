"""Adam's moments in one byte each: logarithmic codes with a scale for every 256 numbers, rounded at random.

A moment moves by a thousandth of itself a step, far less than a code's width (9 %); rounded to the nearest it
would stand still. Rounding up or down at random, with the odds that keep the mean, lets it move on average.
Codes are logarithmic because a moment that rounds to zero while its partner does not would make a huge step.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256  # numbers that share a scale
LEVELS = 8  # codes an octave


def encode(values: Tensor, generator: torch.Generator, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of fp32 `values` (any shape): int8 with 7 bits of magnitude (16 octaves below the
    largest of its block) when `signed`, else uint8 with 8 (32 octaves). Smaller numbers become 0 if
    signed, else the least code, so that a second moment is never 0 unless its whole block is.
    """
    top = 127 if signed else 255
    flat = values.flatten()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True)
    share = blocks.abs() / scales.clamp_min(torch.finfo(torch.float32).tiny)  # 0..1
    exponent = torch.floor(torch.log2(share.clamp_min(2.0**-40)) * LEVELS)
    low, high = torch.exp2(exponent / LEVELS), torch.exp2((exponent + 1) / LEVELS)
    draw = torch.rand(share.shape, generator=generator, device=share.device)
    codes = exponent + (draw < (share - low) / (high - low)) + top
    codes = torch.where(codes < 1, 0 if signed else 1, codes.clamp(max=top))
    codes = codes * blocks.sign() if signed else codes
    packed = codes.to(torch.int8 if signed else torch.uint8).flatten()[: len(flat)]
    return packed.view(values.shape), scales[:, 0]


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """The fp32 numbers of `encode`'s codes and scales."""
    signed = codes.dtype == torch.int8
    flat = codes.flatten().float()
    size = torch.exp2((flat.abs() - (127 if signed else 255)) / LEVELS)
    value = torch.where(flat == 0, 0.0, size * flat.sign())
    blocks = torch.nn.functional.pad(value, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    return (blocks * scales[:, None]).flatten()[: len(flat)].view(codes.shape)
