"""What a feature store says of itself: its identity, the manifest of each shard, the parts that those vouch
for, and who is writing. Imports no torch: `dflash-lab status` reads manifests.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_lab import files
from dflash_lab.errors import InputError, StoreError
from dflash_lab.files import lock_holder, sole_lock, waiting_lock

SCHEMA = 1
STORE_FILE = "store.json"
MANIFEST_FILE = "manifest.jsonl"
_LOCK_FILE = ".lock"  # hidden: who held it last is no part of what the store holds
_IDENTITY = {"target": dict, "tap_ids": list, "hidden": int, "has_final": bool, "storage": str}
_FIELDS: dict[str, dict[str, type]] = {
    "part": {"file": str, "bytes": int, "checksum": str, "samples": int, "tokens": int},
    "discard": {"file": str},
}
_SHARD = re.compile(r"shard-(\d{5})-of-(\d{5})$")
_PART = re.compile(r"part-(\d{6})\.safetensors")
log = logging.getLogger(__name__)


# Shards, and who writes them ------------------------------------------------------------------------------


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
    found = store.iterdir() if store.is_dir() else ()
    return sorted(path for path in found if path.is_dir() and _SHARD.match(path.name))


def shard_count(folder: Path) -> int:
    """The count of shards that a shard's folder is one of."""
    return int(folder.name.rsplit("-", 1)[1])


def store_lock(store: Path) -> AbstractContextManager[None]:
    """Hold a store for the moment it takes to compare or write its identity; waits for its turn."""
    return waiting_lock(store / _LOCK_FILE)


def shard_lock(folder: Path) -> AbstractContextManager[None]:
    """Hold a shard for writing; `InputError` naming the holder when another process has it."""
    return sole_lock(
        folder / _LOCK_FILE,
        f"process {os.getpid()} on {socket.gethostname()}",
        lambda who: (
            f"{folder} is being written by {who}. Wait for it or stop it; to work beside it "
            "give another shard."
        ),
    )


def refuse_other_counts(store: Path, num_shards: int) -> None:
    """`InputError` when a live process writes this store with another shard count: their samples would
    overlap.
    """
    for folder in shard_folders(store):
        if shard_count(folder) != num_shards and (holder := lock_holder(folder / _LOCK_FILE)) is not None:
            raise InputError(
                f"{folder} is being written by {holder} with another shard count than "
                f"num_shards={num_shards}; the two would store the same samples. Stop it first, or use "
                "its count."
            )


# The manifest of a shard ----------------------------------------------------------------------------------
#
# One JSON object a line, appended and synced; what it does not name does not exist. Lines: `run` (who wrote,
# with what), `selftest`, `check` (samples of a batch, compared), `retry` (an attempt that did not fit),
# `part` (a sealed file), `discard` (a part found damaged and given up), `quarantine` (a sample that could not
# be stored, and why), `mend` (a line that was broken and taken out), `end` (the account of a finished run).


@dataclass(frozen=True)
class Broken:
    """A line of a manifest that is none, and why, in words."""

    folder: Path
    number: int  # from 1
    raw: bytes
    why: str

    def __str__(self) -> str:
        """What was found and what it costs."""
        return (
            f"{self.folder / MANIFEST_FILE}:{self.number}: not a manifest line ({self.why}). Extract again: "
            "what it named is redone, and the other parts stay, which have checksums of their own."
        )


def read_lines(folder: Path, broken: list[Broken] | None = None) -> list[dict[str, Any]]:
    """Read a shard's manifest; a last line torn by a crash is ignored. A broken line elsewhere (a disk, a
    hand) is a `StoreError`, unless `broken` is given, which then gets it.
    """
    values = []
    for number, line in enumerate(_bytes(folder).split(b"\n")[:-1], 1):  # the rest was never finished
        try:
            values.append(_read_line(line))
        except (ValueError, RecursionError) as error:
            found = Broken(folder, number, line, str(error))
            if broken is None:
                raise StoreError(str(found)) from error
            broken.append(found)
    return values


def _bytes(folder: Path) -> bytes:
    path = folder / MANIFEST_FILE
    return path.read_bytes() if path.exists() else b""


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


def add_line(folder: Path, kind: str, **fields: Any) -> None:
    """Append one synced line."""
    files.append_line(folder / MANIFEST_FILE, {"kind": kind, **fields})


def mend(folder: Path) -> None:
    """Make a shard ready for appending after a crash: what its manifest does not name goes, a torn last line,
    and broken lines, which the log and a `mend` line remember. Needs the shard's lock.
    """
    broken: list[Broken] = []
    named = {part.file for part in sealed_parts(folder, broken)}
    data = _bytes(folder)
    *lines, torn = data.split(b"\n")
    if broken:
        gone = {line.number for line in broken}
        kept = [line for number, line in enumerate(lines, 1) if number not in gone]
        for line in broken:
            log.warning("%s", line)
            text = line.raw[:400].decode("utf-8", "replace")
            told = {"kind": "mend", "line": line.number, "why": line.why, "text": text}
            kept.append(json.dumps(told).encode())
        files.write_bytes(folder / MANIFEST_FILE, b"".join(line + b"\n" for line in kept))
    elif torn:
        os.truncate(folder / MANIFEST_FILE, len(data) - len(torn))
    for path in folder.iterdir():
        unnamed = path.name.startswith("part-") and path.name not in named
        if unnamed or (path.name.startswith(".part-") and path.name.endswith(".tmp")):
            path.unlink()


