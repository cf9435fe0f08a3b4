"""Several processes of this machine that do one run together and end together."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from dflash_lab import files
from dflash_lab.errors import LabError, carried
from dflash_lab.machine import usable_cpus

POLL_S = 0.5
BLAME_S = 3.0  # for other processes to fail too, so that the first fault can be told from its echoes
KILL_S = 5.0  # between asking a process to end and ending it


class WorkerFailed(LabError, RuntimeError):
    """A process of a run failed; the message holds its own traceback or the end of its own output, `advice`
    and `details` what its own error carried.
    """

    def __init__(self, message: str, told: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.advice: str = (told or {}).get("advice") or ""
        self.details: dict[str, Any] = (told or {}).get("details") or {}


def words_of(error: BaseException) -> dict[str, Any]:
    """Return what a process hands on of its error: `advice` and `details`."""
    return {"advice": carried(error, "advice"), "details": carried(error, "details", dict)}


class PeerGone(LabError, RuntimeError):
    """The process at the other end of a connection is gone: an echo of its fault, not a fault of this one."""


@dataclass(frozen=True)
class Job:
    """One process: `work(*arguments)` returns plain JSON values. `work` is a function of a module."""

    name: str
    work: Callable[..., Any]
    arguments: tuple[Any, ...]
    leads: bool  # the run is over when all that lead have returned


def run_workers(
    jobs: Sequence[Job],
    folder: Path,
    *,
    ends: Sequence[Connection] = (),
    on_poll: Callable[[], None] | None = None,
    on_stop: Callable[[], None] | None = None,
    grace_s: float = 60.0,
) -> dict[str, Any]:
    """Start every job and wait for them; what each returned, by name.

    Each is started fresh (spawn). What it prints goes into a log of its own; what it returns, or the
    traceback it ends with, into a file beside it. The first that fails ends the run: the others are given a
    moment to tell whether the fault was theirs, then ended, and `WorkerFailed` holds the failing one's own
    traceback, or the signal that killed it. When all that lead have returned, the rest are told nothing: they
    see their connections close, and have `grace_s` to end by themselves.

    `ends` are connections handed to jobs, closed here once they have started. `on_poll` is called twice a
    second; when it raises, `on_stop` is to ask the leading jobs for an end, and they have `grace_s` for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    threads = max(1, usable_cpus() // len(jobs))
    processes: dict[str, BaseProcess] = {}
    try:
        for job in jobs:
            for path in (_result(folder, job.name), _error(folder, job.name)):
                path.unlink(missing_ok=True)
            process = context.Process(target=_child, args=(job, folder, threads), name=job.name, daemon=True)
            process.start()
            processes[job.name] = process
        for end in ends:
            end.close()
        leading = [processes[job.name] for job in jobs if job.leads]
        try:
            _watch(processes, leading, folder, on_poll)
        except WorkerFailed:
            raise
        except BaseException:
            if on_stop is not None:
                on_stop()
                _join(leading, grace_s)
            raise
        _join(processes.values(), grace_s)
        _blame(processes, folder)
    finally:
        _end(processes.values())
    return {job.name: files.read_json(_result(folder, job.name)) for job in jobs}


def receive(connection: Connection, peer: str, timeout_s: float | None = None) -> Any:
    """The next message of `peer`, None after `timeout_s`; `PeerGone` if it, or the parent, is gone."""
    if not heard([connection], timeout_s):
        return None
    try:
        return connection.recv()
    except (EOFError, OSError) as error:
        raise PeerGone(f"{peer} is gone") from error


def heard(connections: Sequence[Connection], timeout_s: float | None = None) -> list[Connection]:
    """Those of `connections` that have a message or have closed, none after `timeout_s`; `PeerGone` if the
    parent is gone.
    """
    parent = multiprocessing.parent_process()
    found = wait([*connections, *([parent.sentinel] if parent is not None else [])], timeout_s)
    speaking = [connection for connection in connections if connection in found]
    if found and not speaking:
        raise PeerGone("the process that started this run is gone")
    return speaking


def send(connection: Connection, peer: str, message: Any) -> None:
    """Send to `peer`; `PeerGone` if nobody is there."""
    try:
        connection.send(message)
    except OSError as error:
        raise PeerGone(f"{peer} is gone") from error


def _watch(
    processes: dict[str, BaseProcess],
    leading: Sequence[BaseProcess],
    folder: Path,
    on_poll: Callable[[], None] | None,
) -> None:
    """Return when all that lead have ended well."""
    while any(process.exitcode is None for process in leading):
        running = [process.sentinel for process in processes.values() if process.exitcode is None]
        wait(running, POLL_S)
        if any(process.exitcode for process in processes.values()):
            _join(processes.values(), BLAME_S)
            _blame(processes, folder)
        if on_poll is not None:
            on_poll()


def _blame(processes: dict[str, BaseProcess], folder: Path) -> None:
    """`WorkerFailed` for the process whose fault it was, if any ended badly."""
    causes: list[tuple[float, str, str]] = []  # when, what is said, and whose it is
    echoes: list[tuple[float, str, str]] = []
    for name, process in processes.items():
        code = process.exitcode
        if not code:
            continue
        if _error(folder, name).exists():
            told = files.read_json(_error(folder, name))
            entry = (told["time"], f"{name} failed:\n{told['traceback']}", name)
            (echoes if told["echo"] else causes).append(entry)
        else:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            words = _tail(folder / f"{name}.log")
            causes.append(
                (0.0, f"{name} {how}.{f' The end of its output:{chr(10)}{words}' if words else ''}", name)
            )
    if causes or echoes:
        _, words, name = min(causes or echoes)
        told = _error(folder, name)
        raise WorkerFailed(words, files.read_json(told) if told.exists() else None)


def _join(processes: Any, seconds: float) -> None:
    until = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))


def _end(processes: Any) -> None:
    """End what is still running of the processes this call started."""
    running = [process for process in processes if process.exitcode is None]
    for process in running:
        process.terminate()
    _join(running, KILL_S)
    for process in running:
        if process.exitcode is None:
            process.kill()
            process.join()


def _child(job: Job, folder: Path, threads: int) -> None:
    """The whole life of one process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and asks for an orderly end
    log = os.open(folder / f"{job.name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for number in (1, 2):
        os.dup2(log, number)
    import torch

    torch.set_num_threads(threads)
    try:
        result = job.work(*job.arguments)
    except BaseException as error:
        told = {"time": time.time(), "echo": isinstance(error, PeerGone), "traceback": traceback.format_exc()}
        files.write_json(_error(folder, job.name), told | words_of(error))
        raise
    files.write_json(_result(folder, job.name), result)


def _result(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _error(folder: Path, name: str) -> Path:
    return folder / f"{name}.error.json"


def _tail(path: Path, size: int = 2000) -> str:
    return path.read_bytes()[-size:].decode(errors="replace").strip() if path.exists() else ""
