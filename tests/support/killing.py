"""Cut an action short as `kill -9` does, before each of its operations on files in turn: what Python's audit
events tell of below one folder. Each try is a forked process, so call it from a script whose libraries have
started no threads.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

EVENTS = {"open", "shutil.rmtree"} | {
    f"os.{name}" for name in ("rename", "remove", "mkdir", "rmdir", "chmod", "truncate")
}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT

Step = Callable[[Path], None]


def killed_everywhere(root: Path, prepare: Step, act: Step, check: Step, stride: int = 1) -> int:
    """For each `stride`-th operation of `act`: prepare a fresh folder, kill `act` right before it, and let
    `check` look at what is left. Returns the number of kills; stops with an error when a check fails.
    """
    for kills, number in enumerate(range(0, 100_000, stride)):
        folder = root / "try"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        ended_well(forked(prepare, folder), f"prepare {number}")
        status = forked(act, folder, number)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if not killed:
            ended_well(status, f"act {number}")
        ended_well(forked(check, folder), f"check after a kill before operation {number}")
        if not killed:
            return kills
    raise SystemExit("the action never ended")


def forked(step: Step, folder: Path, kill_at: int | None = None) -> int:
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        if kill_at is not None:
            _arm(folder, kill_at)
        step(folder)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def count_operations(act: Step, folder: Path) -> int:
    """Run `act` in a process of its own and return how many operations it does."""
    told = folder.with_name(f"{folder.name}.count")

    def counting(folder: Path) -> None:
        count = [0]

        def one() -> None:
            count[0] += 1

        _watch(folder, one)
        act(folder)
        told.write_text(str(count[0]))

    ended_well(forked(counting, folder), "counting")
    return int(told.read_text())


def _arm(folder: Path, kill_at: int) -> None:
    left = [kill_at]

    def one() -> None:
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    _watch(folder, one)


def _watch(folder: Path, operation: Callable[[], None]) -> None:
    def watch(event: str, arguments: tuple) -> None:
        if event not in EVENTS or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        if event == "open" and not (arguments[2] or 0) & WRITES:
            return
        if os.path.abspath(os.fsdecode(arguments[0])).startswith(f"{folder}{os.sep}"):
            operation()

    sys.addaudithook(watch)


def ended_well(status: int, what: str) -> None:
    if status:
        raise SystemExit(f"{what}: ended with status {status}")
