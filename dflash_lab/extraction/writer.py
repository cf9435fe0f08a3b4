"""Captured states on their way to disk: copied off the device, packed, written and committed by a thread."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dflash_lab.extraction import store as manifests
from dflash_lab.extraction.oom import classify
from dflash_lab.extraction.store import FLAGS, Layout, hex_to_hashes, write_part
from dflash_lab.models.hooks import Taps
from dflash_lab.models.load import Target

# ----------------------------------------------------------------------------------------------------
# Is a captured state one that a model computes? NaN, infinite, all-zero and constant rows are kept out of
# the store.
#
# Checked on the device in one pass over the rows, so that only a byte a sample and state travels to the
# host.


# By rank: the worst finding among a sample's rows is kept.
FINDINGS = ("sound", "constant", "all zero", "infinite", "NaN")


def check_rows(states: Tensor, owner: Tensor, samples: int) -> Tensor:
    """Return the worst finding a sample, uint8 [samples] (index into FINDINGS).

    `states` [T, H] are the rows of one tap, `owner` [T] int64 says which sample a row belongs to.
    """
    low, high = torch.aminmax(states, dim=-1)  # NaN propagates
    found = (low == high).to(torch.uint8)
    found.masked_fill_((low == 0) & (high == 0), 2)
    found.masked_fill_(low.isinf() | high.isinf(), 3)
    found.masked_fill_(low.isnan() | high.isnan(), 4)
    return torch.zeros(samples, dtype=torch.uint8, device=states.device).scatter_reduce_(
        0, owner, found, "amax"
    )


def describe(flags: np.ndarray, layout: Layout) -> str:
    """Say in words what is wrong with a sample: `flags` [states] as `check_rows` gives them, worst first."""
    names = [f"tap {tap}" for tap in layout.tap_ids] + ["the final state"]
    worst = int(flags.max())
    where = [name for name, flag in zip(names, flags) if flag == worst]
    return f"{FINDINGS[worst]} row in {', '.join(where)}"


# ----------------------------------------------------------------------------------------------------
# From finished batches to sealed parts, on two threads of their own: one collects, one seals.
#
# The bytes in flight are bounded by construction: a batch lies in one of a fixed number of host buffers
# (`HostBuffers`), pinned on CUDA, and the loop waits for a free one. The collecting thread waits for the
# copy's event and copies the rows of each sound sample into the part under way. A part that is full or old
# goes to the sealing thread (temporary name, hash and write, fsync, rename, manifest line) while the next
# one is filled: a disk that takes a second for a part must not hold the buffers that the device waits for.
# Parts are sealed one after another, in order. An error in either thread stops the run: the loop sees it at
# its next batch, and nothing unsealed is ever named.


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


class _Rows:
    """Memory for the rows of one part: `capacity` tokens of every region, their ids and masks."""

    def __init__(self, layout: Layout, capacity: int) -> None:
        self.states = {
            region.name: torch.empty(capacity, region.width, dtype=region.dtype) for region in layout.regions
        }
        self.ids = torch.empty(capacity, dtype=torch.int32)
        self.mask = torch.empty(capacity, dtype=torch.uint8)

    def tensors(self, tokens: int) -> dict[str, Tensor]:
        """Views of the first `tokens` rows, by their names in a part."""
        found = {name: rows[:tokens] for name, rows in self.states.items()}
        return found | {"input_ids": self.ids[:tokens], "loss_mask": self.mask[:tokens]}


class PartWriter:
    """Collects samples into one of two sets of rows and seals the other. `add`, `seal` and `finish` are
    called by one thread.

    part_bytes: bound of what is collected or being sealed, so each of the two parts may take half of it.
    """

    def __init__(
        self, folder: Path, layout: Layout, records: Records, *, part_bytes: int, seal_seconds: float
    ) -> None:
        self._folder, self._layout, self._records = folder, layout, records
        longest = int(records.lengths.max(initial=1))
        self._capacity = max(part_bytes // 2 // (layout.token_bytes + 5), longest)
        self._capacity = min(self._capacity, max(int(records.lengths.sum()), 1))
        self._seal_seconds = seal_seconds
        self._rows, self._other = _Rows(layout, self._capacity), _Rows(layout, self._capacity)
        self._next = manifests.next_part_index(folder)
        self._manifest = threading.Lock()  # both threads append lines
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="extraction-sealer")
        self._sealing: Future[None] | None = None
        self._start_part()
        self.written = Written()

    def _start_part(self) -> None:
        self._samples: list[int] = []
        self._offsets = [0]
        self._began = time.monotonic()

    def check(self) -> None:
        """Raise what went wrong in sealing, if anything did; never waits."""
        if self._sealing is not None and self._sealing.done():
            self._sealing.result()

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
        place = slice(self._offsets[-1], self._offsets[-1] + length)
        for name, rows in self._rows.states.items():
            rows[place].copy_(views[name][at : at + length])
        self._rows.ids[place] = torch.from_numpy(batch.input_ids[number])
        self._rows.mask[place] = torch.from_numpy(batch.loss_mask[number])
        self._samples.append(row)
        self._offsets.append(place.stop)

    def seal_if_old(self) -> None:
        """Seal a part that has been open too long, so that a slow run loses little to a crash."""
        if self._samples and time.monotonic() - self._began > self._seal_seconds:
            self.seal()

    def seal(self) -> None:
        """Hand the part under way to the sealing thread once that has done the one before; nothing happens
        without samples. Raises what went wrong with the one before.
        """
        if not self._samples:
            return
        self._wait()
        name, self._next = manifests.part_name(self._next), self._next + 1
        tensors = self._rows.tensors(self._offsets[-1]) | {
            "offsets": torch.tensor(self._offsets, dtype=torch.int64),
            "hashes": hex_to_hashes([self._records.content_hashes[row] for row in self._samples]),
            "heldout": torch.from_numpy(self._records.heldout[self._samples].astype(np.uint8)),
        }
        self._sealing = self._sealer.submit(self._seal, name, tensors)
        self._rows, self._other = self._other, self._rows
        self._start_part()

    def finish(self) -> None:
        """Seal what is left and wait until all is sealed."""
        self.seal()
        self._wait()

    def close(self) -> None:
        """Let a part that is being sealed finish; what is merely collected is given up."""
        self._sealer.shutdown()

    def _wait(self) -> None:
        if self._sealing is not None:
            self._sealing.result()

    def _seal(self, name: str, tensors: dict[str, Tensor]) -> None:
        began = time.perf_counter()
        size, digest = write_part(self._folder / name, tensors)
        samples, tokens = len(tensors["heldout"]), len(tensors["input_ids"])
        self.record("part", file=name, bytes=size, checksum=digest, samples=samples, tokens=tokens)
        done = self.written
        done.samples += samples
        done.tokens += tokens
        done.bytes += size
        done.parts += 1
        done.write_seconds += time.perf_counter() - began

    def quarantine(self, row: int, reason: str) -> None:
        """Record that a sample is not stored, and why; it is tried again by the next run."""
        records = self._records
        digest, length = records.content_hashes[row], int(records.lengths[row])
        self.record("quarantine", id=records.ids[row], hash=digest, length=length, reason=reason)
        self.written.quarantined[row] = reason

    def record(self, kind: str, **fields: object) -> None:
        """Append a line to the shard's manifest."""
        with self._manifest:
            manifests.append(self._folder, kind, **fields)


