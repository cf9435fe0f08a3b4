"""One writer a shard: a lock on `<shard>/.lock`, and for moments one on the store."""

from __future__ import annotations

import os
import socket
from contextlib import AbstractContextManager
from pathlib import Path

from dflash_lab.errors import InputError
from dflash_lab.extraction.manifest import shard_folders
from dflash_lab.locks import lock_holder, sole_lock, waiting_lock

_LOCK_FILE = ".lock"  # hidden: who held it last is no part of what the store holds


def store_lock(store: Path) -> AbstractContextManager[None]:
    """Hold a store for the moment it takes to compare or write its identity; waits for its turn."""
    return waiting_lock(store / _LOCK_FILE)


def shard_lock(folder: Path) -> AbstractContextManager[None]:
    """Hold a shard for writing; `InputError` naming the holder when another process has it."""
    return sole_lock(
        folder / _LOCK_FILE,
        f"process {os.getpid()} on {socket.gethostname()}",
        lambda who: (
            f"{folder} is being written by {who}. Wait for it or stop it; to work beside it "
            "give another shard."
        ),
    )


def refuse_other_counts(store: Path, num_shards: int) -> None:
    """`InputError` when a live process writes this store with another shard count: their samples would
    overlap.
    """
    for folder in shard_folders(store):
        other = int(folder.name.rsplit("-", 1)[1]) != num_shards
        if other and (holder := lock_holder(folder / _LOCK_FILE)) is not None:
            raise InputError(
                f"{folder} is being written by {holder} with another shard count than "
                f"num_shards={num_shards}; the two would store the same samples. Stop it first, or use "
                "its count."
            )
