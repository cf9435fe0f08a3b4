"""Drafter checkpoints in the z-lab layout, and the state that lets a training go on."""

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
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file

from dflash_lab import files
from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.drafter.model import Drafter
from dflash_lab.drafter.objective import TrainSettings
from dflash_lab.errors import FileError, InputError, LabError, StoreError, naming, near, reading

# The z-lab layout, which z-lab, vLLM, SGLang and SpecForge read ---------------------------------------------
# A folder with `config.json` and `model.safetensors`: tensor names without a prefix, no other tensor in the
# file.


WEIGHTS, CONFIG = "model.safetensors", "config.json"
# In the header of weights that we wrote: a flipped bit, or another number in config.json, would load unseen.
DIGEST, CONFIG_DIGEST = "xxh3_128", "config_xxh3_128"
_REMEDY = "Remove it and run the stage that wrote it again (it keeps what it has), or copy it again."


def save_checkpoint(
    folder: Path | str, drafter: Drafter, tensors: dict[str, torch.Tensor] | None = None
) -> None:
    """Write `config.json` and `model.safetensors`. `tensors` replaces the drafter's own (gathered) ones."""
    tensors = drafter.state_dict() if tensors is None else tensors
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    write_checkpoint(folder, tensors, drafter.config.to_json(dtype))


def write_checkpoint(folder: Path | str, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Write weights, then the configuration that makes them a checkpoint, each atomically.

    Another configuration that lies there is removed first: killed in between, the folder holds no drafter
    rather than weights under a configuration that is not theirs.
    """
    folder = Path(folder)
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    header = {"format": "pt", DIGEST: _digest(tensors), CONFIG_DIGEST: files.digest(config)}
    files.make_folder(folder)
    with _configured(folder, config), files.atomic_path(folder / WEIGHTS) as temporary:
        save_file(tensors, temporary, metadata=header)


def copy_checkpoint(source: Path | str, folder: Path | str) -> None:
    """Put the checkpoint in `source` into `folder`, bytes as they are, in the same order."""
    source, folder = Path(source), Path(folder)
    files.make_folder(folder)
    with (
        _configured(folder, files.read_json(source / CONFIG)),
        files.atomic_path(folder / WEIGHTS) as temporary,
    ):
        shutil.copyfile(source / WEIGHTS, temporary)


@contextlib.contextmanager
def _configured(folder: Path, config: dict[str, Any]) -> Iterator[None]:
    """Stand around the writing of weights: `config` is there when they are, no other one before."""
    path = folder / CONFIG
    if path.is_file() and path.read_bytes() != files.as_json(config):
        path.unlink()
        files.sync_folder(folder)
    yield
    files.write_json(path, config)


def read_config(folder: Path | str) -> DrafterConfig:
    """Read a checkpoint's configuration without its weights."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise InputError(
            f"no drafter at {folder}: {path} is missing. Give a folder with config.json and {WEIGHTS}."
        )
    values = files.read_json(path, "Give the folder of a drafter whose config.json is whole.")
    if not isinstance(values, dict):
        raise InputError(f"{path}: not a JSON object; is this a DFlash checkpoint?")
    return DrafterConfig.from_json(values, str(path))


def load_checkpoint(
    folder: Path | str, device: torch.device | str = "cpu", dtype: torch.dtype | str = "auto"
) -> Drafter:
    """Load a drafter; `dtype` "auto" keeps the file's. `InputError` lists missing, surplus and misshapen
    tensors; `StoreError` says that weights or configuration are not those that were written.
    """
    folder = Path(folder)
    config = read_config(folder)
    path = folder / WEIGHTS
    if not path.is_file():
        raise InputError(f"no weights at {path}; a z-lab checkpoint has one {WEIGHTS}.")
    with reading(path, _REMEDY), safe_open(path, framework="pt") as file:
        written = (file.metadata() or {}).get(CONFIG_DIGEST)
    if written is not None and written != files.digest(files.read_json(folder / CONFIG)):
        raise StoreError(
            f"{folder / CONFIG} is not the configuration that the weights beside it were written with: put "
            "it back, or remove it and run the stage that wrote it again."
        )
    with torch.device("meta"):
        drafter = Drafter(config)
    tensors = read_tensors(path, device)
    check_tensors(path, drafter, tensors)
    if dtype != "auto":
        wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        tensors = {name: tensor.to(wanted) for name, tensor in tensors.items()}
    drafter.load_state_dict(tensors, assign=True)
    return drafter


def read_tensors(path: Path, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Read every tensor of a safetensors file; a damaged file is a `StoreError`. (Files of others carry no
    digest, so of those only damage that breaks the format is seen.)
    """
    with reading(path, _REMEDY), safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        written = (file.metadata() or {}).get(DIGEST)
    if written is not None and written != _digest(tensors):
        raise StoreError(f"{path}: its values are not those that were written. {_REMEDY}")
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return the xxh3-128 of names, dtypes, shapes and bytes, in the order of names."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_tensors(path: Path, drafter: Drafter, tensors: dict[str, torch.Tensor]) -> None:
    """Hold names and shapes in a file against what the configuration calls for; no value may be NaN."""
    wanted = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    wrong = [f"{name} is missing{near(name, tensors)}" for name in wanted if name not in tensors]
    wrong += [f"{name} is not part of this drafter" for name in tensors if name not in wanted]
    wrong += [
        f"{name} is {tuple(tensor.shape)}, config.json calls for {wanted[name]}"
        for name, tensor in tensors.items()
        if name in wanted and tuple(tensor.shape) != wanted[name]
    ]
    wrong += [
        f"{name} holds values that are not finite"
        for name, tensor in tensors.items()
        if not tensor.isfinite().all()
    ]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise InputError(f"{path}: " + "; ".join(wrong[:5]) + more + ".")


# Checkpoints of a run: whole folders that appear at once, the newest few kept -------------------------------
# `checkpoints/step-00000100/` is a drafter with `trainer/` beside its weights: `state.json` (place in the
# data, schedule, guard, best) and `state.safetensors` (masters, moments, open sums). Random streams depend on
# seed and place alone, so the place is all that a resumed run must know of them.


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
