"""Vocabulary-parallel mode: each rank of a group holds a slice of the head, and a few numbers a row cross.

Every rank sees the same hidden states, labels and weights. Per chunk the ranks exchange the label's logit (1 number a row),
the partial sums (11 numbers a row), and the hidden gradient [n, H]; logits never leave their rank.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_lab.drafter.loss.terms import Partials
from dflash_lab.errors import InputError


@dataclass(frozen=True)
class VocabShard:
    """This rank's slice [start, start + rows of head) of a vocabulary of `total` tokens, over the ranks of `group`."""

    start: int
    total: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, vocab: int, group: dist.ProcessGroup | None = None) -> VocabShard:
        """Split `vocab` evenly, the first ranks taking one more; slice the head as ``head[shard.rows(...)]``."""
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        return cls(start=_bound(vocab, rank, size), total=vocab, group=group)

    def slice(self) -> slice:
        """The rows of the whole head that `VocabShard.of` gives this rank."""
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        return slice(_bound(self.total, rank, size), _bound(self.total, rank + 1, size))

    def check(self, rows: int, device: torch.device) -> None:
        """Refuse slices that do not tile the vocabulary. Collective: every rank raises the same error."""
        size = dist.get_world_size(self.group)
        mine = torch.tensor([self.start, rows, self.total], device=device)
        every = torch.empty(size, 3, dtype=mine.dtype, device=device)
        dist.all_gather_into_tensor(every, mine, group=self.group)
        expected = 0
        for rank, (start, count, total) in enumerate(every.tolist()):
            if start != expected or total != self.total:
                raise InputError(
                    f"VocabShard of rank {rank} starts at {start} of {total}, expected {expected} of {self.total}: "
                    "slices must follow each other in rank order."
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

    def first_largest(self, value: Tensor, token: Tensor) -> Tensor:
        """The token of the largest value over the ranks [u]; the lowest rank, so the lowest token, among equals."""
        values, tokens = self._gather(value), self._gather(token)
        return tokens.gather(0, values.argmax(0, keepdim=True))[0]

    def merge(self, part: Partials, temperature: float) -> Partials:
        """Combine the partial sums of all ranks into those of the whole vocabulary."""
        every = Partials(
            *(None if v is None else self._gather(v) for v in (getattr(part, f.name) for f in fields(part)))
        )
        return merge_partials(every, temperature)

    def _gather(self, value: Tensor) -> Tensor:
        """[ranks, n]"""
        value = value.contiguous()
        out = value.new_empty(dist.get_world_size(self.group), *value.shape)
        dist.all_gather_into_tensor(out, value, group=self.group)
        return out


def merge_partials(every: Partials, temperature: float) -> Partials:
    """Merge partial sums of slices in vocabulary order (every field [slices, n]) as an online softmax does."""
    peak = every.peak.amax(0)
    shift = every.peak - peak  # <= 0; -inf for a slice of padding
    mass = _scaled(every.mass, shift)
    # sum e^(z - peak) (z - peak): each slice's own slope plus its shift times its mass
    slope = _scaled(every.slope, shift) + torch.where(mass == 0, 0, mass * shift)
    drafter = (
        peak, mass.sum(0), slope.sum(0), _scaled(every.mass_t, shift / temperature).sum(0),
        every.argmax.gather(0, every.peak.argmax(0, keepdim=True))[0], every.above.sum(0),
    )  # fmt: skip
    if every.target_peak is None:
        return Partials(*drafter)
    assert every.target_mass is not None and every.target_mass_t is not None
    assert every.cross is not None and every.target_argmax is not None
    target_peak = every.target_peak.amax(0)
    shift = every.target_peak - target_peak
    return Partials(
        *drafter,
        target_peak,
        _scaled(every.target_mass, shift).sum(0),
        _scaled(every.target_mass_t, shift / temperature).sum(0),
        _scaled(every.cross, shift / temperature).sum(0),
        every.target_argmax.gather(0, every.target_peak.argmax(0, keepdim=True))[0],
    )


def _scaled(value: Tensor, shift: Tensor) -> Tensor:
    """value * e^shift, 0 where the slice is all padding (shift -inf), whose own sums are NaN."""
    return torch.where(shift == -torch.inf, 0, value * shift.exp())


def _bound(vocab: int, rank: int, size: int) -> int:
    return rank * (vocab // size) + min(rank, vocab % size)
