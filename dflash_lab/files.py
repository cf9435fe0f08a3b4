"""Files that are whole or not there: atomic writes, checksums, locks, results that replace others together.

Everything the lab leaves on disk goes through here: JSON, Parquet and safetensors; nothing is ever pickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import xxhash

from dflash_lab.errors import FileError, InputError, StoreError, naming


@contextlib.contextmanager
def atomic_path(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the block ends well it is synced and renamed `path`, so that
    a crash never leaves half a file under that name.

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


def read_json(path: Path | str, remedy: str = "Remove the file to make it again.") -> Any:
    """Read JSON; a `StoreError` names the file and line when it cannot be parsed, and says the remedy."""
    path = Path(path)
    with naming(path):
        data = path.read_bytes()
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        raise StoreError(f"{path}:{error.lineno}: not valid JSON ({error.msg}). {remedy}") from error
    except UnicodeDecodeError as error:
        raise StoreError(f"{path}: not UTF-8 text at byte {error.start}. {remedy}") from error
    except ValueError as error:  # a number of more digits than Python converts
        raise StoreError(f"{path}: not valid JSON ({error}). {remedy}") from error
    except RecursionError:
        raise StoreError(f"{path}: nested too deeply for JSON. {remedy}") from None


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


# --- Folders that a person names, walked within bounds: `/` for `data/` would otherwise be read for hours


MOST_FILES = 200_000
_SYSTEM = ("proc", "sys", "dev")  # what lies there has no end


def too_wide(folder: Path | str) -> str:
    """Why `folder` is taken for a slip of the hand, and what to give instead; "" if it is not."""
    path = Path(os.path.realpath(os.path.expanduser(folder)))
    home = Path(os.path.realpath(os.path.expanduser("~")))
    what = ""
    if path == Path(path.anchor) or path in home.parents:
        what = "the whole disk" if path == Path(path.anchor) else "the folder of everybody's home"
    elif path == home:
        what = "a whole home folder"
    elif path.parts[1] in _SYSTEM and path.parts[1:3] != ("dev", "shm"):  # a disk in memory
        what = "the system's own"
    return what and f"this is {what}; give the folder in it that holds what is to be read"


def walk(folder: Path | str, onerror: Callable[[OSError], None] | None = None) -> Iterator[Path]:
    """Yield every file below `folder`, folders in order, hidden files and folders left out.

    `onerror` is told of folders that cannot be listed. `InputError` for a folder that is `too_wide`, and when
    more than `MOST_FILES` turn up.
    """
    if why := too_wide(folder):
        raise InputError(f"{folder}: {why}.")
    count = 0
    for place, folders, names in os.walk(folder, onerror=onerror):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            if name.startswith("."):
                continue
            if (count := count + 1) > MOST_FILES:
                raise InputError(
                    f"{folder}: holds more than {MOST_FILES:,} files. Give a folder in it, or put small "
                    "files together into one (cat *.jsonl > all.jsonl)."
                )
            yield Path(place, name)


# --- Locks
#
# The kernel's (flock): the holder's death, however it comes, drops them, so none is left behind. Some network
# file systems have no locks. There everyone gets one, with a warning.


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


# --- New results in the place of old ones
#
# All of them or none, whenever the process is killed. A stage makes what it leaves beside what is there. When
# it is whole, a journal in the run's folder names each new file and its place; from then on the change is
# decided, and whoever looks next (`settle`) ends it if its process was killed in the middle. A folder changes
# places with the old one in a single step of the kernel, so at no moment is there none.


JOURNAL = ".replacing.json"
_LOCK = ".replacing.lock"
_AT_CWD, _EXCHANGE = -100, 2  # of renameat2(2)


@dataclass(frozen=True)
class Move:
    """A new file or folder and its place. `whole`: the old folder goes with all that is in it; without it,
    what the new one has no file of stays.
    """

    new: Path
    place: Path
    whole: bool = False


def replace(run: Path, moves: Iterable[Move], removed: Iterable[Path] = ()) -> None:
    """Put each of `moves` that is there into its place and take `removed` away, as one change of the run's
    folder.
    """
    with waiting_lock(run / _LOCK):
        _finish(run)  # of another shard, perhaps, that has moved the same
        wanted = [_entry(run, _on_one_disk(move)) for move in moves if move.new.exists()]
        write_json(
            run / JOURNAL, {"moves": wanted, "removed": [os.path.relpath(path, run) for path in removed]}
        )
        _finish(run)


def settle(run: Path) -> None:
    """End a change that a killed process had begun. Costs nothing where there is none."""
    if (run / JOURNAL).exists():
        with waiting_lock(run / _LOCK):
            _finish(run)


def beside(place: Path) -> Path:
    """Return where to make the folder that will take the place of another: beside it, so that it is on its
    disk; within where that is not possible, as in a folder where a disk is mounted.
    """
    place = Path(os.path.realpath(place))
    name = f".{place.name}.new"
    return place / name if os.path.ismount(place) else place.with_name(name)


def _on_one_disk(move: Move) -> Move:
    """Bring a new file to the disk of its place, where alone it can be renamed; a link may lead elsewhere."""
    place = Path(os.path.realpath(move.place))
    make_folder(place.parent)
    if move.new.is_dir() or move.new.stat().st_dev == place.parent.stat().st_dev:
        return move
    near = place.with_name(f".{place.name}.new")
    with atomic_path(near) as temporary:
        shutil.copyfile(move.new, temporary)
    move.new.unlink()
    return Move(near, place)


def _entry(run: Path, move: Move) -> dict[str, Any]:
    new, place = move.new, Path(os.path.realpath(move.place))
    whole = False
    if new.is_dir():
        if place.exists() and not place.is_dir():  # a file, or a device, that somebody named by mistake
            raise FileError(errno.ENOTDIR, place)
        others = (
            {path.name for path in place.iterdir()} - {path.name for path in new.iterdir()}
            if place.is_dir()
            else ()
        )
        whole = move.whole or not others
    names = {
        "new": os.path.relpath(new.resolve(), run.resolve()),
        "place": os.path.relpath(place, run.resolve()),
    }
    return {**names, "whole": whole, "inode": new.stat().st_ino}


def _finish(run: Path) -> None:
    """Do what the journal says, from wherever it was left. Needs the lock."""
    path = run / JOURNAL
    if not path.exists():
        return
    try:
        record = read_json(path)
        moves = [
            (run / one["new"], run / one["place"], one["whole"], one["inode"]) for one in record["moves"]
        ]
        removed = [run / name for name in record["removed"]]
    except (KeyError, TypeError) as error:
        raise StoreError(
            f"{path}: no list of what takes whose place. Remove it, and run the stage again."
        ) from error
    for new, place, whole, inode in moves:
        if not new.exists():
            continue  # it was moved before
        make_folder(place.parent)
        if new.is_dir() and not whole:
            for one in sorted(path for path in new.rglob("*") if path.is_file()):
                goal = place / one.relative_to(new)
                make_folder(goal.parent)
                os.replace(one, goal)
        elif not new.is_dir():
            os.replace(new, place)
        elif not place.exists():
            os.rename(new, place)
        elif place.stat().st_ino != inode:
            _exchange(new, place)
        sync_folder(place.parent)
    for one in removed:
        one.unlink(missing_ok=True)
    path.unlink()
    sync_folder(run)
    for new, _, _, _ in moves:  # what is left there is old
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(_aside(new), ignore_errors=True)
    for made in {new.parent for new, _, _, _ in moves} - {run}:
        with contextlib.suppress(OSError):  # not empty: it was more than a place to make things in
            made.rmdir()


def _exchange(new: Path, place: Path) -> None:
    """Let two folders change places, in one step where the file system can."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        if libc.renameat2(_AT_CWD, os.fsencode(new), _AT_CWD, os.fsencode(place), _EXCHANGE) == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
            raise OSError(number, os.strerror(number), str(place))
    os.rename(place, _aside(new))  # network file systems: two steps, and `_finish` goes on after the first
    os.rename(new, place)


def _aside(new: Path) -> Path:
    return new.with_name(f"{new.name}.old")
