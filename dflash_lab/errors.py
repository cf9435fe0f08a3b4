"""Errors that a person is meant to read: what is wrong, where, and what to type instead."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


class LabError(Exception):
    """Base of every error this package raises on purpose."""


class InputError(LabError, ValueError):
    """A parameter, file or tensor given by the user is wrong; the message says what, where and the remedy."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows (IPython asks for it): the sentence, not the way through our code to it."""
        return [f"{type(self).__name__}: {self}"]


class StoreError(LabError, RuntimeError):
    """Something on disk is not what its manifest says: missing, cut, altered, or of another setup."""


class UnsupportedTarget(InputError):
    """A model whose structure is not understood; the message names it and says what would be needed."""


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its cause, the cause's cause, and so on; contexts where there is no cause."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def carried(error: BaseException, name: str, kind: type = object) -> Any:
    """Return the first `name` of `kind` that the error, or what caused it, carries; None if none does."""
    found = (getattr(link, name, None) for link in chain(error))
    return next((value for value in found if value and isinstance(value, kind)), None)


def near(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the closest of `known`, or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""


# --- What the system says about a file
#
# A full disk, a read-only mount or a file where a folder should be reach us as `OSError`, as polars'
# `ComputeError` or as safetensors' own error, often without any path. `naming` and `reading` stand around
# everything that writes and reads, so that all of them become one `FileError` (or, where the content is at
# fault, one `StoreError`).

_RUST = re.compile(r"\(os error (\d+)\)")  # how polars and safetensors, written in Rust, spell an errno
_FULL = "Free space, or give a folder elsewhere; what is finished is kept and the same command goes on."
_BROKEN = "See the system's log (dmesg); once the disk answers, the same command goes on."
_BLOCKED = "Remove it, or give another path."

# errno -> what happened, what to do
_WORDS = {
    errno.ENOSPC: ("the disk is full", _FULL),
    errno.EDQUOT: ("your disk quota is used up", _FULL),
    errno.EFBIG: ("the file would be larger than this system allows (ulimit -f)", _FULL),
    errno.EROFS: ("the file system is read-only", "Give a folder that you can write to."),
    errno.EACCES: ("permission denied", "Give a path that you may use, or change its permissions."),
    errno.EPERM: ("permission denied", "Give a path that you may use, or change its permissions."),
    errno.ENOTDIR: ("a file stands where a folder is needed", _BLOCKED),
    errno.EEXIST: ("a file stands where a folder is needed", _BLOCKED),
    errno.EISDIR: ("a folder stands where a file is needed", _BLOCKED),
    errno.ENOENT: ("it is not there", "Give a path that exists."),
    errno.ENAMETOOLONG: ("the name is too long", "Give a shorter path."),
    errno.ELOOP: ("its links go round in a circle", "Give a path without them."),
    errno.EINVAL: ("this is nothing that can be read or written as a file", "Give a plain file or folder."),
    errno.ENXIO: ("there is no device behind it", "Give a plain file or folder."),
    errno.EBUSY: ("another program holds it", "Stop that program, or give another path."),
    errno.EIO: ("the disk failed", _BROKEN),
    errno.ESTALE: ("the network file system lost it", _BROKEN),
    errno.EMFILE: ("too many files are open", "Raise the limit: ulimit -n 65536."),
    errno.ENFILE: ("too many files are open on this machine", "Close some programs, and start again."),
}


class FileError(LabError, OSError):
    """A file or folder cannot be used; the message names it, says what happened and the remedy.

    `errno` is the system's number, `path` the file or folder, `advice` the remedy alone.
    """

    def __init__(self, number: int, path: Path | str) -> None:
        what, remedy = _WORDS[number]
        blocker = _blocker(Path(path)) if number in (errno.ENOTDIR, errno.EEXIST) else Path(path)
        super().__init__(f"{blocker}: {what}. {remedy}")
        self.errno = number
        self.path = blocker
        self.advice = remedy

    def __reduce__(self) -> tuple:  # pickled on its way from a cluster's worker
        return FileError, (self.errno, self.path)


def system_number(error: BaseException) -> int | None:
    """Return the errno behind `error`, if it is one about files that we have words for."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (
        isinstance(error, OSError) or _is_librarys(error)
    ):  # polars' OSError has text alone
        found = _RUST.search(str(error))
        number = int(found.group(1)) if found else None
    return number if number in _WORDS else None


def file_error(error: BaseException, path: Path | str) -> FileError | None:
    """Return `error` as a `FileError` about its own file, or `path` when it names none; None if it is
    another kind.
    """
    number = system_number(error)
    if number is None or isinstance(error, LabError):
        return None
    own = getattr(error, "filename", None)
    if isinstance(own, str | bytes) and not os.fsdecode(own).endswith(".tmp"):  # of ours, while being written
        return FileError(number, os.fsdecode(own))
    return FileError(number, path)


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Turn what the system says about a file within the block into a `FileError`; about `path`, unless the
    error names another file itself.
    """
    try:
        yield
    except BaseException as error:  # polars' PanicException is no Exception
        if (named := file_error(error, path)) is None:
            raise
        raise named from error


@contextlib.contextmanager
def reading(path: Path | str, remedy: str) -> Iterator[None]:
    """Like `naming`, for a block that reads `path`: content that polars or safetensors refuse is a
    `StoreError` that ends with the remedy.
    """
    try:
        with naming(path):
            yield
    except BaseException as error:
        if not _is_librarys(error):
            raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise StoreError(f"{path}: cannot be read ({first}). {remedy}") from error


def _is_librarys(error: BaseException) -> bool:
    """Say whether polars or safetensors raised this, without importing either."""
    kinds = type(error).__mro__
    return any(kind.__module__.startswith(("polars", "safetensors", "pyo3_runtime")) for kind in kinds)


def _blocker(path: Path) -> Path:
    """Return the file that stands where `path` or one of its folders should be, else `path` itself."""
    return next((one for one in (path, *path.parents) if one.exists() and not one.is_dir()), path)
