"""New results take the place of old ones: all of them or none, whenever the process is killed.

A stage makes what it leaves beside what is there. When it is whole, a journal in the run's folder names each
new file and its place; from then on the change is decided, and whoever looks next (`settle`) ends it if its
process was killed in the middle. A folder changes places with the old one in a single step of the kernel, so
at no moment is there none.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_lab.errors import StoreError
from dflash_lab.file_errors import FileError
from dflash_lab.files import atomic_path, make_folder, read_json, sync_folder, write_json
from dflash_lab.locks import waiting_lock

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
