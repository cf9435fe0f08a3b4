"""The table and the figures of the quality study.

    python benchmarks/quality_report.py benchmarks/results/h200/quality.json docs/results

Reads what `quality.py study` and `quality.py train` left (a record a row) and writes quality.md (the table),
quality.html and quality.png (tau of every row with its interval, and tau against tokens seen).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dflash_lab.files import read_json, write_bytes

SETS = {"heldout": ("held-out", "#1f77b4"), "humaneval": ("HumanEval", "#d62728")}


def changed(record: dict[str, Any], base: dict[str, Any]) -> str:
    """What a row changes of the base, in words."""
    own = {k: v for k, v in record["parameters"].items() if base["parameters"].get(k) != v}
    own = {k: v for k, v in own.items() if k not in ("max_steps", "time_limit_s")}
    return ", ".join(f"{k} {v}" for k, v in own.items()) or "(base)"


def table(rows: dict[str, dict[str, Any]]) -> str:
    """A Markdown table, best held-out tau first."""
    base = rows["base"]
    lines = [
        "| row | changes | tau held-out | tau HumanEval | training streak | steps | anchors/s | peak GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in sorted(rows.items(), key=lambda pair: -pair[1]["tau"]["heldout"]["tau"]):
        taus = [
            f"{row['tau'][key]['tau']:.2f} ({row['tau'][key]['low']:.2f} to {row['tau'][key]['high']:.2f})"
            for key in SETS
        ]
        figures, peak = row["figures"], row["peak_gib"]
        cells = [name, changed(row, base), *taus, f"{row['training']['streak']:.2f}", str(figures["steps"])]
        cells += [f"{figures['anchors_per_s']:,.0f}", "" if peak is None else f"{peak:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def commands(rows: dict[str, dict[str, Any]]) -> str:
    """The command of each row."""
    return "".join(f"{name}: `{row['command']}`\n\n" for name, row in rows.items())


def rows_figure(rows: dict[str, dict[str, Any]], title: str) -> go.Figure:
    """Tau of every row on both sets, with intervals over answers."""
    order = sorted(rows, key=lambda name: rows[name]["tau"]["heldout"]["tau"])
    fig = make_subplots(
        rows=1, cols=2, shared_yaxes=True, subplot_titles=[label for label, _ in SETS.values()]
    )
    for column, (key, (label, color)) in enumerate(SETS.items(), start=1):
        taus = [rows[name]["tau"][key] for name in order]
        fig.add_scatter(
            x=[tau["tau"] for tau in taus], y=order, mode="markers", name=label,
            marker={"size": 9, "color": color},
            error_x={
                "array": [tau["high"] - tau["tau"] for tau in taus],
                "arrayminus": [tau["tau"] - tau["low"] for tau in taus],
            },
            row=1, col=column,
        )  # fmt: skip
        level = rows["base"]["tau"][key]["tau"]
        fig.add_vline(x=level, line={"dash": "dot", "color": "grey"}, row=1, col=column)
        fig.update_xaxes(title="tau, 128 tokens, greedy", row=1, col=column)
    fig.update_layout(
        title=title, template="plotly_white", width=1000, height=140 + 32 * len(order), showlegend=False
    )
    return fig


def save(found: dict[str, Any], folder: Path) -> None:
    """Write the table and the figure into `folder`."""
    rows = found["rows"]
    device = found["device"]["device"] if isinstance(found["device"], dict) else found["device"]
    steps = rows["base"]["figures"]["steps"]
    tokens = rows["base"]["data"].get("tokens", 0)
    fig = rows_figure(rows, f"{steps:,} steps on {tokens / 1e6:.1f} M tokens, {device}")
    write_bytes(folder / "quality.md", (table(rows) + "\n" + commands(rows)).encode())
    write_bytes(folder / "quality.html", fig.to_html(include_plotlyjs="cdn").encode())
    write_bytes(folder / "quality.png", fig.to_image("png", scale=1.5))


if __name__ == "__main__":
    save(read_json(Path(sys.argv[1])), Path(sys.argv[2]))
