"""The extraction loop: every sample of a shard is stored once or quarantined with a reason, whatever fails on
the way.

Batches wait in a deque, longest first. One that does not fit is split in place and its length bucket's budget
lowered; one sample that does not fit alone is tried again at the very end, with the memory as empty as it
gets, then quarantined. Nothing is handed to the writer before a batch's states are complete, so a failed
attempt leaves no half.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dflash_lab import provenance
from dflash_lab.data.batching import Plan, plan_batches
from dflash_lab.errors import InputError, StoreError
from dflash_lab.extraction import manifest as manifests
from dflash_lab.extraction.budget import BucketBudgets
from dflash_lab.extraction.capture import Capture, busy
from dflash_lab.extraction.codecs import find_codec
from dflash_lab.extraction.layout import Layout
from dflash_lab.extraction.lock import refuse_other_counts, shard_lock, store_lock
from dflash_lab.extraction.oom import DeviceLost, Failure, alive, classify, release
from dflash_lab.extraction.report import BatchRecord, ExtractionReport, Quarantined
from dflash_lab.extraction.selftest import PREFIXES, self_test
from dflash_lab.extraction.shard import SampleIndex, Tokens, not_stored, read_index, shard_rows
from dflash_lab.extraction.verify import drop_part, stored_keys
from dflash_lab.extraction.writer import BackgroundWriter, HostBuffers, PartWriter, Records, Written
from dflash_lab.target.model import Target
from dflash_lab.target.taps import check_tap_ids

GIB = 1 << 30
LAST_CHANCES = 2  # more attempts, at the end, for a sample that did not fit alone


def store_identity(target: Target, layout: Layout, samples_hash: str) -> dict[str, Any]:
    """What every shard of a store must agree on; both spellings of the layer ids."""
    return {
        "schema": manifests.SCHEMA,
        "target": target.identity,
        "compute_dtype": str(target.dtype).removeprefix("torch."),
        "tap_ids": list(layout.tap_ids),
        "tap_ids_plus_one": [layer + 1 for layer in layout.tap_ids],
        "hidden": layout.hidden,
        "has_final": layout.has_final,
        "storage": layout.codec.name,
        "samples": samples_hash,
    }


def extract(
    target: Target,
    samples: Path | str,
    store: Path | str,
    *,
    tap_ids: list[int],
    shard: int = 0,
    num_shards: int = 1,
    token_budget: int,
    max_batch: int,
    store_final: bool = False,
    storage: str = "bf16",
    window: int = 32768,
    part_gib: float = 4.0,
    buffers: int = 3,
    seal_seconds: float = 300.0,
    recheck: bool = False,
    notes: dict[str, Any] | None = None,
    on_progress: Callable[..., None] | None = None,
) -> ExtractionReport:
    """Store the tapped states of one shard of `samples`; return the account.

    token_budget: padded tokens of a batch. part_gib: the most unsealed bytes a crash can lose. buffers: host
    buffers of one batch each. recheck: read the checksum of every sealed part before trusting it. notes: goes
    into the manifest's run line.

    Raises `InputError` for parameters that fit neither target nor data and for a shard in use, `StoreError`
    naming the differences when the store was made by another setup, `SelfTestError`, and `DeviceLost` after
    sealing what was done. Quarantined samples do not raise here: the report lists them.
    """
    store, index = Path(store), read_index(samples)
    last = target.num_layers - 1
    layers = [*check_tap_ids(tap_ids, target.num_layers), *([last] if store_final else [])]
    layout = Layout(tuple(tap_ids), target.hidden_size, store_final, find_codec(storage))
    folder = store / manifests.shard_name(shard, num_shards)
    store.mkdir(parents=True, exist_ok=True)
    refuse_other_counts(store, num_shards)
    with shard_lock(folder):
        with store_lock(store):
            manifests.open_identity(store, store_identity(target, layout, index.set_hash))
        clean(folder)
        chunk = 64 if target.is_hybrid else 1
        mine = shard_rows(index, shard, num_shards, chunk=chunk, hidden=target.hidden_size)
        todo = not_stored(index, mine, _trusted(store, folder, recheck))
        plan = plan_batches(
            index.lengths[todo], token_budget=token_budget, max_batch=max_batch, window=window, chunk=chunk
        )
        tokens = _tokens(index, todo, target)
        run = _Run(
            target, layout, index, todo, plan, tokens, folder, part_gib, buffers, seal_seconds, on_progress
        )
        manifests.append(
            folder,
            "run",
            shard=shard,
            num_shards=num_shards,
            samples=len(mine),
            stored_before=len(mine) - len(todo),
            plan={
                "token_budget": token_budget,
                "max_batch": max_batch,
                "window": window,
                "chunk": chunk,
                "batches": len(plan),
                "waste_pct": round(plan.waste_pct, 4),
            },
            notes=notes or {},
            **provenance.provenance(),
        )
        written = run.all(layers) if len(todo) else Written()
        return _account(run, written, index, mine, folder)


def clean(folder: Path) -> None:
    """Make a shard folder ready for appending after a crash: torn line, temporary files and unnamed
    parts go.
    """
    manifests.cut_torn_line(folder)
    named = {part.file for part in manifests.sealed_parts(folder)}
    for path in folder.iterdir():
        unnamed = path.name.startswith("part-") and path.name not in named
        if unnamed or (path.name.startswith(".part-") and path.name.endswith(".tmp")):
            path.unlink()


def _trusted(store: Path, folder: Path, recheck: bool) -> np.ndarray:
    """The keys of samples that are soundly stored; damaged parts of our own shard are given up here.

    Damaged parts of other shards are only left out: their samples are redone by whoever now has them.
    """
    keys, faults = stored_keys(store, check_bytes=recheck)
    for fault in faults:
        if fault.file.startswith(f"{folder.name}/"):
            drop_part(store / fault.file, fault.what)
    return keys


def _tokens(index: SampleIndex, rows: np.ndarray, target: Target) -> Tokens:
    tokens = Tokens(index, rows)
    if tokens.largest_id() >= target.vocab_size:
        raise InputError(
            f"{index.path} holds token id {tokens.largest_id()}, but {target.name} has "
            f"{target.vocab_size}. It was prepared "
            "for another tokenizer: run prepare with this target."
        )
    return tokens


class _Run:
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
        return parts.written

    def _examples(self) -> list[np.ndarray]:
        """Up to six samples for the self-test, spread over those long enough for every prefix."""
        rows = np.concatenate(self.batches)
        long = rows[self.index.lengths[rows] > max(PREFIXES)]
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
            release(self.target.device)
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
            release(self.target.device)
            lost = alive(self.target.device)
        if lost is not None:
            raise DeviceLost(
                f"{self.target.device} is lost ({lost.message}). What was finished is sealed; start "
                f"this shard again in a new "
                "process and it goes on from there."
            )


def _account(
    run: _Run, written: Written, index: SampleIndex, mine: np.ndarray, folder: Path
) -> ExtractionReport:
    """Hold the account together: every sample of the shard is stored or quarantined, or this raises."""
    quarantined = [
        Quarantined(index.ids[row], index.content_hashes[row], int(index.lengths[row]), reason)
        for row, reason in sorted(written.quarantined.items())
    ]
    before = len(mine) - run.planned
    lost = len(mine) - before - written.samples - len(quarantined)
    if lost:
        raise StoreError(
            f"{folder}: of {len(mine)} samples {before} were stored before, {written.samples} now and "
            f"{len(quarantined)} "
            f"quarantined: {lost} are unaccounted for. Run again, and report this as a defect."
        )
    report = ExtractionReport(
        samples_in=len(mine),
        stored_before=before,
        samples_stored=written.samples,
        tokens_stored=written.tokens,
        quarantined=quarantined,
        duplicates=index.duplicates,
        batches=run.records,
        padded_tokens=sum(batch.samples * batch.longest for batch in run.records),
        seconds=run.seconds,
        forward_seconds=run.forward_seconds,
        bytes_written=written.bytes,
        write_seconds=written.write_seconds,
        parts=written.parts,
        failures=run.failures,
        gpu_idle_pct=run.idle_pct,
        selftest=run.selftest,
    )
    manifests.append(folder, "end", **report.figures())
    return report
