"""What the CUDA allocator held at the moment it refused a request, kept small enough to lie beside a failure.

torch calls an observer before the failing frames unwind, while the tensors to blame still exist. An observer
costs nothing until then and cannot be taken off again, so one is attached for the life of the process and
hands on to whoever listens. A whole snapshot of a long run is tens of megabytes; kept are the largest live
blocks, and the others summed by size, in the form that `explain_crash` reads.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dflash_lab.errors import InputError

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
