"""Each stage of a run: finished, out of date and why, failed, never run. A dry run of what would be done
again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_lab.errors import LabError
from dflash_lab.stages import STAGES, params_class
from dflash_lab.workbench.finished import RESULT, differences, older_rules, stale_after
from dflash_lab.workbench.named_runs import NamedRun, find_run
from dflash_lab.workbench.params import StageParams
from dflash_lab.workbench.replace import settle
from dflash_lab.workbench.run_params import Typed, resolve
from dflash_lab.workbench.runs import folder_state


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
    typed: dict[str, tuple[Any, str]] = {"run": (str(run), "given by name")}
    if run_dir:
        typed["run_dir"] = (str(run_dir), "given by name")
    found: list[StageStatus] = []
    again: dict[str, str] = {}  # folder of a stage -> the earlier one that comes first
    for stage in STAGES:
        if not _has(named, stage):
            continue
        try:
            shards = list(_shards(stage, typed))
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


def _has(named: NamedRun, stage: str) -> bool:
    """Say whether a run has parameters for a stage; with `common.yaml` alone it has them for all."""
    files = [] if named.parameters is None else [path.stem for path in named.parameters.glob("*.yaml")]
    return stage in files or not {*files} & {*STAGES}


def _shards(stage: str, typed: Typed) -> Iterator[StageParams]:
    first = resolve(params_class(stage), typed)
    for shard in range(getattr(first, "num_shards", 1)):
        yield first.changed(shard=shard) if hasattr(first, "shard") else first


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
