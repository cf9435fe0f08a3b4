"""Read single tensors of a safetensors checkpoint, local or in the hub cache, without building the model.

The text model of a multimodal checkpoint sits below a prefix (``model.language_model.``); it is found from
the tensor names, so that the vision tower is never opened and the head can be read alone (2 GiB of a 54 GB
checkpoint).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils.hub import cached_file

from dflash_lab.errors import InputError, UnsupportedTarget

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def local_file(source: str, file: str) -> Path | None:
    """Return the path of a checkpoint's file, in its folder or in the hub cache (fetched if need be), or
    None.
    """
    if Path(source).is_dir():
        path = Path(source) / file
        return path if path.is_file() else None
    found = cached_file(source, file, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def open_weights(path: Path, device: str = "cpu") -> Any:
    """Open a weight file; `InputError` names it when it is cut short or no safetensors file at all."""
    try:
        return safe_open(path, framework="pt", device=device)
    except SafetensorError as error:
        raise InputError(
            f"{path}: not a whole safetensors file ({error}). Copy or download it again."
        ) from error


def _weight_map(index: Path) -> dict[str, str]:
    """Read which file holds each tensor; `InputError` when the index says no such thing."""
    try:
        found = json.loads(index.read_bytes())
    except ValueError as error:
        raise InputError(f"{index}: not valid JSON ({error}). Copy or download it again.") from error
    names = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise InputError(f"{index}: has no weight_map of tensor and file names. Copy or download it again.")
    return names


class Checkpoint:
    """The tensors of a folder or hub id by name. `file_of`: tensor name -> file name."""

    def __init__(self, source: str) -> None:
        self.source = source
        index = local_file(source, _INDEX)
        if index is not None:
            self.file_of: dict[str, str] = _weight_map(index)
            return
        single = local_file(source, _SINGLE)
        if single is None:
            raise InputError(
                f"{source}: neither {_SINGLE} nor {_INDEX} is there. Only safetensors checkpoints are read "
                "(pickled ones can run code); save the model again with save_pretrained."
            )
        with open_weights(single) as tensors:
            self.file_of = dict.fromkeys(tensors.keys(), _SINGLE)

    def files(self) -> list[Path]:
        """Return the local paths of all weight files (a hub id's are downloaded), by name."""
        return [self._path(file) for file in sorted(set(self.file_of.values()))]

    def _path(self, file: str) -> Path:
        path = local_file(self.source, file)
        if path is None:
            raise InputError(
                f"{self.source}: {file}, which the index names, is not there. The download is incomplete."
            )
        return path

    def read(self, name: str, *, device: str | torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Read one tensor onto `device` in `dtype`."""
        with open_weights(self._path(self.file_of[name]), str(device)) as tensors:
            return tensors.get_tensor(name).to(dtype)

    def text_prefix(self, embedding_name: str, norm_name: str) -> str:
        """Return the prefix below which both the embedding's and the final norm's weight lie.

        A vision tower has norms too, but no token embedding beside them, so the answer is unique or the model
        is refused.
        """
        norm, embedding = f"{norm_name}.weight", f"{embedding_name}.weight"
        prefixes = [n.removesuffix(norm) for n in self.file_of if n == norm or n.endswith("." + norm)]
        prefixes = [p for p in prefixes if p + embedding in self.file_of]
        if len(prefixes) != 1:
            raise UnsupportedTarget(
                f"{self.source}: expected one text model with {embedding!r} and {norm!r} below one prefix, "
                f"found {len(prefixes)}. Its tensors would need those names."
            )
        return prefixes[0]

    def head_tensor(self, head: str) -> str | None:
        """Return the name of the head's weight, or None when the checkpoint has none (a tied head)."""
        names = [n for n in self.file_of if n == f"{head}.weight" or n.endswith(f".{head}.weight")]
        names = [n for n in names if not n.startswith("mtp")]
        if len(names) > 1:
            raise UnsupportedTarget(f"{self.source}: several tensors could be the head: {', '.join(names)}.")
        return names[0] if names else None
