"""Files that are either whole or absent: write to a temporary name in the same folder, fsync, rename, fsync
the folder.

Everything the lab leaves on disk goes through these functions, so that a crash or a full disk never leaves
half a file under its final name. Formats are JSON, Parquet and safetensors; nothing is ever pickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from dflash_lab.errors import StoreError


@contextlib.contextmanager
def atomic_path(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the block ends well it is synced and renamed `path`."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        os.chmod(temporary, 0o666 & ~_umask())
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path | str, data: bytes) -> None:
    """Write `data` atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path | str, value: Any) -> None:
    """Write `value` atomically as indented JSON. NaN and infinity are refused: JSON has no such numbers."""
    write_bytes(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path | str) -> Any:
    """Read JSON; a `StoreError` names the file and line when it cannot be parsed."""
    path = Path(path)
    try:
        return json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        raise StoreError(
            f"{path}:{error.lineno}: not valid JSON ({error.msg}). Remove the file to make it again."
        ) from error
    except UnicodeDecodeError as error:
        raise StoreError(
            f"{path}: not UTF-8 text at byte {error.start}. Remove the file to make it again."
        ) from error


def append_line(path: Path | str, value: Any) -> None:
    """Append one JSON object as a line and sync it. A torn last line (crash) is the reader's to ignore."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(value, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def checksum(path: Path | str) -> str:
    """Return the xxh3-128 of a file's bytes as hex."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def inside(folder: Path | str, name: str) -> Path:
    """Resolve `name` below `folder`; a name that leads out (``..``, absolute, link) is a `StoreError`."""
    folder = Path(folder).resolve()
    path = (folder / name).resolve()
    if not path.is_relative_to(folder):
        raise StoreError(f"{name!r} points outside {folder}: the manifest that names it cannot be trusted.")
    return path


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
