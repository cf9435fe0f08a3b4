"""What is under `runs/`: the state of every stage, tables over the results, and what differs between runs.

Everything is read from `result.json`, `failure.json` and the lock of each stage folder; there is no database
to fall out of step with them.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import polars as pl

from dflash_lab.errors import InputError, LabError, StoreError
from dflash_lab.files import as_json, read_json, settle, write_json
from dflash_lab.params import StageParams
from dflash_lab.results import FAILURE, RESULT, differences, of_today, older_rules, read_result, stale_after
from dflash_lab.run_params import find_run, resolve
from dflash_lab.stage_run import LOCK, is_held
from dflash_lab.stages import STAGES, params_class

# --- The closing table of a run: the few numbers of each stage that answer "did it work"


Figures = dict[str, Any]
JUDGEMENT = "judgement"  # a sentence of `acceptance` among the numbers

# What an earlier start of the stage left, which its own figures count apart.
EARLIER = {"samples_stored": "samples_stored_before", "tokens_stored": "tokens_stored_before"}
# name in the table -> (unit, stage, name in that stage's figures, how several shards are put together)
ROWS: dict[str, tuple[str, str, str, Callable[[list[float]], float]]] = {
    "samples_in": ("", "prepare", "samples_in", sum),
    "samples_stored": ("", "extract", "samples_stored", sum),
    "samples_quarantined": ("", "extract", "samples_quarantined", sum),
    "tokens_stored": ("tokens", "extract", "tokens_stored", sum),
    "extract_tokens_per_s": ("tokens/s a process", "extract", "extract_tokens_per_s", fmean),
    "padding_waste_pct": ("%", "extract", "padding_waste_pct", max),
    "predicted_peak_gib": ("GiB", "memory_sweep", "predicted_peak_gib", max),
    "measured_peak_gib": ("GiB", "memory_sweep", "measured_peak_gib", max),
    "loss_first": ("nats", "train_drafter", "loss_first", max),
    "loss_last": ("nats", "train_drafter", "loss_last", max),
    "tau_trained": ("tokens/round", "acceptance", "tau_trained", max),
    "tau_untrained": ("tokens/round", "acceptance", "tau_untrained", max),
    "speedup_chain": ("times plain", "acceptance", "speedup_chain", max),
    "tau_other": ("tokens/round", "acceptance", "tau_other", max),
    "speedup_other": ("times plain", "acceptance", "speedup_other", max),
}


def stage_results(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the finished results below a run folder by stage name; shards of a stage in order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(run.glob(f"*/{RESULT}")):
        result = read_result(path)
        found.setdefault(result["stage"], []).append(result)
    return found


def closing_figures(run: Path) -> Figures:
    """Return the table's numbers by name, and the sentence on tau. A stage that has not run leaves out its
    own.
    """
    results = stage_results(run)
    figures: Figures = {}
    for name, (_, stage, source, together) in ROWS.items():
        values = [
            result["figures"][source] for result in results.get(stage, []) if source in result["figures"]
        ]
        values = [value for value in values if value is not None]
        if values and source in EARLIER:
            values += [result["figures"].get(EARLIER[source], 0) for result in results[stage]]
        if values:
            figures[name] = together(values)
    told = [result["figures"].get(JUDGEMENT) for result in results.get("acceptance", [])]
    if any(told):
        figures[JUDGEMENT] = told[-1]
    for stage in STAGES:
        if stage in results:
            figures[f"{stage}_seconds"] = round(sum(result["seconds"] for result in results[stage]), 1)
    return figures


def closing_rows(figures: Figures) -> list[tuple[str, str, str]]:
    """Return the table as text: name, value, unit."""
    return [
        (name, closing_number(value), ROWS[name][0])
        if name in ROWS
        else (name.removesuffix("_seconds") + " time", f"{value:,.1f}", "s")
        for name, value in figures.items()
        if name != JUDGEMENT
    ]


def closing_lines(figures: Figures) -> list[str]:
    """Return the table as aligned lines of text, and below it what the measured tau amounts to."""
    rows = closing_rows(figures)
    width = max((len(row[0]) for row in rows), default=0)
    right = max((len(row[1]) for row in rows), default=0)
    lines = [f"{name:<{width}}  {value:>{right}} {unit}".rstrip() for name, value, unit in rows]
    return [*lines, *([figures[JUDGEMENT]] if JUDGEMENT in figures else [])]


def closing_number(value: float) -> str:
    """Return a number as the tables show it: an int whole, a float with three decimals below 100."""
    return (
        f"{value:,}" if isinstance(value, int) else f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    )


# --- Tables over the results on disk, and what differs between runs


PLAN = "plan.json"
_SCHEMA: dict[str, Any] = {
    "run": pl.String,
    "folder": pl.String,
    "stage": pl.String,
    "state": pl.String,
    "time": pl.Datetime("us", "UTC"),
    "seconds": pl.Float64,
    "peak_rss_gib": pl.Float64,
    "peak_gpu_gib": pl.Float64,
    "parameters": pl.String,
    "figures": pl.String,
    "message": pl.String,
}


def stage_table(root: Path) -> pl.DataFrame:
    """Return one row a stage folder below `root`: run, folder, stage, state, time, seconds, peaks, JSON of
    the rest.

    States: finished, failed, stopped, running, killed (started and gone without a word), unreadable.
    """
    rows = [_row(run, folder) for run in run_folders(root) for folder in _stage_folders(run)]
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row")


def run_folders(root: Path) -> list[Path]:
    """Return the folders directly below `root` that hold at least one stage."""
    if not root.is_dir():
        raise InputError(f"{root}: no such folder of runs. `make demo` makes runs/demo.")
    runs = [path for path in sorted(root.iterdir()) if path.is_dir() and _stage_folders(path)]
    for run in runs:
        settle(run)
    return runs


def _stage_folders(run: Path) -> list[Path]:
    found = [path for path in run.iterdir() if path.is_dir() and _stage_name(path) in STAGES]
    kept = [path for path in found if any((path / name).exists() for name in (RESULT, FAILURE, LOCK))]
    return sorted(kept, key=lambda path: (STAGES.index(_stage_name(path)), path.name))


def leave_plan(run: Path, folders: Sequence[str]) -> None:
    """Write down the stage folders that a run will have, so that one cut short does not look whole."""
    plan = {"stages": list(folders)}
    if not (run / PLAN).is_file() or (run / PLAN).read_bytes() != as_json(plan):
        write_json(run / PLAN, plan)


def planned(run: Path) -> list[str]:
    """Return the stage folders that a run was to have; none when its stages were started one by one."""
    if not (run / PLAN).exists():
        return []
    plan = read_json(run / PLAN)
    names = plan.get("stages") if isinstance(plan, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise StoreError(f"{run / PLAN}: no list of stages. Remove the file: the next start writes it again.")
    return names


def _stage_name(folder: Path) -> str:
    return folder.name.split("-")[0]


def _row(run: Path, folder: Path) -> tuple:
    state, record = folder_state(folder)
    peak = _peaks(record)
    return (
        run.name,
        folder.name,
        _stage_name(folder),
        state,
        _time(record.get("time")),
        record.get("seconds"),
        peak["rss_gib"],
        peak["gpu_gib"],
        json.dumps(record.get("parameters", {})),
        json.dumps(record.get("figures", {})),
        record.get("message", ""),
    )


def folder_state(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return a stage folder's state, as in `stage_table`, or "never run", and what its result or failure
    says.
    """
    if is_held(folder):
        return "running", {}
    try:
        if (folder / RESULT).exists():
            record = _sound(read_result(folder / RESULT), folder / RESULT)
            record["message"] = ""
            if (
                folder / FAILURE
            ).exists():  # of an attempt to replace the result, which is valid all the same
                later = _sound(read_json(folder / FAILURE), folder / FAILURE)
                state = later.get("state", "failed")
                record["message"] = f"a later attempt {state}: {later.get('message', '')}"
            return "finished", record
        if (folder / FAILURE).exists():
            record = _sound(read_json(folder / FAILURE), folder / FAILURE)
            return record.get("state", "failed"), record
    except StoreError as error:
        return "unreadable", {"message": str(error)}
    if not (folder / LOCK).exists():
        return "never run", {}
    return "killed", {"message": "started and gone without a result; run it again to go on"}


