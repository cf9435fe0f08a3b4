"""Notebooks headless through papermill: one stage, a run in order, or what papermill's own command asks.

papermill runs inside this process, so a SIGTERM (a pre-empted job) is ours to pass on to the kernel. The exit
code is true; whether a stage is done is said by its `result.json` alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dflash_lab.errors import InputError, LabError, near
from dflash_lab.files import make_folder, read_json, settle, write_bytes, write_json
from dflash_lab.papermill_engine import ENGINE, QuietEngine
from dflash_lab.params import StageParams
from dflash_lab.progress import duration, handling
from dflash_lab.provenance import provenance
from dflash_lab.report import REPORT, write_index, write_report
from dflash_lab.results import (
    FAILURE,
    RESULT,
    SCHEMA_VERSION,
    WouldReplace,
    check_ready,
    input_fingerprints,
    is_finished,
    out_of_date,
    read_result,
)
from dflash_lab.run_params import PARAMS, Given, check_owner, find_run, read_given
from dflash_lab.runs import closing_figures, closing_lines, leave_plan
from dflash_lab.secrets import RedactingFormatter, redact, redact_tree
from dflash_lab.stages import STAGES, params_class
from dflash_lab.workspace import enter_workspace, notebook_path, stage_notebook, workspace

OK, FAILED, USAGE, TERMINATED = 0, 1, 2, 143  # exit codes; 138, papermill's own, for a dead kernel
KILL_AFTER_S = 25.0  # a kernel that is still there this long after SIGTERM is killed; its finished files stay

STOPPED = "stopped by SIGTERM; the same command goes on from what is finished"

logger = logging.getLogger(__name__)


def output_notebook(params: StageParams) -> Path:
    """Return where the executed notebook goes: beside the stage's folder, under the same name."""
    return params.folder.with_suffix(".ipynb")


def attempt_notebook(params: StageParams) -> Path:
    """Return where it stands until it has ended well: beside that place, where there is a result to lose."""
    output = output_notebook(params)
    return output.with_suffix(".attempt.ipynb") if (params.folder / RESULT).exists() else output


def literal(path: Path) -> str:
    """Return a path that survives papermill's `{name}` formatting."""
    return str(path).replace("{", "{{").replace("}", "}}")


def save_whole(output: Path, attempt: Path) -> None:
    """Let papermill in this process save the notebook `output` whole or not at all, and without secrets. It
    stands at `attempt`, which may be the same path, until every cell of it has ended well; what is at
    `output` stays until then. (papermill's own writer leaves half a notebook on a full disk.)
    """
    from papermill.iorw import LocalHandler, papermill_io

    class Whole(LocalHandler):
        def write(self, buf: str, path: str) -> None:
            write_bytes(attempt, redact(buf).encode())
            if attempt != output and ended_well(buf):
                os.replace(attempt, output)

    # A scheme is what a path begins with; the last one is asked first.
    papermill_io.register(str(output), Whole())


def ended_well(text: str) -> bool:
    """Say whether a notebook that papermill saves is at its end: it has one, and every cell had its answer.

    papermill's own state of a cell is `completed` also where the kernel died in it, and for those after it.
    """
    notebook = json.loads(text)
    record = notebook["metadata"]["papermill"]
    run = [c for c in notebook["cells"] if c["cell_type"] == "code" and "".join(c["source"]).strip()]
    answered = all("shell.execute_reply" in cell["metadata"].get("execution", {}) for cell in run)
    return bool(record.get("end_time")) and not record.get("exception") and answered


def run_notebook(stage: str, given: Given, extra: list[str]) -> int:
    """Run one stage through papermill with `extra` options of papermill's own; return the exit code."""
    enter_workspace()
    params = read_given(params_class(stage), given)
    check_before(params)
    source = notebook_path(stage)
    output = output_notebook(params)
    make_folder(output.parent)
    attempt = attempt_notebook(params)
    words = [literal(source), literal(output), *given.arguments(stage), *_defaults(extra), *extra]
    if not any("interactive" in values for _, values in given.sources(stage)):
        words += ["-p", "interactive", "False"]  # a kernel knows by itself only where there is a /proc
    save_whole(output, attempt)
    began = time.time()
    with _pass_on_sigterm() as terminated:
        code = _papermill(words)
    if terminated.is_set():
        code = TERMINATED
    _closing_words(params, attempt if attempt.exists() else output, code, began)
    return code


def check_before(params: StageParams) -> None:
    """Raise an `InputError` when the stage cannot begin, as its kernel would; a finished one is shown."""
    check_owner(params)
    settle(params.run_folder)
    inputs = input_fingerprints(params)
    if params.force or not is_finished(params, inputs):
        check_ready(params, inputs)


