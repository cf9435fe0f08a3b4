"""Drafter checkpoints in the z-lab layout, the one that z-lab, vLLM, SGLang and SpecForge read.

A folder with `config.json` and `model.safetensors`: tensor names without a prefix, no other tensor in the
file.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file

from dflash_lab import files
from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.drafter.model import Drafter
from dflash_lab.errors import InputError, StoreError, near
from dflash_lab.file_errors import reading

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
    values = files.read_json(path)
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
    _check_config(folder)
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


def _check_config(folder: Path) -> None:
    path = folder / WEIGHTS
    with reading(path, _REMEDY), safe_open(path, framework="pt") as file:
        written = (file.metadata() or {}).get(CONFIG_DIGEST)
    if written is not None and written != files.digest(files.read_json(folder / CONFIG)):
        raise StoreError(
            f"{folder / CONFIG} is not the configuration that the weights beside it were written with: put "
            "it back, or remove it and run the stage that wrote it again."
        )


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
