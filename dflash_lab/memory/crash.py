"""Explain an out-of-memory: what was asked for, which tensor it was, and what held the memory, from the
exception's message and from a snapshot of the allocator.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_lab.errors import InputError
from dflash_lab.memory.shapes import GIB, MIB

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": MIB, "GiB": GIB, "KB": 1000, "MB": 10**6, "GB": 10**9}
_SIZE = r"(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB|KB|MB|GB)"
_REQUEST = re.compile(rf"Tried to allocate {_SIZE}|can't allocate memory: you tried to allocate (\d+) bytes")
_PARTS = {
    "capacity": re.compile(rf"total capacity of {_SIZE}"),
    "free": re.compile(rf"of which {_SIZE} is free"),
    "process": re.compile(rf"this process has {_SIZE} memory in use"),
    "allocated": re.compile(rf"Of the allocated memory {_SIZE} is allocated by PyTorch"),
    "unallocated": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),
    "limit": re.compile(rf"{_SIZE} allowed"),
}
_OTHER = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_ELEMENT_BYTES = {2: "bfloat16 or float16", 4: "float32"}


@dataclass(frozen=True)
class Holder:
    """Live memory by where it was made (the innermost line outside torch) or, without recorded frames, by the
    size of its blocks and the tensor they most likely are.
    """

    size: int
    blocks: int
    where: str
    known: bool = True  # whether frames were recorded

    @property
    def made(self) -> str:
        """How a sentence about the blocks goes on."""
        return f" by {self.where}" if self.known else f", {self.where}"


@dataclass(frozen=True)
class Crash:
    """A failed request, in bytes. `shapes` are readings of it as a tensor, likeliest first."""

    requested: int
    parts: Mapping[str, int]
    holders: tuple[Holder, ...]
    shapes: tuple[str, ...]
    others: tuple[tuple[str, int], ...] = ()  # other processes on the device, and what they hold

    @property
    def fragmented(self) -> bool:
        """Whether the memory was there but in pieces: what was free in the reserve would have sufficed."""
        return self.parts.get("unallocated", 0) >= self.requested > 0

    def explain(self) -> str:
        """Say in a paragraph what happened and what would have fitted."""
        lines = [f"{self.requested / GIB:.2f} GiB were asked for"]
        if self.shapes:
            lines[0] += f", most likely {self.shapes[0]}"
        if "process" in self.parts and "capacity" in self.parts:
            used, capacity = self.parts["process"] / GIB, self.parts["capacity"] / GIB
            lines.append(f"the process held {used:.2f} of the device's {capacity:.2f} GiB")
        # Unless this process is told apart, one of them may be it, under the number that it has elsewhere.
        if self.others and "process" in self.parts:
            held = ", ".join(f"process {pid} {size / GIB:.2f}" for pid, size in self.others)
            lines.append(f"others held of it: {held} GiB")
        if self.fragmented:
            gap = self.parts["unallocated"] / GIB
            lines.append(
                f"{gap:.2f} GiB of it were reserved and free, but not in one piece: "
                "set PYTORCH_ALLOC_CONF=expandable_segments:True before CUDA starts"
            )
        if self.holders:
            held = "; ".join(
                f"{h.size / GIB:.2f} GiB in {h.blocks} block{'s' * (h.blocks > 1)}{h.made}"
                for h in self.holders[:3]
            )
            lines.append(f"most of what was live: {held}")
        return ". ".join(line[0].upper() + line[1:] for line in lines) + "."


def requested_bytes(message: str) -> int:
    """Return the bytes that an out-of-memory message says were asked for, 0 if it does not say."""
    match = _REQUEST.search(message)
    if not match:
        return 0
    number, unit, plain = match.groups()
    return int(plain) if plain else round(float(number) * _UNITS[unit])


def explain_crash(
    message: str | BaseException = "",
    snapshot: Path | str | Mapping[str, Any] | None = None,
    *,
    dimensions: Mapping[str, int] | None = None,
) -> Crash:
    """Explain a crash from its message, a snapshot (or its JSON file), or both.

    `dimensions` are names and sizes of the run (batch, length, hidden, vocabulary ...), with which the
    request is read as a tensor shape. Raises `InputError` when neither source tells the size of the request.
    """
    text = str(message)
    data = _load(snapshot) if snapshot is not None else {}
    requested = requested_bytes(text) or _refused(data)
    if not requested:
        raise InputError(
            "No request found: give the text of the exception ('... Tried to allocate 2.00 GiB ...') or a "
            "snapshot taken when it was raised (dflash_lab.memory.crash.on_failure)."
        )
    parts = {name: _read(pattern, text) for name, pattern in _PARTS.items()}
    return Crash(
        requested=requested,
        parts={name: size for name, size in parts.items() if size},
        holders=tuple(_holders(data, dimensions or {})),
        shapes=tuple(read_shapes(requested, dimensions or {})),
        others=tuple((pid, round(float(size) * _UNITS[unit])) for pid, size, unit in _OTHER.findall(text)),
    )


def read_shapes(size: int, dimensions: Mapping[str, int]) -> list[str]:
    """Name products of `dimensions` within 1% of `size` bytes (messages round), fewest factors first."""
    names = [name for name, value in dimensions.items() if value > 1]
    found: list[tuple[int, float, str]] = []

    def extend(start: int, product: int, used: tuple[str, ...]) -> None:
        for element, dtype in _ELEMENT_BYTES.items():
            error = abs(product * element / size - 1)
            if used and error < 0.01:
                shape = " x ".join(f"{name} {dimensions[name]:,}" for name in used)
                found.append((len(used), error, f"[{shape}] in {dtype}"))
        if len(used) == 4 or product * 2 > size * 1.01:
            return
        for place in range(start, len(names)):
            extend(place + 1, product * dimensions[names[place]], (*used, names[place]))

    extend(0, 1, ())
    return [text for _, _, text in sorted(found)]


def _load(snapshot: Path | str | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(snapshot, Mapping):
        return snapshot
    try:
        data = json.loads(Path(snapshot).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{snapshot}: no snapshot as JSON ({error}); pickles are not read.") from error
    if not isinstance(data, dict):
        raise InputError(
            f"{snapshot}: a snapshot is a JSON object with 'segments', this is a {type(data).__name__}."
        )
    return data


def _refused(data: Mapping[str, Any]) -> int:
    if isinstance(data.get("refused"), Mapping):
        return int(data["refused"].get("size", 0))
    events = [
        event for trace in data.get("device_traces", ()) for event in trace if event.get("action") == "oom"
    ]
    return int(events[-1].get("size", 0)) if events else 0


def _read(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.search(text)
    return round(float(match.group(1)) * _UNITS[match.group(2)]) if match else 0


def _holders(data: Mapping[str, Any], dimensions: Mapping[str, int]) -> list[Holder]:
    sums: dict[str | int, tuple[int, int]] = {}
    for segment in data.get("segments", ()):
        for block in segment.get("blocks", ()):
            if block.get("state") != "active_allocated":
                continue
            bytes_, count = int(block.get("size", 0)), int(block.get("count", 1))
            where: str | int = _where(block.get("frames") or ()) or bytes_ // count
            size, blocks = sums.get(where, (0, 0))
            sums[where] = (size + bytes_, blocks + count)
    ranked = sorted(sums.items(), key=lambda item: -item[1][0])
    return [
        Holder(size, count, where)
        if isinstance(where, str)
        else Holder(size, count, _by_size(where, dimensions, read=place < 8), known=False)
        for place, (where, (size, count)) in enumerate(ranked)
    ]


def _by_size(size: int, dimensions: Mapping[str, int], *, read: bool) -> str:
    """Name blocks of `size` bytes, of which no frames were recorded."""
    shapes = read_shapes(size, dimensions) if read and size >= MIB else []
    return f"tensors of {size / MIB:,.1f} MiB each" + (f", most likely {shapes[0]}" if shapes else "")


def _where(frames: Iterable[Mapping[str, Any]]) -> str:
    """Name the innermost frame that is not torch's own; nothing where there is none."""
    for frame in frames:
        name = str(frame.get("filename", ""))
        if name.endswith(".py") and "/torch/" not in name:
            return f"{'/'.join(Path(name).parts[-2:])}:{frame.get('line', 0)} ({frame.get('name', '')})"
    return ""


