"""Online training over many GPUs: M targets feed K drafters, row by row, in turn.

Row t of the run is made by target t mod M for drafter t mod K. Both sides draw the rows themselves from the
same seed, so only states travel, and every drafter gets exactly the rows, in the order, that it would have
got with a target of its own: the drafter that comes out is the same. Each pair of a target and a drafter has
a channel with a few slots; a target that finds its next one full waits.

A run resumes at the drafters' checkpoint: they tell the targets where they begin.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import torch

from dflash_lab import files
from dflash_lab.data.samples import FeatureItem
from dflash_lab.drafter.channel import Asked, Begin, Giver, Place, Taker
from dflash_lab.drafter.crew import heard
from dflash_lab.drafter.feed import prefetch
from dflash_lab.drafter.live import LiveItems, SampleItems
from dflash_lab.drafter.rows import PackedRows, Row

SCHEMA: dict[str, Any] = {
    "worker": pl.String,
    "turn": pl.Int64,
    "time": pl.Float64,  # seconds since the epoch
    "waited_ms": pl.Float64,  # drafter: its device idle for want of a row; target: for want of a free slot
    "depth": pl.Int64,  # drafter: rows that lay ready for it
    "forward_ms": pl.Float64,  # target: one row through the target
}


class Diary:
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

    def _ms(self, span: Any) -> float | None:
        if not isinstance(span, tuple):
            return span
        begin, end = span
        return begin.elapsed_time(end) if self._cuda else (end - begin) * 1e3

    def frame(self) -> pl.DataFrame:
        """The records; waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        rows = [
            (self.worker, turn, at, self._ms(waited), depth, self._ms(forward))
            for turn, at, waited, forward, depth in self._records
        ]
        return pl.DataFrame(rows, schema=SCHEMA, orient="row")

    def save(self, folder: Path) -> None:
        """Write `<worker>.parquet`."""
        with files.atomic_path(folder / f"{self.worker}.parquet") as temporary:
            self.frame().write_parquet(temporary)


class PipelineItems(SampleItems):
    """A drafter's samples; their states come from target processes through `takers`."""

    def __init__(
        self,
        path: Path | str,
        hidden_size: int,
        tap_ids: list[int],
        takers: Sequence[Taker],
        *,
        identity: dict[str, Any],
        rank: int,
        world: int,
        diary: Diary,
    ) -> None:
        super().__init__(path, hidden_size, tap_ids)
        self.takers, self._identity, self.diary = takers, identity, diary
        self._turn, self._world = rank, world

    def source(self) -> dict[str, Any]:
        """As a live target's, so that either goes on with a run of the other."""
        return {"samples": self.digest(), "target": self._identity, "tap_ids": self.tap_ids}

    def begin(self, epoch: int, index: int) -> None:
        """Let the targets run ahead."""
        for taker in self.takers:
            taker.begin(Begin(epoch, index))

    def fill(self, row: Row, epoch: int, index: int) -> Row:
        """`row` with its states, once its target has made them."""
        taker = self.takers[self._turn % len(self.takers)]
        depth = sum(each.waiting() for each in self.takers)
        began = self.diary.mark()
        full = taker.full(Place(self._turn, epoch, index))
        self.diary.note(self._turn, (began, self.diary.mark()), depth=depth)
        self._turn += self._world
        taps, final = taker.read(*full)
        return dataclasses.replace(row, taps=taps, final=final)

    def fill_heldout(self, row: Row, number: int) -> Row:
        """Held-out row `number` with its states, from the first target."""
        taps, final = self.takers[0].ask(Asked("heldout", number))
        return dataclasses.replace(row, taps=taps, final=final)

    def __getitem__(self, index: int) -> FeatureItem:
        """Sample `index` with its states in host memory; only before the run begins."""
        item = self.bare(index)
        taps, final = (states.cpu() for states in self.takers[0].ask(Asked("item", index)))
        ids, mask = item.input_ids[: len(taps)], item.loss_mask[: len(taps)]
        return dataclasses.replace(item, input_ids=ids, loss_mask=mask, taps=taps, final=final)

    def close(self) -> None:
        """The run is over: let the targets end."""
        for taker in self.takers:
            taker.close()


