"""The tables and the figures of the quality study.

    python benchmarks/quality_report.py benchmarks/results/h200/quality.json docs/results
    python benchmarks/quality_report.py FILE docs/results --page docs/quality.md
    python benchmarks/quality_report.py FILE docs/results --study NAME=RUNS --run NAME=DIR --client NAME=JSON

The file holds `studies` (each with `rows`: same data, same slots a step, compared at the last step that all
of them reached) and `runs` (what `quality.py train` left of the recorded runs, each with `clients`: what
`quality.py client` left, by block size). `--study` (a folder of rows), `--run` (a folder with row.json) and
`--client` (of a run) first put what they name into the file; a row or run that was cut counts as far as its
diary goes. Written: quality.md (tables and commands), quality-runs (streak of the runs against tokens seen)
and quality-study (what each row gains on the base), each as HTML, JSON and PNG. `--page` puts the tables
between the page's `<!-- begin: runs -->` and `<!-- end: runs -->`, and the same with `rows`.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from quality_figures import against, common_step, gains, has_tau, point_at, runs_figure, study_figure
from quality_study import left_by
from result_figure import save_figure
from result_file import made_of, read_result, told

from dflash_lab.errors import InputError, near
from dflash_lab.files import write_bytes, write_json

SETS = ("heldout", "humaneval")
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


def number(value: float | None, form: str) -> str:
    """A cell; empty where nothing was measured."""
    return "" if value is None else format(value, form)


def table(heads: list[str], lines: list[list[str]]) -> str:
    """A Markdown table."""
    rows = ["| " + " | ".join(cells) + " |\n" for cells in (heads, *lines)]
    return "".join([rows[0], "|" + "---|" * len(heads) + "\n", *rows[1:]])


def study_table(study: Record) -> str:
    """Rows of a study, best first; `gain`: on the base. Tau's columns only if all rows have one."""
    rows = study["rows"]
    step, trained = (common_step(rows, kind) for kind in ("heldout", "train"))
    heads = ["row", "changes", f"held-out streak, step {step:,}", "gain", "cross-entropy", "KL"]
    heads += [f"training streak, step {trained:,}"] if trained else []
    tau = has_tau(rows)
    heads += [word for key in SETS for word in (f"tau {key}", "gain (95 %)")] if tau else []
    lines = []
    for name, gain in gains(rows).items():
        kept = point_at(rows[name], "heldout", step)
        cells = [name, changed(rows[name], rows["base"]), f"{kept['streak']:.3f}"]
        cells += ["" if name == "base" else f"{gain:+.3f}"]
        cells += [number(kept.get(key), ".2f") for key in ("ce", "kl")]
        cells += [number(point_at(rows[name], "train", trained).get("streak"), ".2f")] if trained else []
        for key in SETS if tau else ():
            found = against(rows[name], rows["base"], key)
            low, high = found.interval.low, found.interval.high
            cells += [f"{rows[name]['tau'][key]['tau']:.3f}"]
            cells += ["" if name == "base" else f"{found.difference:+.3f} ({low:+.3f} to {high:+.3f})"]
        lines.append(cells)
    return table(heads, lines)


def studies_text(studies: dict[str, Record]) -> str:
    """Every study: its size in a sentence, then its rows."""
    parts = []
    for study in studies.values():
        tokens, step = study["data"]["tokens"] / 1e6, common_step(study["rows"], "heldout")
        words = f"{len(study['rows'])} rows on {tokens:.1f} M tokens, step {step:,} of {study['steps']:,}"
        parts.append(f"{words}; from {study['record']}.\n\n{study_table(study)}")
    return "\n".join(parts)


def runs_table(runs: dict[str, Record]) -> str:
    """The recorded runs: the public client's tau at each block size it decoded with, then tau from stored
    answers; last what a run that was not measured left.
    """
    heads = "run, tokens, block, seconds, steps, anchors/s, epoch, streak: training, held-out, peak GiB"
    lines = []
    for name, run in runs.items():
        figures, training = run["figures"], run["training"]
        epoch = training.get("epoch")
        cells = [name, f"{run['data']['tokens'] / 1e6:.1f} M", str(run["parameters"]["block_size"])]
        cells += [number(figures["train_seconds"], ".0f"), f"{figures['steps']:,}"]
        cells += [number(figures["anchors_per_s"], ",.0f"), number(epoch and epoch + 1, ".0f")]
        cells += [number(training["streak"], ".2f"), number(figures["streak_last"], ".3f")]
        lines.append([*cells, number(run["peak_gib"], ".1f")])
    text = table(heads.split(", "), lines)
    lines = []
    for name, run in runs.items():
        measured = {f"client, {how}": found["tau"] for how, found in run["clients"].items()}
        measured |= {"stored answers": run["tau"]} if run["tau"] else {}
        for how, taus in measured.items():
            lines.append([name, how, *(w for k in SETS for w in (spelled(taus[k]), str(taus[k]["answers"])))])
        if not measured:
            lines.append([name, "not measured", "", "", "", ""])
    return text + "\n" + table(["run", "how", "tau held-out", "answers", "tau HumanEval", "answers"], lines)


