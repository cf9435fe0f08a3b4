"""Folders that a person names, walked within bounds: `/` for `data/` would otherwise be read for hours."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from dflash_lab.errors import InputError

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