# What the CUDA allocator held when it refused a request. torch calls an observer before the failing frames
# unwind: after the `except` block what they held is gone. It costs nothing until then and cannot be taken off
# again, so one is attached for the life of the process and hands on to whoever listens. A whole snapshot of a
# long run is tens of megabytes; kept are the largest live blocks, and the others summed by size.

MOST_BLOCKS = 1500  # that keep an entry of their own; with 6 frames each about a megabyte of JSON
MOST_FRAMES = 6
MOST_SIZES = 500
_FRAME = ("filename", "line", "name")
log = logging.getLogger(__name__)
Write = Callable[[Mapping[str, Any]], None]
_listeners: list[Write] = []
_attached = False


@contextlib.contextmanager
def on_failure(write: Write, *, frames: bool = False) -> Iterator[None]:
    """Hand a small snapshot to `write` whenever an allocation on a CUDA device fails inside.

    `frames` also records which lines made each tensor: microseconds an allocation, so switch it on to find
    what blocks of a known size are, not for every run. Raises `InputError` without a CUDA device.
    """
    import torch

    _attach()
    if frames:
        torch.cuda.memory._record_memory_history(enabled="state", stacks="python")
    _listeners.append(write)
    try:
        yield
    finally:
        _listeners.remove(write)
        if frames:
            torch.cuda.memory._record_memory_history(enabled=None)


