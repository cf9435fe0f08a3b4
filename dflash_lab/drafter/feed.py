"""Rows on their way to the device: read, packed, pinned and copied by a thread, on a stream of its own.

The copy of a row of a 27B target (half a gigabyte) takes as long as a hundredth of its step; on the step's
own stream the device would stand still for it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from dflash_lab.drafter.rows import Row

T = TypeVar("T")
DEPTH = 2  # rows that lie ready; the memory room counts them


@dataclass(frozen=True)
class Fed:
    """A row at its place in the data: on the host, and on the device once `copied` (an event) has passed."""

    epoch: int
    index: int
    host: Row
    row: Row
    copied: Any = None

    def arrived(self) -> Row:
        """The device's row, safe to use on the current stream."""
        if self.copied is not None:
            stream = torch.cuda.current_stream(self.row.taps.device)
            stream.wait_event(self.copied)
            for tensor in self.row.tensors():
                if tensor.is_cuda:
                    tensor.record_stream(stream)
        return self.row


def feed(rows: Iterable[tuple[int, int, Row]], device: torch.device) -> Iterator[Fed]:
    """Send rows to `device`; to be run in a thread (`prefetch`)."""
    if device.type != "cuda":
        yield from (Fed(epoch, index, row, row.to(device)) for epoch, index, row in rows)
        return
    torch.cuda.set_device(device)  # each thread has its own
    stream = torch.cuda.Stream(device)
    for epoch, index, row in rows:
        host = row.pinned()
        with torch.cuda.stream(stream):
            sent = host.to(device)
            copied = torch.cuda.Event()
            copied.record(stream)
        yield Fed(epoch, index, host, sent, copied)


def prefetch(source: Iterable[T], depth: int = DEPTH) -> Generator[T]:
    """Run `source` in a thread, at most `depth` ahead. Its exceptions are raised here; closing ends the
    thread.
    """
    ready: queue.Queue = queue.Queue(maxsize=depth)
    stop = threading.Event()

    def put(entry: tuple[str, object]) -> None:
        while not stop.is_set():
            try:
                return ready.put(entry, timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for value in source:
                if stop.is_set():
                    return
                put(("value", value))
            put(("end", None))
        except BaseException as error:
            put(("error", error))

    thread = threading.Thread(target=work, name="row-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "error":
                raise value  # type: ignore[misc]
            if kind == "end":
                return
            yield value  # type: ignore[misc]
    finally:
        stop.set()
        thread.join()
