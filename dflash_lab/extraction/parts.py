"""A part on disk: a safetensors file streamed straight from the row buffers, hashed in the same pass (on a
second thread: both release the interpreter).

Flat tensors and offsets, never a tensor a sample: a safetensors header is capped at 100 MB. The file is
written by hand (length, JSON header, bytes) because the library's writer first copies every tensor; readers
use the library.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from dflash_lab import files
from dflash_lab.errors import StoreError
from dflash_lab.file_errors import reading

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

    Raises `FileError` (a full disk) with nothing left under `path`.
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
    digest, total, hashed = xxhash.xxh3_128(), 0, []
    with (
        ThreadPoolExecutor(1) as hashing,  # one worker: pieces are hashed in order, beside their writing
        files.atomic_path(path) as temporary,
        open(temporary, "wb") as file,
    ):
        head = memoryview(len(text).to_bytes(8, "little") + text)
        for block in (head, *map(_bytes, tensors.values())):
            for start in range(0, len(block), _BLOCK):
                piece = block[start : start + _BLOCK]
                hashed.append(hashing.submit(digest.update, piece))
                file.write(piece)
                total += len(piece)
        for piece_hashed in hashed:
            piece_hashed.result()
    return total, digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview[int]:
    if not tensor.is_contiguous():
        raise ValueError("a part is written from contiguous tensors")
    return tensor.view(-1).view(torch.uint8).numpy().data


def open_part(path: Path):
    """Open a part for reading (memory mapped); `StoreError` when it is no safetensors file or cut short."""
    if not path.exists():
        raise StoreError(
            f"{path} is missing although its manifest names it; extract again to redo its samples."
        )
    with reading(path, "Extract again with recheck: exactly its samples are redone."):
        return safe_open(path, framework="pt")


def as_keys(hashes: Tensor) -> np.ndarray:
    """View hashes [n, 16] uint8 as [n] opaque 16-byte values that numpy can sort and compare."""
    return np.ascontiguousarray(hashes.numpy()).view("V16").reshape(-1)


def hex_to_hashes(content_hashes: list[str]) -> Tensor:
    """Turn hex content hashes (32 digits) into uint8 [n, 16]."""
    return torch.from_numpy(
        np.frombuffer(bytes.fromhex("".join(content_hashes)), np.uint8).reshape(-1, 16).copy()
    )
