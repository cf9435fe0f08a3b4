"""Extraction: every sample of a shard through the target once, its tapped states to disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dflash_lab import files, provenance
from dflash_lab.data.batching import Plan, fit_batches
from dflash_lab.errors import InputError, StoreError
from dflash_lab.extraction.checks import (
    AROUND_A_CHUNK,
    CANDIDATES,
    Comparison,
    SelfTestError,
    SpotChecks,
    self_test,
    trusted_keys,
    worst,
)
from dflash_lab.extraction.manifest import (
    add_line,
    mend,
    next_part_index,
    open_identity,
    part_name,
    refuse_other_counts,
    shard_lock,
    shard_name,
    store_lock,
)
from dflash_lab.extraction.oom import Failure, MemoryShort, attempt, halves, halving
from dflash_lab.extraction.report import BatchRecord, ExtractionReport
from dflash_lab.extraction.shard import SampleIndex, Tokens, drawn, not_stored, read_index, shard_rows
from dflash_lab.extraction.store import Layout, find_codec
from dflash_lab.extraction.writer import Capture, HostBatch, HostBuffers, Writer, busy, pad
from dflash_lab.machine import device_budget_gib, others_on, release
from dflash_lab.models.hooks import check_tap_ids, default_tap_ids
from dflash_lab.models.load import Target
from dflash_lab.models.source import load_config

logger = logging.getLogger(__name__)
GIB = 1 << 30
GRID = 65_535  # blocks of a CUDA grid in its second and third dimension
BUFFERS = 3  # on the host, of one batch each; the device runs as many batches ahead of their copies
FEW = 3  # samples in a row that do not fit alone, before what fitted before is asked for again
WAITS_S = (1, 2, 4, 8, 16, 32)  # for memory to come back, each ended by one more try
LAST_CHANCES = 2  # more attempts, at the end, for a sample that did not fit alone


def extract(
    target: Target,
    samples: Path | str,
    store: Path | str,
    *,
    tap_ids: list[int] | None = None,
    shard: int = 0,
    num_shards: int = 1,
    max_samples: int = 0,
    seed: int = 0,
    token_budget: int = 16_384,
    max_batch: int = 512,
    store_final: bool = False,
    storage: str = "bf16",
    window: int = 32768,
    part_gib: float = 4.0,
    seal_seconds: float = 300.0,
    recheck: bool = False,
    notes: dict[str, Any] | None = None,
    on_progress: Callable[..., None] | None = None,
) -> ExtractionReport:
    """Store the tapped states of one shard of `samples`; return the account.

    tap_ids: 0-based decoder layers; None: five by the DFlash rule. max_samples: how many of all shards'
    samples are drawn by `seed` (0: all); what more is stored stays. token_budget: padded tokens of a batch;
    lowered where few samples would make it mostly padding, which the report says. max_batch: rows of one;
    lowered to what kernels can launch (`most_rows`). window: samples sorted by length together (0: all).
    part_gib: the most unsealed bytes a crash can lose. recheck: read the checksum of every sealed part before
    trusting it. notes: goes into the manifest's run line.

    Raises `InputError` for parameters that fit neither target nor data and for a shard in use, `StoreError`
    naming the differences when the store was made by another setup, `SelfTestError`, and, after sealing what
    was done, `DeviceLost` and `MemoryShort` (another process keeps the device's memory). Quarantined samples
    do not raise here: the report lists them.
    """
    store, index = Path(store), read_index(samples)
    if tap_ids is None:  # by the config: fewer layers than the model has may be loaded
        tap_ids = default_tap_ids(load_config(target.name).num_hidden_layers)
    layers = check_tap_ids(tap_ids, target.num_layers) + [target.num_layers - 1] * store_final
    layout = Layout(tuple(tap_ids), target.hidden_size, store_final, find_codec(storage))
    folder = store / shard_name(shard, num_shards)
    files.make_folder(store)
    refuse_other_counts(store, num_shards)
    with shard_lock(folder):
        identity = layout.identity(target.identity, target.dtype, index.set_hash)
        with store_lock(store):
            open_identity(store, identity)
        mend(folder)

        chunk = 64 if target.is_hybrid else 1
        some = drawn(index, max_samples, seed)
        mine = shard_rows(index, shard, num_shards, chunk=chunk, hidden=target.hidden_size)
        mine = mine[some[mine]]
        todo = not_stored(index, mine, trusted_keys(store, folder, recheck=recheck))
        max_batch = min(max_batch, most_rows(target))
        fitted = fit_batches(
            index.lengths[todo], token_budget=token_budget, max_batch=max_batch, window=window, chunk=chunk
        )
        plan = fitted.plan
        if fitted.lowered:
            logger.info("%s", fitted.lowered)
        examples = _examples(index.lengths) if len(todo) else todo
        tokens = _tokens(index, np.union1d(todo, examples), target)
        add_line(
            folder,
            "run",
            shard=shard,
            num_shards=num_shards,
            store=identity,
            samples=len(mine),
            drawn={"max_samples": 0 if some.all() else max_samples, "seed": seed, "of": len(some)},
            stored_before=len(mine) - len(todo),
            plan={
                "token_budget": plan.token_budget,
                "token_budget_given": token_budget,
                "max_batch": max_batch,
                "window": window,
                "chunk": chunk,
                "batches": len(plan),
                "waste_pct": round(plan.waste_pct, 4),
            },
            notes=notes or {},
            **provenance.provenance(),
        )
        report = ExtractionReport(
            samples_in=len(mine),
            stored_before=len(mine) - len(todo),
            tokens_before=int(index.lengths[mine].sum()) - plan.real_tokens,
            duplicates=index.duplicates,
            token_budget=plan.token_budget,
            token_budget_lowered=fitted.lowered,
        )
        if len(todo):
            batches = [todo[batch] for batch in _largest_early(plan)]
            sizes = [layout.buffer_bytes(int(index.lengths[rows].sum()), len(rows)) for rows in batches]
            buffers = HostBuffers(BUFFERS, max(sizes), pinned=target.device.type == "cuda")
            part_bytes = int(part_gib * GIB)  # what a crash can lose: the buffers have their share of it
            part_bytes = max(part_bytes - buffers.count * buffers.size, part_bytes // 2)
            writer = Writer(
                folder, layout, index, buffers, report, part_bytes=part_bytes, seal_seconds=seal_seconds
            )
            with Capture(target, layout, buffers) as capture:
                report.selftest = self_test(target, capture, tokens.of(examples)[0], layers)
                writer.record("selftest", **report.selftest)
                run = Run(target, layers, index, tokens, folder, capture, writer, report, on_progress)
                run.all(batches, tokens.of(examples[:1])[0][0][: max(report.selftest["lengths"])])
        if report.quarantined:
            place = {digest: number for number, digest in enumerate(index.content_hashes)}
            report.quarantined.sort(key=lambda one: place[one.hash])
        found = report.stored_before + report.samples_stored + len(report.quarantined)
        if lost := report.samples_in - found:
            raise StoreError(
                f"{folder}: of {len(mine)} samples {report.stored_before} were stored before, "
                f"{report.samples_stored} now and {len(report.quarantined)} quarantined: {lost} are "
                "unaccounted for. Run again, and report this as a defect."
            )
        add_line(folder, "end", **report.figures())
        return report


class Run:
    """One pass over the batches of a shard: each is attempted, split where it does not fit, tried again, and
    in the end every sample is in the writer's hands or quarantined.

    One sample that does not fit alone is tried again at the very end, with the memory as empty as it gets,
    then quarantined. A few of those in a row raise the question whether what fitted before still fits: if
    not, someone else took the memory, and the run waits for it a while, then stops.
    """

    def __init__(
        self,
        target: Target,
        layers: list[int],  # of the stored states in order
        index: SampleIndex,
        tokens: Tokens,
        folder: Path,
        capture: Capture,
        writer: Writer,
        report: ExtractionReport,
        on_progress: Callable[..., None] | None,
    ) -> None:
        self.target, self.index, self.tokens, self.folder = target, index, tokens, folder
        self.capture, self.writer, self.report = capture, writer, report
        self._progress = on_progress or (lambda *_args, **_fields: None)
        self._compare, self._checks = Comparison(target, capture, layers), SpotChecks()
        self._doubted = next_part_index(folder)  # of the first part since the last batch that was compared
        self._free_gib = device_budget_gib(target.device)
        self._began, self._done, self._total = time.perf_counter(), 0, 0

    def all(self, batches: list[np.ndarray], fits: np.ndarray) -> None:
        """Run every batch of sample numbers; whatever happens, what is finished gets sealed. `fits`: token
        ids of a sample that ran.
        """
        self._fits = fits  # the longest so far
        self._total = sum(int(self.index.lengths[rows].sum()) for rows in batches)
        with self.writer:
            alone = self._attempt_all(batches)
            release()
            for row in alone:
                self._last_chances(row)
        report, spans = self.report, self.capture.spans
        report.seconds = time.perf_counter() - self._began
        report.forward_seconds, report.gpu_idle_pct = busy(spans)
        if spans:  # one a record: the device's own time instead of the host's, which mostly waits
            report.batches = [
                replace(one, seconds=begin.elapsed_time(end) / 1e3)
                for one, (begin, end) in zip(report.batches, spans, strict=True)
            ]

    def _attempt_all(self, batches: Iterable[np.ndarray]) -> list[int]:
        """Keep what fits; return the samples that did not fit alone."""
        alone: list[int] = []
        in_a_row = 0
        attempts = halving(batches, self._forward, longest=self._longest, device=self.target.device)
        for rows, found in attempts:
            if not isinstance(found, Failure):
                self._keep(*found)
                in_a_row = 0
            elif len(rows) > 1:
                first, second = halves(rows)
                self._trace(found, rows, f"{len(first)} and {len(second)} samples")
            else:
                self._trace(found, rows, "again at the end")
                alone.append(int(rows[0]))
                in_a_row += 1
                if in_a_row == FEW:
                    self._await_memory()
                    in_a_row = 0
        return alone

    def _last_chances(self, row: int) -> None:
        rows = np.asarray([row])
        for left in reversed(range(LAST_CHANCES)):
            found = attempt(self._forward, rows, device=self.target.device)
            if not isinstance(found, Failure):
                return self._keep(*found)
            self._trace(found, rows, "the same again" if left else "nothing: quarantined")
        self.writer.quarantine(row, f"does not fit alone: {self.report.failures[-1]}")

    def _longest(self, rows: np.ndarray) -> int:
        return int(self.index.lengths[rows].max())

    def _forward(self, rows: np.ndarray) -> tuple[HostBatch, list[int], float]:
        """Run one batch; return it on its way to the host, which of its samples were compared with themselves
        alone, and when it began. Nothing is handed on before all is complete, so a failed attempt leaves no
        half.
        """
        began = time.perf_counter()
        ids, masks = self.tokens.of(rows)
        chosen = self._checks.choose(self.index.lengths[rows])
        batch = self.capture.run(
            rows, ids, masks, self.writer.check, lambda states: self._examine(rows, chosen, states)
        )
        return batch, chosen, began

    def _keep(self, batch: HostBatch, chosen: list[int], began: float) -> None:
        """Hand a batch that ran to the writer, and take note of it."""
        self.writer.submit(batch)
        lengths = self.index.lengths[batch.rows]
        self._checks.ran(lengths, chosen)
        longest, tokens = int(lengths.max()), int(lengths.sum())
        if longest > len(self._fits):
            self._fits = batch.input_ids[int(lengths.argmax())]
        self.report.batches.append(BatchRecord(len(lengths), longest, tokens, time.perf_counter() - began))
        self._done += tokens
        self._tell()

    def _tell(self) -> None:
        rate = round(self._done / (time.perf_counter() - self._began))
        ooms = len(self.report.failures)
        self._progress("extract", self._done, self._total, tokens_per_s=rate, ooms=ooms)

    def _examine(self, rows: np.ndarray, chosen: list[int], states: list[Tensor]) -> None:
        """Hold samples `chosen` of a batch against the same alone; `SelfTestError` when they differ."""
        if not chosen:
            return
        ids = self.tokens.of(rows[chosen])[0]
        found = [
            self._compare.of(row, [state[number, : len(row)] for state in states])
            for number, row in zip(chosen, ids, strict=True)
        ]
        samples = [self.index.ids[row] for row in rows[chosen]]
        batch = f"{len(rows)} x {self._longest(rows)} tokens"
        if any(one.problems for one in found):
            self.writer.give_up()
            told = [f"{name}: {text}" for name, one in zip(samples, found) for text in one.problems]
            raise SelfTestError(
                f"{self.target.name}: batch {len(self.report.batches) + 1} of this run ({batch}) does not "
                "give its samples the states that they have alone.\n  "
                + "\n  ".join(told[:12])
                + "\nIt was not stored, nor was what lay unsealed. What was sealed before stays; of this "
                f"shard, parts from {part_name(self._doubted)} on, if any, were made since the "
                "last batch that passed: remove those, and their samples are redone. Run again with a "
                "smaller max_batch or token_budget, or with fast=off; dtype=float32 tells kernels from "
                "rounding."
            )
        error, limit = worst([one.error for one in found]), worst([one.limit for one in found])
        self.writer.record("check", batch=batch, samples=samples, batched_error=error, tolerance=limit)
        self._doubted = next_part_index(self.folder)

    def _trace(self, failure: Failure, rows: np.ndarray | None, then: str) -> None:
        """After a failure of a batch (None: of what fitted before), leave a trace of what is tried `then`."""
        self.report.failures.append(failure.message)
        count, longest = (1, len(self._fits)) if rows is None else (len(rows), self._longest(rows))
        free_gib = round(device_budget_gib(self.target.device), 3)
        logger.warning(
            "%d x %d tokens did not fit (%s); next: %s; %.2f GiB can be had",
            count,
            longest,
            failure.message,
            then,
            free_gib,
        )
        self.writer.record(
            "retry", samples=count, longest=longest, error=failure.message, next=then, free_gib=free_gib
        )

    def _await_memory(self) -> None:
        """Return if the longest sample that ever fitted still does and at least half of the memory that the
        run began with is there; else wait for it, then give up with `MemoryShort`.
        """
        device, told, began = self.target.device, "", time.monotonic()
        for wait, following in zip((0, *WAITS_S), (*WAITS_S, None), strict=True):
            until = time.monotonic() + wait
            while time.monotonic() < until:
                self._tell()  # obeys a stop
                time.sleep(1.0)
                if device_budget_gib(device) >= 0.9 * self._free_gib:
                    break
            failure, told = attempt(self._run_what_fitted, device=device), ""
            if failure is not None:
                told = f", nor does one of {len(self._fits)} tokens that fitted before ({failure.message})"
                then = "nothing: the run stops" if following is None else f"the same within {following} s"
                self._trace(failure, None, then)
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

    def _run_what_fitted(self) -> None:
        self.capture.states(pad([self._fits], self.target.device))


def most_rows(target: Target) -> int:
    """The most rows of a batch that every attention kernel's grid holds. Those of softmax attention count
    rows in one dimension and heads in another, those of the gated delta rule rows x heads in one.
    """
    names = ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads")
    return max(1, GRID // max(getattr(target.config, name, None) or 1 for name in names))


def _examples(lengths: np.ndarray) -> np.ndarray:
    """Sample numbers for the self-test: spread over those long enough for every prefix, whatever their shard,
    stored already or not, as it asks about the target.
    """
    long = np.flatnonzero(lengths >= max(AROUND_A_CHUNK))
    if len(long) < CANDIDATES:
        long = np.argsort(-lengths, kind="stable")
    spread = long[np.unique(np.linspace(0, len(long) - 1, CANDIDATES).astype(int))]
    return np.concatenate((spread[::2], spread[1::2]))


def _tokens(index: SampleIndex, rows: np.ndarray, target: Target) -> Tokens:
    tokens = Tokens(index, rows)
    for token in tokens.id_range():
        if not 0 <= token < target.vocab_size:
            raise InputError(
                f"{index.path} holds token id {token}, but {target.name} has {target.vocab_size}. It was "
                "prepared for another tokenizer: run prepare with this target."
            )
    return tokens


def _largest_early(plan: Plan) -> list[np.ndarray]:
    """The plan's batches, those of the most rows and of the most tokens right after the first: what shows
    only in a large batch shows in the first minute.
    """
    first = dict.fromkeys((0, int(plan.sizes.argmax()), int(plan.costs.argmax()))) if len(plan) else {}
    return [plan.batches[number] for number in first | dict.fromkeys(range(len(plan)))]
