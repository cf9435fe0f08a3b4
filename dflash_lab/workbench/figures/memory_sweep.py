"""Figures of memory: terms as stacked bars, prediction against measurement, batches that fit, advice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go
import polars as pl

from dflash_lab.workbench.figures.style import BLUE, GREEN, GREY, LOG_AXIS, ORANGE, PURPLE, RED, SKY, escape

if TYPE_CHECKING:
    from dflash_lab.memory.account import Account

GIB = 2**30
# Colour and order of the terms in a bar, by what they are.
GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "weights": (
        BLUE,
        ("target weights", "head and embedding", "drafter weights", "gathered weights", "before the batch"),
    ),
    "optimizer": (
        PURPLE,
        (
            "fp32 masters",
            "optimizer moments",
            "gradients",
            "gathered gradients",
            "selector gradients",
            "update temporaries",
            "update",
        ),
    ),
    "captured states": (
        GREEN,
        (
            "captured states",
            "stored hidden states",
            "packed states",
            "packed states in flight",
            "target final states",
            "rows ahead",
            "rows on their way",
            "noisy states",
            "recorded forward's states",
            "fc output and its norm",
        ),
    ),
    "activations": (
        SKY,
        (
            "embedded tokens",
            "residual stream",
            "norms",
            "attention",
            "gated delta net",
            "gated delta net chunk states",
            "MLP",
            "block states",
            "draft layers: norms",
            "draft layers: attention",
            "draft layers: MLP",
            "draft layers: convolutions",
            "draft layers: stream",
            "draft layers: inputs",
            "gradients inside the backward",
            "target's forward of a row",
            "backward",
            "activations",
            "the batch",
        ),
    ),
    "logits and loss": (
        ORANGE,
        (
            "logits",
            "logits of one chunk",
            "softmax and its gradient",
            "selector's chunk",
            "loss inputs",
            "loss and block states",
        ),
    ),
    "cache, mask, indices": (RED, ("cache", "mask", "positions", "token ids")),
    "workspace and fragments": (
        GREY,
        ("workspace", "fragmentation", "recorded forward's pool", "outside torch"),
    ),
}


def account_bars(bars: Mapping[str, Account], budget_gib: float) -> go.Figure:
    """One stacked bar an account, a segment a term; what fits ends before the dashed line."""
    formulas = {label: account.formulas for label, account in bars.items()}
    sizes = {
        label: {term: size / GIB for term, size in account.terms.items()} for label, account in bars.items()
    }
    return _stacked(sizes, formulas, budget_gib, "What fills the memory at the peak")


def term_bars(terms: pl.DataFrame, budget_gib: float) -> go.Figure:
    """The stage's accounts side by side: extraction and training."""
    sizes: dict[str, dict[str, float]] = {}
    formulas: dict[str, dict[str, str]] = {}
    for row in terms.iter_rows(named=True):
        label = row["title"].replace(", ", "<br>")
        sizes.setdefault(label, {})[row["term"]] = row["gib"]
        formulas.setdefault(label, {})[row["term"]] = row["formula"]
    return _stacked(sizes, formulas, budget_gib, "What fills the memory at the peak")


def predicted_measured(points: pl.DataFrame) -> go.Figure:
    """What a batch brings, predicted against measured; on the line is right."""
    measured = points.filter(pl.col("measured_moving").is_not_null() & ~pl.col("out_of_memory"))
    figure = go.Figure()
    ends = [1e-3, 1e-2]
    if measured.height:
        low, high = measured["measured_moving"].min(), measured["measured_moving"].max()
        ends = [float(low) / GIB / 2, float(high) / GIB * 2]  # type: ignore[arg-type]
    figure.add_scatter(
        x=ends, y=ends, mode="lines", line={"color": GREY, "dash": "dot"}, name="exact", hoverinfo="skip"
    )
    rows = measured.with_columns(
        predicted=pl.col("analytic_moving") / GIB, measured=pl.col("measured_moving") / GIB
    ).to_dicts()
    figure.add_scatter(
        x=[row["measured"] for row in rows],
        y=[row["predicted"] for row in rows],
        mode="markers",
        marker={"color": BLUE, "symbol": "circle", "size": 9},
        name="predicted",
        customdata=[
            [row["batch"], row["length"], 100 * (row["predicted"] / row["measured"] - 1)] for row in rows
        ],
        hovertemplate="%{customdata[0]:,} x %{customdata[1]:,}<br>measured %{x:.4f} GiB"
        "<br>predicted %{y:.4f} GiB (%{customdata[2]:+.1f} %)<extra></extra>",
    )
    figure.update_layout(
        title="What a batch brings: predicted against measured",
        xaxis={"title": "measured, GiB", **LOG_AXIS},
        yaxis={"title": "predicted, GiB", **LOG_AXIS},
    )
    return figure


