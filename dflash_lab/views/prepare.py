"""Figures of what became of the input: kept, merged, lost and why, and which tokens are trained on."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
import polars as pl

from dflash_lab.views.style import BLUE, GREY, ORANGE, PURPLE, RED, SKY, escape

_TINTS = {True: "rgba(230, 159, 0, 0.30)", False: "transparent"}  # of what is trained on, and the rest


def outcome(figures: dict[str, Any]) -> go.Figure:
    """One bar from left to right: what each record that came in became."""
    parts = (
        ("stored, train", "train", BLUE),
        ("stored, held out", "heldout", SKY),
        ("exact duplicates", "duplicates", GREY),
        ("left out by the mixture", "lost_not_drawn", PURPLE),
        ("lost", "lost", RED),
    )
    total = max(figures["samples_in"], 1)
    left = figures.get("lost_not_drawn", 0)  # counted under `lost` too: not stored, but as the mixture asks
    counts = figures | {"lost_not_drawn": left, "lost": figures["lost"] - left}
    figure = go.Figure()
    for name, key, colour in parts:
        if key == "lost_not_drawn" and not left:
            continue
        count = counts[key]
        figure.add_bar(
            x=[count],
            y=[""],
            name=name,
            orientation="h",
            marker_color=colour,
            text=f"{count:,}" if count / total > 0.04 else "",
            hovertemplate=f"{name}: %{{x:,}} ({100 * count / total:.1f} %)<extra></extra>",
        )
    figure.update_layout(
        title=f"What became of {figures['samples_in']:,} records",
        xaxis_title="records",
        barmode="stack",
        height=290,
        margin_b=100,
        legend={"traceorder": "normal", "y": -0.6, "yanchor": "top", "x": 0, "xanchor": "left"},
    )
    return figure


_KINDS = (  # figure, words, colour
    ("with_several_turns", "several answers", BLUE),
    ("with_reasoning", "reasoning", SKY),
    ("with_tools", "tools or calls", ORANGE),
    ("forged_tokens", "control tokens spelled in a text: lost", RED),
)


def conversation_kinds(figures: dict[str, Any]) -> go.Figure:
    """How many of the conversations read had more than a question and an answer."""
    names, words, colours = zip(*_KINDS, strict=True)
    counts = [figures[name] for name in names]
    figure = go.Figure()
    figure.add_bar(
        y=words,
        x=counts,
        orientation="h",
        marker_color=colours,
        text=[f"{count:,}" for count in counts],
        hovertemplate="%{y}: %{x:,}<extra></extra>",
    )
    figure.update_layout(
        title="More than a question and an answer",
        xaxis_title="conversations",
        xaxis_rangemode="tozero",
        yaxis={"type": "category", "autorange": "reversed"},
        showlegend=False,
        height=260,
    )
    return figure


def problem_kinds(problems: pl.DataFrame, figures: dict[str, Any], *, keep: int = 20) -> go.Figure:
    """Problems by kind, in records: those that were lost, and those that only have a note.

    What a mixture leaves out is no problem; `outcome` shows it.
    """
    problems = problems.filter(pl.col("kind") != "not drawn")
    noted = pl.col("kind").map_elements(
        lambda kind: figures.get(f"noted_{kind.replace(' ', '_')}", 0), return_dtype=pl.Int64
    )
    table = (
        problems.group_by("kind")
        .agg(pl.col("records").sum().alias("lost"), (pl.col("records") == 0).sum().alias("notes"))
        .with_columns(pl.max_horizontal("notes", noted))  # one row stands for all such records of a file
        .with_columns((pl.col("lost") + pl.col("notes")).alias("all"))
        .sort("all", "kind", descending=[False, True])
        .tail(keep)
    )
    names = [escape(kind) for kind in table["kind"]]
    figure = go.Figure()
    for column, name, colour in (("lost", "records lost", RED), ("notes", "noted, nothing lost", GREY)):
        figure.add_bar(
            y=names,
            x=table[column].to_list(),
            name=name,
            orientation="h",
            marker_color=colour,
            hovertemplate=f"%{{y}}: %{{x:,}} {name}<extra></extra>",
        )
    figure.update_layout(
        title="Problems by kind" if table.height else "No problems",
        xaxis_title="records",
        xaxis_rangemode="tozero",
        yaxis_type="category",
        barmode="stack",
        legend_traceorder="normal",
        height=max(220, 150 + 26 * table.height) if table.height else 90,
    )
    if not table.height:
        figure.update_xaxes(visible=False).update_yaxes(visible=False)
    return figure


def problems_html(problems: pl.DataFrame, *, keep: int = 40) -> str:
    """Return the first problems as an HTML table, all text escaped; the file has them all."""
    if not problems.height:
        return "<p>No problems.</p>"
    rows = "".join(
        f"<tr><td>{escape(file)}</td><td style='text-align:right'>{line or ''}</td><td>{escape(kind)}</td>"
        f"<td style='text-align:left'>{escape(reason)}</td></tr>"
        for file, line, kind, reason in problems.head(keep)
        .select("file", "line", "kind", "reason")
        .iter_rows()
    )
    more = f"<p>{problems.height - keep:,} more in problems.parquet</p>" if problems.height > keep else ""
    head = "<tr><th>file</th><th>line</th><th>kind</th><th style='text-align:left'>reason</th></tr>"
    return f"<table>{head}{rows}</table>{more}"


def mask_html(previews: pl.DataFrame) -> str:
    """Return the previewed samples as HTML: what is trained on stands on colour, all text escaped."""
    blocks = []
    for (name,), pieces in previews.group_by("id", maintain_order=True):
        text = "".join(
            f"<span style='background:{_TINTS[trained]};'>{escape(piece)}</span>"
            for piece, trained in pieces.select("text", "trained").iter_rows()
        )
        blocks.append(
            f"<p><b>{escape(name)}</b></p><pre style='white-space:pre-wrap; word-break:normal; "
            f"overflow-wrap:anywhere; border-left:3px solid {ORANGE}; padding-left:8px'>{text}</pre>"
        )
    return "".join(blocks) or "<p>No samples.</p>"
