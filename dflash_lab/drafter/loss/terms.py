"""The numbers that sweeps over a row's logits yield, in two steps: sums over the vocabulary, then terms of
the loss.

Sums can be taken over any slice of the vocabulary and merged, which is all that the vocabulary-parallel mode
needs. With z the drafter's logits of a row and y its label:

    lse = log sum e^z = peak + log mass        CE = lse - z_y        H = lse - sum p z = log mass - slope /
    mass

KL and TV compare both rows element by element once both are normalised; that happens where the gradient is
written, which reads both rows anyway. (Taking KL from sums alone, sum q (s - z) - lse + lse, cancels near
convergence.)
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class DrafterSums:
    """Sums over a slice of the vocabulary for each drafter row, all [n]."""

    peak: Tensor  # max z
    mass: Tensor  # sum e^(z - peak)
    slope: Tensor  # sum e^(z - peak) (z - peak)
    mass_t: Tensor  # sum e^((z - peak) / T)
    argmax: Tensor  # int64, in the whole vocabulary
    above: Tensor  # int64: tokens before the label


@dataclass(frozen=True)
class TargetSums:
    """Sums over a slice of the vocabulary for each distinct target row, all [u]."""

    peak: Tensor  # max s
    mass: Tensor  # sum e^(s - peak)
    mass_t: Tensor  # sum e^((s - peak) / T)
    argmax: Tensor  # int64, in the whole vocabulary


@dataclass(frozen=True)
class TargetTerms:
    """What the loss needs of each distinct target row, all [u]."""

    lse: Tensor
    lse_t: Tensor  # of s / T
    argmax: Tensor  # int64


@dataclass(frozen=True)
class Rows:
    """One chunk for the row pass: n drafter rows, u distinct target rows, tokens [offset, offset + V) of the
    vocabulary.
    """

    z: Tensor  # [n, V] drafter logits, float32 or float64
    label: Tensor  # [n] int64, in the whole vocabulary
    s: Tensor | None = None  # [u, V] target logits
    source: Tensor | None = None  # [n] int64: which row of s belongs to a drafter row
    target: TargetTerms | None = None
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
class Terms:
    """The terms of each live row, all [n]; None for what the sweep does not compute."""

    label: Tensor  # int64
    weight: Tensor  # the weight used
    lse: Tensor
    lse_t: Tensor  # of z / T
    ce: Tensor
    entropy: Tensor
    p_max: Tensor
    argmax: Tensor  # int64
    rank: Tensor  # int64
    kl: Tensor | None = None
    target_argmax: Tensor | None = None  # int64
    tv: Tensor | None = None
    below: Tensor | None = None  # sum of p over tokens with p < q
    reached: Tensor | None = None  # probability that the block is accepted up to this slot

    @classmethod
    def empty(
        cls, label: Tensor | None, weight: Tensor, *, target: bool, overlap: bool, length: bool = False
    ) -> Terms:
        """Allocate the terms of all live rows; chunks write into slices of them. `label` and `weight` are
        kept if final.
        """

        def floats() -> Tensor:
            return torch.empty_like(weight)

        def whole() -> Tensor:
            return torch.empty(weight.shape, dtype=torch.int64, device=weight.device)

        return cls(
            label=whole() if label is None else label,
            weight=weight.clone(),
            lse=floats(),
            lse_t=floats(),
            ce=floats(),
            entropy=floats(),
            p_max=floats(),
            argmax=whole(),
            rank=whole(),
            kl=floats() if target else None,
            target_argmax=whole() if target else None,
            tv=floats() if overlap else None,
            below=floats() if overlap else None,
            reached=floats() if length else None,
        )

    def slice(self, start: int, end: int) -> Terms:
        """Views of rows [start, end)."""

        def cut(value: Tensor | None) -> Tensor | None:
            return None if value is None else value[start:end]

        return Terms(**{field.name: cut(getattr(self, field.name)) for field in fields(self)})  # type: ignore[arg-type]


def finish_drafter(
    sums: DrafterSums, label_logit: Tensor, label: Tensor, vocab: int, temperature: float, out: Terms
) -> None:
    """Terms from sums over the whole vocabulary. A label outside [0, vocab) makes its row NaN instead of a
    wrong read.
    """
    log_mass = sums.mass.log()
    out.lse.copy_(sums.peak + log_mass)
    out.lse_t.copy_(sums.peak / temperature + sums.mass_t.log())
    out.ce.copy_(torch.where((label >= 0) & (label < vocab), out.lse - label_logit, torch.nan))
    out.entropy.copy_(log_mass - sums.slope / sums.mass)
    out.p_max.copy_(1 / sums.mass)
    out.argmax.copy_(sums.argmax)
    out.rank.copy_(sums.above)


def finish_target(sums: TargetSums, temperature: float) -> TargetTerms:
    """Terms of target rows from sums over the whole vocabulary."""
    return TargetTerms(
        lse=sums.peak + sums.mass.log(), lse_t=sums.peak / temperature + sums.mass_t.log(), argmax=sums.argmax
    )
