"""Tiny drafters, what they are trained on and how; weights N(0, 0.3), errors judged by relative L2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_lab.data.samples import FeatureItem
from dflash_lab.drafter.config import FULL, SLIDING, DrafterConfig
from dflash_lab.drafter.journal import read_journal
from dflash_lab.drafter.loss_terms import LossConfig
from dflash_lab.drafter.model import Drafter
from dflash_lab.drafter.model import RMSNorm as PlainNorm
from dflash_lab.drafter.objective import TrainSettings
from dflash_lab.drafter.optim import OptimizerConfig
from dflash_lab.models.load import TargetHead

VOCAB, HIDDEN, TAPS = 97, 48, (1, 3)
MIXED = (SLIDING, FULL, SLIDING)
SECOND = dict(conv_kernel_size=2, conv_group_size=16, selector_rank=8, selector_top_k=4)


def tiny_config(**changes: Any) -> DrafterConfig:
    """Three layers, sliding, full, sliding, of a width that a matrix library does not round up."""
    values: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=80,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        block_size=4,
        mask_token_id=VOCAB - 1,
        tap_ids=TAPS,
        num_target_layers=6,
        layer_types=MIXED,
        sliding_window=7,
        rope_theta=1e4,
        initializer_range=0.3,
    )
    values.update(changes)
    if "num_layers" in changes and "layer_types" not in changes:
        values["layer_types"] = (FULL,) * changes["num_layers"]
    return DrafterConfig(**values)


def tiny_drafter(config: DrafterConfig | None = None, seed: int = 0) -> Drafter:
    """A drafter with random weights, DFlash 2's parts included (so that the identity start hides nothing)."""
    generator = torch.Generator().manual_seed(seed)
    drafter = Drafter(config or tiny_config()).initialize(generator)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "conv" in name or "codebook" in name or parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return drafter


def tiny_head(seed: int = 1, dtype: torch.dtype = torch.float32) -> TargetHead:
    """Embedding, norm and head of no model in particular."""
    generator = torch.Generator().manual_seed(seed)
    norm = PlainNorm(HIDDEN, 1e-6).to(dtype).requires_grad_(False)
    return TargetHead(
        embedding_weight=torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype),
        norm=norm,
        weight=(torch.randn(VOCAB, HIDDEN, generator=generator) * 0.3).to(dtype),
    )


def head_on(device: Any, dtype: torch.dtype = torch.float32) -> TargetHead:
    """The tiny head on a device."""
    head = tiny_head(dtype=dtype)
    return TargetHead(head.embedding_weight.to(device), head.norm.to(device), head.weight.to(device))


class ItemList(list):
    """A list of items with what a feature store knows beforehand."""

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(item) for item in self])

    @property
    def heldout(self) -> np.ndarray:
        return np.array([item.heldout for item in self], dtype=bool)


def tiny_items(
    count: int = 12, *, heldout: int = 3, seed: int = 2, final: bool = True, low: int = 14, high: int = 30
) -> ItemList:
    """Learnable samples: the token at p + 1 follows from that at p, and taps show the tokens so far."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(VOCAB, HIDDEN * len(TAPS), generator=generator)
    items = ItemList()
    for number in range(count):
        length = int(torch.randint(low, high, (1,), generator=generator))
        ids = (torch.arange(length) * 7 + int(torch.randint(0, VOCAB, (1,), generator=generator))) % (
            VOCAB - 1
        )
        mask = torch.ones(length, dtype=torch.uint8)
        mask[: int(torch.randint(1, 6, (1,), generator=generator))] = 0
        items.append(
            FeatureItem(
                hash=f"{number:032x}",
                input_ids=ids.int(),
                loss_mask=mask,
                taps=table[ids].to(torch.bfloat16),
                final=torch.randn(length, HIDDEN, generator=generator).to(torch.bfloat16) if final else None,
                heldout=number < heldout,
            )
        )
    return items


LOSS = LossConfig(hard_weight=0.85, soft_weight=0.15, cap_weight=0.05)


def tiny_settings(**changes: Any) -> TrainSettings:
    """Nine steps of two rows, measured and saved every four."""
    values: dict[str, Any] = dict(
        max_steps=9,
        context_tokens=64,
        anchors=12,
        accumulate=2,
        loss=LOSS,
        gamma=4.0,
        noise_std=0.02,
        optimizer=OptimizerConfig(lr=2e-3),
        log_every=3,
        eval_every=4,
        eval_rows=1,
        checkpoint_every=4,
    )
    return TrainSettings(**(values | changes))


def learner(dtype: torch.dtype = torch.float32, device: Any = "cpu", **changes: Any) -> Drafter:
    """A drafter before its first step, the same each time."""
    config = tiny_config(initializer_range=0.05, **changes)
    return Drafter(config).initialize(torch.Generator().manual_seed(0)).to(device, dtype)


class Killed(Exception):
    """Stands for a kill at a step."""


def killed_at(*steps: int) -> Callable[..., None]:
    """Progress that ends a run after each of these steps once."""
    left = list(steps)

    def progress(description: str, done: int, total: int, **facts: Any) -> None:
        if left and done == left[0]:
            left.pop(0)
            raise Killed

    return progress


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    """A run's records of a kind, without what the clock and the machine say."""
    clock = ("seconds", "loader_share", "time", "memory_gib")
    return [{k: v for k, v in r.items() if k not in clock} for r in read_journal(folder) if r["kind"] == kind]


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """||found - wanted|| / ||wanted||."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
