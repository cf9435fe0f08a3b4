"""Where runs lie, who started this kernel, and which notebook it runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dflash_lab.errors import InputError
from dflash_lab.stages import STAGES

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
