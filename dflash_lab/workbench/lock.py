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
from dflash_lab.file_errors import naming
from dflash_lab.locks import open_lock, sign, signature, try_lock

LOCK = ".lock"


@contextlib.contextmanager
def stage_lock(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, making the folder.

    `InputError` when another process holds it, `FileError` when the folder cannot be written to.
    """
    with open_lock(folder / LOCK) as file:
        if not try_lock(file):
            raise InputError(
                f"{folder}: in use by another process {signature(file)}. Wait for it, or stop it."
            )
        sign(file, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        yield


def is_held(folder: Path) -> bool:
    """Say whether a process on this machine works in the stage's folder now."""
    path = folder / LOCK
    if not path.exists():
        return False
    with naming(path), open(path, "rb") as file:
        return not try_lock(file, shared=True)
