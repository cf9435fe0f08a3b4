"""Where runs lie, who started this kernel, which notebook it runs, and where its log lines go."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from dflash_lab.errors import InputError
from dflash_lab.secrets import RedactingFormatter
from dflash_lab.stages import STAGES

_LOGGER = logging.getLogger("dflash_lab")
_RUNNERS = ("papermill", "dflash-lab", "dflash_lab.cli", "dflash_lab.launch")


def workspace(start: Path | None = None) -> Path:
    """Return the nearest folder at or above `start` with `notebooks/` and `params/`, else `start` itself."""
    start = (start or Path.cwd()).resolve()
    for folder in (start, *start.parents):
        if (folder / "notebooks").is_dir() and (folder / "params").is_dir():
            return folder
    return start


def enter_workspace() -> Path:
    """Make the workspace the working directory and return it."""
    root = workspace()
    if root != Path.cwd():
        os.chdir(root)
    return root


def in_kernel() -> bool:
    """Say whether this code runs in a notebook's kernel."""
    loaded = sys.modules.get("IPython")  # a kernel has it; nobody else need import it to ask
    return loaded is not None and hasattr(loaded.get_ipython(), "kernel")


def show_logging(stream: TextIO) -> logging.Handler:
    """Let the package's log lines reach `stream`, without secrets, and return what does it."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(RedactingFormatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    _LOGGER.addHandler(handler)
    if _LOGGER.level == logging.NOTSET:
        _LOGGER.setLevel(logging.INFO)
    return handler


def show_logging_in_kernel() -> None:
    """In a notebook, let log lines be plain text from here on: a warning without a handler goes to stderr,
    which is shown as a red box.
    """
    if in_kernel() and not _LOGGER.handlers:
        show_logging(sys.stdout)


@contextlib.contextmanager
def logging_shown() -> Iterator[None]:
    """Let log lines reach a job's log, or a notebook's output, within the block; where they do so already,
    that stays.
    """
    show_logging_in_kernel()
    if _LOGGER.handlers:
        yield
        return
    level, handler = _LOGGER.level, show_logging(sys.stderr)
    try:
        yield
    finally:
        _LOGGER.removeHandler(handler)
        _LOGGER.setLevel(level)


def started_by_papermill() -> bool:
    """Say whether the parent process is papermill or our launcher; papermill leaves no other sign."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")[:4]
    except OSError:  # no /proc on this system: the notebook's own parameter decides
        return False
    return any(Path(word.decode(errors="replace")).name in _RUNNERS for word in words)


def notebook_path(stage: str) -> Path:
    """Return the stage's notebook: the workspace's, else that of the checkout this package runs from."""
    checkout = Path(__file__).resolve().parents[1]
    for root in (workspace(), checkout):
        path = root / "notebooks" / f"{stage}.ipynb"
        if path.exists():
            return path
    raise InputError(
        f"{stage}: no notebooks/{stage}.ipynb in {Path.cwd()} nor in {checkout}. Start in the repository."
    )


def stage_notebook(word: str, cwd: Path) -> tuple[str, Path] | None:
    """Return the stage and path of the notebook of ours that a word typed in `cwd` means; None for others.

    A path that exists is that file and no other. One that does not may be typed as if from the workspace or
    from its `notebooks/`.
    """
    given = Path(word)
    if given.suffix != ".ipynb" or given.stem not in STAGES:
        return None
    inside = Path("notebooks") / given.name
    ours = workspace(cwd) / inside
    if (cwd / given).exists():
        checkout = Path(__file__).resolve().parents[1]
        roots = [path for path in (ours, checkout / inside) if path.exists() and path.samefile(cwd / given)]
    else:
        roots = [ours] if ours.exists() and given in (inside, Path(given.name)) else []
    # Another project may have a notebooks/prepare.ipynb beside a params/ of its own.
    return next(((given.stem, path) for path in roots if b"dflash_lab" in path.read_bytes()), None)
