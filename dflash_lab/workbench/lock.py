"""One process at a time in a stage's folder.

The lock is the kernel's (flock), so a killed process leaves none behind; the file's text only says who
held it last, which lets the run browser tell "running" from "killed".
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from dflash_lab.errors import InputError

LOCK = ".lock"
logger = logging.getLogger(__name__)


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
        if not _take(file.fileno()):
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
        return not _take(file.fileno())


def _take(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
            raise
        logger.warning("this file system has no locks: do not start the same stage twice at a time")
    return True
