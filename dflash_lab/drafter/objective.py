"""From a packed row to its loss: embed the blocks, run the drafter, compare with what the target says.

The head and the embedding are the target's and frozen. Teacher states are the target's own last hidden states
at a + k - 1 through its own final norm: they give its distribution of the token at a + k, exact when slots 1
.. k-1 are right, which is the case that acceptance depends on.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dflash_lab.drafter.anchors import decay_weights
from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.drafter.loss.fused import FusedDraftLoss
from dflash_lab.drafter.loss.result import DraftLoss, RowStats
from dflash_lab.drafter.loss.shard import VocabShard
from dflash_lab.drafter.model import Drafter
from dflash_lab.drafter.rows import Row
from dflash_lab.drafter.selector_loss import selector_loss
from dflash_lab.drafter.settings import TrainSettings
from dflash_lab.errors import InputError

if TYPE_CHECKING:
    from dflash_lab.models.load import TargetHead


def add_noise(taps: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """taps + uniform noise in (-std, std), independent for every element; `generator` lives on the taps'
    device.
    """
    noise = torch.rand(taps.shape, generator=generator, device=taps.device, dtype=torch.float32)
    return noise.mul_(2).sub_(1).mul_(std).to(taps.dtype).add_(taps)


# The terms of a loss, in the order of `RowLoss.parts`; `selector` is DFlash 2's.
TERMS = ("ce", "kl", "cap", "tv", "lk", "length", "selector")


@dataclass(frozen=True)
class RowLoss:
    """What a row costs: `total` (differentiable, unnormalised), the part that each of TERMS has in it [7],
    `below` (what it is divided by), statistics of its slots, and the tokens [A, B] that DFlash 2's selector
    chose (None without one).
    """

    total: Tensor
    parts: Tensor
    below: Tensor
    rows: RowStats
    chosen: Tensor | None


class Objective:
    """The loss of packed rows under a run's settings, on the device of `head`."""

    def __init__(
        self,
        head: TargetHead,
        config: DrafterConfig,
        settings: TrainSettings,
        plan_group: Any = None,
        *,
        shard: VocabShard | None = None,
        target_device: torch.device | str | None = None,
    ) -> None:
        """`plan_group`: processes that must use the same loss chunks. With `shard`, head.weight is this
        rank's slice of the head. On a `target_device` of its own the target's logits are made, by a copy of
        norm and head there; None: beside `head`.
        """
        self.head, self.settings, self.shard = head, settings, shard
        self.teacher = head if target_device is None else on_device(head, target_device)
        self.hosts = None if shard is None else shard.group
        if shard is not None and dist.get_backend(shard.group) == "nccl":
            self.hosts = dist.new_group(backend="gloo")  # labels and their like are on the host
        self.attention = settings.attention  # `warm_up` takes another where this one does not compile
        self.weights = decay_weights(config.block_size, settings.gamma)
        scaled = dataclasses.replace(
            settings.loss, logit_scale=config.output_multiplier, logit_softcap=config.final_logit_softcapping
        )
        self.fused = FusedDraftLoss(scaled, shard=shard, plan_group=plan_group)
        on = settings.loss
        factors = [on.hard_weight, on.soft_weight, on.cap_weight, on.tv_weight, on.lk_weight]
        factors += [on.length_weight, settings.selector_weight]
        self.factors = dict(zip(TERMS, factors, strict=True))
        self._factors = torch.tensor(factors, dtype=torch.float64).to(head.weight.device)
        self._none = torch.zeros_like(self._factors[0])

    def __call__(
        self, model: nn.Module, drafter: Drafter, row: Row, taps: Tensor, *, teacher: bool
    ) -> RowLoss:
        """Loss of one row. `model` is `drafter` or a wrapper of it; `taps` [S, K*H] the row's states, with
        noise or without. `teacher` compares with the target where the row has its final states, even if no
        term needs it (one more matrix product).
        """
        head, device = self.head, self.head.weight.device
        embeddings = head.embed(row.block_ids.to(device)).to(taps.device)
        hidden = model(embeddings, taps, row.layout, self.attention).to(device)
        target_hidden = None
        if row.final is None:
            if self.settings.loss.needs_target:
                raise InputError(
                    "this loss compares with the target's distribution, but the store has no final states. "
                    "Extract with store_final: true, or train on hard labels from the data alone."
                )
        elif teacher or self.settings.loss.needs_target:
            with torch.no_grad():
                final = row.final.to(self.teacher.weight.device, head.weight.dtype)
                target_hidden = self.teacher.normed(final)
        weights = row.slot_mask * self.weights
        target_rows = None if target_hidden is None else row.target_rows
        mine = (hidden, row.labels, weights, target_hidden, target_rows)
        if self.shard is None:
            loss = self.compare(*mine)
        else:  # all ranks compute each one's loss, the owner of the rows keeps it
            for turn in self.shard.turns(*mine, self.hosts):
                of_turn = self.compare(*turn[1:])
                if turn.mine:
                    loss = of_turn
        total, chosen, sums = loss.total, None, loss.sums
        if drafter.candidate_selector is not None and self.settings.selector_weight:
            selector, chosen = selector_loss(drafter, hidden, head.weight, row.labels, loss.rows)
            total = total + self.settings.selector_weight * selector
            sums = {**sums, "selector": selector.detach()}
        found = [sums[name] if name in sums and self.factors[name] else self._none for name in TERMS]
        parts = torch.stack(found) * self._factors
        below = loss.weight_sum if self.settings.denominator == "weights" else loss.row_count
        return RowLoss(total, parts, below, loss.rows, chosen)

    def compare(
        self,
        hidden: Tensor,
        labels: Tensor,
        weights: Tensor,
        target_hidden: Tensor | None,
        target_rows: Tensor | None,
    ) -> DraftLoss:
        """The draft loss of hidden states [A, B, H]; see `fused_draft_loss`."""
        own = target_hidden is not None and self.teacher is not self.head
        return self.fused(
            hidden,
            self.head.weight,
            labels,
            weights,
            target_hidden=target_hidden,
            target_rows=target_rows,
            target_head=self.teacher.weight if own else None,
        )


def on_device(head: TargetHead, device: torch.device | str) -> TargetHead:
    """A copy of norm and head matrix on `device`, with the embedding where it was."""
    norm = copy.deepcopy(head.norm).to(device)
    return dataclasses.replace(head, norm=norm, weight=head.weight.to(device, copy=True))
