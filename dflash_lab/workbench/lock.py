"""One process at a time in a stage's folder.

The file's text only says who held it last; the lock, which a killed process loses, lets the run browser tell
"running" from "killed".
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from dflash_lab.errors import InputError
from dflash_lab.locks import try_lock

LOCK = ".lock"


@contextlib.contextmanager
def stage_lock(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, making the folder.

    `InputError` when another process holds it or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 - closed below, after the lock's life
    except OSError as error:
        raise InputError(
            f"{folder}: cannot write here ({error.strerror}). Give a run_dir that you can write to."
        ) from error
    with file:
        if not try_lock(file):
            file.seek(0)
            raise InputError(
                f"{folder}: in use by another process {file.read(200).strip()}. Wait for it, or stop it."
            )
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        file.flush()
        yield


def is_held(folder: Path) -> bool:
    """Say whether a process on this machine works in the stage's folder now."""
    path = folder / LOCK
    if not path.exists():
        return False
    with open(path, encoding="utf-8") as file:
        return not try_lock(file)