class BackgroundWriter:
    """Runs a `PartWriter` on a thread. Leaving seals what is left, after an error too, then raises it."""

    def __init__(self, writer: PartWriter, buffers: HostBuffers) -> None:
        self._writer, self._buffers = writer, buffers
        self._queue: queue.SimpleQueue[HostBatch | Callable[[], None] | None] = queue.SimpleQueue()
        self._given_up = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="extraction-writer", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what went wrong in the thread, if anything did."""
        if self._error is not None:
            raise self._error
        self._writer.check()
        if not self._thread.is_alive():
            raise RuntimeError("the writer thread has ended early")

    def submit(self, batch: HostBatch) -> None:
        """Hand a batch over; its buffer returns to the pool when its rows are in the part."""
        self.check()
        self._queue.put(batch)

    def quarantine(self, row: int, reason: str) -> None:
        """Hand a quarantined sample over, so that the manifest has one writer."""
        self._queue.put(lambda: self._writer.quarantine(row, reason))

    def record(self, kind: str, **fields: object) -> None:
        """Hand a line of the manifest over."""
        self._queue.put(lambda: self._writer.record(kind, **fields))

    def give_up(self) -> None:
        """Seal nothing more: what has been handed over is in doubt."""
        self._given_up = True

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
                if message is None and not self._given_up:
                    self._writer.finish()
                if message is None or self._given_up:
                    return
                self._take(message)
        except BaseException as error:
            self._error = error
            if classify(error).kind == "dead":
                self._writer.finish()  # what is on the host is sound; only the device is lost
        finally:
            self._writer.close()

    def _take(self, message: HostBatch | Callable[[], None]) -> None:
        if not isinstance(message, HostBatch):
            message()
            return
        try:
            if message.event is not None:
                message.event.synchronize()
            self._writer.add(message)
        finally:
            self._buffers.give_back(message.buffer)
        self._writer.seal_if_old()


# ----------------------------------------------------------------------------------------------------
# One batch through the target: pad right, no mask, catch the taps, drop the padding, one copy to the host.
#
# Right padding without a mask is exact for causal attention and for recurrent layers: a position sees only
# what stands before it. The rows of all taps are gathered into one buffer on the device, which leaves in
# one copy on a stream of its own while the next forward runs.


@dataclass(frozen=True)
class Padded:
    """A batch on the device. `valid` [T] are the flat positions of real tokens, `owner` [T] the row each
    belongs to.
    """

    input_ids: Tensor  # [B, L] int64, zeros after each sample
    valid: Tensor
    owner: Tensor


def pad(ids: list[np.ndarray], device: torch.device) -> Padded:
    """Pad samples on the right with token 0 and say where their tokens are."""
    lengths = np.asarray([len(row) for row in ids])
    batch = np.zeros((len(ids), int(lengths.max())), np.int64)
    for number, row in enumerate(ids):
        batch[number, : len(row)] = row
    owner = np.repeat(np.arange(len(ids)), lengths)
    valid = np.flatnonzero(np.arange(batch.shape[1])[None, :] < lengths[:, None])
    return Padded(*(_to(array, device) for array in (batch, valid, owner)))


def _to(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@contextlib.contextmanager
def without_final_norm(target: Target) -> Iterator[None]:
    """Let the target's body end after its last layer; the norm returns to its place whatever happens."""
    name = next(name for name, module in target.body.named_modules() if module is target.final_norm)
    norm = target.final_norm
    target.body.set_submodule(name, nn.Identity())
    try:
        yield
    finally:
        target.body.set_submodule(name, norm)


