"""The recipes that the quality study compares: one base, and rows that change one thing of it.

A row is a set of `train_drafter`'s parameters; the base is params/quality/train_drafter.yaml. Two more words
are known: `samples` names a file that `quality.py data` wrote, `start_layers` layers of the target that the
drafter's start from (`quality_warm.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

PARAMS = Path(__file__).resolve().parents[1] / "params" / "quality" / "train_drafter.yaml"
HARD = dict(hard_weight=1.0, soft_weight=0.0)

ROWS: dict[str, dict[str, Any]] = {
    "base": {},
    "ce": HARD,
    "ce-argmax": dict(HARD, labels="argmax"),
    "kl": dict(hard_weight=0.0, soft_weight=1.0),
    "half-kl": dict(hard_weight=0.5, soft_weight=0.5),
    "gamma-7": dict(gamma=7.0),
    "gamma-10": dict(gamma=10.0),
    "dpace": dict(weighting="dpace"),
    "length": dict(hard_weight=0.0, soft_weight=0.15, length_weight=1.0, gamma=0.0),
    "ce-length": dict(hard_weight=0.5, soft_weight=0.15, length_weight=0.5),
    "noise": dict(noise_std=0.05),
    "noise-0.5": dict(noise_std=0.5),
    "noise-2": dict(noise_std=2.0),
    "cap": dict(cap_weight=0.1),
    "adamw": dict(optimizer="adamw"),
    "adamw-decay": dict(optimizer="adamw", weight_decay=0.1),
    "muon-slow": dict(muon_lr=2e-3),
    "muon-fast": dict(muon_lr=1e-2),
    "layers-2": dict(num_layers=2),
    "block-16": dict(block_size=16, gamma=7.0),
    "dflash2": dict(second=True),
    "prompts-too": dict(samples="whole.parquet"),
    "warm": dict(start_layers=[2, 8, 15, 22, 28]),
    "warm-late": dict(start_layers=[25, 26, 27, 28, 29]),
    # The two recorded runs: little data many times over, and much data a few times.
    "short": dict(hard_weight=0.5, soft_weight=0.5, noise_std=0.5, muon_lr=4e-3, compile_target=True),
    "long": dict(
        block_size=16,
        gamma=7.0,
        hard_weight=0.7,
        soft_weight=0.3,
        muon_lr=4e-3,
        compile_target=True,  # as recorded
        eval_every=1000,
        checkpoint_every=3000,
    ),
}


def recipe(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Parameters of row `name`, with `changes` on top; how long it trains is for the caller to say."""
    base = yaml.safe_load(PARAMS.read_text())
    base.pop("time_limit_s")
    values = {**base, **ROWS[name], **changes}
    values["anchors"] = values["anchors"] * base["block_size"] // values["block_size"]  # as many slots a step
    return values
