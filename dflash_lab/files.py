"""Files that are either whole or absent: write to a temporary name in the same folder, fsync, rename, fsync
the folder.

Everything the lab leaves on disk goes through these functions, so that a crash or a full disk never leaves
half a file under its final name. Formats are JSON, Parquet and safetensors; nothing is ever pickled.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from dflash_lab.errors import StoreError
from dflash_lab.file_errors import naming


@contextlib.contextmanager
def atomic_path(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the block ends well it is synced and renamed `path`.

    A full disk, a read-only folder and their like are a `FileError` about `path`, with nothing left behind.
    """
    path = Path(path)
    make_folder(path.parent)
    with naming(path):
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


def sweep(folder: Path) -> None:
    """Remove what processes that were killed left half-written below `folder`. Only for who has its lock."""
    for path in list(folder.rglob(".*.tmp")):
        with naming(path):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def make_folder(path: Path | str) -> None:
    """Make a folder and those above it, if they are not there yet."""
    with naming(path):
        Path(path).mkdir(parents=True, exist_ok=True)


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
    write_bytes(path, as_json(value))


def as_json(value: Any) -> bytes:
    """The bytes that `write_json` writes."""
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def plain(value: Any) -> Any:
    """Return what a person is told as a JSON value: a number that JSON has no word for (NaN, infinity) is
    None, a scalar of numpy or torch its number, anything else its text.
    """
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bool | str | None):
        return value
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, int) else str(value)


def read_json(path: Path | str) -> Any:
    """Read JSON; a `StoreError` names the file and line when it cannot be parsed."""
    path = Path(path)
    with naming(path):
        data = path.read_bytes()
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        raise StoreError(
            f"{path}:{error.lineno}: not valid JSON ({error.msg}). Remove the file to make it again."
        ) from error
    except UnicodeDecodeError as error:
        raise StoreError(
            f"{path}: not UTF-8 text at byte {error.start}. Remove the file to make it again."
        ) from error
    except ValueError as error:  # a number of more digits than Python converts
        raise StoreError(f"{path}: not valid JSON ({error}). Remove the file to make it again.") from error
    except RecursionError:
        raise StoreError(f"{path}: nested too deeply for JSON. Remove the file to make it again.") from None


def append_line(path: Path | str, value: Any) -> None:
    """Append one JSON object as a line and sync it; when that fails, the file is as it was.

    A line torn by a crash is the reader's to ignore.
    """
    path = Path(path)
    make_folder(path.parent)
    line = (json.dumps(value, allow_nan=False) + "\n").encode()
    with naming(path), open(path, "ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        try:
            written = file.write(line)
            while written < len(line):  # a disk about to be full takes a part, and refuses the next
                written += file.write(line[written:])
            os.fsync(file.fileno())
        except OSError:
            file.truncate(before)
            raise


def sealed(value: dict[str, Any]) -> dict[str, Any]:
    """Return `value` with a checksum of its own, for a line whose damage must show by itself."""
    return {**value, "check": _check(value)}


def unsealed(line: bytes) -> dict[str, Any] | None:
    """Return the value that `sealed` closed, from its line; None when the line is no longer that.

    A line without a checksum is one of an earlier version, and is taken as it is.
    """
    try:
        value = json.loads(line)
        check = value.pop("check", None)
    except (ValueError, RecursionError, AttributeError, TypeError):
        return None
    return value if check is None or check == _check(value) else None


def _check(value: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())


def digest(value: Any) -> str:
    """Return the xxh3-128 of a JSON value as hex, whatever the order of its keys."""
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


def checksum(path: Path | str) -> str:
    """Return the xxh3-128 of a file's bytes as hex."""
    found = xxhash.xxh3_128()
    with naming(path), open(path, "rb") as file:
        while block := file.read(1 << 22):
            found.update(block)
    return found.hexdigest()


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