@dataclasses.dataclass(frozen=True)
class Making:
    """What a target process makes rows of: those of the run, and the held-out ones."""

    items: LiveItems
    rows: PackedRows
    heldout: PackedRows | None
    givers: Sequence[Giver]  # one a drafter
    number: int  # of this target
    targets: int

    def answer(self, giver: Giver, asked: Asked) -> None:
        """Give a drafter what it wants before it begins."""
        if asked.kind == "item":
            item = self.items[asked.number]
            taps, final = item.taps, item.final
        else:
            assert self.heldout is not None, "a drafter with held-out rows has held-out samples"
            row = self.heldout.row(0, asked.number).to(self.items.target.device)
            filled = self.items.fill_heldout(row, asked.number)
            taps, final = filled.taps, filled.final
        assert final is not None, "a live target makes final states"
        written = giver.write(taps, final)
        giver.settle()
        giver.tell(asked, *written)

    def wait_for_begin(self) -> Begin | None:
        """Answer until all drafters have begun; None if they end before."""
        connections = {giver.connection: giver for giver in self.givers}
        while any(giver.begun is None for giver in self.givers):
            for connection in heard(list(connections)):
                giver = connections[connection]
                giver.listen()
                while giver.asked and giver.wait_free():
                    self.answer(giver, giver.asked.popleft())
                if giver.ended:
                    return None
        begun = {giver.begun for giver in self.givers}
        if len(begun) > 1:
            raise RuntimeError(f"the drafters begin at different places: {begun}")
        return begun.pop()

    def mine(self, start: Begin) -> Iterator[tuple[Place, Row]]:
        """This target's rows from `start` on."""
        turn, epoch, index = 0, start.epoch, start.index
        cuda = self.items.target.device.type == "cuda"
        if cuda:
            torch.cuda.set_device(self.items.target.device)  # each thread has its own
        while True:
            for i in range(index, self.rows.count(epoch)):
                if turn % self.targets == self.number:
                    row = self.rows.row(epoch, i)
                    yield Place(turn, epoch, i), row.pinned() if cuda else row
                turn += 1
            epoch, index = epoch + 1, 0


def serve(making: Making, diary: Diary) -> dict[str, Any]:
    """Make rows for the drafters until they end; how long that took and how busy this target was."""
    start = making.wait_for_begin()
    began, rows = time.perf_counter(), 0
    if start is not None:
        with contextlib.closing(prefetch(making.mine(start))) as stream:
            rows = _make(making, stream, diary)
    seconds = time.perf_counter() - began
    for giver in making.givers:
        giver.connection.close()
    waited = float(diary.frame()["waited_ms"].sum()) / 1e3
    return {"rows": rows, "seconds": seconds, "waited_s": waited}


def _make(making: Making, stream: Iterator[tuple[Place, Row]], diary: Diary) -> int:
    device = making.items.target.device
    # A stream of its own for the copies: the next row's forward need not wait for them.
    copies = torch.cuda.Stream(device) if device.type == "cuda" else None
    told = 0
    under_way: Any = None  # the row whose copy may still run while the next one is started

    def tell() -> None:
        nonlocal told, under_way
        if under_way is None:
            return
        giver, place, written, event = under_way
        under_way = None
        if event is not None:
            event.synchronize()
        giver.tell(place, *written)
        told += 1

    for place, host_row in stream:
        giver = making.givers[place.turn % len(making.givers)]
        waited = 0.0
        if not giver.free():
            tell()
            asked = time.perf_counter()
            if not giver.wait_free():
                break
            waited = (time.perf_counter() - asked) * 1e3
        if giver.ended:
            break
        began = diary.mark()
        row = making.items.fill(host_row.to(device), place.epoch, place.index)
        diary.note(place.turn, waited, (began, diary.mark()))
        assert row.final is not None, "a live target makes final states"
        event = None
        if copies is None:
            written = giver.write(row.taps, row.final)
        else:
            copies.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(copies):
                written = giver.write(row.taps, row.final)
                event = torch.cuda.Event()
                event.record(copies)
            for states in (row.taps, row.final):
                states.record_stream(copies)
        tell()
        under_way = giver, place, written, event
        if event is None:
            tell()
    return told


def summary(frame: pl.DataFrame, drafters: dict[str, float]) -> dict[str, float | int | str]:
    """Headline figures of a run: `frame` of all workers' diaries, `drafters` the seconds each spent in steps.

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
    depth = mine["depth"].mean()
    return {
        "drafter_busy_pct": busy,
        "target_busy_pct": target_busy,
        "limit": "targets" if busy < target_busy else "drafters",
        "queue_depth": float(depth) if isinstance(depth, int | float) else 0.0,
        "target_forward_ms": _median(others["forward_ms"]),
    }


def _median(values: pl.Series) -> float:
    found = values.median()
    return float(found) if isinstance(found, int | float) else 0.0
