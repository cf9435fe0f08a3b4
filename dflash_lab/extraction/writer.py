"""From finished batches to sealed parts, on a thread of its own.

The bytes in flight are bounded by construction: a batch lies in one of a fixed number of host buffers
(`HostBuffers`), pinned on CUDA, and the loop waits for a free one. The thread waits for the copy's event,
copies the rows of each sound sample into the part under way, and seals the part (temporary name, fsync,
rename, manifest line) when it is full or old. An error in the thread stops the run: the loop sees it at its
next batch, and nothing unsealed is ever named.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dflash_lab.extraction import manifest as manifests
from dflash_lab.extraction.health import describe
from dflash_lab.extraction.layout import FLAGS, Layout
from dflash_lab.extraction.oom import classify
from dflash_lab.extraction.parts import hex_to_hashes, write_part

log = logging.getLogger(__name__)


@dataclass
class HostBatch:
    """A batch on its way to disk. `buffer` belongs to the pool; `event` tells when its bytes have arrived."""

    buffer: Tensor  # uint8, from HostBuffers
    rows: np.ndarray  # [n] sample numbers
    input_ids: list[np.ndarray]  # n arrays of int32
    loss_mask: list[np.ndarray]  # n arrays of uint8
    event: torch.cuda.Event | None = None


class HostBuffers:
    """`count` fixed uint8 buffers of `size` bytes. Pinned memory is rounded up to powers of two, so it is
    taken once.
    """

    def __init__(self, count: int, size: int, *, pinned: bool) -> None:
        self.size, self.count = size, count
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put(torch.empty(size, dtype=torch.uint8, pin_memory=pinned))

    def acquire(self, still_working: Callable[[], None]) -> Tensor:
        """Wait for a free buffer; `still_working` raises when none can ever come."""
        while True:
            try:
                return self._free.get(timeout=0.2)
            except queue.Empty:
                still_working()

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer to the pool."""
        self._free.put(buffer)


@dataclass(frozen=True)
class Records:
    """What the store keeps of the samples themselves, by sample number: ids and hashes to store and to
    report.
    """

    ids: list[str]
    lengths: np.ndarray
    content_hashes: list[str]
    heldout: np.ndarray


@dataclass
class Written:
    """The writer's account so far."""

    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    parts: int = 0
    write_seconds: float = 0.0
    quarantined: dict[int, str] = field(default_factory=dict)  # sample number -> reason