def _sound(record: Any, path: Path) -> dict[str, Any]:
    """Return a record whose fields a row can show; `StoreError` names one that is of another kind."""
    if not isinstance(record, dict):
        raise StoreError(f"{path}: no record of a stage. Remove the file to make it again.")
    kinds: dict[str, Any] = {"state": str, "message": str, "parameters": dict, "figures": dict}
    kinds |= {"peak_memory": dict, "seconds": int | float, "time": str}
    numbers = {f"peak_memory.{name}": value for name, value in _peaks(record).items()}
    for name, value in {**record, **numbers}.items():
        kind = kinds.get(name, int | float | None if name in numbers else object)
        if not isinstance(value, kind):
            raise StoreError(f"{path}: {name} is {str(value)[:60]!r}. Remove the file to make it again.")
    try:
        _time(record.get("time"))
    except ValueError:
        raise StoreError(f"{path}: time is {record['time']!r}. Remove the file to make it again.") from None
    return record


def _peaks(record: dict[str, Any]) -> dict[str, Any]:
    peaks = record.get("peak_memory", {})
    return {name: peaks.get(name) for name in ("rss_gib", "gpu_gib")} if isinstance(peaks, dict) else {}


def _time(text: str | None) -> datetime.datetime | None:
    return datetime.datetime.fromisoformat(text).astimezone(datetime.UTC) if text else None


