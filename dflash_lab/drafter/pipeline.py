"""Online training over many GPUs: M target processes make rows of states for K drafter processes, row by row,
in turn, through shared slots.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor

from dflash_lab import files
from dflash_lab.data.samples import FeatureItem
from dflash_lab.drafter.live import LiveItems, SampleItems
from dflash_lab.drafter.rows import PackedRows, Row, prefetch
from dflash_lab.drafter.workers import PeerGone, heard, receive, send

# Row t of the run is made by target t mod M for drafter t mod K. Both sides draw the rows themselves from the
# same seed, so only states travel, and every drafter gets exactly the rows, in the order, that it would have
# got with a target of its own: the drafter that comes out is the same. A run resumes at the drafters'
# checkpoint: they tell the targets where they start.

GOODBYE_S = 10.0  # for the target to let go of the slots


@dataclass(frozen=True)
class RunRow:
    """Row `turn` of this run: row `index` of `epoch`."""

    turn: int
    epoch: int
    index: int


@dataclass(frozen=True)
class Request:
    """What a drafter wants before it starts: a held-out row or a sample (`kind` heldout | item)."""

    kind: str
    number: int


@dataclass(frozen=True)
class Start:
    """Where the drafter's run starts."""

    epoch: int
    index: int


class Receiver:
    """The drafter's end of its channel with one target: slots for the states of rows, and messages.

    This side makes the slots, on its own device, and the sender writes right into them (CUDA IPC: over NVLink
    between two GPUs; shared memory on CPUs). Memory is shared once, at the start, and belongs to the one who
    outlives the other. Messages (a slot is full, a slot is free) go through a pipe, each after the copy it
    speaks of has ended, so neither side ever reads what the other still writes; with all slots full the
    target waits: that is the back-pressure.
    """

    def __init__(
        self,
        connection: Connection,
        peer: str,
        *,
        slots: int,
        row_tokens: int,
        tap_width: int,
        hidden: int,
        device: torch.device,
    ) -> None:
        self._connection, self.peer = connection, peer
        shape: dict[str, Any] = dict(dtype=torch.bfloat16, device=device)
        self.taps = torch.zeros(slots, row_tokens, tap_width, **shape)  # [slots, S, K*H]
        self.final = torch.zeros(slots, row_tokens, hidden, **shape)
        if device.type == "cpu":
            self.taps.share_memory_()
            self.final.share_memory_()
        else:
            torch.cuda.synchronize(device)
        self._full: deque[tuple[Any, int, int]] = deque()  # what for, slot, tokens
        self._reading: list[tuple[int, Any]] = []  # slots being copied from, with the copy's event
        send(connection, peer, ("slots", self.taps, self.final))

    def ready(self) -> int:
        """Rows that lie ready."""
        while self._connection.poll(0):
            self._full.append(receive(self._connection, self.peer))
        return len(self._full)

    def request(self, wanted: Request) -> tuple[Tensor, Tensor]:
        """States of a held-out row or a sample."""
        send(self._connection, self.peer, wanted)
        return self.read(*self.wait_full(wanted))

    def start(self, start: Start) -> None:
        """Let the target run ahead from `start`."""
        self.release()
        send(self._connection, self.peer, start)

    def wait_full(self, wanted: Request | RunRow) -> tuple[int, int]:
        """Wait until a slot holds the states of `wanted`: (slot, tokens)."""
        self.release()
        if not self._full:
            self._full.append(receive(self._connection, self.peer))
        given, slot, tokens = self._full.popleft()
        if given != wanted:
            raise RuntimeError(f"{self.peer} gave {given}, not {wanted}: the two count rows differently")
        return slot, tokens

    def read(self, slot: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Own copies of a slot's taps [S, K*H] and final [S, H]; the slot is free once they have ended."""
        taps, final = self.taps[slot, :tokens].clone(), self.final[slot, :tokens].clone()
        event = None
        if taps.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self._reading.append((slot, event))
        return taps, final

    def release(self) -> None:
        """Give back slots whose copies have ended, waiting for them."""
        for slot, event in self._reading:
            if event is not None:
                event.synchronize()
            send(self._connection, self.peer, ("free", slot))
        self._reading.clear()

    def close(self) -> None:
        """End the run for the target, and wait until it has let go of the slots."""
        try:
            send(self._connection, self.peer, ("end",))
            until = time.monotonic() + GOODBYE_S
            while (left := until - time.monotonic()) > 0:
                receive(self._connection, self.peer, left)
        except PeerGone:
            return


class Sender:
    """The target's end of its channel with one drafter; see `Receiver`."""

    def __init__(self, connection: Connection, peer: str) -> None:
        self.connection, self.peer = connection, peer
        _, self._taps, self._final = receive(connection, peer)
        self._free = deque(range(len(self._taps)))
        self.requests: deque[Request] = deque()
        self.started: Start | None = None
        self.ended = False

    def listen(self, timeout_s: float | None = None) -> None:
        """Take in one message, if one comes within `timeout_s`."""
        message = receive(self.connection, self.peer, timeout_s)
        if isinstance(message, Request):
            self.requests.append(message)
        elif isinstance(message, Start):
            self.started = message
        elif message is not None and message[0] == "free":
            self._free.append(message[1])
        elif message is not None:
            self.ended = True

    def free(self) -> bool:
        """Whether a slot is free; takes in what has been said."""
        while not self.ended and self.connection.poll(0):
            self.listen()
        return bool(self._free)

    def wait_free(self) -> bool:
        """Wait for a free slot; False when the drafter wants no more."""
        while not self.ended and not self._free:
            self.listen()
        return not self.ended

    def write(self, taps: Tensor, final: Tensor | None) -> tuple[int, int]:
        """Start copying states into a free slot; (slot, tokens) for `tell`, once the copy has ended."""
        assert final is not None, "a live target makes final states"
        slot = self._free.popleft()
        self._taps[slot, : len(taps)].copy_(taps, non_blocking=True)
        self._final[slot, : len(final)].copy_(final, non_blocking=True)
        return slot, len(taps)

    def tell(self, what: Request | RunRow, slot: int, tokens: int) -> None:
        """Say that a slot is full."""
        send(self.connection, self.peer, (what, slot, tokens))

    def answer(self, request: Request, taps: Tensor, final: Tensor | None) -> None:
        """Give a drafter what it wants before it starts."""
        written = self.write(taps, final)
        if self._taps.is_cuda:  # whichever of the two devices runs the copies
            torch.cuda.synchronize()
            torch.cuda.synchronize(self._taps.device)
        self.tell(request, *written)


TIMING_SCHEMA: dict[str, Any] = {
    "worker": pl.String,
    "turn": pl.Int64,
    "time": pl.Float64,  # seconds since the epoch
    "waited_ms": pl.Float64,  # drafter: its device idle for want of a row; target: for want of a free slot
    "depth": pl.Int64,  # drafter: rows that lay ready for it
    "forward_ms": pl.Float64,  # target: one row through the target
}


class Timings:
    """What one worker did, a record a row; written as parquet at the end."""

    def __init__(self, worker: str, device: torch.device) -> None:
        self.worker, self._cuda = worker, device.type == "cuda"
        self._records: list[tuple[int, float, Any, Any, int | None]] = []

    def mark(self) -> Any:
        """Now: on a GPU, when it comes to this point of its work."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def note(self, turn: int, waited: Any, forward: Any = None, depth: int | None = None) -> None:
        """Remember a row. Times are milliseconds, or pairs of marks."""
        self._records.append((turn, time.time(), waited, forward, depth))

    def frame(self) -> pl.DataFrame:
        """The records; waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()

        def ms(span: Any) -> float | None:
            if not isinstance(span, tuple):
                return span
            begin, end = span
            return begin.elapsed_time(end) if self._cuda else (end - begin) * 1e3

        rows = [
            (self.worker, turn, at, ms(waited), depth, ms(forward))
            for turn, at, waited, forward, depth in self._records
        ]
        return pl.DataFrame(rows, schema=TIMING_SCHEMA, orient="row")

    def save(self, folder: Path) -> None:
        """Write `<worker>.parquet`."""
        with files.atomic_path(folder / f"{self.worker}.parquet") as temporary:
            self.frame().write_parquet(temporary)


class PipelineItems(SampleItems):
    """A drafter's samples; their states come from target processes through `receivers`, one each."""

    def __init__(
        self,
        path: Path | str,
        hidden_size: int,
        tap_ids: list[int],
        receivers: Sequence[Receiver],
        *,
        identity: dict[str, Any],
        rank: int,
        world: int,
        timings: Timings,
    ) -> None:
        super().__init__(path, hidden_size, tap_ids)
        self.receivers, self._identity, self.timings = receivers, identity, timings
        self._turn, self._world = rank, world

    def source(self) -> dict[str, Any]:
        """As a live target's, so that either goes on with a run of the other."""
        return {"samples": self.digest(), "target": self._identity, "tap_ids": self.tap_ids}

    def begin(self, epoch: int, index: int) -> None:
        """Let the targets run ahead."""
        for receiver in self.receivers:
            receiver.start(Start(epoch, index))

    def fill(self, row: Row, epoch: int, index: int) -> Row:
        """`row` with its states, once its target has made them."""
        receiver = self.receivers[self._turn % len(self.receivers)]
        depth = sum(each.ready() for each in self.receivers)
        began = self.timings.mark()
        full = receiver.wait_full(RunRow(self._turn, epoch, index))
        self.timings.note(self._turn, (began, self.timings.mark()), depth=depth)
        self._turn += self._world
        taps, final = receiver.read(*full)
        return dataclasses.replace(row, taps=taps, final=final)

    def fill_heldout(self, row: Row, number: int) -> Row:
        """Held-out row `number` with its states, from the first target."""
        taps, final = self.receivers[0].request(Request("heldout", number))
        return dataclasses.replace(row, taps=taps, final=final)

    def __getitem__(self, index: int) -> FeatureItem:
        """Sample `index` with its states in host memory; only before the run begins."""
        item = self.bare(index)
        taps, final = (states.cpu() for states in self.receivers[0].request(Request("item", index)))
        ids, mask = item.input_ids[: len(taps)], item.loss_mask[: len(taps)]
        return dataclasses.replace(item, input_ids=ids, loss_mask=mask, taps=taps, final=final)

    def close(self) -> None:
        """The run is over: let the targets end."""
        for receiver in self.receivers:
            receiver.close()


@dataclass(frozen=True)
class RowServer:
    """A target process: it makes rows, those of the run and the held-out ones, for all drafters."""

    items: LiveItems
    rows: PackedRows
    heldout: PackedRows | None
    senders: Sequence[Sender]  # one a drafter
    number: int  # of this target
    targets: int
    timings: Timings

    def serve(self) -> dict[str, Any]:
        """Make rows for the drafters until they end; how long that took and how busy this target was."""
        start = self.answer_until_started()
        began, rows = time.perf_counter(), 0
        if start is not None:
            with contextlib.closing(prefetch(self.mine(start))) as stream:
                rows = self.send_rows(stream)
        seconds = time.perf_counter() - began
        for sender in self.senders:
            sender.connection.close()
        waited = float(self.timings.frame()["waited_ms"].sum()) / 1e3
        return {"rows": rows, "seconds": seconds, "waited_s": waited}

    def answer_until_started(self) -> Start | None:
        """Answer requests until all drafters have started; None if they end before."""
        connections = {sender.connection: sender for sender in self.senders}
        while any(sender.started is None for sender in self.senders):
            for connection in heard(list(connections)):
                sender = connections[connection]
                sender.listen()
                while sender.requests and sender.wait_free():
                    request = sender.requests.popleft()
                    if request.kind == "item":
                        item = self.items[request.number]
                        sender.answer(request, item.taps, item.final)
                    else:
                        assert self.heldout is not None, "a drafter with held-out rows has held-out samples"
                        row = self.heldout.row(0, request.number).to(self.items.target.device)
                        filled = self.items.fill_heldout(row, request.number)
                        sender.answer(request, filled.taps, filled.final)
                if sender.ended:
                    return None
        started = {sender.started for sender in self.senders}
        if len(started) > 1:
            raise RuntimeError(f"the drafters start at different places: {started}")
        return started.pop()

    def mine(self, start: Start) -> Iterator[tuple[RunRow, Row]]:
        """This target's rows from `start` on."""
        turn, epoch, index = 0, start.epoch, start.index
        cuda = self.items.target.device.type == "cuda"
        if cuda:
            torch.cuda.set_device(self.items.target.device)  # each thread has its own
        while True:
            for i in range(index, self.rows.count(epoch)):
                if turn % self.targets == self.number:
                    row = self.rows.row(epoch, i)
                    yield RunRow(turn, epoch, i), row.pinned() if cuda else row
                turn += 1
            epoch, index = epoch + 1, 0

    def send_rows(self, stream: Iterator[tuple[RunRow, Row]]) -> int:
        """Make and send rows until a drafter wants no more; how many were told of."""
        device = self.items.target.device
        # A stream of its own for the copies: the next row's forward need not wait for them.
        copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        told = 0
        under_way: Any = None  # the row whose copy may still run while the next one is started

        def tell() -> None:
            nonlocal told, under_way
            if under_way is None:
                return
            sender, run_row, written, event = under_way
            under_way = None
            if event is not None:
                event.synchronize()
            sender.tell(run_row, *written)
            told += 1

        for run_row, host_row in stream:
            sender = self.senders[run_row.turn % len(self.senders)]
            waited = 0.0
            if not sender.free():
                tell()
                asked = time.perf_counter()
                if not sender.wait_free():
                    break
                waited = (time.perf_counter() - asked) * 1e3
            if sender.ended:
                break
            began = self.timings.mark()
            row = self.items.fill(host_row.to(device), run_row.epoch, run_row.index)
            self.timings.note(run_row.turn, waited, (began, self.timings.mark()))
            event = None
            if copies is None:
                written = sender.write(row.taps, row.final)
            else:
                copies.wait_stream(torch.cuda.current_stream(device))
                with torch.cuda.stream(copies):
                    written = sender.write(row.taps, row.final)
                    event = torch.cuda.Event()
                    event.record(copies)
                assert row.final is not None
                for states in (row.taps, row.final):
                    states.record_stream(copies)
            tell()
            under_way = sender, run_row, written, event
            if event is None:
                tell()
        return told


def summary(frame: pl.DataFrame, drafters: dict[str, float]) -> dict[str, float | int | str]:
    """Headline figures of a run: `frame` of all workers' timings, `drafters` the seconds each spent in steps.

    A side is the limit when the other one waits for it more than it waits itself.
    """
    mine = frame.filter(pl.col("worker").is_in(list(drafters)))
    others = frame.filter(~pl.col("worker").is_in(list(drafters)))
    waited = float(mine["waited_ms"].sum()) / 1e3
    busy = 100 * (1 - waited / max(sum(drafters.values()), 1e-9))
    spans = others.group_by("worker").agg(
        (pl.col("time").max() - pl.col("time").min()).alias("seconds"), pl.col("waited_ms").sum()
    )
    span = float(spans["seconds"].sum())
    target_busy = 100 * (1 - float(spans["waited_ms"].sum()) / 1e3 / span) if span else 0.0
    depth, forward_ms = mine["depth"].mean(), others["forward_ms"].median()
    return {
        "drafter_busy_pct": busy,
        "target_busy_pct": target_busy,
        "limit": "targets" if busy < target_busy else "drafters",
        "queue_depth": float(depth) if isinstance(depth, int | float) else 0.0,
        "target_forward_ms": float(forward_ms) if isinstance(forward_ms, int | float) else 0.0,
    }
