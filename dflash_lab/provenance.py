"""What made a result: versions of the libraries and kernels, the git commit, the device, the time."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

_PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "flash-linear-attention",
    "causal-conv1d",
    "safetensors",
    "polars",
    "plotly",
    "papermill",
    "numpy",
)


def versions() -> dict[str, str]:
    """Return installed versions by package name; a package that is absent has no entry."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str:
    """Return the commit this package runs from, ``+dirty`` if changed, or ``unknown`` outside a checkout.

    A copy of the code on another machine has no history, or an older one beside newer files: whoever copies
    it says what it is in DFLASH_LAB_COMMIT, and `source_tree` shows whether that is true.
    """
    if given := os.environ.get("DFLASH_LAB_COMMIT", ""):
        return given
    root = Path(__file__).resolve().parent.parent
    try:
        commit = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+dirty" if changed else "")


def source_tree(folder: Path | None = None) -> str:
    """Return git's id of a folder's code and settings (default: this package), computed without git.

    These are the package's files in a commit exactly if ``git rev-parse <commit>:dflash_lab`` says the same.
    """
    return _tree(folder or Path(__file__).resolve().parent).hex()


_CODE = (".py", ".json")


def _tree(folder: Path) -> bytes:
    entries: list[tuple[bytes, bytes]] = []  # what git sorts by, the entry
    for path in folder.iterdir():
        name = path.name.encode()
        if path.is_dir() and any(one.suffix in _CODE for one in path.rglob("*")):
            entries.append((name + b"/", b"40000 " + name + b"\0" + _tree(path)))
        elif path.suffix in _CODE:
            entries.append((name, b"100644 " + name + b"\0" + _object(b"blob", path.read_bytes())))
    return _object(b"tree", b"".join(entry for _, entry in sorted(entries)))


def _object(kind: bytes, content: bytes) -> bytes:
    return hashlib.sha1(kind + b" %d\0" % len(content) + content, usedforsecurity=False).digest()


def device_info() -> dict[str, str | int | float]:
    """Return the accelerator's name, memory in GiB and CUDA version, or the CPU's count of threads."""
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return {
            "device": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 2),
            "count": torch.cuda.device_count(),
            "cuda": torch.version.cuda or "",
        }
    return {"device": "cpu", "machine": platform.machine(), "threads": torch.get_num_threads()}


def provenance() -> dict[str, object]:
    """Return everything above with the UTC time, as plain JSON values."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "source_tree": source_tree(),
        "versions": versions(),
        "device": device_info(),
        "argv0": Path(sys.argv[0]).name,
    }
