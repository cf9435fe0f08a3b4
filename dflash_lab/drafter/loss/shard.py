"""Vocabulary-parallel mode: each rank of a group holds a slice of the head, and a few numbers a row cross.

Every rank sees the same hidden states, labels and weights (`VocabShard.turns`, where ranks have rows of their
own). Per chunk the ranks exchange the label's logit (1 number a row), their sums (10 numbers a row), and the
hidden gradient [n, H]; logits never leave their rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_lab.drafter.loss.terms import DrafterSums, TargetSums
from dflash_lab.errors import InputError


class Turn(NamedTuple):
    """The rows of one rank, `mine` those of this one: hidden [A, B, H] and target_hidden [R, H] on the
    device, labels, weights and target_rows [A, B] on the CPU.
    """

    mine: bool
    hidden: Tensor
    labels: Tensor
    weights: Tensor
    target_hidden: Tensor | None
    target_rows: Tensor | None


@dataclass(frozen=True)
class VocabShard:
    """This rank's slice of a vocabulary of `total` tokens, split evenly over the ranks of `group` (None:
    all), the first ones taking one more; a rank's head is `head[shard.slice()]`.
    """

    total: int
    group: dist.ProcessGroup | None = None

    @property
    def start(self) -> int:
        """The first token of this rank's slice."""
        return self.slice().start

    def slice(self) -> slice:
        """The rows of the whole head that are this rank's."""
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        bounds = [each * (self.total // size) + min(each, self.total % size) for each in (rank, rank + 1)]
        return slice(*bounds)

    def check(self, head: Tensor) -> None:
        """`InputError` for a head that is not this rank's slice."""
        mine = self.slice()
        if len(head) != mine.stop - mine.start:
            raise InputError(
                f"the head has {len(head)} tokens, but this rank's slice of a vocabulary of {self.total} is "
                f"[{mine.start}, {mine.stop}): give head[shard.slice()]."
            )

    def turns(
        self,
        hidden: Tensor,
        labels: Tensor,
        weights: Tensor,
        target_hidden: Tensor | None,
        target_rows: Tensor | None,
        hosts: dist.ProcessGroup | None = None,
    ) -> Iterator[Turn]:
        """Each rank's rows in turn, on every rank: data-parallel ranks have rows of their own, of which each
        computes the loss of all with its slice of the head.

        Gathered all at once they would outweigh the head that is saved; so one rank's are there at a time.
        labels, weights and target_rows [A, B] are on the CPU, and cross over `hosts`, a group that moves
        CPU tensors, so that no rank waits for its device. Blocks and target states may be more on one rank
        than on another; whether there are target states may not.
        """
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        every: list[Any] = [None] * size
        target_size = None if target_hidden is None else len(target_hidden)
        dist.all_gather_object(every, (labels, weights, target_rows, target_size), group=hosts)
        for turn, (labels, weights, target_rows, target_size) in enumerate(every):
            mine = turn == rank
            source = turn if self.group is None else dist.get_global_rank(self.group, turn)
            states = (
                hidden.detach().contiguous() if mine else hidden.new_empty(*labels.shape, hidden.shape[2])
            )
            dist.broadcast(states, source, group=self.group)
            teacher = None
            if target_hidden is not None:
                wide = target_hidden.shape[1]
                teacher = target_hidden.contiguous() if mine else target_hidden.new_empty(target_size, wide)
                dist.broadcast(teacher, source, group=self.group)
            # A gradient is asked for on all ranks or on none, as they exchange its parts.
            given = hidden if mine else states.requires_grad_(hidden.requires_grad)
            yield Turn(mine, given, labels, weights, teacher, target_rows)

    def maximum(self, value: Tensor) -> Tensor:
        """Elementwise maximum over the ranks."""
        value = value.clone()
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
        return value

    def sum(self, value: Tensor) -> Tensor:
        """Elementwise sum over the ranks."""
        value = value.clone()
        dist.all_reduce(value, group=self.group)
        return value

    def merge_drafter(self, sums: DrafterSums, temperature: float) -> DrafterSums:
        """Combine all ranks' sums of drafter rows into those of the whole vocabulary."""
        real = self._gather(torch.stack((sums.peak, sums.mass, sums.slope, sums.mass_t)))
        whole = self._gather(torch.stack((sums.argmax, sums.above)))
        return merge_drafter(DrafterSums(*real.unbind(1), *whole.unbind(1)), temperature)

    def merge_target(self, sums: TargetSums, temperature: float) -> TargetSums:
        """Combine all ranks' sums of target rows into those of the whole vocabulary."""
        peak, mass, mass_t = self._gather(torch.stack((sums.peak, sums.mass, sums.mass_t))).unbind(1)
        return merge_target(TargetSums(peak, mass, mass_t, self._gather(sums.argmax)), temperature)

    def _gather(self, value: Tensor) -> Tensor:
        """[ranks, *shape]"""
        every = [torch.empty_like(value) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(every, value, group=self.group)
        return torch.stack(every)


def merge_drafter(every: DrafterSums, temperature: float) -> DrafterSums:
    """Merge sums of slices in vocabulary order (every field [slices, n]) as an online softmax does."""
    peak = every.peak.amax(0)
    shift = every.peak - peak  # <= 0; -inf for a slice of padding
    mass = _scaled(every.mass, shift)
    # sum e^(z - peak) (z - peak): each slice's own slope, plus its shift times its mass
    slope = _scaled(every.slope, shift) + torch.where(mass == 0, 0, mass * shift)
    mass_t = _scaled(every.mass_t, shift / temperature)
    return DrafterSums(
        peak, mass.sum(0), slope.sum(0), mass_t.sum(0), _first(every.argmax, every.peak), every.above.sum(0)
    )


def merge_target(every: TargetSums, temperature: float) -> TargetSums:
    """As `merge_drafter` for target rows."""
    peak = every.peak.amax(0)
    shift = every.peak - peak
    mass, mass_t = _scaled(every.mass, shift), _scaled(every.mass_t, shift / temperature)
    return TargetSums(peak, mass.sum(0), mass_t.sum(0), _first(every.argmax, every.peak))


def _first(token: Tensor, value: Tensor) -> Tensor:
    """The token of the largest value over the slices [n]; the lowest slice, so the lowest token, among
    equals.
    """
    return token.gather(0, value.argmax(0, keepdim=True))[0]


def _scaled(value: Tensor, shift: Tensor) -> Tensor:
    """value * e^shift, 0 where the slice is all padding (shift -inf), whose own sums are NaN."""
    return torch.where(shift == -torch.inf, 0, value * shift.exp())
