"""Captured states on their way to disk: a batch through the target, checked, copied off the device in one
piece, packed into parts and sealed by threads.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dflash_lab.extraction.manifest import add_line, next_part_index, part_name
from dflash_lab.extraction.oom import classify
from dflash_lab.extraction.report import ExtractionReport, Quarantined
from dflash_lab.extraction.shard import SampleIndex
from dflash_lab.extraction.store import FLAGS, Layout, hex_to_hashes, write_part
from dflash_lab.models.hooks import Taps
from dflash_lab.models.load import Target

log = logging.getLogger(__name__)


# One batch through the target -----------------------------------------------------------------------------
#
# Right padding without a mask is exact for causal attention and for recurrent layers: a position sees only
# what stands before it. The rows of all taps are gathered into one buffer on the device, which leaves in one
# copy on a stream of its own while the next forward runs.


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
        wanted = [*layout.tap_ids, *([target.num_layers - 1] if layout.has_final else [])]
        ids = sorted(set(wanted))
        self._order = [ids.index(layer) for layer in wanted]  # caught state of each stored one
        self._taps = Taps(target, ids)
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


# Is a captured state one that a model computes? -----------------------------------------------------------


# By rank: the worst finding among a sample's rows is kept.
FINDINGS = ("sound", "constant", "all zero", "infinite", "NaN")


def check_rows(states: Tensor, owner: Tensor, samples: int) -> Tensor:
    """Return the worst finding a sample, uint8 [samples] (index into FINDINGS).

    `states` [T, H] are the rows of one tap, `owner` [T] int64 says which sample a row belongs to. One pass on
    the device, so that only a byte a sample and state travels to the host.
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


# From finished batches to sealed parts --------------------------------------------------------------------


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


