"""From a packed row to its loss: embed the blocks, run the drafter, compare with what the target says.

The head and the embedding are the target's and frozen. Teacher states are the target's own last hidden states
at a + k - 1 through its own final norm: they give its distribution of the token at a + k, exact when slots 1
.. k-1 are right, which is the case that acceptance depends on.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.drafter.loss.config import LossConfig
from dflash_lab.drafter.loss.fused import FusedDraftLoss
from dflash_lab.drafter.loss.result import DraftLoss
from dflash_lab.drafter.rows import Row
from dflash_lab.errors import InputError

if TYPE_CHECKING:
    from dflash_lab.target.head import TargetHead


def add_noise(taps: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """taps + uniform noise in (-std, std), independent for every element; `generator` lives on the taps'
    device.
    """
    noise = torch.rand(taps.shape, generator=generator, device=taps.device, dtype=torch.float32)
    return taps + ((noise * 2 - 1) * std).to(taps.dtype)


def loss_config(config: LossConfig, drafter: DrafterConfig) -> LossConfig:
    """Put the drafter's logit scale and soft cap into the loss, which projects the hidden states itself."""
    return dataclasses.replace(
        config, logit_scale=drafter.output_multiplier, logit_softcap=drafter.final_logit_softcapping
    )


def row_loss(
    model: nn.Module,
    head: TargetHead,
    row: Row,
    taps: Tensor,
    weights: Tensor,
    loss: FusedDraftLoss,
    *,
    attention: str = "auto",
    teacher: bool = True,
) -> DraftLoss:
    """Loss and statistics of one row on the device of `head`.

    `model` is a Drafter or a wrapper of one; `taps` [S, K*H] are the row's states, with noise or without;
    `weights` [B] weigh the slots of a block. `teacher` compares with the target where the row has its final
    states, even if no term of the loss needs it (one more matrix product).
    """
    hidden = model(head.embed(row.block_ids), taps, row.layout, attention)
    target_hidden = None
    if row.final is None:
        if loss.config.needs_target:
            raise InputError(
                "this loss compares with the target's distribution, but the features hold no final states. "
                "Extract with store_final: true, or train on hard labels from the data alone."
            )
    elif teacher or loss.config.needs_target:
        with torch.no_grad():
            target_hidden = head.normed(row.final.to(head.weight.dtype))
    return loss(
        hidden,
        head.weight,
        row.labels,
        row.slot_mask * weights,
        target_hidden=target_hidden,
        target_rows=None if target_hidden is None else row.target_rows,
    )
