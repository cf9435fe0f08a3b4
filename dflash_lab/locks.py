"""Locks of the kernel (flock): the holder's death, however it comes, drops them, so none is left behind.

Some network file systems have no locks. There everyone gets one, with a warning.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import time
from pathlib import Path
from typing import IO

from dflash_lab.file_errors import naming
from dflash_lab.files import make_folder

PATIENCE_S = 0.5

logger = logging.getLogger(__name__)


def open_lock(path: Path) -> IO[bytes]:
    """Open a file to lock, making it and its folder; `FileError` where that cannot be."""
    make_folder(path.parent)
    with naming(path):
        return open(path, "a+b", buffering=0)  # closing it has nothing left to write, so it cannot fail


def sign(file: IO[bytes], holder: str) -> None:
    """Leave the holder's name in a locked file, for whoever asks who has it."""
    with naming(file.name):
        file.truncate(0)
        file.write(holder.encode())


def signature(file: IO[bytes]) -> str:
    """Return what the holder wrote."""
    file.seek(0)
    return file.read(200).decode(errors="replace").strip()


def try_lock(file: IO, *, shared: bool = False) -> bool:
    """Take the lock of an open file until it is closed; False when another process has it.

    shared: only to see whether somebody holds it. Whoever looks so has the lock for an instant, so the
    exclusive one is tried for `PATIENCE_S` before it counts as taken.
    """
    if shared:
        return _flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    deadline = time.monotonic() + PATIENCE_S
    while not _flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def wait_for_lock(file: IO) -> None:
    """Take the lock of an open file until it is closed, waiting for other processes to be done."""
    _flock(file, fcntl.LOCK_EX)


def _flock(file: IO, how: int) -> bool:
    try:
        fcntl.flock(file, how)
    except OSError as error:
        if how & fcntl.LOCK_NB and error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
            raise
        logger.warning("%s: no locks on this file system; never start the same work twice", file.name)
    return True
