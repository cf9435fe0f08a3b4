"""Checkpoints of a run: whole folders that appear at once, the newest few kept.

`checkpoints/step-00000100/` is a drafter in the z-lab layout with `trainer/` beside its weights: `state.json`
(place in the data, schedule, guard, best) and `state.safetensors` (masters, moments, open sums). Random
streams depend on seed and place alone, so the place is all that a resumed run must know of them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dflash_lab import files
from dflash_lab.drafter.checkpoint import WEIGHTS, read_tensors, save_checkpoint
from dflash_lab.drafter.model import Drafter
from dflash_lab.drafter.settings import TrainSettings
from dflash_lab.errors import LabError, StoreError
from dflash_lab.file_errors import FileError, naming

_NAME = re.compile(r"step-(\d{8})")
_TENSORS = "trainer/state.safetensors"
_STATE = "trainer/state.json"


def save_state(
    root: Path,
    step: int,
    drafter: Drafter,
    weights: dict[str, torch.Tensor],
    tensors: dict[str, torch.Tensor],
    state: dict[str, Any],
) -> Path:
    """Write one checkpoint folder below `root`, whole or not at all."""
    final = root / f"step-{step:08d}"
    if final.exists():  # a stop right after a save: the state is a function of the step
        return final
    temporary = root / f".step-{step:08d}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        save_checkpoint(temporary, drafter, weights)
        with files.atomic_path(temporary / _TENSORS) as path:
            save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path)
        sums = {name: files.checksum(temporary / name) for name in (WEIGHTS, _TENSORS)}
        state = {**state, "checksums": sums}
        files.write_json(temporary / _STATE, {**state, "digest": files.digest(state)})
        with naming(final):
            os.replace(temporary, final)
            files.sync_folder(root)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # what a full disk cut short would only fill it more
    return final


def checkpoints(root: Path) -> dict[int, Path]:
    """Whole checkpoints below `root` by step, oldest first."""
    found = {}
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if match := _NAME.fullmatch(path.name):
            found[int(match[1])] = path
    return found


def newest(root: Path) -> Path | None:
    """The checkpoint to go on from."""
    return next(reversed(checkpoints(root).values()), None)


def load_state(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """Read a checkpoint's weights, training tensors and state; `StoreError` if one of them is damaged."""
    with _whole(folder):
        record = _record(folder)
        for name, known in record.get("checksums", {}).items():  # older checkpoints have none
            if files.checksum(files.inside(folder, name)) != known:
                raise StoreError(f"{folder / name}: its bytes are not those that were written.")
        return read_tensors(folder / WEIGHTS), read_tensors(folder / _TENSORS), record


def _record(folder: Path) -> dict[str, Any]:
    record = files.read_json(folder / _STATE)
    if not isinstance(record, dict) or not isinstance(record.get("setup"), dict):
        raise StoreError(f"{folder / _STATE}: no state of a training run.")
    digest = record.pop("digest", None)
    if digest is not None and digest != files.digest(record):
        raise StoreError(f"{folder / _STATE}: its values are not those that were written.")
    return record


@contextlib.contextmanager
def _whole(folder: Path) -> Iterator[None]:
    """Tell how to go on without a damaged checkpoint, which is no file to be made again or copied."""
    try:
        yield
    except (LabError, FileNotFoundError) as error:
        if isinstance(error, FileError) and error.errno not in (errno.ENOENT, errno.EISDIR, errno.ENOTDIR):
            raise  # the disk or its rights are at fault, not the checkpoint
        raise StoreError(
            f"{folder}: this checkpoint is damaged or not whole. Move the folder away: training then goes on "
            "from the checkpoint before it, or anew if there is none."
        ) from error


def setup(
    settings: TrainSettings, drafter: Drafter, lengths: Sequence[int], world: int, source: dict[str, Any]
) -> dict[str, Any]:
    """What must be the same for a run to go on; `lengths` are those of the training samples, `source` says
    where states and first weights come from (plain JSON values).
    """
    return {
        "source": source,
        "settings": settings.as_dict(),
        "drafter": drafter.config.to_json(str(drafter.fc.weight.dtype).removeprefix("torch.")),
        "samples": len(lengths),
        "tokens": int(sum(lengths)),
        "world": world,
    }


def saved_setup(run: Path) -> dict[str, Any] | None:
    """The setup of the run in a folder, None if it has no checkpoint yet."""
    found = newest(run / "checkpoints")
    if found is None:
        return None
    with _whole(found):
        return _record(found)["setup"]


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Name the leaves in which two nested dicts differ, as "path: old -> new"."""
    found = []
    for name in sorted(old.keys() | new.keys()):
        a, b, where = old.get(name), new.get(name), f"{prefix}{name}"
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{where}.")
        elif a != b:
            found.append(f"{where}: {a} -> {b}")
    return found


def rotate(root: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, each out of the way before it is taken apart, and what a
    process that was killed left of one.
    """
    for path in list(checkpoints(root).values())[:-keep]:
        path.rename(root / f".{path.name}.old")
    for left in root.glob(".step-*"):
        shutil.rmtree(left)
