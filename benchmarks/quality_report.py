"""The table and the figures of the quality study.

    python benchmarks/quality_report.py benchmarks/results/h200/quality.json docs/results

The file holds `rows` (what `quality.py study` left: same steps, same slots a step) and `runs` (what
`quality.py train` left of the recorded runs, each with `clients`: what `quality.py client` left, by block
size). Written: quality.md (tables and commands), quality-runs.html and quality-runs.png (streak of the runs
against tokens seen) and, if there are rows, quality.html and quality.png (tau of each, with its interval).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots
from result_figure import save_figure

from dflash_lab.files import read_json, write_bytes

SETS = {"heldout": ("held-out", "#1f77b4"), "humaneval": ("HumanEval", "#d62728")}
LENGTH = ("max_steps", "time_limit_s", "samples")
Record = dict[str, Any]


def changed(record: Record, base: Record) -> str:
    """What a row changes of the base, in words."""
    own = {k: v for k, v in record["parameters"].items() if base["parameters"].get(k) != v}
    words = ", ".join(f"{k} {v}" for k, v in own.items() if k not in LENGTH)
    if Path(str(record["parameters"].get("samples", ""))).name == "whole.parquet":
        words = f"{words}, blocks in user turns too".lstrip(", ")
    return words or "(base)"


def spelled(tau: Record) -> str:
    """A tau with its interval."""
    return f"{tau['tau']:.2f} ({tau['low']:.2f} to {tau['high']:.2f})"


def study_table(rows: dict[str, Record]) -> str:
    """Rows of the study, best held-out tau first."""
    lines = [
        "| row | changes | tau held-out | tau HumanEval | training streak | anchors/s | peak GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in sorted(rows.items(), key=lambda pair: -pair[1]["tau"]["heldout"]["tau"]):
        taus = [spelled(row["tau"][key]) for key in SETS]
        rate, peak = row["figures"]["anchors_per_s"], row["peak_gib"]
        cells = [name, changed(row, rows["base"]), *taus, f"{row['training']['streak']:.2f}", f"{rate:,.0f}"]
        lines.append("| " + " | ".join([*cells, "" if peak is None else f"{peak:.1f}"]) + " |")
    return "\n".join(lines) + "\n"


def runs_table(runs: dict[str, Record]) -> str:
    """The recorded runs: the public client's tau at each block size it decoded with, then tau from stored
    answers.
    """
    lines = [
        "| run | tokens | seconds | steps | anchors/s | epochs | streak: training | held-out | peak GiB |",
        "|" + "---|" * 9,
    ]
    for name, run in runs.items():
        figures, peak = run["figures"], run["peak_gib"]
        cells = [name, f"{run['data']['tokens'] / 1e6:.1f} M", f"{figures['train_seconds']:.0f}"]
        cells += [f"{figures['steps']:,}", f"{figures['anchors_per_s']:,.0f}"]
        cells += [f"{run['training']['epoch'] + 1:.0f}", f"{run['training']['streak']:.2f}"]
        cells += [f"{figures['streak_last']:.2f}", "" if peak is None else f"{peak:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| run | how | tau held-out | answers | tau HumanEval | answers |", "|" + "---|" * 6]
    for name, run in runs.items():
        measured = {f"client, {how}": found["tau"] for how, found in run["clients"].items()}
        for how, taus in (measured | {"stored answers": run["tau"]}).items():
            cells = [name, how]
            for key in SETS:
                cells += (
                    [spelled(taus[key]), str(taus[key]["answers"])] if key in taus else ["not measured", ""]
                )
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def commands(records: dict[str, Record]) -> str:
    """The command of each record."""
    return "".join(f"- {name}: `{record['command']}`\n" for name, record in records.items())


def rows_figure(rows: dict[str, Record], title: str) -> go.Figure:
    """Tau of every row on both sets, with intervals over answers."""
    order = sorted(rows, key=lambda name: rows[name]["tau"]["heldout"]["tau"])
    titles = [label for label, _ in SETS.values()]
    fig = make_subplots(rows=1, cols=2, shared_yaxes=True, subplot_titles=titles)
    for column, (key, (label, color)) in enumerate(SETS.items(), start=1):
        taus = [rows[name]["tau"][key] for name in order]
        above = [tau["high"] - tau["tau"] for tau in taus]
        below = [tau["tau"] - tau["low"] for tau in taus]
        fig.add_scatter(
            x=[tau["tau"] for tau in taus], y=order, mode="markers", name=label,
            marker={"size": 9, "color": color}, error_x={"array": above, "arrayminus": below},
            row=1, col=column,
        )  # fmt: skip
        level = rows["base"]["tau"][key]["tau"]
        fig.add_vline(x=level, line={"dash": "dot", "color": "grey"}, row=1, col=column)
        fig.update_xaxes(title="tau, 128 tokens, greedy", row=1, col=column)
    fig.update_layout(title=title, template="plotly_white", showlegend=False)
    return fig.update_layout(width=1000, height=160 + 32 * len(order))


def runs_figure(runs: dict[str, Record]) -> go.Figure:
    """Streak on training and held-out rows against tokens seen, a colour a run."""
    fig = go.Figure()
    for color, (name, run) in zip(("#1f77b4", "#d62728", "#2ca02c", "#9467bd"), runs.items(), strict=False):
        trained = [point for point in run["curve"] if point["kind"] == "train"]
        steps = {point["step"]: point["context_tokens"] for point in trained}
        kept = [point for point in run["curve"] if point["kind"] == "heldout" and point["step"] in steps]
        for kind, points, dash in (("training", trained, "dot"), ("held-out", kept, "solid")):
            fig.add_scatter(
                x=[steps[point["step"]] / 1e6 for point in points], y=[point["streak"] for point in points],
                mode="lines", line={"color": color, "dash": dash}, name=f"{name}, {kind} rows",
            )  # fmt: skip
    return fig.update_layout(
        title="Streak (accepted drafts + 1, uniform anchors) against tokens seen", template="plotly_white",
        xaxis={"title": "context tokens seen (millions)", "type": "log"}, yaxis={"title": "streak"},
        width=1000, height=520,
    )  # fmt: skip


def save(found: Record, folder: Path) -> None:
    """Write tables and figures into `folder`."""
    rows, runs, device = found["rows"], found["runs"], found["device"]
    text = runs_table(runs) + "\n" + commands(runs)
    pictures = {"quality-runs": runs_figure(runs)}
    if rows:
        base = rows["base"]
        title = f"{base['figures']['steps']:,} steps on {base['data']['tokens'] / 1e6:.1f} M tokens, {device}"
        text += "\n" + study_table(rows) + "\n" + commands(rows)
        pictures["quality"] = rows_figure(rows, title)
    write_bytes(folder / "quality.md", text.encode())
    for name, fig in pictures.items():
        save_figure(fig, folder, name)


if __name__ == "__main__":
    save(read_json(Path(sys.argv[1])), Path(sys.argv[2]))
