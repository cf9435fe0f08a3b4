"""One pass over the batches of a shard: attempt, split, retry, quarantine, and never lose one.

Batches wait in a deque, longest first. One that does not fit is split in place and its length bucket's budget
lowered; one sample that does not fit alone is tried again at the very end, with the memory as empty as it
gets, then quarantined. A few of those in a row raise the question whether what fitted before still fits: if
not, someone else took the memory, and the run waits for it a while, then stops. Nothing is handed to the
writer before a batch's states are complete, so a failed attempt leaves no half.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from dflash_lab.data.batching import Plan
from dflash_lab.extraction import manifest as manifests
from dflash_lab.extraction.budget import BucketBudgets
from dflash_lab.extraction.capture import Capture, busy, pad
from dflash_lab.extraction.layout import Layout
from dflash_lab.extraction.oom import DeviceLost, Failure, MemoryShort, alive, classify
from dflash_lab.extraction.report import BatchRecord
from dflash_lab.extraction.selftest import Comparison, SelfTestError, SpotChecks, self_test
from dflash_lab.extraction.shard import SampleIndex, Tokens
from dflash_lab.extraction.writer import BackgroundWriter, HostBuffers, PartWriter, Records, Written
from dflash_lab.machine import device_budget_gib, others_on
from dflash_lab.models.load import Target
from dflash_lab.release import release

logger = logging.getLogger(__name__)
T = TypeVar("T")
GIB = 1 << 30
FEW = 3  # samples in a row that do not fit alone, before what fitted before is asked for again
WAITS_S = (1, 2, 4, 8, 16, 32)  # for memory to come back, each ended by one more try
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
            self._fits = self.examples[0][: max(test.lengths)]
            self._free_gib = device_budget_gib(self.target.device)
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
        in_a_row = 0  # samples that did not fit alone
        while self.batches:
            rows = self._fit(self.batches.popleft())
            failure = self._attempt(capture, writer, rows)
            if failure is None:
                in_a_row = 0
            elif len(rows) == 1:
                self._recover(writer, failure, rows, "again at the end")
                self.last_chance.append(int(rows[0]))
                in_a_row += 1
                if in_a_row == FEW:
                    self._await_memory(capture, writer)
                    in_a_row = 0
            else:
                half = (len(rows) + 1) // 2
                self._recover(writer, failure, rows, f"{half} and {len(rows) - half} samples")
                self.budgets.failed(int(self.index.lengths[rows].max()), len(rows))
                self.batches.extendleft((rows[half:], rows[:half]))
        for row in self.last_chance:
            self._try_alone(capture, writer, row)

    def _try_alone(self, capture: Capture, writer: BackgroundWriter, row: int) -> None:
        rows = np.asarray([row])
        for left in reversed(range(LAST_CHANCES)):
            release()
            failure = self._attempt(capture, writer, rows)
            if failure is None:
                return
            self._recover(writer, failure, rows, "the same again" if left else "nothing: quarantined")
        writer.quarantine(row, f"does not fit alone: {failure.message if failure else ''}")

    def _await_memory(self, capture: Capture, writer: BackgroundWriter) -> None:
        """Return if the longest sample that ever fitted still does and at least half of the memory that the
        run began with is there; else wait for it, then give up with `MemoryShort`.
        """
        device, told, began = self.target.device, "", time.monotonic()

        def known() -> None:
            capture.states(pad([self._fits], device))

        for wait, following in zip((0, *WAITS_S), (*WAITS_S, None), strict=True):
            until = time.monotonic() + wait
            while time.monotonic() < until:
                self._tell()  # obeys a stop
                time.sleep(1.0)
                if device_budget_gib(device) >= 0.9 * self._free_gib:
                    break
            failure, told = attempt(known), ""
            if failure is not None:
                told = f", nor does one of {len(self._fits)} tokens that fitted before ({failure.message})"
                then = "nothing: the run stops" if following is None else f"the same within {following} s"
                self._recover(writer, failure, None, then)
            free_gib = device_budget_gib(device)
            if failure is None and free_gib >= self._free_gib / 2:
                return
        others = others_on(device)
        raise MemoryShort(
            f"{FEW} samples in a row did not fit {device} alone{told}. {free_gib:.2f} GiB can be had there, "
            f"{self._free_gib:.2f} GiB when this run began. "
            + (f"Others hold: {others}. " if others else "Another program took it (nvidia-smi, top). ")
            + f"Waited {time.monotonic() - began:.0f} s for it. What was finished is sealed: free the "
            "memory, and the same command goes on from there."
        )

    def _fit(self, rows: np.ndarray) -> np.ndarray:
        """Cut a batch to its bucket's budget; the rest goes back to the front of the queue."""
        allowed = self.budgets.rows(int(self.index.lengths[rows].max()), len(rows))
        if allowed < len(rows):
            self.batches.appendleft(rows[allowed:])
        return rows[:allowed]

    def _attempt(self, capture: Capture, writer: BackgroundWriter, rows: np.ndarray) -> Failure | None:
        """Run one batch and hand it to the writer, or say why it does not fit."""
        ids, masks = self.tokens.of(rows)
        lengths = self.index.lengths[rows]
        chosen = self._checks.choose(lengths)
        began = time.perf_counter()
        batch = attempt(
            lambda: capture.run(
                rows, ids, masks, writer.check, lambda states: self._examine(writer, rows, chosen, states)
            )
        )
        if isinstance(batch, Failure):
            return batch
        writer.submit(batch)
        self._checks.ran(lengths, chosen)
        longest, tokens = int(lengths.max()), int(lengths.sum())
        self.budgets.fitted(longest, len(rows))
        if longest > len(self._fits):
            self._fits = ids[int(lengths.argmax())]
        self.records.append(BatchRecord(len(rows), longest, tokens, time.perf_counter() - began))
        self._done += tokens
        self._tell()
        return None

    def _tell(self) -> None:
        rate = round(self._done / (time.perf_counter() - self._began))
        self._progress("extract", self._done, self.total, tokens_per_s=rate, ooms=len(self.failures))

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

    def _recover(
        self, writer: BackgroundWriter, failure: Failure, rows: np.ndarray | None, then: str
    ) -> None:
        """After a failure of a batch (None: of what fitted before): free what it left, and leave a trace of
        what is tried `then`; or stop when the device no longer answers.
        """
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
        count = 1 if rows is None else len(rows)
        longest = len(self._fits) if rows is None else int(self.index.lengths[rows].max())
        free_gib = round(device_budget_gib(self.target.device), 3)
        logger.warning(
            "%d x %d tokens did not fit (%s); next: %s; %.2f GiB can be had",
            count,
            longest,
            failure.message,
            then,
            free_gib,
        )
        writer.record(
            "retry", samples=count, longest=longest, error=failure.message, next=then, free_gib=free_gib
        )


def attempt(action: Callable[[], T]) -> T | Failure:
    """Run; a lack of memory or a dead device comes back as strings: the exception and its frames, which hold
    tensors, end with the `except`. Other errors are raised.
    """
    try:
        return action()
    except Exception as error:
        failure = classify(error)
        if failure.kind == "other":
            raise
        return failure


def _largest_early(plan: Plan) -> list[np.ndarray]:
    """The plan's batches, those of the most rows and of the most tokens right after the first: what shows
    only in a large batch shows in the first minute.
    """
    first = dict.fromkeys((0, int(plan.sizes.argmax()), int(plan.costs.argmax()))) if len(plan) else {}
    return [plan.batches[number] for number in first | dict.fromkeys(range(len(plan)))]
