"""All stages of a named run in their order, the finished ones skipped, ending in one table and one report."""

from __future__ import annotations

import dataclasses
import logging
import time
from pathlib import Path
from typing import Any

from dflash_lab.errors import InputError, near
from dflash_lab.files import write_json
from dflash_lab.provenance import provenance
from dflash_lab.stages import STAGES, params_class
from dflash_lab.workbench.closing import closing_figures, closing_lines
from dflash_lab.workbench.finished import (
    RESULT,
    SCHEMA_VERSION,
    WouldReplace,
    is_finished,
    out_of_date,
    read_result,
)
from dflash_lab.workbench.kernel import enter_workspace
from dflash_lab.workbench.launch import OK, output_notebook, run_notebook
from dflash_lab.workbench.named_runs import PARAMS, check_owner, find_run
from dflash_lab.workbench.param_files import Given, read_given
from dflash_lab.workbench.progress import duration
from dflash_lab.workbench.replace import settle
from dflash_lab.workbench.report import REPORT, write_index, write_report
from dflash_lab.workbench.runs import leave_plan
from dflash_lab.workbench.secrets import redact_tree

logger = logging.getLogger(__name__)


def run_all(given: Given, extra: list[str], *, stale: bool = False) -> int:
    """Run every stage that the run has a parameter file for; return the first exit code that is not 0.

    A finished stage of other parameters or inputs ends the run with what to type, unless `stale` asks for
    those to be done again.
    """
    enter_workspace()
    steps = plan(given)
    first = read_given(params_class(steps[0][0]), steps[0][1])
    check_owner(first)
    run = first.run_folder
    settle(run)
    leave_plan(run, [read_given(params_class(stage), step).folder.name for stage, step in steps])
    start = time.monotonic()
    worked = False
    for number, (stage, step) in enumerate(steps, 1):
        params = read_given(params_class(stage), step)
        head = f"[{number}/{len(steps)}] {params.folder.name}"
        again = stale and bool(out_of_date(params))
        if not (params.force or again) and output_notebook(params).exists() and is_finished(params):
            logger.info("%s: finished before", head)
            continue
        logger.info("%s", head)
        worked, begun = True, time.monotonic()
        if again:
            step = dataclasses.replace(step, typed=[*step.typed, ("force", "True")])
        try:
            code = run_notebook(stage, step, extra)
        except WouldReplace as error:
            raise WouldReplace(f"{error}. All that is out of date: the same command with --stale") from None
        if code != OK:
            return code
        logger.info("%s: %s", head, duration(time.monotonic() - begun))
    if worked or not (run / RESULT).exists() or not (run / REPORT).exists():
        _close(run, time.monotonic() - start)
    _show(run)
    return OK


def plan(given: Given) -> list[tuple[str, Given]]:
    """Return (stage, parameters) in order, checked; a stage with `num_shards` comes once a shard."""
    folder = find_run(given.run).parameters
    if folder is None:
        raise InputError(f"{given.run}: no parameters in {PARAMS}. A new run: dflash-lab new NAME.")
    stages = [stage for stage in STAGES if (folder / f"{stage}.yaml").exists()]
    if not stages:
        raise InputError(f"{folder}: has no <stage>.yaml. Stages: {', '.join(STAGES)}.")
    _refuse_names_of_no_stage(stages, given)
    steps = []
    for stage in stages:
        own = _only_known(stage, given)
        params = read_given(params_class(stage), own)
        shards = getattr(params, "num_shards", 1)
        if shards == 1:
            steps.append((stage, own))
        for shard in range(shards if shards > 1 else 0):
            steps.append((stage, dataclasses.replace(own, typed=[*own.typed, ("shard", str(shard))])))
    return steps


def _only_known(stage: str, given: Given) -> Given:
    """Keep the `-p` and `-r` values that this stage has a parameter for."""
    known = params_class(stage).model_fields
    return dataclasses.replace(
        given,
        typed=[(name, text) for name, text in given.typed if name in known],
        raw=[(name, text) for name, text in given.raw if name in known],
    )


def _refuse_names_of_no_stage(stages: list[str], given: Given) -> None:
    known = {name for stage in stages for name in params_class(stage).model_fields}
    for name, _ in [*given.typed, *given.raw]:
        if name not in known:
            raise InputError(f"no stage has a parameter {name[:80]!r}{near(name, known)}.")


def _close(run: Path, wall_s: float) -> None:
    """Write the run's closing table, its report and the index of runs."""
    figures = closing_figures(run)
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "run": run.name,
        "figures": figures,
        "wall_s": round(wall_s, 1),  # of this start; finished stages were skipped in it
        **provenance(),
    }
    write_json(run / RESULT, redact_tree(record))
    write_report(run)
    write_index(run.parent)


def _show(run: Path) -> None:
    for line in closing_lines(read_result(run / RESULT)["figures"]):
        logger.info("%s", line)
    logger.info("notebooks  %s", run / "*.ipynb")
    logger.info("report     %s", run / REPORT)