class PartWriter:
    """Collects samples into row buffers of fixed size and seals them as parts. Used by one thread."""

    def __init__(
        self, folder: Path, layout: Layout, records: Records, *, part_bytes: int, seal_seconds: float
    ) -> None:
        self._folder, self._layout, self._records = folder, layout, records
        longest = int(records.lengths.max(initial=1))
        self._capacity = max(part_bytes // (layout.token_bytes + 5), longest)
        self._capacity = min(self._capacity, max(int(records.lengths.sum()), 1))
        self._seal_seconds = seal_seconds
        self._rows = {
            region.name: torch.empty(self._capacity, region.width, dtype=region.dtype)
            for region in layout.regions
        }
        self._ids = torch.empty(self._capacity, dtype=torch.int32)
        self._mask = torch.empty(self._capacity, dtype=torch.uint8)
        self._next = manifests.next_part_index(folder)
        self._start_part()
        self.written = Written()

    def _start_part(self) -> None:
        self._samples: list[int] = []
        self._offsets = [0]
        self._began = time.monotonic()

    def add(self, batch: HostBatch) -> None:
        """Take a batch whose bytes have arrived; samples with a bad flag go to quarantine."""
        lengths = [len(ids) for ids in batch.input_ids]
        views = self._layout.views(batch.buffer, sum(lengths), len(lengths))
        flags, at = views[FLAGS].numpy(), 0
        for number, row in enumerate(batch.rows):
            length = lengths[number]
            if flags[number].any():
                self.quarantine(int(row), describe(flags[number], self._layout))
            else:
                self._append(int(row), batch, number, views, at)
            at += length

    def _append(self, row: int, batch: HostBatch, number: int, views: dict[str, Tensor], at: int) -> None:
        length = len(batch.input_ids[number])
        if self._offsets[-1] + length > self._capacity:
            self.seal()
        start = self._offsets[-1]
        for name, rows in self._rows.items():
            rows[start : start + length].copy_(views[name][at : at + length])
        self._ids[start : start + length] = torch.from_numpy(batch.input_ids[number])
        self._mask[start : start + length] = torch.from_numpy(batch.loss_mask[number])
        self._samples.append(row)
        self._offsets.append(start + length)

    def seal_if_old(self) -> None:
        """Seal a part that has been open too long, so that a slow run loses little to a crash."""
        if self._samples and time.monotonic() - self._began > self._seal_seconds:
            self.seal()

    def seal(self) -> None:
        """Write the part under way and name it in the manifest; nothing happens without samples."""
        if not self._samples:
            return
        began, tokens, name = time.perf_counter(), self._offsets[-1], manifests.part_name(self._next)
        tensors = {region: rows[:tokens] for region, rows in self._rows.items()}
        tensors |= {
            "input_ids": self._ids[:tokens],
            "loss_mask": self._mask[:tokens],
            "offsets": torch.tensor(self._offsets, dtype=torch.int64),
            "hashes": hex_to_hashes([self._records.content_hashes[row] for row in self._samples]),
            "heldout": torch.from_numpy(self._records.heldout[self._samples].astype(np.uint8)),
        }
        size, digest = write_part(self._folder / name, tensors)
        manifests.append(
            self._folder,
            "part",
            file=name,
            bytes=size,
            checksum=digest,
            samples=len(self._samples),
            tokens=tokens,
        )
        done = self.written
        done.samples += len(self._samples)
        done.tokens += tokens
        done.bytes += size
        done.parts += 1
        done.write_seconds += time.perf_counter() - began
        self._next += 1
        self._start_part()

    def quarantine(self, row: int, reason: str) -> None:
        """Record that a sample is not stored, and why; it is tried again by the next run."""
        records = self._records
        manifests.append(
            self._folder,
            "quarantine",
            id=records.ids[row],
            hash=records.content_hashes[row],
            length=int(records.lengths[row]),
            reason=reason,
        )
        self.written.quarantined[row] = reason


class BackgroundWriter:
    """Runs a `PartWriter` on a thread. `close` seals what is left; leaving with an error seals it too, then
    raises.
    """

    def __init__(self, writer: PartWriter, buffers: HostBuffers) -> None:
        self._writer, self._buffers = writer, buffers
        self._queue: queue.SimpleQueue[HostBatch | tuple[int, str] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self.busy_seconds = 0.0
        self._thread = threading.Thread(target=self._work, name="extraction-writer", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what went wrong in the thread, if anything did."""
        if self._error is not None:
            raise self._error
        if not self._thread.is_alive():
            raise RuntimeError("the writer thread has ended early")

    def submit(self, batch: HostBatch) -> None:
        """Hand a batch over; its buffer returns to the pool when its rows are in the part."""
        self.check()
        self._queue.put(batch)

    def quarantine(self, row: int, reason: str) -> None:
        """Hand a quarantined sample over, so that the manifest has one writer."""
        self._queue.put((row, reason))

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Wait until everything handed over is sealed. The thread's own error is raised unless another is
        under way.
        """
        self._queue.put(None)
        self._thread.join()
        if self._error is None:
            return
        if error is None:
            raise self._error
        if error is not self._error:
            log.error("the writer stopped as well", exc_info=self._error)

    def _work(self) -> None:
        try:
            while True:
                try:
                    message = self._queue.get(timeout=1.0)
                except queue.Empty:
                    self._writer.seal_if_old()
                    continue
                if message is None:
                    self._writer.seal()
                    return
                began = time.perf_counter()
                self._take(message)
                self.busy_seconds += time.perf_counter() - began
        except BaseException as error:
            self._error = error
            if classify(error).kind == "dead":
                self._writer.seal()  # what is on the host is sound; only the device is lost

    def _take(self, message: HostBatch | tuple[int, str]) -> None:
        if isinstance(message, tuple):
            self._writer.quarantine(*message)
            return
        try:
            if message.event is not None:
                message.event.synchronize()
            self._writer.add(message)
        finally:
            self._buffers.give_back(message.buffer)
        self._writer.seal_if_old()
