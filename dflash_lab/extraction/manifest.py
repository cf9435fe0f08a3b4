"""The manifest of a shard: one JSON object a line, appended and synced; what it does not name does not exist.

Lines: `run` (who wrote, with what), `selftest`, `check` (samples of a batch, compared), `retry` (an
attempt that did not fit), `part` (a sealed file), `discard` (a part found damaged and given up), `quarantine`
(a sample that could not be stored, and why), `mend` (a line that was broken and taken out), `end` (the
account of a finished run).

A crash can tear the last line only; the reader ignores it and the next writer cuts it off. A line broken
otherwise (by a disk, by a hand) costs what it named: readers refuse the shard until the next writer has taken
the line out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_lab import files
from dflash_lab.errors import InputError, StoreError

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
