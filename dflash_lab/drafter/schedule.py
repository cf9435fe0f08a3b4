"""How the learning rate moves: a linear warm-up, then half a cosine down to a floor."""

from __future__ import annotations

import math


def learning_rate_factor(progress: float, warmup: float, floor: float) -> float:
    """Factor on the peak rate at `progress` in 0..1; `warmup` is the share of the run spent rising, `floor`
    the end.
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return progress / warmup
    share = (progress - warmup) / max(1.0 - warmup, 1e-12)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * share))