def overview(root: Path) -> pl.DataFrame:
    """Return one row a run: state, stages finished, last change, duration in seconds, main figures."""
    table = stage_table(root)
    rows = []
    for run in run_folders(root):
        stages = table.filter(pl.col("run") == run.name)
        states = stages["state"].to_list()
        try:
            folders = {*stages["folder"], *planned(run)}
        except StoreError:
            folders, states = {*stages["folder"]}, [*states, "unreadable"]
        figures = closing_figures(run) if "unreadable" not in states else {}
        rows.append(
            {
                "run": run.name,
                "state": _run_state(states, len(folders)),
                "finished": f"{states.count('finished')}/{len(folders)}",
                "last": stages["time"].max(),
                "seconds": stages["seconds"].sum(),
                "samples": figures.get("samples_stored"),
                "tokens_per_s": figures.get("extract_tokens_per_s"),
                "loss_last": figures.get("loss_last"),
                "tau_trained": figures.get("tau_trained"),
                "tau_untrained": figures.get("tau_untrained"),
            }
        )
    return pl.DataFrame(rows, infer_schema_length=None)


def _run_state(states: list[str], stages: int) -> str:
    """Return the state of a run of so many stages, of which some have begun."""
    for state in ("running", "failed", "killed", "stopped", "unreadable"):
        if state in states:
            return state
    return "finished" if len(states) >= stages else "incomplete"


def compare_parameters(runs: Sequence[Path]) -> pl.DataFrame:
    """Return the parameters that differ: stage, parameter, and one column a run (JSON text).

    A stage that only some of the runs have is one row: parameter ``(stage)``, ``"run"`` or null.
    """
    return _compare(runs, "parameters")


def compare_closing(runs: Sequence[Path]) -> pl.DataFrame:
    """Return the closing tables side by side: figure, unit, one column a run (text; null: not measured)."""
    names = _checked_names(runs)
    tables = {name: closing_rows(closing_figures(run)) for name, run in zip(names, runs, strict=True)}
    cells = {name: {figure: value for figure, value, _ in table} for name, table in tables.items()}
    units = {figure: unit for table in tables.values() for figure, _, unit in table}
    rows = [
        {"figure": figure, "unit": unit, **{name: cells[name].get(figure) for name in names}}
        for figure, unit in units.items()
    ]
    return pl.DataFrame(rows, schema=dict.fromkeys(("figure", "unit", *names), pl.String))


def compare_figures(runs: Sequence[Path]) -> pl.DataFrame:
    """Return every figure of every stage: stage, figure, and one column a run (JSON; null: not there)."""
    return _compare(runs, "figures", only_different=False)


