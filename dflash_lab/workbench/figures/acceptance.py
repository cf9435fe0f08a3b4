"""Figures of the stage `acceptance` on what is accepted: tables in, plotly figures out."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl

from dflash_lab.workbench.figures.style import (
    BELOW_LEFT,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SEQUENTIAL,
    SKY,
    escape,
)

_COLOURS = {"trained": BLUE, "untrained": GREY, "best block": SKY, "tree": GREEN, "other": PURPLE}


def taus(figures: dict[str, Any]) -> go.Figure:
    """Decoded and offline acceptance lengths side by side, with bootstrap intervals where there are any."""
    names = {
        "tau_untrained": ("untrained", GREY),
        "tau_trained": ("trained", BLUE),
        "tau_no_selector": ("trained, no selector", ORANGE),
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


def selector(figures: dict[str, Any]) -> go.Figure:
    """What DFlash 2's selector adds: streak and acceptance lengths with it and without it, side by side."""
    pairs = {
        "streak, all anchors": ("streak_uniform", "streak_uniform_no_selector"),
        "tau, offline": ("tau_offline_all", "tau_offline_all_no_selector"),
        "tau, decoded": ("tau_trained", "tau_no_selector"),
    }
    fig = go.Figure()
    for place, (name, colour) in enumerate((("with selector", BLUE), ("without", ORANGE))):
        values = [figures[names[place]] for names in pairs.values()]
        fig.add_bar(
            x=list(pairs),
            y=values,
            name=name,
            marker_color=colour,
            text=[f"{value:.2f}" for value in values],
            textposition="inside",
            hovertemplate="%{x}<br>%{y:.3f}<extra>" + name + "</extra>",
        )
    fig.add_hline(y=1, line={"color": GREY, "dash": "dot"}, annotation_text="no draft accepted")
    fig.update_layout(title="What the selector adds", yaxis_title="tokens a round", barmode="group")
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
        title="Acceptance by slot", xaxis_title="slot of the block", yaxis_title="%", legend=BELOW_LEFT
    )
    fig.update_yaxes(range=[0, 101])
    fig.update_xaxes(dtick=1 if block_size <= 20 else None)
    return fig


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


MOST_GROUPS = 12  # kinds or sources shown, the most frequent first
_BREAKS_BY = {
    "kind": "the token that was not drafted",
    "source": "source",
    "entropy": "entropy of the draft (nats)",
    "place": "token of the answer",
}


def breaks(frame: pl.DataFrame, by: str = "kind") -> go.Figure:
    """Where drafts die: rounds that broke by `kind` of token, `source`, `entropy` of the draft or `place` in
    the answer, split by how sure the drafter was of its own token.
    """
    names, group = _groups(frame[by])
    sure = frame["p_top"].to_numpy()
    fig = go.Figure()
    for name, low, high, colour in (
        ("unsure (below 0.3)", 0.0, 0.3, SKY),
        ("leaning (0.3 to 0.7)", 0.3, 0.7, ORANGE),
        ("sure and wrong (above 0.7)", 0.7, np.inf, RED),
    ):
        counts = np.bincount(group[(sure >= low) & (sure < high)], minlength=len(names))
        fig.add_bar(
            x=[escape(name) for name in names],
            y=100 * counts[: len(names)] / max(1, frame.height),
            name=name,
            marker_color=colour,
            hovertemplate="%{x}: %{y:.1f} % of breaks<extra></extra>",
        )
    fig.update_layout(
        title=f"Where drafts die: {_BREAKS_BY[by]}",
        barmode="stack",
        legend=BELOW_LEFT,
        xaxis={"title": _BREAKS_BY[by], "type": "category"},
        yaxis_title="% of breaks",
    )
    return fig


def _groups(values: pl.Series) -> tuple[list[str], np.ndarray]:
    """Return the names of groups and the group of each value [n], that of left-out ones beyond the last:
    words by how often they occur, whole numbers in even bins, others in nats.
    """
    if values.dtype == pl.String:
        known = values.value_counts(sort=True, name="count").sort(
            "count", values.name, descending=[True, False]
        )
        names = known[values.name].head(MOST_GROUPS).to_list()
        number = {name: place for place, name in enumerate(names)}
        return names, np.asarray([number.get(value, len(names)) for value in values], dtype=np.int64)
    if values.dtype.is_integer():
        last = int(values.to_numpy().max(initial=0))
        edges = np.unique(np.linspace(0, last + 1, 13).astype(int))
        names = [f"{low}-{high - 1}" for low, high in pairwise(edges)]
    else:
        edges = np.asarray([0.0, 0.1, 0.5, 1.0, 2.0, 4.0, np.inf])
        names = [f"{low:g} to {high:g}" for low, high in pairwise(edges[:-1])] + [f"{edges[-2]:g} and more"]
    return names, np.searchsorted(edges[1:-1], values.to_numpy(), side="right")


def two_drafters(
    answers: pl.DataFrame, figures: dict[str, Any], first: str = "trained", second: str = "other"
) -> go.Figure:
    """Tau of each answer under two methods; dots above the line are answers where the second is better. The
    title says the mean difference and its interval, from paired resampling of the answers.
    """
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
    name = f"{second}_minus_{first}"
    change, low, high = figures[name], figures[f"{name}_low"], figures[f"{name}_high"]
    fig.update_layout(
        title=f"Answer by answer: {second} - {first} = {change:+.3f} (95 % from {low:+.3f} to {high:+.3f})",
        xaxis_title=f"tau, {first}",
        yaxis_title=f"tau, {second}",
    )
    return fig