def step_bars(steps: pl.DataFrame, budget_gib: float) -> go.Figure:
    """Peaks of training steps over anchors x block size: predicted, and as measured."""
    table = steps.sort(pl.col("anchors") * pl.col("block_size"), "block_size", "order")
    several = steps.select("anchors", "block_size").is_duplicated().any()  # measured in both orders
    labels = [
        f"{row['anchors']} x {row['block_size']}" + (f", {row['order']}" if several and row["order"] else "")
        for row in table.iter_rows(named=True)
    ]
    figure = go.Figure()
    for column, name, colour in (("analytic_gib", "predicted", BLUE), ("measured_gib", "measured", GREEN)):
        figure.add_bar(
            x=labels,
            y=table[column].to_list(),
            name=name,
            marker_color=colour,
            hovertemplate=f"%{{x}}: %{{y:.3f}} GiB {name}<extra></extra>",
        )
    figure.add_hline(y=budget_gib, line={"color": RED, "dash": "dash"})
    top = max(table["analytic_gib"], default=1.0)
    high = max(top, budget_gib) if budget_gib < 4 * top else top
    figure.update_layout(
        title=f"Peak of a training step; the red line is {budget_gib:.4g} GiB",
        xaxis={"title": "anchors x block size", "type": "category"},
        yaxis={"title": "GiB", "range": [0, 1.12 * high]},
    )
    return figure


def bucket_bars(buckets: pl.DataFrame, budget_gib: float) -> go.Figure:
    """The largest batch of each length bucket, and what the plan takes of it (the rate is flat beyond)."""
    edges = [f"{length:,}" for length in buckets["length"]]
    figure = go.Figure()
    for column, name, colour in (("batch", "fits", SKY), ("planned", "planned", BLUE)):
        figure.add_bar(
            x=edges,
            y=buckets[column].to_list(),
            name=name,
            marker_color=colour,
            text=[f"{value:,}" for value in buckets[column]],
            customdata=[[escape(row["limited_by"]), row["gib"]] for row in buckets.iter_rows(named=True)],
            hovertemplate=f"up to %{{x}} tokens: %{{y:,}} rows {name}<br>limited by %{{customdata[0]}}"
            "<br>%{customdata[1]:.2f} GiB at the largest<extra></extra>",
        )
    figure.update_layout(
        title=f"Largest batch by length under {budget_gib:.4g} GiB",
        barmode="overlay",
        xaxis={"title": "longest sample of the batch, tokens", "type": "category"},
        yaxis={"title": "rows", "type": "log", "dtick": 1},
    )
    return figure


def advice_bars(advice: pl.DataFrame, what: str) -> go.Figure:
    """What each change gives, ranked; green fits the budget by itself."""
    table = advice.filter(pl.col("what") == what).reverse()
    rows = table.to_dicts()
    figure = go.Figure(
        go.Bar(
            y=[escape(row["name"]) for row in rows],
            x=[max(row["saves_gib"], 0.0) for row in rows],
            orientation="h",
            marker_color=[_advice_colour(row) for row in rows],
            text=[_advice_text(row) for row in rows],
            textposition="outside",
            cliponaxis=False,
            customdata=[[row["peak_gib"], escape(row["why"])] for row in rows],
            hovertemplate="%{y}: %{x:.2f} GiB less, peak %{customdata[0]:.2f} GiB<br>"
            "%{customdata[1]}<extra></extra>",
        )
    )
    figure.update_layout(
        title=f"What each change gives ({what}); green fits by itself, grey is not built in",
        xaxis_title="GiB less at the peak",
        height=max(320, 60 + 26 * len(rows)),
        margin={"r": 140},
    )
    return figure


def _stacked(
    sizes: Mapping[str, Mapping[str, float]],
    formulas: Mapping[str, Mapping[str, str]],
    budget_gib: float,
    title: str,
) -> go.Figure:
    """Every known term is a trace, whether it is there or not, so that a live figure keeps its traces."""
    labels = list(sizes)
    known = [(group, colour, term) for group, (colour, terms) in GROUPS.items() for term in terms]
    others = sorted({term for bar in sizes.values() for term in bar} - {term for *_, term in known})
    figure = go.Figure()
    shown: set[str] = set()
    for group, colour, term in [*known, *(("other", GREY, term) for term in others)]:
        values = [sizes[label].get(term, 0.0) for label in labels]
        first = group not in shown and any(values)
        shown |= {group} if first else set()
        figure.add_bar(
            x=labels,
            y=values,
            name=group,
            legendgroup=group,
            showlegend=first,
            marker={"color": colour, "line": {"width": 0.5, "color": "white"}},
            customdata=[[term, escape(formulas[label].get(term, ""))] for label in labels],
            hovertemplate="%{customdata[0]}: %{y:.3f} GiB<br>%{customdata[1]}<extra></extra>",
        )
    figure.add_hline(
        y=budget_gib,
        line={"color": RED, "dash": "dash"},
        annotation_text=f"budget {budget_gib:.4g} GiB",
        annotation_position="top left",
    )
    top = max((sum(bar.values()) for bar in sizes.values()), default=1.0)
    # A budget far above everything would flatten the bars: the line then lies outside the view.
    high = max(top, budget_gib) if budget_gib < 4 * top else top
    figure.update_layout(
        title=title,
        barmode="stack",
        bargap=0.35,
        yaxis={"title": "GiB", "range": [0, 1.12 * high]},
        legend={"orientation": "v", "x": 1.02, "xanchor": "left", "y": 1.0, "yanchor": "top"},
        margin={"r": 190},
    )
    return figure


def _advice_colour(row: Mapping[str, Any]) -> str:
    if not row["built_in"]:
        return GREY
    return GREEN if row["fits"] else SKY


def _advice_text(row: Mapping[str, Any]) -> str:
    if row["saves_gib"] <= 1e-3:
        return "no help"
    other = "" if row["same_goal"] else ", another run"
    return f"{row['saves_gib']:.2f} GiB, {row['time_pct']:+.0f} % time{other}"
