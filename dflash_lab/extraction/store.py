"""The feature store's tensors: how states become bytes, the part files, and the reader of samples."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from dflash_lab import files
from dflash_lab.data.samples import FeatureItem
from dflash_lab.errors import InputError, StoreError, near, reading
from dflash_lab.extraction.manifest import SCHEMA, parts_of, read_identity

# How a state row becomes bytes ----------------------------------------------------------------------------
#
# `bf16` is exact (the default), `fp8` and `int8` keep one float32 scale a row and tap, and halve the store.
# A residual stream has a few channels hundreds of times larger than the rest. A row scaled to int8 spends
# its 255 steps on those; e4m3 spends its bits on the exponent and keeps about 2.6 % everywhere
# (`benchmarks/extraction.py` measures what each loses).


_TOP = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


@dataclass(frozen=True)
class Codec:
    """A storage type. `scaled` codecs keep max|row| / top beside the codes."""

    name: str
    dtype: torch.dtype
    scaled: bool

    def encode(self, states: Tensor, codes: Tensor, scale: Tensor | None) -> None:
        """Write `states` [T, H] (any float dtype) into `codes` [T, H] and `scale` [T, 1] (views)."""
        if scale is None:
            codes.copy_(states)
            return
        top = _TOP[self.dtype]
        most = states.abs().amax(dim=-1, keepdim=True).float()
        step = most.clamp_min(torch.finfo(torch.float32).tiny) / top
        scale.copy_(step)
        scaled = states.float() / step
        if self.dtype is torch.int8:
            scaled = scaled.round_()
        codes.copy_(scaled.clamp_(-top, top).to(self.dtype))

    def decode(self, codes: Tensor, scale: Tensor | None) -> Tensor:
        """Return bf16 states [T, K*H] from `codes` [T, K*H] and `scale` [T, K]."""
        if scale is None:
            return codes
        rows, taps = scale.shape
        return (codes.float().view(rows, taps, -1) * scale[:, :, None]).to(torch.bfloat16).view(rows, -1)


CODECS = {
    codec.name: codec
    for codec in (
        Codec("bf16", torch.bfloat16, False),
        Codec("fp8", torch.float8_e4m3fn, True),
        Codec("int8", torch.int8, True),
    )
}


def find_codec(name: str) -> Codec:
    """Return a codec by name; `InputError` lists the known ones."""
    if name not in CODECS:
        raise InputError(f"storage={name!r}{near(name, CODECS)}: choose one of {', '.join(CODECS)}.")
    return CODECS[name]


# What is stored a token -----------------------------------------------------------------------------------
#
# Taps, final state, scales and health flags of a batch lie in one run of bytes, so a batch leaves the device
# in ONE copy. The same regions, by the same names, are the tensors of a part on disk.


_ALIGN = 64
FLAGS = "flags"
EXACT = CODECS["bf16"]  # of the final state: eight bits would change which token the target says


@dataclass(frozen=True)
class Region:
    """`rows` x `width` values of one dtype, a row a token."""

    name: str
    dtype: torch.dtype
    width: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.width * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """What is stored a token: a state of `hidden` values a tap in a codec, and perhaps the final state."""

    tap_ids: tuple[int, ...]
    hidden: int
    has_final: bool
    codec: Codec

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> Layout:
        """The layout that a store's identity (`store.json`) describes."""
        codec = find_codec(identity["storage"])
        return cls(tuple(identity["tap_ids"]), identity["hidden"], identity["has_final"], codec)

    def identity(self, target: Mapping[str, Any], dtype: torch.dtype, samples_hash: str) -> dict[str, Any]:
        """What every shard of a store must agree on, as JSON will give it back: the target's identity, its
        dtype, what is kept (both spellings of the layer ids), and the set of samples.
        """
        found = {
            "schema": SCHEMA,
            "target": target,
            "compute_dtype": str(dtype).removeprefix("torch."),
            "tap_ids": self.tap_ids,
            "tap_ids_plus_one": [layer + 1 for layer in self.tap_ids],
            "hidden": self.hidden,
            "has_final": self.has_final,
            "storage": self.codec.name,
            "samples": samples_hash,
        }
        return json.loads(json.dumps(found))

    @property
    def taps(self) -> int:
        """Number of taps, K."""
        return len(self.tap_ids)

    @property
    def states(self) -> int:
        """States a token: the taps and the final one."""
        return self.taps + self.has_final

    @property
    def regions(self) -> tuple[Region, ...]:
        """The token regions in storage order."""
        found = [Region("taps", self.codec.dtype, self.taps * self.hidden)]
        if self.codec.scaled:
            found.append(Region("taps_scale", torch.float32, self.taps))
        if self.has_final:
            found.append(Region("final", EXACT.dtype, self.hidden))
        return tuple(found)

    @property
    def token_bytes(self) -> int:
        """Bytes that a token's states take on disk (its id, mask and share of the offsets add about 6)."""
        return sum(region.row_bytes for region in self.regions)

    def buffer_bytes(self, tokens: int, samples: int) -> int:
        """Bytes of the buffer of a batch of `tokens` valid tokens in `samples` samples."""
        return sum(_up(tokens * region.row_bytes) for region in self.regions) + _up(samples * self.states)

    def views(self, buffer: Tensor, tokens: int, samples: int) -> dict[str, Tensor]:
        """Cut a uint8 `buffer` into its regions [tokens, width] and the flags [samples, states] (uint8)."""
        found, at = {}, 0
        for region in self.regions:
            size = tokens * region.row_bytes
            found[region.name] = buffer[at : at + size].view(region.dtype).view(tokens, region.width)
            at += _up(size)
        found[FLAGS] = buffer[at : at + samples * self.states].view(samples, self.states)
        return found

    def write_state(self, views: Mapping[str, Tensor], index: int, states: Tensor) -> None:
        """Encode state number `index` ([T, H]; taps in order, then the final one) into its columns."""
        codec, codes, scale = self._place(views, index)
        codec.encode(states, codes, scale)

    def read_state(self, views: Mapping[str, Tensor], index: int) -> Tensor:
        """State number `index` as a reader will get it, bf16 [T, H]."""
        codec, codes, scale = self._place(views, index)
        return codec.decode(codes, scale)

    def _place(self, views: Mapping[str, Tensor], index: int) -> tuple[Codec, Tensor, Tensor | None]:
        if index == self.taps:
            return EXACT, views["final"], None
        codes = views["taps"][:, index * self.hidden : (index + 1) * self.hidden]
        return self.codec, codes, views["taps_scale"][:, index : index + 1] if self.codec.scaled else None


