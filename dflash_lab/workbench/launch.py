"""Run a stage's notebook headless: fill in papermill's output path, check first, end with an exit code that
is true.

papermill runs inside this process, so a SIGTERM (a pre-empted job) is ours to pass on: the kernel stops its
stage at a point it can resume from and the saved notebook says so. The exit code is 0, 1 for an error, 138
for a dead kernel, 143 after SIGTERM; whether the stage is done is said by its `result.json` alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_lab.files import make_folder, read_json, write_bytes
from dflash_lab.stages import params_class
from dflash_lab.workbench.finished import FAILURE, RESULT, check_ready, input_fingerprints, is_finished
from dflash_lab.workbench.kernel import enter_workspace, notebook_path
from dflash_lab.workbench.named_runs import check_owner
from dflash_lab.workbench.papermill_engine import ENGINE, QuietEngine
from dflash_lab.workbench.param_files import Given, read_given
from dflash_lab.workbench.params import StageParams
from dflash_lab.workbench.replace import settle
from dflash_lab.workbench.secrets import RedactingFormatter, redact

OK, FAILED, USAGE, DEAD_KERNEL, TERMINATED = 0, 1, 2, 138, 143
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
    run = [cell for cell in notebook["cells"] if cell["cell_type"] == "code" and _source(cell)]
    answered = all("shell.execute_reply" in cell["metadata"].get("execution", {}) for cell in run)
    return bool(record.get("end_time")) and not record.get("exception") and answered


def _source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"]).strip()


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
    noise: tuple[str, ...] = (
        "Executing Cell",
        "Ending Cell",
        "Executing notebook",
    )
    noise += ("Input Notebook:", "Output Notebook:", "<IPython.core.display.")
    return bool(text) and not text.startswith(noise)


@contextlib.contextmanager
def stops_with_words() -> Iterator[None]:
    """Outside a notebook's run (before, between, or while the report is written) SIGTERM ends the command at
    once, with the words and the exit code that it has within.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: object) -> None:
        logger.error(STOPPED)
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _pass_on_sigterm() -> Iterator[threading.Event]:
    """Pass SIGTERM on to the kernel once, and kill the kernel if it does not end in time."""
    terminated = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield terminated
        return

    def handle(number: int, frame: object) -> None:
        first = not terminated.is_set()
        terminated.set()
        if not signal_kernels(signal.SIGTERM):
            raise SystemExit(TERMINATED)
        if first:
            killer.start()

    killer = threading.Timer(KILL_AFTER_S, signal_kernels, [signal.SIGKILL])
    killer.daemon = True
    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield terminated
    finally:
        killer.cancel()
        signal.signal(signal.SIGTERM, before)


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
