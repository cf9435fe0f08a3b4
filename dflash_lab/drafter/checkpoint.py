"""Drafter checkpoints in the z-lab layout, the one that z-lab, vLLM, SGLang and SpecForge read.

A folder with `config.json` and `model.safetensors`, tensor names without a prefix, nothing else in the file.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dflash_lab import files
from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.drafter.model import Drafter
from dflash_lab.errors import InputError, LabError, near
from dflash_lab.file_errors import reading

WEIGHTS = "model.safetensors"


def save_checkpoint(
    folder: Path | str, drafter: Drafter, tensors: dict[str, torch.Tensor] | None = None
) -> None:
    """Write `config.json` and `model.safetensors`, each atomically. `tensors` replaces the drafter's own
    (gathered) ones.
    """
    folder = Path(folder)
    tensors = drafter.state_dict() if tensors is None else tensors
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    with files.atomic_path(folder / WEIGHTS) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    files.write_json(folder / "config.json", drafter.config.to_json(dtype))


def read_config(folder: Path | str) -> DrafterConfig:
    """Read a checkpoint's configuration without its weights."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise InputError(
            f"no drafter at {folder}: {path} is missing. Give a folder with config.json and {WEIGHTS}."
        )
    values = files.read_json(path)
    if not isinstance(values, dict):
        raise InputError(f"{path}: not a JSON object; is this a DFlash checkpoint?")
    try:
        return DrafterConfig.from_json(values)
    except LabError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(f"{path}: no configuration of a drafter ({error}).") from error


def load_checkpoint(
    folder: Path | str, device: torch.device | str = "cpu", dtype: torch.dtype | str = "auto"
) -> Drafter:
    """Load a drafter; `dtype` "auto" keeps the file's. `InputError` lists missing, surplus and misshapen
    tensors.
    """
    folder = Path(folder)
    config = read_config(folder)
    path = folder / WEIGHTS
    if not path.is_file():
        raise InputError(f"no weights at {path}; a z-lab checkpoint has one {WEIGHTS}.")
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
    """Read every tensor of a safetensors file; a damaged file is a `StoreError`."""
    with (
        reading(path, "It is not a whole safetensors file: copy or write it again."),
        safe_open(path, framework="pt", device=str(device)) as file,
    ):
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


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
