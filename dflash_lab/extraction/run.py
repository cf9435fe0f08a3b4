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
from torch import Tensor

from dflash_lab.data.batching import Plan
from dflash_lab.extraction import manifest as manifests
from dflash_lab.extraction.budget import BucketBudgets
from dflash_lab.extraction.capture import Capture, busy
from dflash_lab.extraction.layout import Layout
from dflash_lab.extraction.oom import DeviceLost, Failure, alive, classify
from dflash_lab.extraction.report import BatchRecord
from dflash_lab.extraction.selftest import Comparison, SelfTestError, SpotChecks, self_test
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
        examples: list[np.ndarray],
    ) -> None:
        self.examples = examples  # token ids of samples for the self-test
        self.target, self.layout, self.index, self.tokens, self.folder = target, layout, index, tokens, folder
        self.batches = deque(todo[batch] for batch in _largest_early(plan))
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
        self._checks, self._doubted = SpotChecks(), manifests.next_part_index(folder)

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
            test = self_test(self.target, capture, self.examples, layers)
            self.selftest = test.as_dict()
            manifests.append(self.folder, "selftest", **self.selftest)
            self._began, self._compare = time.perf_counter(), Comparison(self.target, capture, layers)
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
        lengths = self.index.lengths[rows]
        chosen = self._checks.choose(lengths)
        began = time.perf_counter()
        try:
            batch = capture.run(
                rows, ids, masks, writer.check, lambda states: self._examine(writer, rows, chosen, states)
            )
        except Exception as error:
            failure = classify(error)
            if failure.kind == "other":
                raise
            return failure
        writer.submit(batch)
        self._checks.ran(lengths, chosen)
        longest, tokens = int(lengths.max()), int(lengths.sum())
        self.budgets.fitted(longest, len(rows))
        self.records.append(BatchRecord(len(rows), longest, tokens, time.perf_counter() - began))
        self._done += tokens
        rate = round(self._done / (time.perf_counter() - self._began))
        self._progress("extract", self._done, self.total, tokens_per_s=rate, ooms=len(self.failures))
        return None

    def _examine(
        self, writer: BackgroundWriter, rows: np.ndarray, chosen: list[int], states: list[Tensor]
    ) -> None:
        """Hold samples `chosen` of a batch against the same alone; `SelfTestError` when they differ."""
        if not chosen:
            return
        ids = self.tokens.of(rows[chosen])[0]
        found = [
            self._compare.of(row, [state[number, : len(row)] for state in states])
            for number, row in zip(chosen, ids, strict=True)
        ]
        samples = [self.index.ids[row] for row in rows[chosen]]
        batch = f"{len(rows)} x {int(self.index.lengths[rows].max())} tokens"
        if any(one.problems for one in found):
            writer.give_up()
            told = [f"{name}: {text}" for name, one in zip(samples, found) for text in one.problems]
            raise SelfTestError(
                f"{self.target.name}: batch {len(self.records) + 1} of this run ({batch}) does not give its "
                "samples the states that they have alone.\n  "
                + "\n  ".join(told[:12])
                + "\nIt was not stored, nor was what lay unsealed. What was sealed before stays; of this "
                f"shard, parts from {manifests.part_name(self._doubted)} on, if any, were made since the "
                "last batch that passed: remove those, and their samples are redone. Run again with a "
                "smaller max_batch or token_budget, or with fast=off; dtype=float32 tells kernels from "
                "rounding."
            )
        worst = [max(one.error[index] for one in found) for index in range(len(states))]
        limit = [max(one.limit[index] for one in found) for index in range(len(states))]
        writer.record("check", batch=batch, samples=samples, batched_error=worst, tolerance=limit)
        self._doubted = manifests.next_part_index(self.folder)

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


def _largest_early(plan: Plan) -> list[np.ndarray]:
    """The plan's batches, those of the most rows and of the most tokens right after the first: what shows
    only in a large batch shows in the first minute.
    """
    first = dict.fromkeys((0, int(plan.sizes.argmax()), int(plan.costs.argmax()))) if len(plan) else {}
    return [plan.batches[number] for number in first | dict.fromkeys(range(len(plan)))]
