"""A part on disk: a safetensors file streamed straight from the row buffers, hashed in the same pass.

Flat tensors and offsets, never a tensor a sample: a safetensors header is capped at 100 MB. The file is
written by hand (length, JSON header, bytes) because the library's writer first copies every tensor; readers
use the library.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_lab import files
from dflash_lab.errors import StoreError

_NAMES = {
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float32: "F32",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
}
_BLOCK = 1 << 26  # bytes hashed and written at a time


def write_part(path: Path, tensors: dict[str, Tensor]) -> tuple[int, str]:
    """Write contiguous CPU tensors atomically as safetensors; return the file's bytes and its xxh3-128.

    Raises `OSError` (a full disk) with nothing left under `path`.
    """
    header, at = {}, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)
    digest, total = xxhash.xxh3_128(), 0
    with files.atomic_path(path) as temporary, open(temporary, "wb") as file:
        head = memoryview(len(text).to_bytes(8, "little") + text)
        for block in (head, *map(_bytes, tensors.values())):
            for start in range(0, len(block), _BLOCK):
                piece = block[start : start + _BLOCK]
                digest.update(piece)
                file.write(piece)
                total += len(piece)
    return total, digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview[int]:
    if not tensor.is_contiguous():
        raise ValueError("a part is written from contiguous tensors")
    return tensor.view(-1).view(torch.uint8).numpy().data


def open_part(path: Path):
    """Open a part for reading (memory mapped); `StoreError` when it is no safetensors file or cut short."""
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise StoreError(
            f"{path} is missing although its manifest names it; extract again to redo its samples."
        ) from error
    except SafetensorError as error:
        raise StoreError(f"{path} cannot be read ({error}); extract again to redo its samples.") from error


def as_keys(hashes: Tensor) -> np.ndarray:
    """View hashes [n, 16] uint8 as [n] opaque 16-byte values that numpy can sort and compare."""
    return np.ascontiguousarray(hashes.numpy()).view("V16").reshape(-1)


def hex_to_hashes(content_hashes: list[str]) -> Tensor:
    """Turn hex content hashes (32 digits) into uint8 [n, 16]."""
    return torch.from_numpy(
        np.frombuffer(bytes.fromhex("".join(content_hashes)), np.uint8).reshape(-1, 16).copy()
    )
