"""Run a stage once: skip it when its finished result matches, leave a result or a failure, never half of one.

`result.json` is written last and atomically; it alone says that a stage is done. It matches when the
parameters and the content of the inputs are the same, so a second run does no work, and a changed stage
invalidates the ones after it. Every caller (notebook, command line, test) goes through `execute`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dflash_lab.errors import StoreError, chain
from dflash_lab.file_errors import FileError, file_error
from dflash_lab.files import read_json, sweep, write_json
from dflash_lab.provenance import provenance
from dflash_lab.release import collect, forget_locals, release
from dflash_lab.workbench import peak
from dflash_lab.workbench.advice import advice_for, details_of
from dflash_lab.workbench.fingerprint import fingerprints
from dflash_lab.workbench.lock import stage_lock
from dflash_lab.workbench.params import StageParams, defaults
from dflash_lab.workbench.progress import Progress, ProgressCallback, StopFlag, Stopped, duration
from dflash_lab.workbench.registry import result_class, run_function
from dflash_lab.workbench.secrets import RedactingFormatter, redact_tree

SCHEMA_VERSION = 1
RESULT = "result.json"
FAILURE = "failure.json"
UNSTOPPED_S = 20.0  # a stage that has not reached a report this long after SIGTERM is ended by force
_FREE = ("run_dir", "interactive", "force")  # parameters that change how a stage runs, not what it finds

logger = logging.getLogger(__name__)


def execute(params: StageParams, progress: ProgressCallback | None = None) -> Any:
    """Run the stage of `params`, or load its finished result. Returns the stage's result object.

    Raises what the stage raises, after writing `failure.json` beside where the result would be.
    """
    release()  # an earlier cell's error may still hold GPU memory
    with _logging(), stage_lock(params.folder):
        inputs = fingerprints([*_target_folder(params), *params.inputs()], params.run)
        if not params.force and is_finished(params, inputs):
            logger.info("%s: finished before with the same parameters and inputs", params.stage)
            return _load(params)
        return _run(params, inputs, progress)


def _load(params: StageParams) -> Any:
    """Read a finished stage's files; `StoreError` when something took or broke them since."""
    try:
        return result_class(params.stage).load(params.folder)
    except Exception as error:  # polars, OSError, StoreError: the remedy is the same
        raise StoreError(
            f"{params.folder}: finished before, but what it left cannot be read ({error}). Remove "
            f"{params.folder / RESULT} to run the stage again; it goes on from what is still there."
        ) from error


def is_finished(params: StageParams, inputs: dict[str, str] | None = None) -> bool:
    """Say whether `result.json` stands for these parameters and the present content of the inputs."""
    path = params.folder / RESULT
    if not path.exists():
        return False
    result = read_result(path)
    if inputs is None:
        inputs = fingerprints([*_target_folder(params), *params.inputs()], params.run)
    then, now = _of_today(type(params), result["parameters"]), redact_tree(params.as_dict())
    same = _significant(then) == _significant(now)
    return same and result["inputs"] == inputs and params.stands()


def read_result(path: Path) -> dict[str, Any]:
    """Read a `result.json`; a `StoreError` when it is not one, or of another version of this program."""
    result = read_json(path)
    version = result.get("schema_version") if isinstance(result, dict) else None
    if version != SCHEMA_VERSION:
        raise StoreError(
            f"{path}: schema version {version!r}, this program writes {SCHEMA_VERSION}. "
            "Move the run folder away, or give another run_dir."
        )
    kinds: dict[str, Any] = {"figures": dict}
    if "run" not in result:  # a stage's own, not the closing table of the run
        kinds |= {"parameters": dict, "inputs": dict, "stage": str, "seconds": int | float}
    for name, kind in kinds.items():
        if not isinstance(result.get(name), kind):
            raise StoreError(f"{path}: has no {name}. Remove the file to make it again.")
    return result


def _run(params: StageParams, inputs: dict[str, str], progress: ProgressCallback | None) -> Any:
    folder = params.folder
    sweep(folder)
    (folder / RESULT).unlink(missing_ok=True)
    stop = StopFlag()
    own = Progress(interactive=params.interactive, stop=stop) if progress is None else None
    report = _stoppable(progress, stop) if progress is not None else own
    peak.reset_peak()
    start = time.monotonic()
    try:
        with _on_sigterm(stop, lambda: _forced(params, start)), _current(params.device):
            result = run_function(params.stage)(params, report)
    except BaseException as error:
        forget_locals(error)
        collect()
        told = _told(error, folder)
        _write_failure(folder / FAILURE, failure_record(params, told, time.monotonic() - start))
        if told is not error:
            raise told from error
        raise
    finally:
        if own is not None:
            own.close()
    seconds = time.monotonic() - start
    write_json(folder / RESULT, redact_tree(_result_record(params, inputs, result.figures, seconds)))
    (folder / FAILURE).unlink(missing_ok=True)
    logger.info("%s: done in %s", params.stage, duration(seconds))
    return result