def _papermill(words: list[str]) -> int:
    import click
    from papermill.cli import papermill
    from papermill.engines import papermill_engines
    from papermill.exceptions import PapermillExecutionError

    papermill_engines.register(ENGINE, QuietEngine)  # also where this package is on a path, not installed
    try:
        papermill.main(args=words, prog_name="papermill", standalone_mode=False)
    except PapermillExecutionError as error:
        logger.error("%s: %s", error.ename, str(error.evalue)[:2000])
        return FAILED
    except click.ClickException as error:
        logger.error("%s", error.format_message())
        return USAGE
    except (click.Abort, KeyboardInterrupt):  # Ctrl-C, which click may not be the first to see
        logger.error("interrupted; the same command goes on from what is finished")
        return FAILED
    except SystemExit as leave:  # papermill's way to say that the kernel died
        return leave.code if isinstance(leave.code, int) else FAILED
    return OK


def _defaults(extra: list[str]) -> list[str]:
    """Return the options a log file wants, unless the caller chose otherwise."""
    chosen = set(extra)
    words = [] if chosen & {"-k", "--kernel"} else ["-k", "python3"]
    if "--engine" not in chosen:
        words += ["--engine", ENGINE]
    if not chosen & {"--log-output", "--no-log-output"}:
        words.append("--log-output")
    if not chosen & {"--progress-bar", "--no-progress-bar"}:
        words.append("--no-progress-bar")
    return words


@contextlib.contextmanager
def log_to_stderr() -> Iterator[None]:
    """Send log lines (ours, and the notebook's own output) to stderr without secrets; other libraries'
    warnings too.

    A handler on the root logger also keeps papermill from setting up its own.
    """
    handlers = []
    for name, level in (("dflash_lab", logging.INFO), ("papermill", logging.INFO), ("", logging.WARNING)):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(RedactingFormatter("%(message)s"))
        handler.addFilter(_worth_a_line)
        target = logging.getLogger(name)
        handlers.append((target, handler, target.level, target.propagate))
        target.addHandler(handler)
        target.setLevel(level)
        target.propagate = False
    try:
        yield
    finally:
        for target, handler, level, propagate in handlers:
            target.removeHandler(handler)
            target.setLevel(level)
            target.propagate = propagate


def _worth_a_line(record: logging.LogRecord) -> bool:
    """Drop empty lines and papermill's running commentary; keep the notebook's words, of a table its size."""
    text = record.getMessage().rstrip()
    if table := re.match(r"shape: \(([\d_,]+), (\d+)\)\n", text):  # polars cuts a wide one past reading
        text = f"table: {table[1].replace('_', ',')} rows, {table[2]} columns"
    record.msg, record.args = text, ()
    return bool(text) and not text.startswith(_COMMENTARY)


_COMMENTARY = (
    "Executing Cell",
    "Ending Cell",
    "Executing notebook",
    "Input Notebook:",
    "Output Notebook:",
    "<IPython.core.display.",
)


@contextlib.contextmanager
def stops_with_words() -> Iterator[None]:
    """Outside a notebook's run (before, between, or while the report is written) SIGTERM ends the command at
    once, with the words and the exit code that it has within.
    """

    def handle(number: int, frame: object) -> None:
        logger.error(STOPPED)
        raise SystemExit(TERMINATED)

    with handling({signal.SIGTERM: handle}):
        yield


@contextlib.contextmanager
def _pass_on_sigterm() -> Iterator[threading.Event]:
    """Pass SIGTERM on to the kernel once, and kill the kernel if it does not end in time."""
    terminated = threading.Event()

    def handle(number: int, frame: object) -> None:
        first = not terminated.is_set()
        terminated.set()
        if not signal_kernels(signal.SIGTERM):
            raise SystemExit(TERMINATED)
        if first:
            killer.start()

    killer = threading.Timer(KILL_AFTER_S, signal_kernels, [signal.SIGKILL])
    killer.daemon = True
    try:
        with handling({signal.SIGTERM: handle}):
            yield terminated
    finally:
        killer.cancel()


def signal_kernels(number: int) -> int:
    """Send a signal to the kernels that this process started; return how many there are."""
    import psutil

    count = 0
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "ipykernel" in " ".join(child.cmdline()):
                os.kill(child.pid, number)
                count += 1
    return count


def _closing_words(params: StageParams, output: Path, code: int, began: float) -> None:
    if code == OK:
        logger.info("%s: finished, %s", params.stage, output)
        return
    failure = params.folder / FAILURE
    logger.error("%s: not finished (exit code %d); the notebook up to there: %s", params.stage, code, output)
    if failure.exists() and failure.stat().st_mtime >= began:
        record = read_json(failure)
        logger.error("details: %s", failure)
        if record.get("advice"):
            logger.error("advice: %s", record["advice"])
    if (params.folder / RESULT).exists():
        logger.error("the earlier result stands as it was: %s", params.folder / RESULT)
    if code == TERMINATED:
        logger.error(STOPPED)


