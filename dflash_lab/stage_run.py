"""Run a stage once: skip it when its finished result matches, leave a result or a failure, never half of one.

Every caller (notebook, command line, cluster, test) goes through `execute`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from dflash_lab import machine
from dflash_lab.errors import FileError, StoreError, carried, chain, file_error
from dflash_lab.files import lock_holder, make_folder, plain, replace, settle, sole_lock, sweep, write_json
from dflash_lab.machine import collect, forget_locals, release
from dflash_lab.params import StageParams
from dflash_lab.progress import Progress, ProgressCallback, StopFlag, Stopped, duration, handling
from dflash_lab.provenance import provenance
from dflash_lab.results import (
    FAILURE,
    RESULT,
    SCHEMA_VERSION,
    check_ready,
    input_fingerprints,
    is_finished,
    kept_more,
    made_again,
    older_rules,
)
from dflash_lab.run_params import check_owner, claim
from dflash_lab.secrets import redact_tree
from dflash_lab.stages import result_class, run_function
from dflash_lab.workspace import logging_shown

LOCK = ".lock"  # in a stage's folder: its text says who held it last, the kernel's lock who holds it now
UNSTOPPED_S = 20.0  # a stage that has not reached a report this long after SIGTERM is ended by force

logger = logging.getLogger(__name__)


def execute(params: StageParams, progress: ProgressCallback | None = None) -> Any:
    """Run the stage of `params`, or load its finished result. Returns the stage's result object.

    `result.json` alone says that a stage is done. It matches when the parameters and the content of the
    inputs are the same. Where it does not match, nothing is done unasked: the stage says what differs and
    what to type. When it is asked (`force`), everything new is made beside the old and takes its place at the
    end, so a failed or killed attempt leaves the earlier result as it was. Raises what the stage raises,
    after writing `failure.json` beside where the result would be.
    """
    release()  # an earlier cell's error may still hold GPU memory
    with logging_shown():
        check_owner(params)
        settle(params.run_folder)
        inputs = input_fingerprints(params)
        if not params.force and is_finished(params, inputs):
            more = "".join(f"; {words}" for words in [*kept_more(params), params.remains()] if words)
            logger.info("%s: finished before with the same parameters and inputs%s", params.stage, more)
            if older := older_rules(params):
                logger.warning("%s. %s", older, made_again(params))
            return _load(params)
        check_ready(params, inputs)
        with stage_lock(params.folder):
            if not params.force and is_finished(params, inputs):  # by another process, meanwhile
                return _load(params)
            check_ready(params, inputs)  # of what another process finished meanwhile, too
            claim(params)
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


def _run(params: StageParams, inputs: dict[str, str], progress: ProgressCallback | None) -> Any:
    folder = params.folder
    sweep(folder)
    shutil.rmtree(params.fresh, ignore_errors=True)
    make_folder(params.fresh)
    stop = StopFlag()
    own = Progress(interactive=params.interactive, stop=stop) if progress is None else None

    def stoppable(description: str, done: int, total: int, **fields: Any) -> None:
        stop.check()
        assert progress is not None
        progress(description, done, total, **fields)

    report = own or stoppable
    machine.reset_peak()
    start = time.monotonic()
    try:
        with _on_sigterm(stop, lambda: _forced(params, start)), _current(params.device):
            result = run_function(params.stage)(params, report)
            result.save(params.fresh)
            seconds = time.monotonic() - start
            record = _result_record(params, inputs, result.figures, seconds)
            write_json(params.fresh / RESULT, redact_tree(record))
            moves, removed = params.replacement()
            if moves:
                replace(params.run_folder, moves, removed)
                shutil.rmtree(params.fresh, ignore_errors=True)
            else:
                logger.info("%s: done, and takes its place when the other shards are", folder.name)
    except BaseException as error:
        forget_locals(error)
        collect()
        named = file_error(error, folder)  # a library's words about a full disk name no file
        if named is not None:
            named.__cause__ = error
        _write_failure(params, named or error, start)
        if named is not None:
            raise named from error
        raise
    finally:
        if own is not None:
            own.close()
    logger.info("%s: done in %s", params.stage, duration(seconds))
    return result


def _write_failure(params: StageParams, failure: BaseException, start: float) -> None:
    """Write the failure; a disk too full even for that must not hide the error itself."""
    record = failure_record(params, failure, time.monotonic() - start)
    try:
        write_json(params.folder / FAILURE, record)
    except FileError as error:
        logger.error("the record of this failure could not be written: %s", error)


def _result_record(params: StageParams, inputs: dict, figures: dict, seconds: float) -> dict[str, Any]:
    files = {
        path.relative_to(root).as_posix(): path.stat().st_size
        for root in (params.folder, params.fresh)  # working files, and those of the result
        for path in root.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "stage": params.stage,
        "parameters": params.as_dict(),
        "overridden": dict(params.overridden),
        "inputs": inputs,
        "figures": plain(figures),
        "seconds": round(seconds, 3),
        "peak_memory": machine.peak_memory(),
        "files": dict(sorted(files.items())),
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
        "details": plain(carried(error, "details", dict) or {}),
        "advice": advice_for(error, params),
        "parameters": params.as_dict(),
        "seconds": round(seconds, 3),
        "peak_memory": machine.peak_memory(),
        **provenance(),
    }
    return redact_tree(record)


@contextlib.contextmanager
def _on_sigterm(stop: StopFlag, end_by_force: Callable[[], None]) -> Iterator[None]:
    """Turn SIGTERM into a stop at the next report, and end by force a stage that does not reach one."""

    def handle(number: int, frame: Any) -> None:
        stop.set("SIGTERM")
        if not killer.is_alive():  # a second signal changes nothing
            killer.start()

    killer = threading.Timer(UNSTOPPED_S, end_by_force)
    killer.daemon = True
    try:
        with handling({signal.SIGTERM: handle}):
            yield
    finally:
        killer.cancel()


@contextlib.contextmanager
def _current(device: str) -> Iterator[None]:
    """Make a GPU that is named by its number the current one: kernels and graphs are launched on that."""
    if not device.startswith("cuda:"):
        yield
        return
    import torch

    from dflash_lab.models.load import choose_device

    with torch.cuda.device(choose_device(device)):
        yield


def _forced(params: StageParams, start: float) -> None:
    """End the process: every file is whole or absent at any time, so this loses only the step it was in."""
    words = (
        f"no safe point reached {UNSTOPPED_S:.0f} s after SIGTERM; ended by force, finished files are kept"
    )
    logger.error(words)
    _write_failure(params, Stopped(words), start)
    os._exit(128 + signal.SIGTERM)


# --- One process at a time in a stage's folder


def stage_lock(folder: Path) -> AbstractContextManager[None]:
    """Hold the folder's lock, making the folder.

    `InputError` when another process holds it, `FileError` when the folder cannot be written to.
    """
    return sole_lock(
        folder / LOCK,
        json.dumps({"pid": os.getpid(), "host": socket.gethostname()}),
        lambda who: f"{folder}: in use by another process {who}. Wait for it, or stop it.",
    )


def is_held(folder: Path) -> bool:
    """Say whether a process on this machine works in the stage's folder now."""
    return lock_holder(folder / LOCK) is not None


# --- What failure.json advises: what the exception itself knows, or what its kind tells


_SIZES = ("batch", "block", "tokens", "anchors", "length", "layers", "taps", "budget", "size", "samples")


def advice_for(error: BaseException, params: StageParams) -> str:
    """Return what to do: the error's own `advice`, else what helps against a lack of memory, else nothing."""
    if own := carried(error, "advice"):
        return str(own)
    from dflash_lab.extraction.oom import classify

    return _memory(error, params) if classify(error).kind == "memory" else ""


def _memory(error: BaseException, params: StageParams) -> str:
    from dflash_lab.memory.crash import explain_crash, requested_bytes

    general = "Run memory_sweep with these parameters for the largest sizes that fit."
    asking = next((str(link) for link in chain(error) if requested_bytes(str(link))), "")
    if not asking:
        return general
    values = {name: value for name, value in params.as_dict().items() if any(word in name for word in _SIZES)}
    sizes = {name: value for name, value in values.items() if isinstance(value, int) and value > 1}
    return f"{explain_crash(asking, dimensions=sizes).explain()} {general}"
