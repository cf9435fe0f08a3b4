"""One process, or many under torchrun: what the loop needs from the others, and how the drafter is wrapped.

Every process packs its own rows of the global batch and counts its own loss; the denominator is summed over all of
them, and gradients are scaled so that they equal those of one process on the whole batch. The model file knows
nothing of this.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dflash_lab.drafter.model import Drafter
from dflash_lab.drafter.optimizer import Optimizer


class Single:
    """A run in one process."""

    rank = 0
    world = 1
    plan_group = None  # processes that must use the same loss chunks

    def wrap(self, drafter: Drafter) -> nn.Module:
        """What the loop calls instead of the drafter."""
        return drafter

    def last_micro(self, model: nn.Module, last: bool) -> None:
        """Told before each row of a step: only the last one's backward needs to exchange gradients."""

    def total(self, value: Tensor) -> Tensor:
        """Sum of `value` over all processes."""
        return value

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Full copies of tensors that may be sharded."""
        return tensors

    def load(self, drafter: Drafter, weights: dict[str, Tensor]) -> None:
        """Put whole `weights` into the (possibly sharded) drafter."""
        drafter.load_state_dict(weights)

    def load_optimizer(self, optimizer: Optimizer, tensors: dict[str, Tensor], steps: int) -> None:
        """Put whole state tensors into the (possibly sharded) optimizer."""
        optimizer.load(tensors, steps)

    def grad_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Norm of all gradients together."""
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return torch.nn.utils.get_total_norm(grads)

    def barrier(self) -> None:
        """Wait for the other processes."""
