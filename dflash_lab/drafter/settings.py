"""Everything a training run is told, checked when it is made. The stage's parameters are turned into one of
these.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from dflash_lab.drafter.loss.config import LossConfig
from dflash_lab.drafter.optimizer import OptimizerConfig
from dflash_lab.errors import InputError

DENOMINATORS = ("weights", "mask")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """A run: its length, batch, objective, optimizer, and what it writes when.

    Attributes:
        max_steps: optimizer steps of the whole run; the schedule ends there.
        context_tokens, anchors: size of a packed row; a step sees `accumulate` rows on each process.
        selector_weight: factor of the cross-entropy of DFlash 2's selector; no matter for DFlash.
        gamma: slot k weighs exp(-(k-1)/gamma); 0: all slots alike.
        denominator: a step's loss is divided by the sum of its slot `weights` (SpecForge, the default) or by
            their number, `mask` (speculators). The two differ by sum(w)/sum(mask), 0.20 to 0.46 for gamma 4
            to 12 at 24 slots, which the learning rate feels.
        noise_std: uniform noise in (-noise_std, noise_std) added to the tapped states of training rows.
        warmup, floor: share of the run spent warming up; final learning rate as a share of the peak.
        clip_norm: gradient norm above which gradients are scaled down; 0: never.
        max_bad_steps: the run ends after this many skipped steps in a row.
        explode_factor: a gradient norm above this many times the median of the last 64 is skipped like a NaN.
        time_limit_s: seconds of training; the schedule then follows the larger of step share and time share,
            so the rate has come down when time is up. 0: none, and only then is a run reproducible bit for
            bit.
    """

    max_steps: int
    context_tokens: int
    anchors: int
    accumulate: int = 1
    loss: LossConfig = field(default_factory=LossConfig)
    selector_weight: float = 1.0
    gamma: float = 7.0
    denominator: str = "weights"
    noise_std: float = 0.0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    warmup: float = 0.04
    floor: float = 0.0
    clip_norm: float = 1.0
    log_every: int = 10
    eval_every: int = 100
    eval_rows: int = 4
    checkpoint_every: int = 500
    keep: int = 2
    max_bad_steps: int = 5
    explode_factor: float = 50.0
    time_limit_s: float = 0.0
    attention: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        low = dict(
            max_steps=1, context_tokens=2, anchors=1, accumulate=1, log_every=1, eval_every=1, eval_rows=0
        )
        low |= dict(checkpoint_every=1, keep=1, max_bad_steps=1)
        for name, least in low.items():
            if getattr(self, name) < least:
                raise InputError(f"training: {name} = {getattr(self, name)} must be at least {least}.")
        for name in ("gamma", "noise_std", "clip_norm", "time_limit_s"):
            if not getattr(self, name) >= 0:
                raise InputError(f"training: {name} = {getattr(self, name)} must not be negative.")
        for name in ("warmup", "floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"training: {name} = {getattr(self, name)} is a share, between 0 and 1.")
        if self.denominator not in DENOMINATORS:
            raise InputError(f"training: denominator = {self.denominator!r}: choose 'weights' or 'mask'.")
        if self.explode_factor <= 1:
            raise InputError(f"training: explode_factor = {self.explode_factor} must be above 1.")

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        values = dataclasses.asdict(self)
        values["optimizer"]["betas"] = list(values["optimizer"]["betas"])
        return values
