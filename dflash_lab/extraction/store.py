"""The feature store on disk: manifest, layout, codecs, part files, and the reader of its samples."""

from __future__ import annotations

import json
import math
import re
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

# ----------------------------------------------------------------------------------------------------
# How a state row becomes bytes: `bf16` exact (the default), `fp8` and `int8` with one scale a row and tap.
#
# A residual stream has a few channels hundreds of times larger than the rest. A row scaled to int8 spends
# its 255 steps on those; e4m3 spends its bits on the exponent and keeps about 2.6 % everywhere. Both halve
# the store; `benchmarks/extraction.py` measures what each loses. Scales are float32, [rows, taps].


_TOP = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


@dataclass(frozen=True)
class Codec:
    """A storage type. `scaled` codecs keep max|row| / top beside the codes."""

    name: str
    dtype: torch.dtype
    scaled: bool

    def encode(self, states: Tensor, codes: Tensor, scale: Tensor | None) -> None:
        """Write `states` [T, H] (any float dtype) into `codes` [T, H] (a view) and `scale` [T]."""
        if scale is None:
            codes.copy_(states)
            return
        top = _TOP[self.dtype]
        step = states.abs().amax(dim=-1).float().clamp_min(torch.finfo(torch.float32).tiny) / top
        scale.copy_(step)
        scaled = states.float() / step[:, None]
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


# ----------------------------------------------------------------------------------------------------
# The regions of one buffer: every tap, the final state, scales and health flags of a batch lie in one run
# of bytes.
#
# So a batch leaves the device in ONE copy. The same regions, by the same names, are the tensors of a part
# on disk.


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

    def write_state(self, views: dict[str, Tensor], index: int, states: Tensor) -> None:
        """Encode state number `index` ([T, H]; taps in order, then the final one) into its columns."""
        if index == self.taps:
            EXACT.encode(states, views["final"], None)
            return
        codes = views["taps"][:, index * self.hidden : (index + 1) * self.hidden]
        self.codec.encode(states, codes, views["taps_scale"][:, index] if self.codec.scaled else None)

    def read_state(self, views: dict[str, Tensor], index: int) -> Tensor:
        """State number `index` as a reader will get it, bf16 [T, H]."""
        if index == self.taps:
            return EXACT.decode(views["final"], None)
        codes = views["taps"][:, index * self.hidden : (index + 1) * self.hidden]
        return self.codec.decode(codes, views["taps_scale"][:, index, None] if self.codec.scaled else None)


def _up(size: int) -> int:
    return math.ceil(size / _ALIGN) * _ALIGN


# ----------------------------------------------------------------------------------------------------
# The manifest of a shard: one JSON object a line, appended and synced; what it does not name does not
# exist.
#
# Lines: `run` (who wrote, with what), `selftest`, `check` (samples of a batch, compared), `retry` (an
# attempt that did not fit), `part` (a sealed file), `discard` (a part found damaged and given up),
# `quarantine` (a sample that could not be stored, and why), `mend` (a line that was broken and taken out),
# `end` (the account of a finished run).
#
# A crash can tear the last line only; the reader ignores it and the next writer cuts it off. A line broken
# otherwise (by a disk, by a hand) costs what it named: readers refuse the shard until the next writer has
# taken the line out.


SCHEMA = 1
STORE_FILE = "store.json"
MANIFEST_FILE = "manifest.jsonl"
_IDENTITY = {"target": dict, "tap_ids": list, "hidden": int, "has_final": bool, "storage": str}
_FIELDS: dict[str, dict[str, type]] = {
    "part": {"file": str, "bytes": int, "checksum": str, "samples": int, "tokens": int},
    "discard": {"file": str},
}
_SHARD = re.compile(r"shard-(\d{5})-of-(\d{5})$")
_PART = re.compile(r"part-(\d{6})\.safetensors")


@dataclass(frozen=True)
class Part:
    """A sealed part as its manifest line describes it. `checksum` is the xxh3-128 of the file's bytes."""

    shard: str
    file: str
    bytes: int
    checksum: str
    samples: int
    tokens: int

    @property
    def name(self) -> str:
        """Path relative to the store."""
        return f"{self.shard}/{self.file}"


