"""What the draft loss returns: a sum to differentiate, its denominators, and every row's statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowStats:
    """Statistics of each slot, all [A, B], detached; 0 (index -1) where the slot is not live. Logarithms are
    natural.

    kl and target_argmax are None without the target's side, tv is None unless a term needs it.
    """

    live: Tensor  # bool: weight is not 0
    weight: Tensor  # the weight the loss used (D-PACE included)
    ce: Tensor  # cross-entropy with the label
    entropy: Tensor  # of the drafter's distribution, nats
    p_max: Tensor  # largest drafter probability
    kl: Tensor | None  # KL(target || drafter) at the soft term's temperature
    tv: Tensor | None  # total variation distance at temperature 1
    label: Tensor  # int64: the label the loss used
    argmax: Tensor  # int64: drafter's first largest logit
    rank: Tensor  # int64: tokens before the label in the drafter's order, ties by index; < k: in the top k
    target_argmax: Tensor | None  # int64: target's first largest logit

    @property
    def correct(self) -> Tensor:
        """[A, B] bool: the drafter's argmax is the label."""
        return self.live & (self.rank == 0)

    def accepted(self) -> tuple[Tensor, Tensor]:
        """Return (sum, count): drafts accepted before the first miss over all blocks with a live slot, and
        those blocks.

        Slots before a block's first live one are skipped; a slot that is not live ends the run. Pool across
        chunks and ranks by adding both; tau = 1 + sum / count.
        """
        started = self.live.cumsum(1) > 0
        run = (self.correct | ~started).cumprod(1).bool() & self.live
        return run.sum(), self.live.any(1).sum()


@dataclass(frozen=True)
class DraftLoss:
    """The unnormalised loss and what normalises it.

    total: scalar, float32 (float64 for float64 input), the only differentiable part: the sum over rows, times
    the
        caller's scale if one was given.
    weight_sum, row_count: the two usual denominators, detached scalars; all-reduce one of them and divide
    outside, so
        that accumulation and data-parallel ranks stay exact.
    sums: detached weighted sums of the terms without their factors ('ce', 'kl' (times T^2), 'cap', 'tv',
    'lk', 'length'), so that
        total = scale * sum of factor * sums[term], and the count 'correct'.
    """

    total: Tensor
    weight_sum: Tensor
    row_count: Tensor
    sums: dict[str, Tensor]
    rows: RowStats


def scatter(
    values: list[Tensor | None], position: Tensor, shape: torch.Size, fill: float | int = 0
) -> list[Any]:
    """Place values of the live rows [n] of one dtype into new [A, B] tensors, all in one go; None stays."""
    found = torch.stack([value for value in values if value is not None])
    out = found.new_full((len(found), shape.numel()), fill)
    out[:, position] = found
    placed = iter(out.unflatten(1, shape).unbind())
    return [None if value is None else next(placed) for value in values]
