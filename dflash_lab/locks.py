"""Locks of the kernel (flock): the holder's death, however it comes, drops them, so none is left behind.

Some network file systems have no locks. There everyone gets one, with a warning.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from dflash_lab.errors import InputError
from dflash_lab.file_errors import naming
from dflash_lab.files import make_folder

PATIENCE_S = 0.5  # whoever looks whether a lock is held has it for an instant

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def waiting_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a file, made with its folder, once other processes are done with it; `FileError` where
    the file cannot be.
    """
    with _opened(path) as file:
        _flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def sole_lock(path: Path, holder: str, taken: Callable[[str], str]) -> Iterator[None]:
    """The same in the name of `holder`; `InputError` when another process has the lock: in the words of
    `taken`, which is given that process's name.
    """
    with _opened(path) as file:
        deadline = time.monotonic() + PATIENCE_S
        while not _flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB):
            if time.monotonic() > deadline:
                raise InputError(taken(_signature(file)))
            time.sleep(0.02)
        with naming(path):
            file.truncate(0)
            file.write(holder.encode())
        yield


def lock_holder(path: Path) -> str | None:
    """Return who holds the lock of a file, which need only be readable; None when no process does."""
    if not path.exists():
        return None
    with naming(path), open(path, "rb") as file:
        return None if _flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB) else _signature(file)


def _opened(path: Path) -> IO[bytes]:
    make_folder(path.parent)
    with naming(path):
        return open(path, "a+b", buffering=0)  # closing it has nothing left to write, so it cannot fail


def _signature(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(200).decode(errors="replace").strip() or "another process"


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