class Writer:
    """Packs batches into parts and seals those, on two threads. Leaving it seals what is left, also after an
    error, and raises what went wrong in the threads.

    The bytes in flight are bounded: a batch lies in one of a fixed number of host buffers, and `part_bytes`
    bounds the part being filled and the one being sealed together. One thread waits for a batch's copy and
    packs the rows of its sound samples; a part that is full or `seal_seconds` old goes to the other
    (temporary name, hash and write, fsync, rename, manifest line) while the next is filled: a disk that takes
    a second for a part must not hold the buffers that the device waits for. What it did goes into `report`.
    """

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        index: SampleIndex,
        buffers: HostBuffers,
        report: ExtractionReport,
        *,
        part_bytes: int,
        seal_seconds: float,
    ) -> None:
        self._folder, self._layout, self._index, self._buffers = folder, layout, index, buffers
        self._report, self._seal_seconds = report, seal_seconds
        self._capacity = max(part_bytes // 2 // (layout.token_bytes + 5), int(index.lengths.max()))
        self._capacity = min(self._capacity, int(index.lengths.sum()))
        self._rows, self._other = self._new_rows(), self._new_rows()  # one is filled, one is sealed
        self._next = next_part_index(folder)
        self._start_part()
        self._queue: queue.SimpleQueue[HostBatch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="extraction-writer", daemon=True)
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="extraction-sealer")
        self._sealing: Future[None] | None = None
        self._manifest = threading.Lock()  # three threads append lines
        self._given_up = False
        self._error: BaseException | None = None

    def _new_rows(self) -> dict[str, Tensor]:
        states = {
            region.name: torch.empty(self._capacity, region.width, dtype=region.dtype)
            for region in self._layout.regions
        }
        ids = torch.empty(self._capacity, dtype=torch.int32)
        return states | {"input_ids": ids, "loss_mask": torch.empty_like(ids, dtype=torch.uint8)}

    def _start_part(self) -> None:
        self._samples: list[int] = []
        self._offsets = [0]
        self._began = time.monotonic()

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._queue.put(None)
        self._thread.join()
        if self._error is None:
            return
        if error is None:
            raise self._error
        if error is not self._error:
            log.error("the writer stopped as well", exc_info=self._error)

    def check(self) -> None:
        """Raise what went wrong in the threads, if anything did; never waits."""
        if self._error is not None:
            raise self._error
        if self._sealing is not None and self._sealing.done():
            self._sealing.result()
        if not self._thread.is_alive():
            raise RuntimeError("the writer thread has ended early")

    def submit(self, batch: HostBatch) -> None:
        """Hand a batch over; its buffer returns to the pool when its rows are in the part."""
        self.check()
        self._queue.put(batch)

    def quarantine(self, row: int, reason: str) -> None:
        """Record that a sample is not stored, and why; it is tried again by the next run."""
        length = int(self._index.lengths[row])
        one = Quarantined(self._index.ids[row], self._index.content_hashes[row], length, reason)
        self.record("quarantine", **asdict(one))
        self._report.quarantined.append(one)

    def record(self, kind: str, **fields: object) -> None:
        """Append a line to the shard's manifest."""
        with self._manifest:
            add_line(self._folder, kind, **fields)

    def give_up(self) -> None:
        """Seal nothing more: what has been handed over is in doubt."""
        self._given_up = True

    def _work(self) -> None:
        try:
            while True:
                try:
                    batch = self._queue.get(timeout=1.0)
                except queue.Empty:
                    self._seal_if_old()
                    continue
                if self._given_up:
                    return
                if batch is None:
                    return self._finish()
                self._pack(batch)
                self._seal_if_old()
        except BaseException as error:
            self._error = error
            if classify(error).kind == "dead":
                self._finish()  # what is on the host is sound; only the device is lost
        finally:
            self._sealer.shutdown()

    def _pack(self, batch: HostBatch) -> None:
        """Take a batch's rows into the part under way; samples with a bad flag go to quarantine."""
        try:
            if batch.event is not None:
                batch.event.synchronize()
            lengths = [len(ids) for ids in batch.input_ids]
            views = self._layout.views(batch.buffer, sum(lengths), len(lengths))
            flags, at = views.pop(FLAGS).numpy(), 0
            for number, (row, length) in enumerate(zip(batch.rows.tolist(), lengths, strict=True)):
                if flags[number].any():
                    self.quarantine(row, describe(flags[number], self._layout))
                else:
                    if self._offsets[-1] + length > self._capacity:
                        self._seal()
                    place = slice(self._offsets[-1], self._offsets[-1] + length)
                    for name, states in views.items():
                        self._rows[name][place].copy_(states[at : at + length])
                    self._rows["input_ids"][place] = torch.from_numpy(batch.input_ids[number])
                    self._rows["loss_mask"][place] = torch.from_numpy(batch.loss_mask[number])
                    self._samples.append(row)
                    self._offsets.append(place.stop)
                at += length
        finally:
            self._buffers.give_back(batch.buffer)

    def _seal_if_old(self) -> None:
        if time.monotonic() - self._began > self._seal_seconds:  # a slow run loses little to a crash
            self._seal()

    def _finish(self) -> None:
        self._seal()
        if self._sealing is not None:
            self._sealing.result()

    def _seal(self) -> None:
        """Hand the part under way to the sealing thread once that has done the one before; nothing happens
        without samples. Raises what went wrong with the one before.
        """
        if not self._samples:
            return
        if self._sealing is not None:
            self._sealing.result()
        name, self._next = part_name(self._next), self._next + 1
        tensors = {region: rows[: self._offsets[-1]] for region, rows in self._rows.items()} | {
            "offsets": torch.tensor(self._offsets, dtype=torch.int64),
            "hashes": hex_to_hashes([self._index.content_hashes[row] for row in self._samples]),
            "heldout": torch.from_numpy(self._index.heldout[self._samples].astype(np.uint8)),
        }
        self._sealing = self._sealer.submit(self._write, name, tensors)
        self._rows, self._other = self._other, self._rows
        self._start_part()

    def _write(self, name: str, tensors: dict[str, Tensor]) -> None:
        began = time.perf_counter()
        size, digest = write_part(self._folder / name, tensors)
        samples, tokens = len(tensors["heldout"]), len(tensors["input_ids"])
        self.record("part", file=name, bytes=size, checksum=digest, samples=samples, tokens=tokens)
        report = self._report
        report.samples_stored += samples
        report.tokens_stored += tokens
        report.bytes_written += size
        report.parts += 1
        report.write_seconds += time.perf_counter() - began
