"""The map of memory: predicted peak over batch and length, the budget as a contour, measured points on it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go
import polars as pl

from dflash_lab.workbench.figures.style import RED, SEQUENTIAL

if TYPE_CHECKING:
    from dflash_lab.stages.memory_sweep import SweepInputs

MAP_STEPS = 15


def peak_map(
    batches: Sequence[int],
    lengths: Sequence[int],
    gib: Sequence[Sequence[float]],
    budget_gib: float,
    points: pl.DataFrame | None = None,
) -> go.Figure:
    """Predicted peak over batch (across) and length (up), with the budget's contour and the measured points.

    `gib` has a row a length. Colour is logarithmic.
    """
    levels = [[math.log10(max(value, 1e-6)) for value in row] for row in gib]
    flat = [value for row in gib for value in row]
    ticks = _ticks(min(flat), max(flat))
    crossed = min(flat) <= budget_gib <= max(flat)
    figure = go.Figure(
        go.Heatmap(
            x=list(batches),
            y=list(lengths),
            z=levels,
            customdata=[list(row) for row in gib],
            colorscale=SEQUENTIAL,
            colorbar={
                "title": "GiB",
                "tickvals": [math.log10(t) for t in ticks],
                "ticktext": [f"{t:g}" for t in ticks],
            },
            hovertemplate="batch %{x:,} x %{y:,} tokens<br>predicted %{customdata:.2f} GiB<extra></extra>",
            name="predicted",
        )
    )
    figure.add_contour(
        x=list(batches),
        y=list(lengths),
        z=levels,
        contours={
            "start": math.log10(budget_gib),
            "end": math.log10(budget_gib),
            "size": 1,
            "coloring": "none",
        },
        line={"color": RED, "width": 3},
        showscale=False,
        hoverinfo="skip",
        name="budget",
        showlegend=crossed,
    )
    tried = pl.col("measured_gib").is_not_null() | pl.col("out_of_memory")
    rows = points.filter(tried).to_dicts() if points is not None else []
    figure.add_scatter(
        x=[row["batch"] for row in rows],
        y=[row["length"] for row in rows],
        mode="markers",
        marker={
            "symbol": ["x" if row["out_of_memory"] else "circle-open" for row in rows],
            "color": "white",
            "size": 9,
            "line": {"width": 2, "color": "white"},
        },
        customdata=[_measured_text(row) for row in rows],
        hovertemplate="%{x:,} x %{y:,}: %{customdata}<extra></extra>",
        name="measured",
        showlegend=False,
    )
    figure.update_layout(
        title="Predicted peak; " + _budget_words(budget_gib, crossed, fits=max(flat) <= budget_gib),
        xaxis={"title": "batch", "type": "log", "tickvals": _powers(batches)},
        yaxis={"title": "length, tokens", "type": "log", "tickvals": _powers(lengths)},
    )
    return figure


def map_axes(points: pl.DataFrame) -> tuple[list[int], list[int]]:
    """Return the batches and lengths that a map of these points spans: the grid and somewhat beyond."""
    from dflash_lab.memory.planner import ladder

    batch, length = points.select(pl.col("batch", "length").max()).row(0)
    return ladder(1, max(batch * 8, 64), MAP_STEPS), ladder(16, max(length * 4, 4096), MAP_STEPS)


def budget_map(inputs: SweepInputs, points: pl.DataFrame, budget_gib: float | None = None) -> go.Figure:
    """The map of a finished stage, spanning its grid and somewhat beyond."""
    from dflash_lab.memory.planner import peak_map as compute

    budget = budget_gib or inputs.budget_gib
    batches, lengths = map_axes(points)
    gib = compute(inputs.shape, inputs.extraction, batches, lengths, cuda=inputs.cuda)
    return peak_map(batches, lengths, gib, budget, points)


def _budget_words(budget_gib: float, crossed: bool, *, fits: bool) -> str:
    if crossed:
        return f"the red line is the budget of {budget_gib:.3g} GiB"
    return f"{'all' if fits else 'nothing'} here fits the budget of {budget_gib:.3g} GiB"


def _measured_text(row: Mapping[str, Any]) -> str:
    if row["out_of_memory"]:
        return "did not fit"
    return f"measured {row['measured_gib']:.2f} GiB, predicted {row['analytic_gib']:.2f}"


def _ticks(low: float, high: float) -> list[float]:
    steps = [m * 10.0**e for e in range(-4, 5) for m in (1, 2, 5)]
    return [step for step in steps if low <= step <= high] or [high]


def _powers(values: Sequence[int]) -> list[int]:
    return [2**power for power in range(0, 21) if min(values) <= 2**power <= max(values)]
