"""Vocabulary-parallel mode: each rank of a group holds a slice of the head, and a few numbers a row cross.

Every rank sees the same hidden states, labels and weights. Per chunk the ranks exchange the label's logit (1
number a row), their sums (10 numbers a row), and the hidden gradient [n, H]; logits never leave their rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_lab.drafter.loss.terms import DrafterSums, TargetSums
from dflash_lab.errors import InputError


@dataclass(frozen=True)
class VocabShard:
    """This rank's slice [start, start + rows of head) of a vocabulary of `total` tokens, over the ranks of
    `group`.
    """

    start: int
    total: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, vocab: int, group: dist.ProcessGroup | None = None) -> VocabShard:
        """Split `vocab` evenly, the first ranks taking one more; a rank's head is `head[shard.slice()]`."""
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        return cls(start=_bound(vocab, rank, size), total=vocab, group=group)

    def slice(self) -> slice:
        """The rows of the whole head that `VocabShard.of` gives this rank."""
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        return slice(_bound(self.total, rank, size), _bound(self.total, rank + 1, size))

    def check(self, rows: int, device: torch.device) -> None:
        """Refuse slices that do not tile the vocabulary. Collective: every rank raises the same error."""
        every = self._gather(torch.tensor([self.start, rows, self.total], device=device))
        expected = 0
        for rank, (start, count, total) in enumerate(every.tolist()):
            if start != expected or total != self.total:
                raise InputError(
                    f"VocabShard of rank {rank} starts at {start} of {total}, expected {expected} of "
                    f"{self.total}: slices must follow each other in rank order."
                )
            expected += count
        if expected != self.total:
            raise InputError(
                f"the head slices of all ranks hold {expected} tokens, but VocabShard.total is {self.total}."
            )

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


def _bound(vocab: int, rank: int, size: int) -> int:
    return rank * (vocab // size) + min(rank, vocab % size)