# Sealed parts ---------------------------------------------------------------------------------------------


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

    def size_fault(self, store: Path) -> str:
        """What is wrong with the file by its presence and size alone, the check that every resume makes; ""
        if nothing is.
        """
        path = store / self.name
        if not path.is_file():
            return "the part is missing"
        if (size := path.stat().st_size) != self.bytes:
            return f"{size} bytes where the manifest says {self.bytes}: the part is truncated or altered"
        return ""


def part_name(index: int) -> str:
    """File name of a shard's part."""
    return f"part-{index:06d}.safetensors"


def next_part_index(folder: Path) -> int:
    """One above every part index ever named in the manifest, also in a line that was broken: a name is never
    used twice.
    """
    named = _PART.findall(_bytes(folder).decode("utf-8", "replace"))
    return max(map(int, named), default=-1) + 1


def sealed_parts(folder: Path, broken: list[Broken] | None = None) -> list[Part]:
    """The parts that a shard's manifest vouches for: named by a `part` line and by no later `discard` line.
    `broken` as in `read_lines`.
    """
    parts: dict[str, Part] = {}
    for line in read_lines(folder, broken):
        if line["kind"] == "part":
            parts[line["file"]] = Part(folder.name, **{name: line[name] for name in _FIELDS["part"]})
        elif line["kind"] == "discard":
            parts.pop(line["file"], None)
    return list(parts.values())


def parts_of(store: Path, broken: list[Broken] | None = None) -> list[Part]:
    """The sealed parts of all shards, by folder and in the order sealed. `broken` as in `read_lines`."""
    return [part for folder in shard_folders(store) for part in sealed_parts(folder, broken)]


def drop_part(path: Path, why: str) -> None:
    """Record that a sealed part no longer counts and remove its file, in this order."""
    add_line(path.parent, "discard", file=path.name, why=why)
    path.unlink(missing_ok=True)


# Trials: runs over some of the samples, drawn by a seed ---------------------------------------------------


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
    drawn = [last_run(folder).get("drawn", {}) for folder in shard_folders(store)]
    return max((one["of"] for one in drawn if one.get("max_samples")), default=0)


def last_run(folder: Path, broken: list[Broken] | None = None) -> dict[str, Any]:
    """The `run` line of a shard's last run; empty if it had none. `broken` as in `read_lines`."""
    return next((line for line in reversed(read_lines(folder, broken)) if line["kind"] == "run"), {})


# What every shard must agree on ---------------------------------------------------------------------------


def read_identity(store: Path) -> dict[str, Any]:
    """Read `store.json`; `InputError` when the folder is no store, `StoreError` for another schema."""
    path = store / STORE_FILE
    if not path.exists():
        raise InputError(
            f"{store} is no feature store: it has no {STORE_FILE}. Run the extract stage, which writes it "
            "(also one that was lost), or give its store folder."
        )
    identity = files.read_json(path)
    if not isinstance(identity, dict):
        raise StoreError(
            f"{path}: a JSON {type(identity).__name__}, not what a store says of itself. Put the file back, "
            "or remove it and extract again: it is written anew."
        )
    schema = identity.get("schema")
    if schema != SCHEMA:
        raise StoreError(f"{path}: schema {schema!r}, but this version reads {SCHEMA}. Extract again.")
    for name, kind in _IDENTITY.items():
        if not isinstance(identity.get(name), kind):
            raise StoreError(
                f"{path}: {name} is {identity.get(name)!r}, not a {kind.__name__}: nobody can tell what the "
                "store holds. Put the file back, or remove it and extract again: it is written anew."
            )
    return identity


def open_identity(store: Path, identity: Mapping[str, Any]) -> None:
    """Write `store.json`, or hold an existing one against `identity` (JSON values); a difference is a
    `StoreError` that names it. One that was lost is written again when every shard says that it was begun
    with `identity`.
    """
    if found := other_setup(store, identity):
        raise StoreError(
            f"{store} was made by another setup and nothing was appended:\n  "
            + "\n  ".join(found)
            + "\nGive the setup the store was made with, another store folder, or force to replace it."
        )
    if not (store / STORE_FILE).exists():
        files.write_json(store / STORE_FILE, identity)


def other_setup(store: Path, identity: Mapping[str, Any]) -> list[str]:
    """Say in what a store differs from `identity`, a sentence each; empty where it is the same or nothing is
    there.
    """
    path = store / STORE_FILE
    stored = [files.read_json(path)] if path.exists() else _begun_with(store)
    found = [text for one in stored for text in _differences(_nameless(one), _nameless(identity))]
    return list(dict.fromkeys(found))


def _begun_with(store: Path) -> list[dict[str, Any]]:
    """What the shards of a store without `store.json` say that they hold, none if there is no shard yet."""
    found = []
    for folder in shard_folders(store):
        if run := last_run(folder, []):
            if not isinstance(run.get("store"), dict):
                raise StoreError(
                    f"{store / STORE_FILE} is missing beside existing shards, and {folder.name} does not say "
                    "what it holds. Put the file back, or use a new store folder."
                )
            found.append(run["store"])
    return found


def _nameless(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the target's name: equal weights may lie in another folder by now."""
    return {**identity, "target": {k: v for k, v in identity.get("target", {}).items() if k != "name"}}


def _differences(stored: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Every field in which two identities differ, one sentence each, nested fields dotted."""
    found = []
    for key in sorted({*stored, *wanted}):
        old, new = stored.get(key), wanted.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found.append(f"{prefix}{key}: the store has {old!r}, this run {new!r}")
    return found