def _told(error: BaseException, folder: Path) -> BaseException:
    """Return the error as a person is told it: a library's words about a full disk name no file."""
    named = file_error(error, folder)
    if named is None:
        return error
    named.__cause__ = error
    return named


def _write_failure(path: Path, record: dict[str, Any]) -> None:
    """Write the failure; a disk too full even for that must not hide the error itself."""
    try:
        write_json(path, record)
    except FileError as error:
        logger.error("the record of this failure could not be written: %s", error)


def _result_record(params: StageParams, inputs: dict, figures: dict, seconds: float) -> dict[str, Any]:
    files = sorted(
        path for path in params.folder.rglob("*") if path.is_file() and not path.name.startswith(".")
    )
    return {
        "schema_version": SCHEMA_VERSION,
        "stage": params.stage,
        "parameters": params.as_dict(),
        "inputs": inputs,
        "figures": {name: _plain(value) for name, value in figures.items()},
        "seconds": round(seconds, 3),
        "peak_memory": peak.peak_memory(),
        "files": {path.relative_to(params.folder).as_posix(): path.stat().st_size for path in files},
        **provenance(),
    }


def failure_record(params: StageParams, error: BaseException, seconds: float) -> dict[str, Any]:
    """Return what `failure.json` holds: the error, where it arose, and what the exception itself knows.

    An exception may carry `details` (a dict of plain values: batch, lengths, memory) and `advice` (a
    sentence).
    """
    frames = [
        f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
        for link in chain(error)
        for frame in traceback.extract_tb(link.__traceback__)
    ]
    record = {
        "schema_version": SCHEMA_VERSION,
        "stage": params.stage,
        "state": "stopped" if isinstance(error, Stopped | KeyboardInterrupt) else "failed",
        "error": type(error).__name__,
        "message": str(error)[:4000],
        "where": frames[-12:],
        "details": _plain(details_of(error)),
        "advice": advice_for(error, params),
        "parameters": params.as_dict(),
        "seconds": round(seconds, 3),
        "peak_memory": peak.peak_memory(),
        **provenance(),
    }
    return redact_tree(record)


def _plain(value: Any) -> Any:
    """Return a JSON value; numbers JSON has no word for (NaN, infinity) become None."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool | str | None):
        return value
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return value if value - value == 0 else None
    return value if isinstance(value, int) else str(value)


def _significant(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if name not in _FREE}


def _of_today(cls: type[StageParams], parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a result under today's names; one that an earlier version did not know had
    its default.
    """
    named = {cls.renamed.get(name, name): value for name, value in parameters.items()}
    return {**defaults(cls), **named}


def _target_folder(params: StageParams) -> list[Path]:
    """The target's folder; one without a config is no checkpoint, and may be a whole disk."""
    folder = Path(os.path.expanduser(params.target))
    return [folder] if os.path.exists(folder / "config.json") else []


def _stoppable(progress: ProgressCallback, stop: StopFlag) -> ProgressCallback:
    def report(description: str, done: int, total: int, **fields: Any) -> None:
        stop.check()
        progress(description, done, total, **fields)

    return report


@contextlib.contextmanager
def _on_sigterm(stop: StopFlag, end_by_force: Callable[[], None]) -> Iterator[None]:
    """Turn SIGTERM into a stop at the next report; only the main thread can, others run without."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: Any) -> None:
        stop.set("SIGTERM")
        if not killer.is_alive():  # a second signal changes nothing
            killer.start()

    killer = threading.Timer(UNSTOPPED_S, end_by_force)
    killer.daemon = True
    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        killer.cancel()
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _current(device: str) -> Iterator[None]:
    """Make a GPU that is named by its number the current one: kernels and graphs are launched on that."""
    if not device.startswith("cuda:"):
        yield
        return
    import torch

    from dflash_lab.target.loading import choose_device

    with torch.cuda.device(choose_device(device)):
        yield


def _forced(params: StageParams, start: float) -> None:
    """End the process: every file is whole or absent at any time, so this loses only the step it was in."""
    words = (
        f"no safe point reached {UNSTOPPED_S:.0f} s after SIGTERM; ended by force, finished files are kept"
    )
    logger.error(words)
    _write_failure(params.folder / FAILURE, failure_record(params, Stopped(words), time.monotonic() - start))
    os._exit(128 + signal.SIGTERM)


@contextlib.contextmanager
def _logging() -> Iterator[None]:
    """Let the package's log lines reach stderr (the notebook's output, the job's log), without secrets."""
    root = logging.getLogger("dflash_lab")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RedactingFormatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    level = root.level
    root.addHandler(handler)
    if level == logging.NOTSET:
        root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