def shard_name(shard: int, num_shards: int) -> str:
    """Return the folder name of a shard; `InputError` when it lies outside the count."""
    if num_shards < 1 or not 0 <= shard < num_shards:
        raise InputError(
            f"shard={shard}, num_shards={num_shards}: shards count from 0 to num_shards - 1, so this must be "
            f"between 0 and {max(num_shards, 1) - 1}."
        )
    return f"shard-{shard:05d}-of-{num_shards:05d}"


def shard_folders(store: Path) -> list[Path]:
    """Every shard folder of a store, whatever the count of shards it was written with, by name."""
    return (
        sorted(path for path in store.iterdir() if path.is_dir() and _SHARD.match(path.name))
        if store.is_dir()
        else []
    )


@dataclass(frozen=True)
class Broken:
    """A line of a manifest that is none, and why, in words."""

    number: int  # from 1
    raw: bytes
    why: str

    def told(self, folder: Path) -> str:
        """Say what was found and what it costs."""
        return (
            f"{folder / MANIFEST_FILE}:{self.number}: not a manifest line ({self.why}). Extract again: what "
            "it named is redone, and the other parts stay, which have checksums of their own."
        )


def read_lines(folder: Path, broken: list[Broken] | None = None) -> list[dict[str, Any]]:
    """Read a shard's manifest; a torn last line is ignored. A broken line elsewhere is a `StoreError`, unless
    `broken` is given, which then gets it.
    """
    path = folder / MANIFEST_FILE
    if not path.exists():
        return []
    values = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):  # the rest was never finished
        try:
            values.append(_read_line(line))
        except (ValueError, RecursionError) as error:
            found = Broken(number, line, str(error))
            if broken is None:
                raise StoreError(found.told(folder)) from error
            broken.append(found)
    return values


def _read_line(line: bytes) -> dict[str, Any]:
    value = json.loads(line)
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise ValueError("no object with a kind")
    for field, kind in _FIELDS.get(value["kind"], {}).items():
        if not isinstance(value.get(field), kind):
            raise ValueError(f"{field} of a {value['kind']} is {value.get(field)!r}")
    if value["kind"] == "part" and not _PART.fullmatch(value["file"]):
        raise ValueError(f"{value['file']!r} is no part's name")
    return value


def mend(folder: Path) -> list[Broken]:
    """Take a torn last line and broken lines out, so that the next append starts on a line of its own; return
    the broken ones, which a `mend` line remembers. Needs the shard's lock.
    """
    path = folder / MANIFEST_FILE
    if not path.exists():
        return []
    broken: list[Broken] = []
    read_lines(folder, broken)
    data = path.read_bytes()
    *lines, torn = data.split(b"\n")
    if broken:
        gone = {line.number for line in broken}
        kept = [line for number, line in enumerate(lines, 1) if number not in gone]
        kept += [json.dumps({"kind": "mend", **_told(line)}).encode() for line in broken]
        files.write_bytes(path, b"".join(line + b"\n" for line in kept))
    elif torn:
        with open(path, "rb+") as file:
            file.truncate(len(data) - len(torn))
    return broken


def _told(line: Broken) -> dict[str, Any]:
    return {"line": line.number, "why": line.why, "text": line.raw[:400].decode("utf-8", "replace")}


def append(folder: Path, kind: str, **fields: Any) -> None:
    """Append one synced line."""
    files.append_line(folder / MANIFEST_FILE, {"kind": kind, **fields})


def sealed_parts(folder: Path, broken: list[Broken] | None = None) -> list[Part]:
    """The parts that a shard's manifest vouches for: named by a `part` line and by no later
    `discard` line. `broken` as in `read_lines`.
    """
    parts: dict[str, Part] = {}
    for line in read_lines(folder, broken):
        if line["kind"] == "part":
            name = line["file"]
            parts[name] = Part(
                folder.name,
                name,
                int(line["bytes"]),
                line["checksum"],
                int(line["samples"]),
                int(line["tokens"]),
            )
        elif line["kind"] == "discard":
            parts.pop(line["file"], None)
    return list(parts.values())


