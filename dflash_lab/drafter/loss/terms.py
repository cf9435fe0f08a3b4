"""The numbers that one sweep over a row's logits yields, in two steps: partial sums, then the terms of the loss.

Partial sums can be taken over any slice of the vocabulary and merged, which is all that the vocabulary-parallel mode
needs; the terms follow from them row by row. With z the drafter's and s the target's logits of a row, y its label:

    lse = log sum e^z            CE = lse - z_y               H = lse - sum p z = log D - E / D
    KL(q || p) at T = sum q (s - z) / T - lse(s / T) + lse(z / T)
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """One chunk for the row pass. n drafter rows, u distinct target rows, V tokens [offset, offset + V) of the vocabulary."""

    z: Tensor  # [n, V] drafter logits, float32 or float64
    s: Tensor | None  # [u, V] target logits
    source: Tensor | None  # [n] int64: which row of s belongs to a drafter row
    label: Tensor  # [n] int64, in the whole vocabulary
    offset: int = 0

    @property
    def owned(self) -> Tensor:
        """[n] bool: the label lies in this slice."""
        return (self.label >= self.offset) & (self.label < self.offset + self.z.shape[1])

    @property
    def local_label(self) -> Tensor:
        """[n] int64: the label's column in this slice, clamped into it where another slice owns it."""
        return (self.label - self.offset).clamp(0, self.z.shape[1] - 1)

    def label_logit(self) -> Tensor:
        """[n]: z at the label, -inf where another slice owns it."""
        return self.z.gather(1, self.local_label[:, None])[:, 0].masked_fill(~self.owned, -torch.inf)


@dataclass(frozen=True)
class Partials:
    """Sums over a slice of the vocabulary, all [n]; target fields are None without the target's side."""

    peak: Tensor  # max z
    mass: Tensor  # sum e^(z - peak)
    slope: Tensor  # sum e^(z - peak) (z - peak)
    mass_t: Tensor  # sum e^((z - peak) / T)
    argmax: Tensor  # int64, in the whole vocabulary
    above: Tensor  # int64: tokens before the label
    target_peak: Tensor | None = None  # max s
    target_mass: Tensor | None = None  # sum e^(s - target_peak)
    target_mass_t: Tensor | None = None  # sum e^((s - target_peak) / T)
    cross: Tensor | None = None  # sum e^((s - target_peak) / T) (s - z) / T
    target_argmax: Tensor | None = None  # int64


@dataclass(frozen=True)
class Terms:
    """The terms of each row, all [n]; None for what the pass does not compute."""

    lse: Tensor
    lse_t: Tensor  # of z / T
    ce: Tensor
    entropy: Tensor
    p_max: Tensor
    argmax: Tensor  # int64
    rank: Tensor  # int64
    label: Tensor  # int64
    weight: Tensor  # the weight used
    target_lse: Tensor | None = None
    target_lse_t: Tensor | None = None
    kl: Tensor | None = None
    target_argmax: Tensor | None = None  # int64
    tv: Tensor | None = None
    below: Tensor | None = None  # sum of p over tokens with p < q

    @classmethod
    def empty(
        cls, rows: int, device: torch.device, dtype: torch.dtype, *, target: bool, overlap: bool
    ) -> Terms:
        """Allocate the terms of all live rows; chunks write into slices of them."""

        def make(kind: torch.dtype = dtype) -> Tensor:
            return torch.empty(rows, dtype=kind, device=device)

        whole = torch.int64
        return cls(
            lse=make(), lse_t=make(), ce=make(), entropy=make(), p_max=make(), argmax=make(whole), rank=make(whole),
            label=make(whole), weight=make(),
            target_lse=make() if target else None, target_lse_t=make() if target else None,
            kl=make() if target else None, target_argmax=make(whole) if target else None,
            tv=make() if overlap else None, below=make() if overlap else None,
        )  # fmt: skip

    def slice(self, start: int, end: int) -> Terms:
        """Views of rows [start, end)."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Terms(**{name: None if value is None else value[start:end] for name, value in values.items()})


def finish(
    partials: Partials, label_logit: Tensor, label: Tensor, vocab: int, temperature: float, out: Terms
) -> None:
    """Turn partial sums over the whole vocabulary into terms. A label outside [0, vocab) makes its row NaN, not a wrong read."""
    log_mass = partials.mass.log()
    torch.add(partials.peak, log_mass, out=out.lse)
    torch.add(partials.peak / temperature, partials.mass_t.log(), out=out.lse_t)
    out.ce.copy_(torch.where((label >= 0) & (label < vocab), out.lse - label_logit, torch.nan))
    torch.sub(log_mass, partials.slope / partials.mass, out=out.entropy)
    torch.reciprocal(partials.mass, out=out.p_max)
    out.argmax.copy_(partials.argmax)
    out.rank.copy_(partials.above)
    if partials.cross is None:
        return
    assert (
        partials.target_peak is not None
        and partials.target_mass is not None
        and partials.target_mass_t is not None
    )
    assert out.target_lse is not None and out.target_lse_t is not None and out.kl is not None
    assert out.target_argmax is not None and partials.target_argmax is not None
    torch.add(partials.target_peak, partials.target_mass.log(), out=out.target_lse)
    torch.add(partials.target_peak / temperature, partials.target_mass_t.log(), out=out.target_lse_t)
    torch.sub(partials.cross / partials.target_mass_t, out.target_lse_t - out.lse_t, out=out.kl)
    out.target_argmax.copy_(partials.target_argmax)
