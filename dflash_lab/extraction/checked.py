"""Parts are read whole once before they are trained on, and remembered as sound.

A part that was altered without a change of size loads, and trains on noise. Its checksum costs one read of
the store, far less than an epoch; so it is asked before the first step, never within one, and again only for
parts whose file has another size or time since, or another line in the manifest. The time of change counts
as well as that of writing: a copy that keeps the latter is another file, and is read. What was found sound
lies in `.checked.json`: hidden, for it says nothing about the store but how lately it was read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import xxhash

from dflash_lab import files
from dflash_lab.errors import StoreError
from dflash_lab.extraction import manifest as manifests
from dflash_lab.file_errors import FileError, naming

CHECKED = ".checked.json"
_THREADS = 4  # reading and hashing release the interpreter
_BLOCK = 1 << 24  # bytes
_TOLD_EVERY_S = 1.0
logger = logging.getLogger(__name__)
Stamp = list[Any]  # [bytes, mtime and ctime in ns, checksum in the manifest]


def check_parts(store: Path | str, on_progress: Callable[[str, int, int], None] | None = None) -> int:
    """Read every part of `store` that is not remembered as sound; return the bytes read.

    `on_progress` gets ("checking the store", bytes done, bytes in all); what it raises ends the reading, and
    finished parts stay remembered. Raises `StoreError` naming each part whose bytes are not those sealed.
    """
    store = Path(store)
    parts = [part for folder in manifests.shard_folders(store) for part in manifests.sealed_parts(folder)]
    known = _remembered(store)
    stamps = {part.name: _stamp(store, part) for part in parts}
    todo = [part for part in parts if known.get(part.name) != stamps[part.name]]
    sound = {name: stamp for name, stamp in stamps.items() if known.get(name) == stamp}
    if not todo:
        return 0
    stop, done = threading.Event(), dict.fromkeys((part.name for part in todo), 0)
    total, damaged = sum(part.bytes for part in todo), []
    with ThreadPoolExecutor(_THREADS) as pool:
        reading = {pool.submit(_is_sound, store, part, done, stop): part.name for part in todo}
        try:
            waiting: set[Future[bool]] = set(reading)
            while waiting:
                ready, waiting = wait(waiting, _TOLD_EVERY_S)
                for one in ready:
                    name = reading[one]
                    if one.result():
                        sound[name] = stamps[name]
                    else:
                        damaged.append(name)
                if on_progress:
                    on_progress("checking the store", sum(done.values()), total)
        finally:
            stop.set()
            _remember(store, sound)
    if damaged:
        raise StoreError(
            f"{store}: {', '.join(sorted(damaged))}: not the bytes that its manifest's checksum is of; they "
            "were damaged since. Run extract with -p recheck True: exactly its samples are redone. "
            "(-p check_store False trains without looking.)"
        )
    return total


def _stamp(store: Path, part: manifests.Part) -> Stamp:
    path = store / part.name
    with naming(path):
        found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, part.checksum]


def _is_sound(store: Path, part: manifests.Part, done: dict[str, int], stop: threading.Event) -> bool:
    """Whether a part's bytes have its checksum; counted in `done`, given up (as not sound) on `stop`."""
    digest, path = xxhash.xxh3_128(), store / part.name
    with naming(path), open(path, "rb") as file:
        while not stop.is_set() and (block := file.read(_BLOCK)):
            digest.update(block)
            done[part.name] += len(block)
    return digest.hexdigest() == part.checksum


def _remembered(store: Path) -> dict[str, Stamp]:
    path = store / CHECKED
    if not path.is_file():
        return {}
    with naming(path):
        found = files.unsealed(path.read_bytes())
    parts = found.get("parts") if found else None
    return parts if isinstance(parts, dict) else {}  # damaged: everything is read again


def _remember(store: Path, sound: dict[str, Stamp]) -> None:
    try:
        files.write_json(store / CHECKED, files.sealed({"parts": sound}))
    except FileError as error:  # a store on a read-only disk
        logger.warning("the next run reads the whole store again: %s", error)