def finished_draws(folder: Path) -> list[dict[str, Any]]:
    """Return what each finished run of a shard drew (`max_samples`, 0 for all, `seed` and `of` how many)
    while no part was given up since; runs of earlier versions drew all.
    """
    everything = {"max_samples": 0}
    begun: dict[str, Any] = everything
    found: list[dict[str, Any]] = []
    for line in read_lines(folder):
        if line["kind"] == "run":
            begun = line.get("drawn", everything)
        elif line["kind"] == "end":
            found.append(begun)
        elif line["kind"] == "discard":
            found = []
    return found


def trial_of(store: Path) -> int:
    """Return of how many samples a store holds only those drawn (`max_samples`); 0 for one of all of them."""
    runs = [
        [line for line in read_lines(folder) if line["kind"] == "run"][-1:] for folder in shard_folders(store)
    ]
    drawn = [line.get("drawn", {}) for lines in runs for line in lines]
    return max((one["of"] for one in drawn if one.get("max_samples")), default=0)


def next_part_index(folder: Path) -> int:
    """One above every part index ever named in the manifest, also in a line that was broken: a name is never
    used twice.
    """
    path = folder / MANIFEST_FILE
    named = _PART.findall(path.read_bytes().decode("utf-8", "replace")) if path.exists() else []
    return max(map(int, named), default=-1) + 1


def part_name(index: int) -> str:
    """File name of a shard's part."""
    return f"part-{index:06d}.safetensors"


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Name every field in which two identities differ, one sentence each, nested fields dotted."""
    found = []
    for key in sorted({*stored, *wanted}):
        old, new = stored.get(key), wanted.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found.append(f"{prefix}{key}: the store has {old!r}, this run {new!r}")
    return found


def open_identity(store: Path, identity: Mapping[str, Any]) -> None:
    """Write `store.json`, or hold an existing one against `identity`; a difference is a `StoreError` that
    names it. One that was lost is written again when every shard says that it was begun with `identity`.
    """
    path = store / STORE_FILE
    identity = plain(identity)
    found = other_setup(store, identity)
    if not found and not path.exists():
        files.write_json(path, identity)
    if found:
        raise StoreError(
            f"{store} was made by another setup and nothing was appended:\n  "
            + "\n  ".join(found)
            + "\nGive the setup the store was made with, another store folder, or force to replace it."
        )


def other_setup(store: Path, identity: Mapping[str, Any]) -> list[str]:
    """Say in what a store differs from `identity`, a sentence each; empty where it is the same or nothing is
    there.
    """
    path, identity = store / STORE_FILE, plain(identity)
    stored = [files.read_json(path)] if path.exists() else _begun_with(store)
    found = [text for one in stored for text in differences(_nameless(one), _nameless(identity))]
    return list(dict.fromkeys(found))


def _begun_with(store: Path) -> list[dict[str, Any]]:
    """What the shards of a store without `store.json` say that they hold, none if there is no shard yet."""
    found = []
    for folder in shard_folders(store):
        runs = [line for line in read_lines(folder, []) if line["kind"] == "run"]
        if runs and not isinstance(runs[-1].get("store"), dict):
            raise StoreError(
                f"{store / STORE_FILE} is missing beside existing shards, and {folder.name} does not say "
                "what it holds. Put the file back, or use a new store folder."
            )
        found += [line["store"] for line in runs[-1:]]
    return found


def plain(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity as JSON will give it back: tuples become lists."""
    return json.loads(json.dumps(identity))


