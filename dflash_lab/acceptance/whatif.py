"""Expected speed-up = tau / cost, for any block size or tree budget, from measured or typed-in times.

A round drafts once, runs the target on width tokens (block size plus nodes of a tree), and yields tau tokens;
plain decoding spends one step of width 1 on each. No torch here: the sliders of the notebook and the choice
of the best operating point call the same few lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from dflash_lab.errors import InputError


@dataclass(frozen=True)
class Costs:
    """Milliseconds by size, each a mapping {size: ms}; sizes between are interpolated, beyond held in
    proportion.

    `step`: target by width; `draft`: drafter by block size; `build`: tree by budget (empty: trees are not
    considered). `replay`: a hybrid target runs accepted tokens again after a partial acceptance.
    """

    step: Mapping[int, float]
    draft: Mapping[int, float]
    build: Mapping[int, float]
    replay: bool = False

    @classmethod
    def from_frame(cls, frame: pl.DataFrame, *, replay: bool = False) -> Costs:
        """Take over `costs.measure_costs`' frame."""
        parts = {
            what: dict(frame.filter(pl.col("what") == what).select("size", "ms").iter_rows())
            for what in ("step", "draft", "build")
        }
        return cls(**parts, replay=replay)

    @classmethod
    def typed(
        cls,
        *,
        step_ms: float,
        step_ms_per_token: float,
        draft_ms: float,
        build_ms_per_node: float = 0.002,
        replay: bool = False,
    ) -> Costs:
        """Costs from four numbers: a step of width w takes step_ms + (w - 1) * step_ms_per_token."""
        widths = (1, 2048)
        return cls(
            {w: step_ms + (w - 1) * step_ms_per_token for w in widths},
            {1: draft_ms, 64: draft_ms},
            {n: n * build_ms_per_node for n in widths},
            replay,
        )


def at(table: Mapping[int, float], size: float) -> float:
    """Return the cost at `size`: linear between measured sizes, along the last two beyond them."""
    if not table:
        return 0.0
    sizes = np.asarray(sorted(table), float)
    values = np.asarray([table[int(s)] for s in sizes])
    if size <= sizes[-1] or len(sizes) < 2:
        return float(np.interp(size, sizes, values))
    slope = max(0.0, (values[-1] - values[-2]) / (sizes[-1] - sizes[-2]))
    return float(values[-1] + slope * (size - sizes[-1]))


def round_ms(costs: Costs, tau: float, block_size: int, budget: int = 0) -> float:
    """Return the expected milliseconds of a round that yields `tau` tokens."""
    width = block_size + budget  # a tree has its best nodes, the anchor and the chain (or part of it)
    total = at(costs.draft, block_size) + at(costs.step, width) + (at(costs.build, budget) if budget else 0.0)
    return total + (at(costs.step, tau) if costs.replay and tau < block_size else 0.0)


def speedup(costs: Costs, tau: float, block_size: int, budget: int = 0) -> float:
    """Return plain decoding's time a token over speculative decoding's."""
    cost = round_ms(costs, tau, block_size, budget)
    if cost <= 0:
        raise InputError("the costs of a round add up to nothing: give positive milliseconds.")
    return tau * at(costs.step, 1) / cost


def operating_points(costs: Costs, taus: pl.DataFrame) -> pl.DataFrame:
    """Add `round_ms` and `speedup` to points `block_size`, `budget` (0: chain), `tau`; best first."""
    points = [
        (b, n, tau, round_ms(costs, tau, b, n), speedup(costs, tau, b, n))
        for b, n, tau in taus.select("block_size", "budget", "tau").iter_rows()
    ]
    schema = {
        "block_size": pl.Int64,
        "budget": pl.Int64,
        "tau": pl.Float64,
        "round_ms": pl.Float64,
        "speedup": pl.Float64,
    }
    return pl.DataFrame(points, schema=schema, orient="row").sort("speedup", descending=True)
