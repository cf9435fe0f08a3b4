"""One process at a time in a stage's folder.

The file's text only says who held it last; the lock, which a killed process loses, lets the run browser tell
"running" from "killed".
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import AbstractContextManager
from pathlib import Path

from dflash_lab.locks import lock_holder, sole_lock

LOCK = ".lock"


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