def _compare(runs: Sequence[Path], what: str, *, only_different: bool = True) -> pl.DataFrame:
    values: dict[tuple[str, str], dict[str, str]] = {}
    names = _checked_names(runs)
    had: dict[str, set[str]] = {}
    for run, name in zip(runs, names, strict=True):
        for folder in _stage_folders(run):
            _, record = folder_state(folder)
            had.setdefault(folder.name, set()).add(name)
            found = record.get(what, {})
            if what == "parameters" and record.get("stage") in STAGES:
                found = of_today(params_class(record["stage"]), found)
            for key, value in found.items():
                values.setdefault((folder.name, key), {})[name] = json.dumps(value)
    if only_different:
        lone = {stage: who for stage, who in had.items() if len(who) < len(names)}
        values = {key: found for key, found in values.items() if key[0] not in lone}
        values |= {(stage, "(stage)"): dict.fromkeys(who, '"run"') for stage, who in lone.items()}
    rows = [
        {"stage": stage, what.removesuffix("s"): key, **{name: found.get(name) for name in names}}
        for (stage, key), found in values.items()
        if key not in StageParams.passing
        and not (only_different and len({found.get(name) for name in names}) == 1)
    ]
    schema = {"stage": pl.String, what.removesuffix("s"): pl.String, **dict.fromkeys(names, pl.String)}
    return pl.DataFrame(rows, schema=schema)


def _checked_names(runs: Sequence[Path]) -> list[str]:
    if len(runs) < 2:
        raise InputError(f"comparing needs two runs or more, got {len(runs)}.")
    for run in runs:
        if not run.is_dir():
            raise InputError(f"{run}: no such run folder.")
    names = [run.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


# --- Each stage of a run: a dry run of what would be done again


@dataclass(frozen=True)
class StageStatus:
    """`state`: finished, stale (finished, and would be done again), running, failed, stopped, killed, never
    run, or unreadable; `why` is a sentence, empty where there is nothing to add.
    """

    stage: str
    folder: str
    state: str
    why: str


def run_status(run: str | Path, run_dir: str | Path = "") -> list[StageStatus]:
    """Return the state of each stage that a run has parameters for, in order, shards apart.

    `run` is its name, or the path of its parameters or folder; `run_dir` its folder where it is elsewhere.
    Raises an `InputError` for a run that is not there.
    """
    named = find_run(str(run), str(run_dir))
    # With `common.yaml` alone a run has parameters for all stages.
    files = set() if named.parameters is None else {path.stem for path in named.parameters.glob("*.yaml")}
    typed: dict[str, tuple[Any, str]] = {"run": (str(run), "given by name")}
    if run_dir:
        typed["run_dir"] = (str(run_dir), "given by name")
    found: list[StageStatus] = []
    again: dict[str, str] = {}  # folder of a stage -> the earlier one that comes first
    for stage in STAGES:
        if stage not in files and files & {*STAGES}:
            continue
        try:
            first = resolve(params_class(stage), typed)
            count = getattr(first, "num_shards", 0)
            shards = [first.changed(shard=shard) for shard in range(count)] or [first]
        except LabError as error:
            found.append(StageStatus(stage, stage, "unreadable", str(error)))
            continue
        for params in shards:
            settle(params.run_folder)
            state, why = _state(params)
            if state == "finished" and params.folder.name in again:
                why = f"goes out of date when {again[params.folder.name]} is done again"
            if state == "stale":
                again |= dict.fromkeys(stale_after(params), params.folder.name)
            found.append(StageStatus(stage, params.folder.name, state, why))
    return found


def _state(params: StageParams) -> tuple[str, str]:
    state, record = folder_state(params.folder)
    told = record.get("message", "")
    if state != "finished":
        return state, told
    try:
        changes = differences(params)
        if not changes and (lacking := params.lacks()):
            changes = [lacking]
        if older := older_rules(params):
            changes.append(older)
        if getattr(params, "num_shards", 1) > 1 and (params.fresh / RESULT).exists():
            told = "; ".join(filter(None, [told, "a new result waits for those of the other shards"]))
        if not changes:
            told = "; ".join(filter(None, [told, params.remains()]))
    except LabError as error:
        return "unreadable", str(error)
    return ("stale", "; ".join(filter(None, [*changes, told]))) if changes else ("finished", told)
