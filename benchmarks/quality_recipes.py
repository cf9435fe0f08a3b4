"""The recipes that the quality study compares: one base, and rows that change one thing of it, or join two
such changes.

A row is a set of `train_drafter`'s parameters; the base is params/quality/train_drafter.yaml. Three more
words are known: `samples` names a file that `quality.py data` wrote, `start_layers` layers of the target that
the drafter's start from (`quality_warm.py`), and `slots` how many slots a step trains (anchors times block
size; an `anchors` that is given counts instead). Rows are in the order in which a study takes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

PARAMS = Path(__file__).resolve().parents[1] / "params" / "quality" / "train_drafter.yaml"
HARD = dict(hard_weight=1.0, soft_weight=0.0)
HALF = dict(hard_weight=0.5, soft_weight=0.5)
SOFT = dict(hard_weight=0.0, soft_weight=1.0)
MORE = dict(samples="augmented.parquet")
WIDE = dict(intermediate_size=4096)
HEADS = dict(num_kv_heads=9)

ROWS: dict[str, dict[str, Any]] = {
    "base": {},
    # What the runs by the clock may take: shape, taps, rate, and what holds off overfitting.
    "taps-9": dict(tap_ids=[1, 4, 8, 11, 14, 17, 20, 24, 27]),
    "taps-late": dict(tap_ids=[14, 18, 22, 26, 29]),
    "taps-last": dict(tap_ids=[1, 8, 15, 22, 29]),
    "muon-fast": dict(muon_lr=1e-2),
    "muon-slow": dict(muon_lr=2e-3),
    "muon-decay-1": dict(muon_weight_decay=1.0),
    "prompts-too": dict(samples="whole.parquet"),
    "noise-0.5": dict(noise_std=0.5),
    "half-kl": HALF,
    "wide": WIDE,
    "layers-8": dict(num_layers=8),
    # The questions that a recipe has to answer.
    "seed-1": dict(seed=1),  # how far two runs of one recipe lie apart
    "ce": HARD,
    "ce-argmax": dict(HARD, labels="argmax"),
    "decay": dict(weighting="decay"),
    "gamma-7": dict(gamma=7.0),
    "gamma-10": dict(gamma=10.0),
    "length": dict(hard_weight=0.0, soft_weight=0.15, length_weight=1.0, gamma=0.0, weighting="decay"),
    "noise": dict(noise_std=0.05),
    "cap": dict(cap_weight=0.1),
    "adamw": dict(optimizer="adamw"),
    "adamw-fast": dict(optimizer="adamw", lr=5e-3),
    "layers-2": dict(num_layers=2),
    "block-16": dict(block_size=16, gamma=7.0),
    "ce-length": dict(hard_weight=0.5, soft_weight=0.15, length_weight=0.5, weighting="decay"),
    "heads": HEADS,
    "kl": SOFT,
    "augment": MORE,
    "dflash2": dict(dflash2=True),
    "muon-decay-0": dict(muon_weight_decay=0.0),
    "augment-half-kl": {**MORE, **HALF},
    "augment-wide": {**MORE, **WIDE},
    "augment-kl": {**MORE, **SOFT},
    "warm": dict(start_layers=[2, 8, 15, 22, 28]),
    # The two runs by the clock: little data many times over, and much data a few times.
    "short": dict(HALF, **WIDE, **HEADS, muon_lr=4e-3, samples="whole.parquet"),
    "long": dict(
        WIDE,
        **HEADS,
        block_size=16,
        gamma=7.0,
        context_tokens=16384,
        slots=16 * 3072,
        hard_weight=0.7,
        soft_weight=0.3,
        muon_lr=4e-3,
        eval_every=1000,
        checkpoint_every=1000,  # a minute and a half of work
    ),
    # What comes along with the demo: 20 MB at most, and few layers for a CPU to go through.
    "small": dict(
        num_layers=4,
        intermediate_size=640,
        context_tokens=16384,
        slots=16 * 3072,
        muon_lr=4e-3,
        eval_every=1000,
        checkpoint_every=1000,
    ),
}
STUDY = tuple(row for row in ROWS if row not in ("short", "long", "small"))


def recipe(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Parameters of row `name`, with `changes` on top; how long it trains is for the caller to say."""
    base = yaml.safe_load(PARAMS.read_text())
    base.pop("time_limit_s")
    slots = base.pop("anchors") * base["block_size"]
    values = {"slots": slots, **base, **ROWS[name], **changes}
    slots = values.pop("slots")
    return {"anchors": slots // values["block_size"], **values}