def commands(found: Record) -> str:
    """The command of each study and run, with its commit."""
    lines = []
    for name, record in {**found["studies"], **found["runs"]}.items():
        commit = record.get("commit", found.get("commit", "unknown"))[:12]
        lines.append(f"- {name} (commit {commit}): `{record['command']}`\n")
    return "".join(lines)


def save(found: Record, folder: Path, page: Path | None = None) -> None:
    """Write tables and figures into `folder`, and the tables into `page`."""
    tables, pictures = {"runs": runs_table(found["runs"])}, {"quality-runs": runs_figure(found["runs"])}
    if found["studies"]:
        tables["rows"] = studies_text(found["studies"])
        pictures["quality-study"] = study_figure(found["studies"])
    write_bytes(folder / "quality.md", "\n".join([*tables.values(), commands(found)]).encode())
    for name, fig in pictures.items():
        save_figure(fig, folder, name)
    if page is not None:
        write_bytes(page, filled(page.read_text(), tables).encode())


def filled(text: str, tables: dict[str, str]) -> str:
    """A page with its tables between their marks."""
    for name, words in tables.items():
        mark = re.compile(rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
        if not mark.search(text):
            raise InputError(
                f"the page has no place for its {name}: <!-- begin: {name} --> to <!-- end: {name} -->"
            )
        text = mark.sub(lambda found, words=words: f"{found[1]}{words}{found[2]}", text)
    return text


def gathered_study(folder: Path) -> Record:
    """A study's rows, those that were cut too, as far as they were measured on held-out rows."""
    records = [left_by(path.parent) for path in sorted(folder.glob("*/row.json"))]
    records = [one for one in records if any(point["kind"] == "heldout" for point in one["curve"])]
    rows = {record["row"]: record for record in records}
    if "base" not in rows:
        raise InputError(f"{folder}: no row `base` with a held-out measure; found {sorted(rows) or 'none'}")
    cut = sorted(name for name, row in rows.items() if not row["tau"])
    base = rows["base"]
    return {
        "record": f"the rows' diaries where they did not end: {', '.join(cut)}" if cut else "finished rows",
        "command": base["command"],
        "steps": base["parameters"]["max_steps"],
        "data": base["data"],
        "commit": base["commit"],
        "rows": rows,
    }


def gathered(
    found: Record, studies: dict[str, str], runs: dict[str, str], clients: list[tuple[str, str]]
) -> Record:
    """`found` with studies, recorded runs and the clients' measures put in."""
    for name, folder in studies.items():
        found["studies"][name] = gathered_study(Path(folder))
    for name, folder in runs.items():
        with made_of(Path(folder) / "row.json", "quality.py"):
            found["runs"][name] = {**left_by(Path(folder)), "clients": {}}
    for name, path in clients:
        measured = read_result(path, "quality.py", tau=dict, block_size=int)
        if name not in found["runs"]:
            raise InputError(f"--client {name}: the file has no such run{near(name, found['runs'])}.")
        how = f"block {measured['block_size']}" if measured["block_size"] else "its own block"
        how += f", {measured['tau']['heldout']['answers']} prompts"
        found["runs"][name]["clients"][how] = {k: measured[k] for k in ("tau", "dtype", "client_device")}
    return found


def named(text: str) -> tuple[str, str]:
    """What NAME=PATH on the command line says."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH, such as long=runs/long")
    return name, path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--study", nargs="*", default=[], type=named, metavar="NAME=RUNS")
    parser.add_argument("--run", nargs="*", default=[], type=named, metavar="NAME=FOLDER")
    parser.add_argument("--client", nargs="*", default=[], type=named, metavar="NAME=JSON")
    args = parser.parse_args()
    found: Record = {"studies": {}, "runs": {}}
    if args.file.exists():
        found = read_result(args.file, "quality.py", studies=dict, runs=dict)
    if args.study or args.run or args.client:
        found = gathered(found, dict(args.study), dict(args.run), args.client)
        write_json(args.file, found)
    with made_of(args.file, "quality_report.py"):
        save(found, args.folder, args.page)


if __name__ == "__main__":
    sys.exit(told(main))