# --- All stages of a run


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
    for line in closing_lines(read_result(run / RESULT)["figures"]):
        logger.info("%s", line)
    logger.info("notebooks  %s", run / "*.ipynb")
    logger.info("report     %s", run / REPORT)
    return OK


def plan(given: Given) -> list[tuple[str, Given]]:
    """Return (stage, parameters) in order, checked; a stage with `num_shards` comes once a shard."""
    folder = find_run(given.run).parameters
    if folder is None:
        raise InputError(f"{given.run}: no parameters in {PARAMS}. A new run: dflash-lab new NAME.")
    stages = [stage for stage in STAGES if (folder / f"{stage}.yaml").exists()]
    if not stages:
        raise InputError(f"{folder}: has no <stage>.yaml. Stages: {', '.join(STAGES)}.")
    known = {name for stage in stages for name in params_class(stage).model_fields}
    names = [name for name, _ in [*given.typed, *given.raw]]
    if old := [name for name in names if name not in known and name in StageParams.renamed]:
        told = "; ".join(f"{name} is now called {StageParams.renamed[name]}" for name in dict.fromkeys(old))
        raise InputError(f"{told}. Type the new name in place of the old one.")
    for name in names:
        if name not in known:
            raise InputError(f"no stage has a parameter {name[:80]!r}{near(name, known)}.")
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


# --- papermill's own command


def main(words: Sequence[str]) -> None:
    """Be papermill's command for `words`: `papermill extract.ipynb -p shard 0` says all that a person means.
    Ends with one sentence on stderr and exit code 1 when it cannot be done.
    """
    from papermill.cli import papermill

    own = papermill.callback

    def complete(**options: Any) -> None:
        try:
            found = filled_in(options, Path.cwd())
        except (LabError, OSError) as error:
            sys.exit(f"papermill: {redact(str(error))}")
        own(**found)

    papermill.callback = complete
    papermill.main(args=[*words], prog_name="papermill")


def filled_in(options: dict[str, Any], cwd: Path) -> dict[str, Any]:
    """Return what papermill's command was given, typed in `cwd`, with the notebook, its output path, the run
    and our engine filled in; what is about another notebook, or only asks for help, as it is.

    The parameters are checked as the launcher does it: raises an `InputError` for those that the stage
    refuses, for a stage that is not ready to run, and where only the person can say where the notebook goes.
    """
    typed, output = options["notebook_path"] or "", options["output_path"]
    found = stage_notebook(typed, cwd)
    if found is None or options["help_notebook"]:
        return options
    stage, source = found
    root = workspace(cwd / (options["cwd"] or ""))
    files, here = options["parameters_file"], all(map(_is_here, options["parameters_file"]))
    if not output and (options["prepare_only"] or not here):
        what = "--prepare-only" if options["prepare_only"] else "a file of parameters that is not here"
        raise InputError(
            f"{stage}: with {what}, say where the notebook is to go: papermill {typed} out.ipynb ..."
        )
    files = [_nearest(path, cwd, root) if _is_here(path) else path for path in files]
    filled = {**options, "engine": options["engine"] or ENGINE, "parameters_file": tuple(files)}
    if not output or not (cwd / typed).exists():
        filled["notebook_path"] = literal(source)
    if not here:
        return filled
    given = Given(
        base64=[*options["parameters_base64"]],
        files=[str(cwd / path) for path in files],
        yaml=[*options["parameters_yaml"]],
        typed=[*options["parameters"]],
        raw=[*options["parameters_raw"]],
    )
    with contextlib.chdir(root):  # where the notebook will run
        params = read_given(params_class(stage), given)
        if not options["prepare_only"]:
            check_before(params)
        goal, attempt = output_notebook(params).absolute(), attempt_notebook(params).absolute()
        # Of `-f` the notebook is told the values, but not in which run's folder they lie.
        if given.named_run(stage) and all(values.get("run") is None for _, values in given.sources(stage)):
            filled["parameters_raw"] = (("run", params.run), *options["parameters_raw"])
    if not output:
        filled["output_path"] = literal(goal)
        make_folder(goal.parent)
        save_whole(goal, attempt)
        until = f"; until it ends well, to {attempt.name}" if attempt != goal else ""
        sys.stderr.write(f"papermill: the executed notebook goes to {goal}{until}\n")
    return filled


def _nearest(path: str, cwd: Path, root: Path) -> str:
    """Return a parameter file as typed; one that is only in the workspace by its path there."""
    return str(root / path) if not (cwd / path).exists() and (root / path).exists() else path


def _is_here(path: str) -> bool:
    """Say whether a parameter file is one on this machine, which papermill may also read from elsewhere."""
    return path != "-" and "://" not in path and not path.startswith("{")  # the last is JSON itself


if __name__ == "__main__":
    main(sys.argv[1:])
