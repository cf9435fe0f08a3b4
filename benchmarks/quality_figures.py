"""The figures of the quality study: what a row gains on the base, and streak against tokens seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dflash_lab.acceptance.results import Paired, compare

PALETTE = (
    "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#e377c2", "#7f7f7f",
)  # fmt: skip
Record = dict[str, Any]


def common_step(rows: dict[str, Record], kind: str) -> int:
    """The last step at which every row was measured; 0: none."""
    steps = [{point["step"] for point in row["curve"] if point["kind"] == kind} for row in rows.values()]
    return max(set.intersection(*steps), default=0)


def point_at(row: Record, kind: str, step: int) -> Record:
    """What a row's curve has at a step."""
    return next((one for one in row["curve"] if (one["kind"], one["step"]) == (kind, step)), {})


def gains(rows: dict[str, Record]) -> dict[str, float]:
    """Held-out streak of each row minus the base's, at their common step; best first, by tau on held-out
    answers where every row has one.
    """
    step = common_step(rows, "heldout")
    streaks = {name: point_at(row, "heldout", step)["streak"] for name, row in rows.items()}
    measured = has_tau(rows)
    rank = {name: rows[name]["tau"]["heldout"]["tau"] if measured else streaks[name] for name in rows}
    return {name: streaks[name] - streaks["base"] for name in sorted(rows, key=lambda name: -rank[name])}


def against(row: Record, base: Record, key: str) -> Paired:
    """The row's tau minus the base's on the same stored answers."""
    return compare(*(record["tau"][key]["per_answer"] for record in (base, row)))


def has_tau(rows: dict[str, Record]) -> bool:
    """Whether every row got as far as its stored answers."""
    return all(row["tau"] for row in rows.values())


def study_figure(studies: dict[str, Record]) -> go.Figure:
    """A panel a study: bars of each row's held-out streak minus the base's; where tau was measured, of tau's
    with its paired interval. Rows of another block size are grey: a longer block can accept more, and has
    fewer anchors at as many slots.
    """
    titles = []
    for study in studies.values():
        rows = study["rows"]
        step = common_step(rows, "heldout")
        base = (
            rows["base"]["tau"]["heldout"]["tau"]
            if has_tau(rows)
            else point_at(rows["base"], "heldout", step)["streak"]
        )
        titles.append(f"step {step:,} of {study['steps']:,}; the base has {base:.2f}")
    fig = make_subplots(
        rows=1, cols=len(studies), subplot_titles=titles, horizontal_spacing=0.6 / (2 * len(studies) + 1)
    )
    for column, study in enumerate(studies.values(), start=1):
        rows = study["rows"]
        found = {name: gain for name, gain in reversed(gains(rows).items()) if name != "base"}
        size = rows["base"]["parameters"]["block_size"]
        colors = [
            PALETTE[0] if rows[name]["parameters"]["block_size"] == size else PALETTE[7] for name in found
        ]
        errors, above, below = None, list(found.values()), list(found.values())
        if has_tau(rows):
            paired = {name: against(rows[name], rows["base"], "heldout") for name in found}
            found = {name: one.difference for name, one in paired.items()}
            above = [one.interval.high for one in paired.values()]
            below = [one.interval.low for one in paired.values()]
            errors = {
                "array": [high - gain for high, gain in zip(above, found.values(), strict=True)],
                "arrayminus": [gain - low for low, gain in zip(below, found.values(), strict=True)],
            }
        fig.add_bar(
            x=list(found.values()), y=list(found), orientation="h", marker={"color": colors},
            error_x=errors, row=1, col=column,
        )  # fmt: skip
        ends = [*above, *below]
        low, high = min(0.0, *ends), max(0.0, *ends)
        margin = 0.15 * (high - low)
        fig.add_scatter(  # beyond what a bar's interval covers
            x=[high + margin] * len(found), y=list(found), text=[f"{gain:+.3f}" for gain in found.values()],
            mode="text", row=1, col=column,
        )  # fmt: skip
        fig.update_xaxes(
            title=f"{'tau on held-out answers' if errors else 'held-out streak'}, minus the base's",
            range=[low - margin, high + 2 * margin], row=1, col=column,
        )  # fmt: skip
    most = max(len(study["rows"]) for study in studies.values())
    fig.update_layout(
        title="What a row gains on the base (grey: another block size)", template="plotly_white",
        showlegend=False, width=1000, height=180 + 28 * most,
    )  # fmt: skip
    return fig


def curves(record: Record) -> list[tuple[str, list[tuple[float, float]], str]]:
    """Kind, points (millions of tokens seen, streak) and dash of a record's two curves."""
    seen = {0: 0.0} | {
        point["step"]: point["context_tokens"] / 1e6
        for point in record["curve"]
        if point.get("context_tokens") is not None
    }
    steps = sorted(seen)

    def tokens(step: int) -> float:
        return float(np.interp(step, steps, [seen[one] for one in steps]))

    return [
        (
            words,
            [(tokens(one["step"]), one["streak"]) for one in record["curve"] if one["kind"] == kind],
            dash,
        )
        for kind, words, dash in (("train", "training", "dot"), ("heldout", "held-out", "solid"))
    ]


def runs_figure(runs: dict[str, Record]) -> go.Figure:
    """Streak on training and held-out rows against tokens seen, a colour a run."""
    fig = go.Figure()
    for color, (name, run) in zip(PALETTE, runs.items(), strict=False):
        for kind, points, dash in curves(run):
            points = [(x, y) for x, y in points if x > 0]  # the axis is logarithmic
            fig.add_scatter(
                x=[x for x, _ in points], y=[y for _, y in points],
                mode="lines" if len(points) > 20 else "lines+markers",
                line={"color": color, "dash": dash}, name=f"{name}, {kind} rows",
            )  # fmt: skip
    return fig.update_layout(
        title="Streak (accepted drafts + 1, uniform anchors) against tokens seen", template="plotly_white",
        xaxis={"title": "context tokens seen (millions)", "type": "log"}, yaxis={"title": "streak"},
        width=1000, height=520,
    )  # fmt: skip
