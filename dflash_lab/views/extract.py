"""Figures of the stage `extract`: speed over the run, the shape of its batches, the self-test, the stored
states.
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
import polars as pl

from dflash_lab.views.style import BLUE, GREY, LOG_AXIS, ORANGE, RED, thin


def speed(batches: pl.DataFrame) -> go.Figure:
    """Tokens a second of each batch along the run, real and padded: the gap is padding, a dip is a retry or
    the disk.
    """
    frame = batches.with_columns(
        done=pl.col("tokens").cum_sum(),
        real=pl.col("tokens") / pl.col("seconds"),
        padded=pl.col("samples") * pl.col("longest") / pl.col("seconds"),
    )[thin(batches.height)]
    fig = go.Figure()
    for name, colour in (("padded", GREY), ("real", BLUE)):
        fig.add_scatter(
            x=frame["done"], y=frame[name], name=f"{name} tokens", mode="lines+markers", marker_color=colour
        )
    fig.update_layout(title="Speed along the run", xaxis_title="tokens done", yaxis_title="tokens / s")
    fig.update_yaxes(rangemode="tozero")
    return fig


def batch_shapes(batches: pl.DataFrame, token_budget: int) -> go.Figure:
    """Rows against padded length of each batch, with the budget as a line: batches below it were cut by a cap
    or a retry.
    """
    frame = batches[thin(batches.height)]
    fig = go.Figure()
    fig.add_scatter(
        x=frame["longest"],
        y=frame["samples"],
        mode="markers",
        name="batches",
        marker={"color": BLUE, "size": 8, "opacity": 0.7},
        customdata=(100 * (1 - frame["tokens"] / (frame["samples"] * frame["longest"]))).to_list(),
        hovertemplate="%{y} samples x %{x} tokens<br>padding %{customdata:.1f} %<extra></extra>",
    )
    if batches.height:
        # beyond the batches, so that a single one has a line too, and the axis a number
        low, high = min(batches["longest"].to_list()) / 2, max(batches["longest"].to_list()) * 2
        grid = [low * (high / low) ** (step / 40) for step in range(41)]
        fig.add_scatter(
            x=grid,
            y=[token_budget / x for x in grid],
            mode="lines",
            name="token budget",
            line={"color": ORANGE},
        )
    fig.update_layout(
        title="Batches under the token budget", xaxis_title="padded length (tokens)", yaxis_title="samples"
    )
    fig.update_xaxes(**LOG_AXIS)
    fig.update_yaxes(**LOG_AXIS)
    return fig


def self_test(selftest: dict[str, Any], names: list[str]) -> go.Figure:
    """Relative L2 error of batched against single states and of each tap against its layer, by state."""
    fig = go.Figure()
    floor = 1e-9  # an exact zero has no place on a log axis
    for label, key, colour in (
        ("batched against single", "batched_error", BLUE),
        ("tap against its layer", "layer_error", ORANGE),
    ):
        values = [max(value, floor) for value in selftest.get(key, [])]
        fig.add_scatter(
            x=names[: len(values)], y=values, mode="markers", name=label, marker={"color": colour, "size": 10}
        )
    if selftest:
        limits = selftest["tolerance"]
        fig.add_scatter(
            x=names[: len(limits)], y=limits, mode="lines", name="limit", line={"color": RED, "dash": "dash"}
        )
    fig.update_layout(
        title="Self-test before the run", xaxis_title="stored state", yaxis_title="relative L2 error"
    )
    fig.update_yaxes(type="log", exponentformat="power")
    return fig


def state_sizes(states: pl.DataFrame) -> go.Figure:
    """Quantiles of the row RMS of each stored state, re-read from the store: a flat or exploding one stands
    out.
    """
    fig = go.Figure()
    for mark, colour, symbol in (
        ("p5", GREY, "line-ew-open"),
        ("p50", BLUE, "circle"),
        ("p95", GREY, "line-ew-open"),
        ("max", RED, "x"),
    ):
        fig.add_scatter(
            x=states["state"],
            y=states[mark],
            mode="markers",
            name=mark,
            marker={"color": colour, "symbol": symbol, "size": 11},
        )
    fig.update_layout(
        title="Size of the stored states", xaxis_title="stored state", yaxis_title="RMS of a row"
    )
    fig.update_yaxes(**LOG_AXIS)
    return fig
