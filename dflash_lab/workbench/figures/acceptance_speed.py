"""Figures of the stage `acceptance` on what pays: trees by budget, speed-ups from costs, time by phase."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
import polars as pl

from dflash_lab.acceptance.results import Costs, operating_points
from dflash_lab.workbench.figures.style import BELOW_LEFT, BLUE, GREEN, GREY, ORANGE, PURPLE


def tau_by_budget(budgets: pl.DataFrame, oracle: pl.DataFrame, chosen: int = 0) -> go.Figure:
    """Offline tau of trees by budget on the test part, its interval, the chain, and what top-k oracles
    would reach.
    """
    test = budgets.filter(pl.col("part") == "test").sort("budget")
    trees, chain = test.filter(pl.col("budget") > 0), test.filter(pl.col("budget") == 0)
    fig = go.Figure()
    band = [*trees["high"], *trees["low"].reverse()]
    fig.add_scatter(
        x=[*trees["budget"], *trees["budget"].reverse()],
        y=band,
        mode="lines",
        fill="toself",
        fillcolor="rgba(0, 158, 115, 0.18)",
        line={"width": 0},
        name="95 % interval",
        hoverinfo="skip",
    )
    fig.add_scatter(x=trees["budget"], y=trees["tau"], name="tree", mode="lines+markers", marker_color=GREEN)
    span = [trees["budget"].min(), trees["budget"].max()]
    lines = [("chain", chain["tau"][0], {"color": BLUE})]
    if oracle.height:
        k, tau = oracle.sort("k").row(-1)
        lines.append((f"if the best {k} of each slot counted", tau, {"color": GREY, "dash": "dot"}))
    for name, value, line in lines:
        fig.add_scatter(x=span, y=[value, value], mode="lines", name=name, line=line)
    if chosen:
        at = trees.filter(pl.col("budget") == chosen)
        marker = {"symbol": "star", "size": 14, "color": ORANGE}
        fig.add_scatter(
            x=at["budget"], y=at["tau"], mode="markers", name="chosen on the dev part", marker=marker
        )
    fig.update_layout(
        title="Acceptance length by tree budget", xaxis_title="nodes", yaxis_title="tau", legend=BELOW_LEFT
    )
    _sizes_on_log_axis(fig, trees["budget"].to_list())
    return fig


def speedups(points: pl.DataFrame, figures: dict[str, Any]) -> go.Figure:
    """Expected speed-up of every block size and tree budget from measured costs, with what decoding really
    gave.
    """
    fig = go.Figure()
    for column, name, colour in (
        ("block_size", "chains by block size", BLUE),
        ("budget", "trees by budget", GREEN),
    ):
        part = points.filter(
            (pl.col("budget") == 0) if column == "block_size" else (pl.col("budget") > 0)
        ).sort(column)
        fig.add_scatter(
            x=part[column],
            y=part["speedup"],
            name=name,
            mode="lines+markers",
            marker_color=colour,
            customdata=part.select("tau", "round_ms").to_numpy(),
            hovertemplate="%{x}: %{y:.2f} times<br>tau %{customdata[0]:.2f}, "
            "%{customdata[1]:.1f} ms a round<extra></extra>",
        )
    for name, label, x, colour in (
        ("speedup_chain", "chain, decoded", figures.get("best_block_size"), BLUE),
        ("speedup_tree", "tree, decoded", figures.get("tree_budget"), GREEN),
    ):
        if name in figures and x:
            marker = {"symbol": "star", "size": 14, "color": colour}
            fig.add_scatter(x=[x], y=[figures[name]], name=label, mode="markers", marker=marker)
    fig.add_hline(y=1, line={"color": GREY, "dash": "dot"}, annotation_text="plain decoding")
    fig.update_layout(
        title="Speed-up: expected and decoded",
        xaxis_title="block size, or nodes of the tree",
        yaxis_title="times plain decoding",
        legend=BELOW_LEFT,
    )
    _sizes_on_log_axis(fig, [*points["block_size"], *points.filter(pl.col("budget") > 0)["budget"]])
    fig.update_yaxes(rangemode="tozero")
    return fig


def what_if(costs: Costs, taus_known: pl.DataFrame, *, block_size: int = 0, budget: int = 0) -> go.Figure:
    """Expected speed-up of every point under `costs`, the best one and the chosen one marked, and which trees
    beat the best chain.

    `taus_known`: `block_size`, `budget` (0: chain), `tau`.
    """
    points = operating_points(costs, taus_known)
    fig = speedups(points, {})
    best = points.row(0, named=True)
    what = f"a tree of {best['budget']}" if best["budget"] else f"a chain of {best['block_size']}"
    fig.update_layout(
        title={
            "text": f"Best under these costs: {what}, {best['speedup']:.2f} times plain decoding",
            "subtitle": {"text": trees_that_win(points)},
        }
    )
    chosen = points.filter((pl.col("block_size") == block_size) & (pl.col("budget") == budget))
    if chosen.height:
        row = chosen.row(0, named=True)
        fig.add_scatter(
            x=[row["budget"] or row["block_size"]],
            y=[row["speedup"]],
            mode="markers",
            name="chosen",
            marker={"symbol": "diamond", "size": 13, "color": ORANGE},
        )
    return fig


def trees_that_win(points: pl.DataFrame) -> str:
    """Say at which budgets a tree is faster than the best chain."""
    chain = points.filter(pl.col("budget") == 0)["speedup"].max()
    trees = points.filter(pl.col("budget") > 0)
    wins = trees.filter(pl.col("speedup") > chain)["budget"].sort().to_list()
    if not trees.height:
        return "No tree was measured."
    if not wins:
        return "No tree beats the best chain."
    return f"Trees of {', '.join(map(str, wins))} nodes beat the best chain."


def phases(shares: dict[str, dict[str, float]]) -> go.Figure:
    """Where the time of a round goes: share of draft, build, verify and commit by method."""
    fig = go.Figure()
    for phase, colour in (("draft", ORANGE), ("build", PURPLE), ("verify", BLUE), ("commit", GREY)):
        fig.add_bar(
            y=list(shares),
            x=[100 * s[phase] for s in shares.values()],
            name=phase,
            orientation="h",
            marker_color=colour,
        )
    fig.update_layout(title="Time of a round by phase", barmode="stack", xaxis_title="% of decoding time")
    return fig


def _sizes_on_log_axis(fig: go.Figure, sizes: list[int]) -> None:
    """Label a logarithmic axis with the sizes that were measured."""
    ticks = sorted(set(sizes))
    fig.update_xaxes(type="log", tickvals=ticks, ticktext=[str(size) for size in ticks], minor_showgrid=False)
