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
from dflash_lab.drafter.loss.selection import upload


@dataclass(frozen=True)
class Teacher:
    """The target's states, with buffers of its own only where its head is another than the drafter's."""

    states: Tensor  # [R, H] after the target's final norm
    head: Tensor | None  # [V, H] beside states; None: the drafter's head serves both sides
    here: Tensor | None  # [c, V] logits on the drafter's device, with a head of its own
    there: Tensor | None  # [c, V] logits on the device of states, likewise
    config: LossConfig

    @classmethod
    def allocate(
        cls, states: Tensor, head: Tensor | None, rows: int, device: torch.device, config: LossConfig
    ) -> Teacher:
        """Buffers for chunks of at most `rows` rows."""
        if head is None:
            return cls(states, None, None, None, config)
        dtype, vocab = logit_dtype(states.dtype), head.shape[0]
        return cls(
            states,
            head,
            logit_buffer(rows, vocab, dtype, device),
            logit_buffer(rows, vocab, dtype, states.device),
            config,
        )

    def select(self, target_row: Tensor) -> tuple[Tensor, Tensor]:
        """(distinct states [u, H], which of them each drafter row uses [n], CPU) for target rows [n] (int64,
        CPU).
        """
        needed, source = torch.unique(target_row, return_inverse=True)
        first, count = int(needed[0]), needed.numel()
        if int(needed[-1]) - first + 1 == count:
            return self.states[first : first + count], source
        return self.states.index_select(0, upload(needed, self.states.device)), source

    def logits(self, states: Tensor) -> Tensor:
        """[u, V] on the drafter's device, projected where the target's own head lies."""
        assert self.head is not None and self.here is not None and self.there is not None
        out = self.there[: states.shape[0]]
        project(states, self.head, out, scale=self.config.logit_scale, softcap=self.config.logit_softcap)
        return self.here[: states.shape[0]].copy_(out, non_blocking=True)
