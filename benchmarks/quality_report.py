"""The tables and the figures of the quality study.

    python benchmarks/quality_report.py benchmarks/results/h200/quality.json docs/results
    python benchmarks/quality_report.py FILE docs/results --page docs/quality.md
    python benchmarks/quality_report.py FILE docs/results --study RUNS --run NAME=FOLDER --client NAME=JSON

The file holds `rows` (what `quality.py study` left: same steps, same slots a step) and `runs` (what
`quality.py train` left of the recorded runs, each with `clients`: what `quality.py client` left, by block
size). `--study` (a folder of rows), `--run` (a folder with row.json) and `--client` (of a run) first put
what they name into the file. Written: quality.md (tables and commands), quality-runs.html and
quality-runs.png (streak of the runs against tokens seen) and, if there are rows, quality.html and quality.png
(each row's difference to the base, with its interval over the same answers) and quality-tokens.html and
quality-tokens.png (held-out streak against tokens seen). `--page` puts the tables between the page's
`<!-- begin: runs -->` and `<!-- end: runs -->`, and the same with `rows`.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots
from result_figure import save_figure

from dflash_lab.acceptance.tau import Paired, compare
from dflash_lab.errors import InputError
from dflash_lab.files import read_json, write_bytes, write_json

PALETTE = (
    "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#e377c2", "#7f7f7f",
)  # fmt: skip
SHOWN = ("base", "augment", "half-kl", "wide", "augment-half-kl", "block-16")  # the rest after a click
SETS = {"heldout": ("held-out", "#1f77b4"), "humaneval": ("HumanEval", "#d62728")}
LENGTH = ("max_steps", "time_limit_s", "samples", "anchors")  # anchors: as many slots a step in every row
SAMPLES = {
    "whole.parquet": "blocks in user turns too",
    "augmented.parquet": "documents made of the samples too",
}
Record = dict[str, Any]


def changed(record: Record, base: Record) -> str:
    """What a row changes of the base, in words."""
    own = {k: v for k, v in record["parameters"].items() if base["parameters"].get(k) != v}
    words = ", ".join(f"{k} {v}" for k, v in own.items() if k not in LENGTH)
    words = [words, SAMPLES.get(Path(str(record["parameters"].get("samples", ""))).name, "")]
    return ", ".join(filter(None, words)) or "(base)"


def spelled(tau: Record) -> str:
    """A tau with its interval."""
    return f"{tau['tau']:.2f} ({tau['low']:.2f} to {tau['high']:.2f})"


def against(row: Record, base: Record, key: str) -> Paired:
    """The row's tau minus the base's on the same stored answers."""
    return compare(*(record["tau"][key]["per_answer"] for record in (base, row)))


def study_table(rows: dict[str, Record]) -> str:
    """Rows of the study, best held-out tau first; `difference`: to the base, with its paired interval."""
    lines = [
        "| row | changes | tau held-out | difference | tau HumanEval | difference | streak: training | "
        "held-out | anchors/s |",
        "|" + "---|" * 9,
    ]
    for name, row in sorted(rows.items(), key=lambda pair: -pair[1]["tau"]["heldout"]["tau"]):
        cells = [name, changed(row, rows["base"])]
        for key in SETS:
            change = against(row, rows["base"], key)
            low, high = change.interval.low, change.interval.high
            cells += [f"{row['tau'][key]['tau']:.3f}"]
            cells += [f"{change.difference:+.3f} ({low:+.3f} to {high:+.3f})" if name != "base" else ""]
        kept = row["figures"]["streak_last"]
        cells += [f"{row['training']['streak']:.2f}", "" if kept is None else f"{kept:.2f}"]
        lines.append("| " + " | ".join([*cells, f"{row['figures']['anchors_per_s']:,.0f}"]) + " |")
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
    """Every row's tau minus the base's on both sets, with paired intervals over answers."""
    order = sorted(rows, key=lambda name: rows[name]["tau"]["heldout"]["tau"])
    titles = [f"{label}: base {rows['base']['tau'][key]['tau']:.2f}" for key, (label, _) in SETS.items()]
    fig = make_subplots(rows=1, cols=2, shared_yaxes=True, subplot_titles=titles)
    for column, (key, (label, color)) in enumerate(SETS.items(), start=1):
        changes = [against(rows[name], rows["base"], key) for name in order]
        above = [change.interval.high - change.difference for change in changes]
        below = [change.difference - change.interval.low for change in changes]
        fig.add_scatter(
            x=[change.difference for change in changes], y=order, mode="markers", name=label,
            marker={"size": 9, "color": color}, error_x={"array": above, "arrayminus": below},
            row=1, col=column,
        )  # fmt: skip
        fig.add_vline(x=0, line={"dash": "dot", "color": "grey"}, row=1, col=column)
        fig.update_xaxes(title="tau minus the base's, same answers, 95 %", row=1, col=column)
    fig.update_layout(title=title, template="plotly_white", showlegend=False)
    return fig.update_layout(width=1000, height=200 + 30 * len(order))


def tokens_figure(rows: dict[str, Record]) -> go.Figure:
    """Training streak (dotted) and held-out streak of every row against context tokens seen."""
    fig = go.Figure()
    for number, (name, row) in enumerate(rows.items()):
        color = PALETTE[number % len(PALETTE)]
        for kind, points, dash in curves(row):
            fig.add_scatter(
                x=[x for x, _ in points], y=[y for _, y in points], mode="lines", legendgroup=name,
                line={"color": color, "dash": dash}, name=name, showlegend=kind == "held-out",
                visible=True if name in SHOWN else "legendonly",
            )  # fmt: skip
    return fig.update_layout(
        title="Streak against tokens seen: training rows dotted, held-out rows solid (a click shows a row)",
        template="plotly_white", xaxis={"title": "context tokens seen (millions)"}, yaxis={"title": "streak"},
        width=1000, height=560,
    )  # fmt: skip


def curves(record: Record) -> list[tuple[str, list[tuple[float, float]], str]]:
    """Kind, points (millions of tokens seen, streak) and dash of a record's two curves."""
    trained = [point for point in record["curve"] if point["kind"] == "train"]
    seen = {point["step"]: point["context_tokens"] / 1e6 for point in trained}
    kept = [point for point in record["curve"] if point["kind"] == "heldout" and point["step"] in seen]
    return [
        (kind, [(seen[point["step"]], point["streak"]) for point in points], dash)
        for kind, points, dash in (("training", trained, "dot"), ("held-out", kept, "solid"))
    ]


