"""The target's side of a chunk: the distinct target rows it needs, projected once, here or on a second
device.

Blocks of neighbouring anchors overlap, so a chunk of n drafter rows needs only u <= n distinct target rows
(rho = u / n). They are a contiguous slice of the target's states when the anchors lie close, else they are
gathered. With the target's head on another device the projection runs there, and only the chunk's logits [u,
V] cross.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_lab.drafter.loss.config import LossConfig
from dflash_lab.drafter.loss.matmul import logit_buffer, logit_dtype, project


@dataclass(frozen=True)
class Teacher:
    """Buffers and weights of the target's side. `there` is None when the target's head lies on the drafter's device."""

    states: Tensor  # [R, H] after the target's final norm
    head: Tensor  # [V, H], on the device of states
    here: Tensor  # [c, V] logits, on the drafter's device
    there: Tensor | None  # [c, V] logits, on the device of states
    config: LossConfig

    @classmethod
    def allocate(
        cls,
        states: Tensor,
        head: Tensor,
        rows: int,
        device: torch.device,
        config: LossConfig,
        *,
        separate: bool,
    ) -> Teacher:
        """Buffers for chunks of at most `rows`; `separate` when the head given is the target's own copy."""
        dtype = logit_dtype(states.dtype)
        here = logit_buffer(rows, head.shape[0], dtype, device)
        there = logit_buffer(rows, head.shape[0], dtype, states.device) if separate else None
        return cls(states, head, here, there, config)

    def logits(self, target_row: Tensor) -> tuple[Tensor, Tensor]:
        """(logits [u, V], which of them each drafter row uses [n]) for the chunk's target rows [n] (int64, on the CPU)."""
        needed, source = torch.unique(target_row, return_inverse=True)
        first, count = int(needed[0]), needed.numel()
        if int(needed[-1]) - first + 1 == count:
            states = self.states[first : first + count]
        else:
            states = self.states[needed.to(self.states.device, non_blocking=True)]
        near = self.here if self.there is None else self.there
        logits = project(
            states, self.head, near[:count], scale=self.config.logit_scale, softcap=self.config.logit_softcap
        )
        if self.there is not None:
            logits = self.here[:count].copy_(logits, non_blocking=True)
        return logits, source.to(self.here.device, non_blocking=True)
