"""Re-read a whole store and name everything that is not as its manifests say.

`verify` only looks. `discard` gives damaged parts up, so that the next extraction redoes exactly their
samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dflash_lab import files
from dflash_lab.errors import StoreError
from dflash_lab.extraction import manifest as manifests
from dflash_lab.extraction.codecs import find_codec
from dflash_lab.extraction.layout import Layout
from dflash_lab.extraction.parts import as_keys, open_part

_ROWS = 1 << 14  # tokens looked at together


@dataclass(frozen=True)
class Fault:
    """One thing wrong: `file` relative to the store, `what` in words. `part` says that a sealed part is
    damaged.
    """

    file: str
    what: str
    part: bool = True


def verify(store: Path | str, on_progress: Callable[[str, int, int], None] | None = None) -> list[Fault]:
    """Read every byte of a store; return its faults, none for a sound store.

    Found and named: a missing, truncated, altered or unreadable part, a tensor of another shape or type than
    store.json says, offsets that do not add up, states that are not numbers, a sample stored twice, a part
    that no manifest names, a line of a manifest that is none.
    """
    store = Path(store)
    identity = manifests.read_identity(store)
    codec = find_codec(identity["storage"])
    layout = Layout(tuple(identity["tap_ids"]), identity["hidden"], identity["has_final"], codec)
    faults: list[Fault] = []
    seen: dict[bytes, str] = {}
    folders = [(folder, _parts(folder, faults)) for folder in manifests.shard_folders(store)]
    total, done = sum(part.bytes for _, parts in folders for part in parts), 0
    for folder, parts in folders:
        named = {part.file for part in parts}
        for stray in sorted(
            path.name for path in folder.glob("part-*.safetensors") if path.name not in named
        ):
            faults.append(
                Fault(
                    f"{folder.name}/{stray}",
                    "no manifest line names it (a crash before its line); ignored",
                    False,
                )
            )
        for part in parts:
            found = size_fault(folder, part) or checksum_fault(folder, part)
            what = found or _content_fault(folder / part.file, part, layout)
            what = what or _state_fault(folder / part.file, part, layout)
            if what:
                faults.append(Fault(part.name, what))
            else:
                with open_part(folder / part.file) as opened:
                    keys = as_keys(opened.get_tensor("hashes"))
                for key in keys:
                    if (other := seen.setdefault(key.tobytes(), part.name)) != part.name:
                        faults.append(
                            Fault(
                                part.name,
                                f"sample {key.tobytes().hex()} is also in {other}; read once",
                                False,
                            )
                        )
            done += part.bytes
            if on_progress:
                on_progress("verify", done, total)
    return faults


def _parts(folder: Path, faults: list[Fault]) -> list[manifests.Part]:
    """The sealed parts of a shard; lines of its manifest that are broken are added to `faults`."""
    broken: list[manifests.Broken] = []
    parts = manifests.sealed_parts(folder, broken)
    file = f"{folder.name}/{manifests.MANIFEST_FILE}"
    faults += [Fault(file, line.told(folder), part=False) for line in broken]
    return parts


def size_fault(folder: Path, part: manifests.Part) -> str | None:
    """What is wrong with a part by its presence and size alone, the check that every resume makes."""
    path = folder / part.file
    if not path.exists():
        return "the part is missing"
    if (size := path.stat().st_size) != part.bytes:
        return f"{size} bytes where the manifest says {part.bytes}: the part is truncated or altered"
    return None


def checksum_fault(folder: Path, part: manifests.Part) -> str | None:
    """What is wrong with a part by its bytes."""
    found = files.checksum(folder / part.file)
    return (
        None
        if found == part.checksum
        else f"checksum {found} where the manifest says {part.checksum}: bytes were altered"
    )


def discard(store: Path | str, faults: list[Fault]) -> int:
    """Give the damaged parts among `faults` up: a `discard` line, then the file goes. Return how
    many parts.
    """
    store, names = Path(store), sorted({fault.file for fault in faults if fault.part})
    for name in names:
        drop_part(files.inside(store, name), next(fault.what for fault in faults if fault.file == name))
    return len(names)


def drop_part(path: Path, why: str) -> None:
    """Record that a sealed part no longer counts and remove its file, in this order."""
    manifests.append(path.parent, "discard", file=path.name, why=why)
    path.unlink(missing_ok=True)


def _content_fault(path: Path, part: manifests.Part, layout: Layout) -> str | None:
    """A part whose bytes are as sealed but whose tensors do not fit the store: a defect of the writer."""
    try:
        with open_part(path) as opened:
            names = list(opened.keys())
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in names}
            offsets = opened.get_tensor("offsets").numpy() if "offsets" in shapes else np.empty(0)
    except StoreError as error:
        return str(error)
    n, t = part.samples, part.tokens
    wanted: dict[str, tuple[int, ...]] = {region.name: (t, region.width) for region in layout.regions}
    wanted |= {"input_ids": (t,), "loss_mask": (t,), "offsets": (n + 1,), "hashes": (n, 16), "heldout": (n,)}
    for name, shape in wanted.items():
        if shapes.get(name) != shape:
            return f"tensor {name} has shape {shapes.get(name)}, {shape} expected"
    if offsets[0] != 0 or offsets[-1] != t or (np.diff(offsets) < 1).any():
        return "offsets do not rise from 0 to the token count"
    return None


def _state_fault(path: Path, part: manifests.Part, layout: Layout) -> str | None:
    """Samples whose states are not numbers, as versions stored them that looked before the cast."""
    bad: set[int] = set()
    with open_part(path) as opened:
        owner = np.repeat(np.arange(part.samples), np.diff(opened.get_tensor("offsets").numpy()))
        slices = {region.name: opened.get_slice(region.name) for region in layout.regions}
        for start in range(0, part.tokens, _ROWS):
            views = {name: rows[start : start + _ROWS] for name, rows in slices.items()}
            for index in range(layout.states):
                finite = layout.read_state(views, index).isfinite().all(dim=-1).numpy()
                bad.update(owner[start : start + _ROWS][~finite].tolist())
        hashes = opened.get_tensor("hashes").numpy()
    if not bad:
        return None
    named = ", ".join(hashes[number].tobytes().hex() for number in sorted(bad)[:8])
    more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
    return f"states of sample {named}{more} are not numbers"


def stored_keys(store: Path, *, check_bytes: bool = False) -> tuple[np.ndarray, list[Fault]]:
    """Sorted 16-byte keys of every sample a store soundly holds, and what does not count: parts, and broken
    lines of manifests.

    Trusts manifest and size; with `check_bytes` the checksum of every part too.
    """
    keys: list[np.ndarray] = []
    faults: list[Fault] = []
    for folder in manifests.shard_folders(store):
        for part in _parts(folder, faults):
            what = size_fault(folder, part) or (checksum_fault(folder, part) if check_bytes else None)
            if what is None:
                with open_part(folder / part.file) as opened:
                    keys.append(as_keys(opened.get_tensor("hashes")))
            else:
                faults.append(Fault(part.name, what))
    return np.unique(np.concatenate(keys)) if keys else as_keys(torch.empty(0, 16, dtype=torch.uint8)), faults