def runs_figure(runs: dict[str, Record]) -> go.Figure:
    """Streak on training and held-out rows against tokens seen, a colour a run."""
    fig = go.Figure()
    for color, (name, run) in zip(PALETTE, runs.items(), strict=False):
        for kind, points, dash in curves(run):
            fig.add_scatter(
                x=[x for x, _ in points], y=[y for _, y in points], mode="lines",
                line={"color": color, "dash": dash}, name=f"{name}, {kind} rows",
            )  # fmt: skip
    return fig.update_layout(
        title="Streak (accepted drafts + 1, uniform anchors) against tokens seen", template="plotly_white",
        xaxis={"title": "context tokens seen (millions)", "type": "log"}, yaxis={"title": "streak"},
        width=1000, height=520,
    )  # fmt: skip


def save(found: Record, folder: Path, page: Path | None = None) -> None:
    """Write tables and figures into `folder`, and the tables into `page`."""
    rows, runs, device = found["rows"], found["runs"], found["device"]
    text = runs_table(runs) + "\n" + commands(runs)
    pictures = {"quality-runs": runs_figure(runs)}
    tables = {"runs": runs_table(runs)}
    if rows:
        base = rows["base"]
        title = f"{base['figures']['steps']:,} steps on {base['data']['tokens'] / 1e6:.1f} M tokens, {device}"
        tables["rows"] = study_table(rows)
        text += "\n" + tables["rows"] + "\n" + commands(rows)
        pictures |= {"quality": rows_figure(rows, title), "quality-tokens": tokens_figure(rows)}
    write_bytes(folder / "quality.md", text.encode())
    for name, fig in pictures.items():
        save_figure(fig, folder, name)
    if page is not None:
        write_bytes(page, filled(page.read_text(), tables).encode())


def filled(text: str, tables: dict[str, str]) -> str:
    """A page with its tables between their marks."""
    for name, table in tables.items():
        mark = re.compile(rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
        if not mark.search(text):
            raise InputError(
                f"the page has no place for its {name}: <!-- begin: {name} --> to <!-- end: {name} -->"
            )
        text = mark.sub(lambda found, table=table: f"{found[1]}{table}{found[2]}", text)
    return text


def gathered(found: Record, study: Path | None, runs: dict[str, str], clients: list[list[str]]) -> Record:
    """`found` with the study's finished rows, recorded runs and the clients' measures put in."""
    if study is not None:
        records = (read_json(path) for path in sorted(study.glob("*/row.json")))
        found["rows"] = {record["row"]: record for record in records if record["tau"]}
    for name, folder in runs.items():
        found["runs"][name] = {**read_json(Path(folder) / "row.json"), "clients": {}}
    for name, path in clients:
        measured = read_json(Path(path))
        how = f"block {measured['block_size']}" if measured["block_size"] else "its own block"
        found["runs"][name]["clients"][how] = {k: measured[k] for k in ("tau", "dtype", "client_device")}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--study", type=Path, help="folder of the study's rows: they replace the file's")
    parser.add_argument("--run", nargs="*", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--client", nargs="*", default=[], metavar="NAME=JSON")
    args = parser.parse_args()
    found = read_json(args.file) if args.file.exists() else {"rows": {}, "runs": {}, "device": "H200"}
    if args.study or args.run or args.client:
        pairs = [pair.split("=", 1) for pair in args.client]
        found = gathered(found, args.study, dict(pair.split("=", 1) for pair in args.run), pairs)
        write_json(args.file, found)
    save(found, args.folder, args.page)


if __name__ == "__main__":
    main()
