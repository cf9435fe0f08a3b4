"""The regions of one buffer: every tap, the final state, scales and health flags of a batch lie in one run of
bytes.

So a batch leaves the device in ONE copy. The same regions, by the same names, are the tensors of a part on
disk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_lab.extraction.codecs import CODECS, Codec

_ALIGN = 64
FLAGS = "flags"
EXACT = CODECS["bf16"]  # of the final state: eight bits would change which token the target says


@dataclass(frozen=True)
class Region:
    """`rows` x `width` values of one dtype, a row a token."""

    name: str
    dtype: torch.dtype
    width: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.width * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """What is stored a token: a state of `hidden` values a tap in a codec, and perhaps the final state."""

    tap_ids: tuple[int, ...]
    hidden: int
    has_final: bool
    codec: Codec

    @property
    def taps(self) -> int:
        """Number of taps, K."""
        return len(self.tap_ids)

    @property
    def states(self) -> int:
        """States a token: the taps and the final one."""
        return self.taps + self.has_final

    @property
    def regions(self) -> tuple[Region, ...]:
        """The token regions in storage order."""
        found = [Region("taps", self.codec.dtype, self.taps * self.hidden)]
        if self.codec.scaled:
            found.append(Region("taps_scale", torch.float32, self.taps))
        if self.has_final:
            found.append(Region("final", EXACT.dtype, self.hidden))
        return tuple(found)

    @property
    def token_bytes(self) -> int:
        """Bytes that a token's states take on disk (its id, mask and share of the offsets add about 6)."""
        return sum(region.row_bytes for region in self.regions)

    def buffer_bytes(self, tokens: int, samples: int) -> int:
        """Bytes of the buffer of a batch of `tokens` valid tokens in `samples` samples."""
        return sum(_up(tokens * region.row_bytes) for region in self.regions) + _up(samples * self.states)

    def views(self, buffer: Tensor, tokens: int, samples: int) -> dict[str, Tensor]:
        """Cut a uint8 `buffer` into its regions [tokens, width] and the flags [samples, states] (uint8)."""
        found, at = {}, 0
        for region in self.regions:
            size = tokens * region.row_bytes
            found[region.name] = buffer[at : at + size].view(region.dtype).view(tokens, region.width)
            at += _up(size)
        found[FLAGS] = buffer[at : at + samples * self.states].view(samples, self.states)
        return found

    def write_state(self, views: dict[str, Tensor], index: int, states: Tensor) -> None:
        """Encode state number `index` ([T, H]; taps in order, then the final one) into its columns."""
        if index == self.taps:
            EXACT.encode(states, views["final"], None)
            return
        codes = views["taps"][:, index * self.hidden : (index + 1) * self.hidden]
        self.codec.encode(states, codes, views["taps_scale"][:, index] if self.codec.scaled else None)

    def read_state(self, views: dict[str, Tensor], index: int) -> Tensor:
        """State number `index` as a reader will get it, bf16 [T, H]."""
        if index == self.taps:
            return EXACT.decode(views["final"], None)
        codes = views["taps"][:, index * self.hidden : (index + 1) * self.hidden]
        return self.codec.decode(codes, views["taps_scale"][:, index, None] if self.codec.scaled else None)


def _up(size: int) -> int:
    return math.ceil(size / _ALIGN) * _ALIGN