class Capture:
    """Runs batches through a target and hands over `HostBatch`es. Enter it; leaving removes every hook."""

    def __init__(self, target: Target, layout: Layout, buffers: HostBuffers) -> None:
        self._target, self._layout, self._buffers = target, layout, buffers
        last = target.num_layers - 1
        self._ids = sorted({*layout.tap_ids, *([last] if layout.has_final else [])})
        wanted = [*layout.tap_ids, *([last] if layout.has_final else [])]
        self._order = [self._ids.index(layer) for layer in wanted]  # caught state of each stored one
        self._taps = Taps(target, self._ids)
        self._stack = contextlib.ExitStack()
        self._cuda = target.device.type == "cuda"
        self._stream = torch.cuda.Stream(target.device) if self._cuda else None
        # Begin and end of each forward, CUDA only.
        self.spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> Capture:
        self._stack.enter_context(without_final_norm(self._target))
        self._stack.enter_context(self._taps)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @torch.inference_mode()
    def states(self, padded: Padded) -> list[Tensor]:
        """Return the stored states of a batch on the device, [B, L, H] each: the taps in order, then the
        final one.
        """
        try:
            self._target.body(input_ids=padded.input_ids, use_cache=False)
            caught = self._taps.take()
        finally:
            self._taps.clear()
        return [caught[at] for at in self._order]

    def forget(self) -> None:
        """Drop what a forward outside `states` left in the hooks."""
        self._taps.clear()

    @torch.inference_mode()
    def run(
        self,
        rows: np.ndarray,
        ids: list[np.ndarray],
        masks: list[np.ndarray],
        still_working: Callable[[], None],
        examine: Callable[[list[Tensor]], None],
    ) -> HostBatch:
        """Forward one batch, let `examine` look at its states [B, L, H], and start its copy. Any error leaves
        no hook's catch and no buffer behind.
        """
        began = self._mark()
        padded = pad(ids, self._target.device)
        states = self.states(padded)
        examine(states)
        tokens, samples = len(padded.valid), len(ids)
        size = self._layout.buffer_bytes(tokens, samples)
        packed = torch.empty(size, dtype=torch.uint8, device=self._target.device) if self._cuda else None
        if packed is not None:
            self._pack(states, padded, packed, tokens, samples)
            states.clear()
        self.spans += [(began, ended)] if began is not None and (ended := self._mark()) is not None else []
        host = self._buffers.acquire(still_working)
        try:
            if packed is None:
                self._pack(states, padded, host, tokens, samples)
            return HostBatch(
                host, rows, ids, masks, self._copy(packed, host[:size]) if packed is not None else None
            )
        except BaseException:
            self._buffers.give_back(host)
            raise

    def _pack(self, states: list[Tensor], padded: Padded, buffer: Tensor, tokens: int, samples: int) -> None:
        """Gather the valid rows of every state into its columns of `buffer`, with the samples'
        health flags.
        """
        views = self._layout.views(buffer, tokens, samples)
        for index, state in enumerate(states):
            valid = state.flatten(0, 1).index_select(0, padded.valid)  # [T, H]
            self._layout.write_state(views, index, valid)
            # As stored: a sum that float32 holds may be infinite in bf16.
            stored = self._layout.read_state(views, index)
            views[FLAGS][:, index] = check_rows(stored, padded.owner, samples)

    def _copy(self, packed: Tensor, host: Tensor) -> torch.cuda.Event:
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._target.device))
        with torch.cuda.stream(self._stream):
            host.copy_(packed, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        packed.record_stream(self._stream)  # its memory is not reused before the copy has read it
        return event

    def _mark(self) -> torch.cuda.Event | None:
        if not self._cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def busy(spans: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> tuple[float, float]:
    """Return the seconds from the first forward's begin to the last one's end, and the percent of
    it without a forward.
    """
    if not spans:
        return 0.0, 0.0
    torch.cuda.synchronize()
    total = spans[0][0].elapsed_time(spans[-1][1])
    return total / 1e3, 100 * (1 - sum(begin.elapsed_time(end) for begin, end in spans) / total)
