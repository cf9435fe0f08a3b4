"""One writer a shard: an flock on `<shard>/.lock`, which the kernel drops when its holder dies, however it
dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from dflash_lab.errors import InputError
from dflash_lab.extraction.manifest import shard_folders

log = logging.getLogger(__name__)
_LOCK_FILE = ".lock"  # hidden: who held it last is no part of what the store holds


@contextlib.contextmanager
def store_lock(store: Path) -> Iterator[None]:
    """Hold a store for the moment it takes to compare or write its identity; waits for its turn."""
    with open(store / _LOCK_FILE, "a+", encoding="utf-8") as file:
        with contextlib.suppress(OSError):  # without locks the comparison alone must do
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def shard_lock(folder: Path) -> Iterator[None]:
    """Hold a shard for writing; `InputError` naming the holder when another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / _LOCK_FILE, "a+", encoding="utf-8") as file:
        if not _take(file, fcntl.LOCK_EX):
            raise InputError(
                f"{folder} is being written by {_holder(folder)}. Wait for it or stop it; to work "
                f"beside it give another shard."
            )
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def refuse_other_counts(store: Path, num_shards: int) -> None:
    """`InputError` when a live process writes this store with another shard count: their samples would
    overlap.
    """
    for folder in shard_folders(store):
        if int(folder.name.rsplit("-", 1)[1]) == num_shards or not (folder / _LOCK_FILE).exists():
            continue
        with open(folder / _LOCK_FILE, "a+", encoding="utf-8") as file:
            if not _take(file, fcntl.LOCK_SH):
                raise InputError(
                    f"{folder} is being written by {_holder(folder)} with another shard count than "
                    f"num_shards={num_shards}; "
                    f"the two would store the same samples. Stop it first, or use its count."
                )


def _take(file: TextIO, how: int) -> bool:
    """Try for the lock; False when another process has it. A file system without locks gives it to
    everyone, with a warning.
    """
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        log.warning("%s: this file system has no locks; never start one shard twice at a time", file.name)
    return True


def _holder(folder: Path) -> str:
    return (folder / _LOCK_FILE).read_text(encoding="utf-8").strip() or "another process"
