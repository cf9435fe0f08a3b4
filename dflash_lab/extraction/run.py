"""One pass over the batches of a shard: attempt, split, retry, quarantine, and never lose one.

Batches wait in a deque, longest first. One that does not fit is split in place and its length bucket's budget
lowered; one sample that does not fit alone is tried again at the very end, with the memory as empty as it
gets, then quarantined. Nothing is handed to the writer before a batch's states are complete, so a failed
attempt leaves no half.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash_lab.data.batching import Plan
from dflash_lab.extraction import manifest as manifests
from dflash_lab.extraction.budget import BucketBudgets
from dflash_lab.extraction.capture import Capture, busy
from dflash_lab.extraction.layout import Layout
from dflash_lab.extraction.oom import DeviceLost, Failure, alive, classify
from dflash_lab.extraction.report import BatchRecord
from dflash_lab.extraction.selftest import AROUND_A_CHUNK, self_test
from dflash_lab.extraction.shard import SampleIndex, Tokens
from dflash_lab.extraction.writer import BackgroundWriter, HostBuffers, PartWriter, Records, Written
from dflash_lab.release import release
from dflash_lab.target.model import Target

GIB = 1 << 30
LAST_CHANCES = 2  # more attempts, at the end, for a sample that did not fit alone


class Run:
    """One pass over the batches of a shard."""

    def __init__(
        self,
        target: Target,
        layout: Layout,
        index: SampleIndex,
        todo: np.ndarray,
        plan: Plan,
        tokens: Tokens,
        folder: Path,
        part_gib: float,
        buffers: int,
        seal_seconds: float,
        on_progress: Callable[..., None] | None,
    ) -> None:
        self.target, self.layout, self.index, self.tokens, self.folder = target, layout, index, tokens, folder
        self.batches = deque(todo[batch] for batch in plan.batches)
        self.planned, self.total = len(todo), plan.real_tokens
        self.budgets = BucketBudgets()
        self.last_chance: deque[int] = deque()
        self.records: list[BatchRecord] = []
        self.failures: list[str] = []
        self.seconds = self.forward_seconds = self.idle_pct = 0.0
        self.selftest: dict[str, Any] = {}
        self._buffers, self._part_bytes, self._seal_seconds = buffers, int(part_gib * GIB), seal_seconds
        self._progress = on_progress or (lambda *_args, **_fields: None)
        self._done, self._began = 0, 0.0

    def all(self, layers: list[int]) -> Written:
        """Self-test, then run every batch; whatever happens, what is finished gets sealed."""
        lengths = self.index.lengths
        sizes = [self.layout.buffer_bytes(int(lengths[batch].sum()), len(batch)) for batch in self.batches]
        buffers = HostBuffers(self._buffers, max(sizes), pinned=self.target.device.type == "cuda")
        held = buffers.count * buffers.size  # a crash loses these too: part and buffers share the bound
        records = Records(self.index.ids, lengths, self.index.content_hashes, self.index.heldout)
        parts = PartWriter(
            self.folder,
            self.layout,
            records,
            part_bytes=max(self._part_bytes - held, self._part_bytes // 2),
            seal_seconds=self._seal_seconds,
        )
        with Capture(self.target, self.layout, buffers) as capture:
            test = self_test(self.target, capture, self._examples(), layers)
            self.selftest = test.as_dict()
            manifests.append(self.folder, "selftest", **self.selftest)
            self._began = time.perf_counter()
            with BackgroundWriter(parts, buffers) as writer:
                self._work(capture, writer)
            self.seconds = time.perf_counter() - self._began
            self.forward_seconds, self.idle_pct = busy(capture.spans)
            if capture.spans:  # one a record: the device's own time instead of the host's, which mostly waits
                timed = zip(self.records, capture.spans, strict=True)
                self.records = [
                    replace(one, seconds=begin.elapsed_time(end) / 1e3) for one, (begin, end) in timed
                ]
        return parts.written

    def _examples(self) -> list[np.ndarray]:
        """Up to six samples for the self-test, spread over those long enough for every prefix."""
        rows = np.concatenate(self.batches)
        long = rows[self.index.lengths[rows] >= max(AROUND_A_CHUNK)]
        rows = long if len(long) >= 6 else rows[np.argsort(-self.index.lengths[rows], kind="stable")][:6]
        return self.tokens.of(rows[:: max(1, len(rows) // 6)][:6])[0]

    def _work(self, capture: Capture, writer: BackgroundWriter) -> None:
        while self.batches:
            rows = self._fit(self.batches.popleft())
            failure = self._attempt(capture, writer, rows)
            if failure is None:
                continue
            self._recover(failure)
            if len(rows) == 1:
                self.last_chance.append(int(rows[0]))
                continue
            self.budgets.failed(int(self.index.lengths[rows].max()), len(rows))
            half = (len(rows) + 1) // 2
            self.batches.extendleft((rows[half:], rows[:half]))
        for row in self.last_chance:
            self._try_alone(capture, writer, row)

    def _try_alone(self, capture: Capture, writer: BackgroundWriter, row: int) -> None:
        for _ in range(LAST_CHANCES):
            release()
            failure = self._attempt(capture, writer, np.asarray([row]))
            if failure is None:
                return
            self._recover(failure)
        writer.quarantine(row, f"does not fit alone: {failure.message if failure else ''}")

    def _fit(self, rows: np.ndarray) -> np.ndarray:
        """Cut a batch to its bucket's budget; the rest goes back to the front of the queue."""
        allowed = self.budgets.rows(int(self.index.lengths[rows].max()), len(rows))
        if allowed < len(rows):
            self.batches.appendleft(rows[allowed:])
        return rows[:allowed]

    def _attempt(self, capture: Capture, writer: BackgroundWriter, rows: np.ndarray) -> Failure | None:
        """Run one batch. A failure comes back as strings: the exception and its frames end with the
        `except`.
        """
        ids, masks = self.tokens.of(rows)
        began = time.perf_counter()
        try:
            batch = capture.run(rows, ids, masks, writer.check)
        except Exception as error:
            failure = classify(error)
            if failure.kind == "other":
                raise
            return failure
        writer.submit(batch)
        longest, tokens = int(self.index.lengths[rows].max()), int(self.index.lengths[rows].sum())
        self.budgets.fitted(longest, len(rows))
        self.records.append(BatchRecord(len(rows), longest, tokens, time.perf_counter() - began))
        self._done += tokens
        rate = round(self._done / (time.perf_counter() - self._began))
        self._progress("extract", self._done, self.total, tokens_per_s=rate, ooms=len(self.failures))
        return None

    def _recover(self, failure: Failure) -> None:
        """After a failure: free what it left, or stop when the device no longer answers."""
        self.failures.append(failure.message)
        lost = failure if failure.kind == "dead" else None
        if lost is None:
            release()
            lost = alive(self.target.device)
        if lost is not None:
            raise DeviceLost(
                f"{self.target.device} is lost ({lost.message}). What was finished is sealed; start "
                "this shard again in a new process and it goes on from there."
            )
