"""Figures of the stage `acceptance`: tables in, plotly figures (and one piece of coloured text) out."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl

from dflash_lab.acceptance.whatif import Costs, operating_points
from dflash_lab.workbench.figures.style import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SEQUENTIAL, SKY, escape

_COLOURS = {"trained": BLUE, "untrained": GREY, "best block": SKY, "tree": GREEN, "other": PURPLE}
_BELOW = {"orientation": "h", "x": 0, "xanchor": "left", "y": -0.22, "yanchor": "top"}  # many entries
_ACCEPTED, _TARGET = "rgba(0, 158, 115, 0.30)", "rgba(213, 94, 0, 0.35)"


def taus(figures: dict[str, Any]) -> go.Figure:
    """Decoded and offline acceptance lengths side by side, with bootstrap intervals where there are any."""
    names = {
        "tau_untrained": ("untrained", GREY),
        "tau_trained": ("trained", BLUE),
        "tau_offline": ("trained, offline", SKY),
        "tau_tree_decoded": ("tree", GREEN),
        "tau_tree": ("tree, offline test part", GREEN),
        "tau_other": ("other drafter", PURPLE),
    }
    shown = [(label, colour, name) for name, (label, colour) in names.items() if name in figures]
    fig = go.Figure()
    for label, colour, name in shown:
        value = figures[name]
        low, high = figures.get(f"{name}_low"), figures.get(f"{name}_high")
        error = {"array": [high - value], "arrayminus": [value - low]} if low is not None else None
        fig.add_bar(
            x=[label],
            y=[value],
            error_y=error,
            marker_color=colour,
            text=[f"{value:.2f}"],
            textposition="inside",
            showlegend=False,
            hovertemplate="%{x}<br>tau %{y:.3f}<extra></extra>",
        )
    fig.add_hline(y=1, line={"color": GREY, "dash": "dot"}, annotation_text="no draft accepted")
    fig.update_layout(title="Acceptance length", yaxis_title="tokens a round (tau)")
    fig.update_yaxes(rangemode="tozero")
    return fig


def round_lengths(rounds: pl.DataFrame) -> go.Figure:
    """Share of rounds by acceptance length, 1 + accepted drafts, for each method."""
    fig = go.Figure()
    for method in rounds["method"].unique(maintain_order=True):
        lengths = (rounds.filter(pl.col("method") == method)["accepted"] + 1).to_numpy()
        counts = np.bincount(lengths)[1:]
        fig.add_bar(
            x=np.arange(1, len(counts) + 1),
            y=100 * counts / counts.sum(),
            name=method,
            marker_color=_COLOURS.get(method, ORANGE),
            customdata=counts,
            hovertemplate="%{x} tokens: %{y:.1f} % (%{customdata} rounds)",
        )
    fig.update_layout(
        title="Tokens a round", xaxis_title="acceptance length of a round", yaxis_title="% of rounds"
    )
    fig.update_xaxes(dtick=1)
    return fig


def slots(by_slot: pl.DataFrame, rounds: pl.DataFrame, block_size: int) -> go.Figure:
    """Acceptance by slot: alone, given that all before held, and all up to it, offline; and as decoded."""
    fig = go.Figure()
    for column, label, colour in (
        ("accuracy", "right, whatever came before", GREY),
        ("conditional", "right, given all before were", ORANGE),
        ("survival", "all up to it right (every anchor)", SKY),
    ):
        fig.add_scatter(
            x=by_slot["slot"], y=100 * by_slot[column], name=label, mode="lines+markers", marker_color=colour
        )
    trained = rounds.filter(pl.col("method") == "trained")["accepted"].to_numpy()
    if len(trained):
        depth = np.arange(1, block_size)
        fig.add_scatter(
            x=depth,
            y=[100 * float((trained >= d).mean()) for d in depth],
            name="all up to it accepted (decoded)",
            mode="lines+markers",
            marker_color=BLUE,
        )
    fig.update_layout(
        title="Acceptance by slot", xaxis_title="slot of the block", yaxis_title="%", legend=_BELOW
    )
    fig.update_yaxes(range=[0, 101])
    fig.update_xaxes(dtick=1 if block_size <= 20 else None)
    return fig


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
        title="Acceptance length by tree budget", xaxis_title="nodes", yaxis_title="tau", legend=_BELOW
    )
    _sizes_on_log_axis(fig, trees["budget"].to_list())
    return fig


def _sizes_on_log_axis(fig: go.Figure, sizes: list[int]) -> None:
    """Label a logarithmic axis with the sizes that were measured."""
    ticks = sorted(set(sizes))
    fig.update_xaxes(type="log", tickvals=ticks, ticktext=[str(size) for size in ticks], minor_showgrid=False)


def position_depth(anchors: pl.DataFrame, block_size: int, bins: int = 12) -> go.Figure:
    """Share of anchors whose draft survives to each depth, by position in the answer."""
    place = anchors["place"].to_numpy()
    edges = np.unique(np.linspace(0, place.max() + 1, bins + 1).astype(int))
    accepted, left = anchors["accepted"].to_numpy(), anchors["left"].to_numpy()
    rows, labels = [], []
    for low, high in pairwise(edges):
        inside = (place >= low) & (place < high)
        labels.append(f"{low}-{high - 1}")
        shares = []
        for depth in range(1, block_size):
            valid = inside & (left >= depth)
            shares.append(100 * float((accepted[valid] >= depth).mean()) if valid.any() else None)
        rows.append(shares)
    fig = go.Figure(
        go.Heatmap(
            z=rows,
            x=list(range(1, block_size)),
            y=labels,
            zmin=0,
            zmax=100,
            colorscale=SEQUENTIAL,
            colorbar_title="%",
            hovertemplate="tokens %{y} of the answer<br>%{z:.0f} % accepted to depth %{x}<extra></extra>",
        )
    )
    fig.update_layout(
        title="Acceptance by position and depth",
        xaxis_title="depth in the block",
        yaxis_title="token of the answer",
    )
    fig.update_yaxes(autorange="reversed")
    return fig


def breaks(frame: pl.DataFrame) -> go.Figure:
    """Where drafts die: rounds that broke on each kind of token, split by how sure the drafter was of its
    own.
    """
    fig = go.Figure()
    kinds = frame.group_by("kind").len().sort("len", descending=True)["kind"].to_list()
    for name, low, high, colour in (
        ("unsure (below 0.3)", 0.0, 0.3, SKY),
        ("leaning (0.3 to 0.7)", 0.3, 0.7, ORANGE),
        ("sure and wrong (above 0.7)", 0.7, 1.01, RED),
    ):
        part = frame.filter((pl.col("p_top") >= low) & (pl.col("p_top") < high))
        counts = dict(
            part.group_by("kind").agg(pl.len(), pl.col("entropy").mean()).select("kind", "len").iter_rows()
        )
        fig.add_bar(
            x=kinds,
            y=[100 * counts.get(kind, 0) / max(1, frame.height) for kind in kinds],
            name=name,
            marker_color=colour,
            hovertemplate="%{x}: %{y:.1f} % of breaks<extra></extra>",
        )
    fig.update_layout(
        title="Where drafts die",
        barmode="stack",
        legend=_BELOW,
        xaxis_title="the token that was not drafted",
        yaxis_title="% of breaks",
    )
    return fig


def breaks_by(frame: pl.DataFrame, by: str = "source") -> go.Figure:
    """Entropy of the draft at each break (nats) by source or by kind of token: low means sure and wrong."""
    fig = go.Figure()
    groups = frame.group_by(by).len().sort("len", descending=True)[by].to_list()[:12]
    for group in groups:
        part = frame.filter(pl.col(by) == group)
        fig.add_box(
            y=part["entropy"].head(2000),
            name=escape(group),
            boxpoints=False,
            marker_color=BLUE,
            showlegend=False,
        )
    fig.update_layout(title=f"Entropy of the draft where it broke, by {by}", yaxis_title="entropy (nats)")
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
        legend=_BELOW,
    )
    _sizes_on_log_axis(fig, [*points["block_size"], *points.filter(pl.col("budget") > 0)["budget"]])
    fig.update_yaxes(rangemode="tozero")
    return fig


def what_if(costs: Costs, taus_known: pl.DataFrame, *, block_size: int = 0, budget: int = 0) -> go.Figure:
    """Expected speed-up of every point under `costs`, the best one and the chosen one marked.

    `taus_known`: `block_size`, `budget` (0: chain), `tau`.
    """
    points = operating_points(costs, taus_known)
    fig = speedups(points, {})
    best = points.row(0, named=True)
    what = f"a tree of {best['budget']}" if best["budget"] else f"a chain of {best['block_size']}"
    fig.update_layout(title=f"Best under these costs: {what}, {best['speedup']:.2f} times plain decoding")
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


def two_drafters(answers: pl.DataFrame, first: str = "trained", second: str = "other") -> go.Figure:
    """Tau of each answer under two methods; dots above the line are answers where the second is better."""
    wide = answers.filter(pl.col("method").is_in([first, second])).pivot(
        "method", index=["answer", "prompt"], values="tau"
    )
    fig = go.Figure()
    if first in wide.columns and second in wide.columns:
        top = max(wide[first].max() or 1, wide[second].max() or 1)
        fig.add_scatter(
            x=[1, top], y=[1, top], mode="lines", line={"color": GREY, "dash": "dot"}, showlegend=False
        )
        fig.add_scatter(
            x=wide[first],
            y=wide[second],
            mode="markers",
            marker={"color": PURPLE, "size": 9},
            text=[escape(prompt) for prompt in wide["prompt"]],
            hovertemplate="%{text}<br>%{x:.2f} and %{y:.2f}<extra></extra>",
            showlegend=False,
        )
    fig.update_layout(
        title=f"Answer by answer: {first} and {second}",
        xaxis_title=f"tau, {first}",
        yaxis_title=f"tau, {second}",
    )
    return fig


def worst_answers(answers: pl.DataFrame, method: str = "trained") -> list[int]:
    """Return the numbers of the answers of `method`, lowest tau first."""
    return (
        answers.filter((pl.col("method") == method) & pl.col("tau").is_not_null())
        .sort("tau")["answer"]
        .to_list()
    )


def coloured_text(tokens: pl.DataFrame, answer: int, method: str = "trained") -> str:
    """Return an answer as HTML: accepted drafts green, the target's own tokens orange with the rejected draft
    struck out.

    All text is escaped: answers are untrusted.
    """
    rows = tokens.filter((pl.col("answer") == answer) & (pl.col("method") == method)).sort("place")
    parts = []
    for text, kind, replaced in rows.select("text", "kind", "replaced").iter_rows():
        shown = escape(text).replace("\n", "&#8629;\n")
        if kind == "accepted":
            parts.append(f'<span style="background-color: {_ACCEPTED}">{shown}</span>')
        elif kind == "target":
            draft = (
                f"<small>{escape(replaced.strip() or '␣')}&#10007;</small> " if replaced is not None else ""
            )
            parts.append(f'<span style="background-color: {_TARGET}">{draft}{shown}</span>')
        else:
            parts.append(f"<b>{shown}</b>")
    return f'<p style="white-space: pre-wrap; line-height: 1.8">{"".join(parts)}</p>'


def legend() -> str:
    """Return one line of HTML that explains the colours of `coloured_text`."""
    accepted, own = (f'<span style="background-color: {colour}">' for colour in (_ACCEPTED, _TARGET))
    return (
        f"<p>{accepted}accepted draft</span> "
        f"{own}<small>rejected draft&#10007;</small> the target's own token</span></p>"
    )
