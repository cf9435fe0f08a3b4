"""One writer a shard: a lock on `<shard>/.lock`, and for moments one on the store."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from dflash_lab.errors import InputError
from dflash_lab.extraction.manifest import shard_folders
from dflash_lab.locks import open_lock, sign, signature, try_lock, wait_for_lock

_LOCK_FILE = ".lock"  # hidden: who held it last is no part of what the store holds


@contextlib.contextmanager
def store_lock(store: Path) -> Iterator[None]:
    """Hold a store for the moment it takes to compare or write its identity; waits for its turn."""
    with open_lock(store / _LOCK_FILE) as file:
        wait_for_lock(file)
        yield


@contextlib.contextmanager
def shard_lock(folder: Path) -> Iterator[None]:
    """Hold a shard for writing; `InputError` naming the holder when another process has it."""
    with open_lock(folder / _LOCK_FILE) as file:
        if not try_lock(file):
            raise InputError(
                f"{folder} is being written by {_holder(file)}. Wait for it or stop it; to work beside it "
                "give another shard."
            )
        sign(file, f"process {os.getpid()} on {socket.gethostname()}")
        yield


def refuse_other_counts(store: Path, num_shards: int) -> None:
    """`InputError` when a live process writes this store with another shard count: their samples would
    overlap.
    """
    for folder in shard_folders(store):
        if int(folder.name.rsplit("-", 1)[1]) == num_shards or not (folder / _LOCK_FILE).exists():
            continue
        with open_lock(folder / _LOCK_FILE) as file:
            if not try_lock(file, shared=True):
                raise InputError(
                    f"{folder} is being written by {_holder(file)} with another shard count than "
                    f"num_shards={num_shards}; the two would store the same samples. Stop it first, or use "
                    "its count."
                )


def _holder(file: IO[bytes]) -> str:
    return signature(file) or "another process"
