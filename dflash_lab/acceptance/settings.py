"""What an evaluation is told. The stage `acceptance` fills it and says the unit and range of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Which target, drafter and prompts, how they decode, and what is measured beside."""

    target: str  # as `load_target` takes it
    device: str
    dtype: str
    seed: int
    drafter: Path  # checkpoint folder
    other_drafter: Path | None  # a second one to compare with
    samples: (
        Path  # whose held-out part gives prompts, and whose provenance tells how training text was rendered
    )
    store: Path | None  # feature store with the states of these samples; None: the live target makes them
    prompts: str  # see `prompts.find_sets`
    num_prompts: int  # of each set; 0: all
    max_new_tokens: int
    batch: int  # prompts decoded together, besides; 1: no
    thinking: bool  # of prompts from files
    block_size: int  # 0: as the drafter was trained
    temperature: float
    top_p: float
    top_k: int
    budgets: Sequence[int]  # of trees, in nodes
    dev_share: float
    decode_tree: bool
    tree_mode: str  # mask | paths, see `decode`
    decode_best: bool
    untrained_tokens: int
    temperatures: Sequence[float]
    offline_samples: int
    cost_repeats: int
    gap_tolerance: float
    server: str  # address of a running one to measure besides; empty: none
    server_model: str
    server_concurrency: Sequence[int]
    server_timeout_s: int
    diagnose: str  # auto | always | never
