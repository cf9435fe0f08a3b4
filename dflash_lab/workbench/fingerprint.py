"""Tell whether a stage's inputs changed, without reading terabytes.

A file counts by its content. A folder (a feature store, a checkpoint, a local target) counts by the names
and sizes of all its files and by the content of the small ones: manifests, configs and indexes carry the
checksums of the large. Times are left out, so that a copied run folder is still finished.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

import xxhash

from dflash_lab.file_errors import FileError, naming
from dflash_lab.files import checksum
from dflash_lab.folders import walk

_SMALL = 4 << 20  # bytes; files of a folder up to this size are read
_LARGE = 256 << 20  # bytes; a single file above this counts by size, its first and its last MiB


def fingerprints(paths: Iterable[Path], run: Path) -> dict[str, str]:
    """Return a fingerprint for each path, keyed relative to the run folder.

    A path that is absent reads ``absent``.
    """
    paths = [Path(path) for path in paths]
    return dict(zip(fingerprint_names(paths, run), map(fingerprint, paths), strict=True))


def fingerprint_names(paths: Iterable[Path], run: Path) -> list[str]:
    """Return each path's name in a result: relative to the run folder, or as it is where it lies outside."""
    relatives = [(path, os.path.relpath(path, run)) for path in paths]
    return [str(path) if relative.startswith("..") else relative for path, relative in relatives]


def fingerprint(path: Path) -> str:
    """Return the xxh3-128 of a file's content, or of a folder's names, sizes and small files; `FileError` for
    what is neither, `InputError` for a folder without end.
    """
    with naming(path):  # also asking whether it is there can fail: a name too long, a dead network mount
        if path.is_dir():
            return _folder(path)
        if path.exists() and not path.is_file():  # a device or a pipe, which may never end
            raise FileError(errno.EINVAL, path)
        return _file(path) if path.exists() else "absent"


def _file(path: Path) -> str:
    size = path.stat().st_size
    if size <= _LARGE:
        return checksum(path)
    with open(path, "rb") as file:
        first = file.read(1 << 20)
        file.seek(-(1 << 20), os.SEEK_END)
        return xxhash.xxh3_128_hexdigest(str(size).encode() + first + file.read())


def _folder(folder: Path) -> str:
    digest = xxhash.xxh3_128()
    for path in sorted(walk(folder)):
        if not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder).as_posix()}\0{size}\0".encode())
        if size <= _SMALL:
            digest.update(checksum(path).encode())
    return digest.hexdigest()