def observe(device: int, size: int, total: int, free: int) -> None:
    """What torch calls: `size` bytes were refused on `device`, which has `total` and has `free` left.

    Nothing may be raised here, it would take the place of the lack of memory itself.
    """
    import torch

    if not _listeners:
        return
    try:
        whole = torch.cuda.memory._snapshot()
        kept = condensed(whole, {"device": device, "size": size, "total": total, "free": free})
        for write in tuple(_listeners):
            write(kept)
    except Exception:
        log.exception("no snapshot of the memory could be taken")


def condensed(snapshot: Mapping[str, Any], refused: Mapping[str, int]) -> dict[str, Any]:
    """Return the largest live blocks of `snapshot` with their innermost frames, the others summed by size."""
    live = [
        block
        for segment in snapshot.get("segments", ())
        if segment.get("device", refused.get("device")) == refused.get("device")
        for block in segment.get("blocks", ())
        if block.get("state") == "active_allocated"
    ]
    live.sort(key=lambda block: -block.get("size", 0))
    blocks = [_small(block) for block in live[:MOST_BLOCKS]]
    rest: dict[int, int] = {}
    for block in live[MOST_BLOCKS:]:
        size = int(block.get("size", 0))
        rest[size] = rest.get(size, 0) + 1
    ranked = sorted(rest.items(), key=lambda item: -item[0] * item[1])
    blocks += [
        {"size": size * count, "count": count, "state": "active_allocated", "frames": []}
        for size, count in ranked[:MOST_SIZES]
    ]
    left_out = sum(size * count for size, count in ranked[MOST_SIZES:])
    return {
        "refused": dict(refused),
        "live_bytes": sum(int(block.get("size", 0)) for block in live),
        "live_blocks": len(live),
        "bytes_left_out": left_out,
        "segments": [{"blocks": blocks}],
    }


def _small(block: Mapping[str, Any]) -> dict[str, Any]:
    own = [
        {name: frame.get(name) for name in _FRAME}
        for frame in block.get("frames") or ()
        if str(frame.get("filename", "")).endswith(".py")
    ]
    outside = [frame for frame in own if "/torch/" not in str(frame["filename"])]
    return {
        "size": int(block.get("size", 0)),
        "state": "active_allocated",
        "frames": (outside or own)[:MOST_FRAMES],
    }


def _attach() -> None:
    global _attached
    if _attached:
        return
    import torch

    if not torch.cuda.is_available():
        raise InputError("Snapshots are taken by the CUDA allocator; there is no CUDA device here.")
    torch.cuda.init()  # the observer is handed to each device's allocator, which must be there
    attach = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
    attach(observe)
    _attached = True
