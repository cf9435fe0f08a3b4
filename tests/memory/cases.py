"""What memory's tests ask about: the 27B target on one card, batches of it, and steps of its drafter."""

from __future__ import annotations

from typing import Any

from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.memory.shapes import ExtractionSetup, TrainingSetup, target_shape
from dflash_lab.models.source import shape_config

CARD_GIB = 94.97
TAPS = (1, 16, 31, 46, 61)
CONFIG = shape_config("qwen3.6-27b")
SHAPE = target_shape(CONFIG)
DRAFTER = DrafterConfig.from_target(
    CONFIG, mask_token_id=248070, num_layers=5, block_size=24, num_heads=32, num_kv_heads=8, head_dim=128
)
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}


def batch(rows: int = 1, length: int = 4096, **options: Any) -> ExtractionSetup:
    """A batch through the 27B target; `options` are fields of the setup."""
    return ExtractionSetup(**({"batch": rows, "length": length, "tap_ids": TAPS} | options))


def step(anchors: int = 1024, context: int = 4096, block_size: int = 24, **options: Any) -> TrainingSetup:
    """A step of training; `options` are fields of the setup."""
    return TrainingSetup(anchors=anchors, context=context, block_size=block_size, **options)