def _up(size: int) -> int:
    return math.ceil(size / _ALIGN) * _ALIGN


# A part on disk -------------------------------------------------------------------------------------------
#
# Flat tensors and offsets, never a tensor a sample: a safetensors header is capped at 100 MB. The file is
# written by hand (length, JSON header, bytes) because the library's writer first copies every tensor; readers
# use the library.


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


# Reading --------------------------------------------------------------------------------------------------


def open_store(path: Path | str) -> FeatureStore:
    """Open a store folder; `InputError` when it is none or holds no sample, `StoreError` when a part is
    damaged.
    """
    return FeatureStore(Path(path))


class FeatureStore:
    """A sequence of `FeatureItem`s, ordered by shard folder, part and place in the part, whatever the count
    of shards that wrote them. A sample that two parts hold counts once.

    Only what a manifest vouches for is read, after one check of its size; `checks.verify` re-reads every
    byte. `manifest` is store.json; `lengths` int64 [n], `heldout` bool [n], `hashes` uint8 [n, 16].
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: dict[str, Any] = read_identity(path)
        self._layout = Layout.of(self.manifest)
        self.tap_ids = list(self._layout.tap_ids)
        self.hidden_size, self.has_final = self._layout.hidden, self._layout.has_final
        self._handles: dict[int, Any] = {}  # parts are memory mapped at their first use
        parts = parts_of(path)
        if not parts:
            raise InputError(
                f"{path} holds no sample yet. Let the extract stage finish, or give another store."
            )
        for part in parts:
            if fault := part.size_fault(path):
                raise StoreError(
                    f"{path / part.name}: {fault}. Extract again: exactly its samples are redone."
                )
        self._files = [path / part.name for part in parts]
        where, start, lengths, heldout, hashes = [], [], [], [], []
        for number in range(len(parts)):
            opened = self._open(number)
            offsets = opened.get_tensor("offsets").numpy()
            where.append(np.full(len(offsets) - 1, number, np.int32))
            start.append(offsets[:-1])
            lengths.append(np.diff(offsets))
            heldout.append(opened.get_tensor("heldout").numpy().astype(bool))
            hashes.append(opened.get_tensor("hashes"))
        _, first = np.unique(as_keys(torch.cat(hashes)), return_index=True)
        kept = np.sort(first)  # the first copy of each sample
        self._part, self._start = np.concatenate(where)[kept], np.concatenate(start)[kept]
        self.lengths, self.heldout = np.concatenate(lengths)[kept], np.concatenate(heldout)[kept]
        self.hashes = torch.cat(hashes).numpy()[kept]
        self._by_hash = {row.tobytes(): number for number, row in enumerate(self.hashes)}

    def check_made_by(self, target: str, weights: str, hidden_size: int) -> None:
        """Refuse states of other weights: width alone cannot tell a model from its fine-tune.

        `weights` and `hidden_size` are those of `target` (`target.identity`).
        """
        if self.hidden_size != hidden_size:
            raise InputError(
                f"{self.path} has states of width {self.hidden_size}, target {target} has {hidden_size}: the "
                "store was made by another target."
            )
        made = self.manifest.get("target", {})
        if made.get("weights") != weights:
            random = " (a random target's weights follow the seed)" if target.startswith("random:") else ""
            raise InputError(
                f"{self.path} was made by {made.get('name')!r} with other weights than those of target "
                f"{target!r}{random}: give the target it was made by, or extract with this one into another "
                "store."
            )

    @property
    def num_samples(self) -> int:
        """Distinct samples stored."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all distinct samples."""
        return int(self.lengths.sum())

    def __len__(self) -> int:
        return self.num_samples

    def find(self, content_hash: str) -> int:
        """Return the number of the sample with this content hash (hex); KeyError when it is not stored."""
        return self._by_hash[bytes.fromhex(content_hash)]

    def __getitem__(self, index: int) -> FeatureItem:
        """Return sample `index` with `taps` [L, K*H] and `final` [L, H] in bf16 on the CPU."""
        if index < 0:
            index += self.num_samples
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        start = int(self._start[index])
        rows = slice(start, start + int(self.lengths[index]))
        part, codec = self._open(int(self._part[index])), self._layout.codec
        scale = part.get_slice("taps_scale")[rows] if codec.scaled else None
        return FeatureItem(
            hash=self.hashes[index].tobytes().hex(),
            input_ids=part.get_slice("input_ids")[rows].long(),
            loss_mask=part.get_slice("loss_mask")[rows],
            taps=codec.decode(part.get_slice("taps")[rows], scale),
            final=part.get_slice("final")[rows] if self.has_final else None,
            heldout=bool(self.heldout[index]),
        )

    def _open(self, number: int) -> Any:
        if number not in self._handles:
            self._handles[number] = open_part(self._files[number])
        return self._handles[number]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": {}}  # a worker process maps the files itself