def _nameless(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the target's name: equal weights may lie in another folder by now."""
    return {**identity, "target": {k: v for k, v in identity.get("target", {}).items() if k != "name"}}


def read_identity(store: Path) -> dict[str, Any]:
    """Read `store.json`; `InputError` when the folder is no store, `StoreError` for another schema."""
    path = store / STORE_FILE
    if not path.exists():
        raise InputError(
            f"{store} is no feature store: it has no {STORE_FILE}. Run the extract stage, which writes it "
            "(also one that was lost), or give its store folder."
        )
    identity = files.read_json(path)
    schema = identity.get("schema") if isinstance(identity, dict) else None
    if schema != SCHEMA:
        raise StoreError(f"{path}: schema {schema!r}, but this version reads {SCHEMA}. Extract again.")
    for name, kind in _IDENTITY.items():
        if not isinstance(identity.get(name), kind):
            raise StoreError(
                f"{path}: {name} is {identity.get(name)!r}, not a {kind.__name__}: nobody can tell what the "
                "store holds. Put the file back, or remove it and extract again: it is written anew."
            )
    return identity


# ----------------------------------------------------------------------------------------------------
# A part on disk: a safetensors file streamed straight from the row buffers, hashed in the same pass (on a
# second thread: both release the interpreter).
#
# Flat tensors and offsets, never a tensor a sample: a safetensors header is capped at 100 MB. The file is
# written by hand (length, JSON header, bytes) because the library's writer first copies every tensor;
# readers use the library.


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


# ----------------------------------------------------------------------------------------------------
# Read a feature store: samples by number or by content hash, whatever the count of shards that wrote them.
#
# Only what a manifest vouches for is read, after one check of its size; `verify` re-reads every byte. A
# sample that two parts hold counts once. Parts are memory mapped and opened on first use, also in worker
# processes.


def open_store(path: Path | str) -> FeatureStore:
    """Open a store folder; `InputError` when it is none or holds no sample, `StoreError` when a part is
    damaged.
    """
    return FeatureStore(Path(path))


class FeatureStore:
    """A sequence of `FeatureItem`s. Samples are ordered by shard folder, part and place in the part.

    `manifest` is store.json; `lengths` int64 [n], `heldout` bool [n], `hashes` uint8 [n, 16].
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: dict[str, Any] = read_identity(path)
        self.tap_ids: list[int] = list(self.manifest["tap_ids"])
        self.hidden_size: int = int(self.manifest["hidden"])
        self.has_final: bool = bool(self.manifest["has_final"])
        self._codec = find_codec(self.manifest["storage"])
        self._handles: dict[int, Any] = {}
        self._files = [path / part.name for folder in shard_folders(path) for part in self._parts(folder)]
        self._index()
        if not self.num_samples:
            raise InputError(
                f"{path} holds no sample yet. Let the extract stage finish, or give another store."
            )

    def _parts(self, folder: Path) -> list[Part]:
        parts = sealed_parts(folder)
        for part in parts:
            file = folder / part.file
            size = file.stat().st_size if file.exists() else -1
            if size != part.bytes:
                what = "is missing" if size < 0 else f"has {size} bytes where its manifest says {part.bytes}"
                raise StoreError(f"{file} {what}. Extract again: exactly its samples are redone.")
        return parts

    def _index(self) -> None:
        """Read hashes, offsets and the held-out mark of every part; keep the first copy of each sample."""
        where, start, lengths, heldout, hashes = [], [], [], [], []
        for number in range(len(self._files)):
            part = self._open(number)
            offsets = part.get_tensor("offsets").numpy()
            where.append(np.full(len(offsets) - 1, number, np.int32))
            start.append(offsets[:-1])
            lengths.append(np.diff(offsets))
            heldout.append(part.get_tensor("heldout").numpy().astype(bool))
            hashes.append(part.get_tensor("hashes").numpy())
        all_hashes = np.concatenate(hashes) if hashes else np.empty((0, 16), np.uint8)
        keys = np.ascontiguousarray(all_hashes).view("V16").reshape(-1)
        _, first = np.unique(keys, return_index=True)
        kept = np.sort(first)
        self._part = np.concatenate(where)[kept] if where else np.empty(0, np.int32)
        self._start = np.concatenate(start)[kept] if start else np.empty(0, np.int64)
        self.lengths = np.concatenate(lengths)[kept] if lengths else np.empty(0, np.int64)
        self.heldout = np.concatenate(heldout)[kept] if heldout else np.empty(0, bool)
        self.hashes = all_hashes[kept]
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
        part = self._open(int(self._part[index]))
        return FeatureItem(
            hash=self.hashes[index].tobytes().hex(),
            input_ids=part.get_slice("input_ids")[rows].long(),
            loss_mask=part.get_slice("loss_mask")[rows],
            taps=self._taps(part, rows),
            final=part.get_slice("final")[rows] if self.has_final else None,
            heldout=bool(self.heldout[index]),
        )

    def _taps(self, part: Any, rows: slice) -> torch.Tensor:
        scale = part.get_slice("taps_scale")[rows] if self._codec.scaled else None
        return self._codec.decode(part.get_slice("taps")[rows], scale)

    def _open(self, number: int) -> Any:
        if number not in self._handles:
            self._handles[number] = open_part(self._files[number])
        return self._handles[number]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": {}}  # a worker process maps the files itself
