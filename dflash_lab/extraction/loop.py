"""Extraction: every sample of a shard through the target once, its tapped states to disk."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from dflash_lab import files, provenance
from dflash_lab.data.batching import Fitted, Plan, balance_shards, fit_batches, predicted_cost
from dflash_lab.data.samples import FlatTokens, checked, read_samples, reading_samples, scan_samples
from dflash_lab.errors import InputError, LabError, StoreError
from dflash_lab.extraction import store as manifests
from dflash_lab.extraction.checks import (
    AROUND_A_CHUNK,
    CANDIDATES,
    Comparison,
    SelfTestError,
    SpotChecks,
    drop_part,
    self_test,
    stored_keys,
)
from dflash_lab.extraction.oom import BucketBudgets, DeviceLost, Failure, MemoryShort, alive, classify
from dflash_lab.extraction.store import Layout, as_keys, find_codec, hex_to_hashes, shard_folders
from dflash_lab.extraction.writer import (
    BackgroundWriter,
    Capture,
    HostBuffers,
    PartWriter,
    Records,
    Written,
    busy,
    pad,
)
from dflash_lab.files import lock_holder, sole_lock, waiting_lock
from dflash_lab.machine import device_budget_gib, others_on, release
from dflash_lab.models.hooks import check_tap_ids
from dflash_lab.models.load import Target

# ----------------------------------------------------------------------------------------------------
# One writer a shard: a lock on `<shard>/.lock`, and for moments one on the store.


_LOCK_FILE = ".lock"  # hidden: who held it last is no part of what the store holds


def store_lock(store: Path) -> AbstractContextManager[None]:
    """Hold a store for the moment it takes to compare or write its identity; waits for its turn."""
    return waiting_lock(store / _LOCK_FILE)


def shard_lock(folder: Path) -> AbstractContextManager[None]:
    """Hold a shard for writing; `InputError` naming the holder when another process has it."""
    return sole_lock(
        folder / _LOCK_FILE,
        f"process {os.getpid()} on {socket.gethostname()}",
        lambda who: (
            f"{folder} is being written by {who}. Wait for it or stop it; to work beside it "
            "give another shard."
        ),
    )


def refuse_other_counts(store: Path, num_shards: int) -> None:
    """`InputError` when a live process writes this store with another shard count: their samples would
    overlap.
    """
    for folder in shard_folders(store):
        other = int(folder.name.rsplit("-", 1)[1]) != num_shards
        if other and (holder := lock_holder(folder / _LOCK_FILE)) is not None:
            raise InputError(
                f"{folder} is being written by {holder} with another shard count than "
                f"num_shards={num_shards}; the two would store the same samples. Stop it first, or use "
                "its count."
            )


# ----------------------------------------------------------------------------------------------------
# The account of an extraction: headline figures, one record a batch, the quarantined samples.


@dataclass(frozen=True)
class BatchRecord:
    """One batch as it ran. `seconds`: of the device on CUDA, of the host elsewhere."""

    samples: int
    longest: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Quarantined:
    """A sample that is not in the store, and why. The next run tries it again."""

    id: str
    hash: str
    length: int
    reason: str


class QuarantineError(LabError, RuntimeError):
    """Samples were quarantined: everything else is sealed, but the store is not all that was asked for."""


@dataclass(frozen=True)
class ExtractionReport:
    """What one shard's run did. ``samples_in == stored_before + samples_stored + len(quarantined)``."""

    samples_in: int
    stored_before: int
    samples_stored: int
    tokens_stored: int
    tokens_before: int  # of the samples stored before
    quarantined: list[Quarantined]
    duplicates: int
    batches: list[BatchRecord]
    padded_tokens: int
    seconds: float
    forward_seconds: (
        float  # CUDA: from the first forward's begin to the last one's end, on the device's clock
    )
    bytes_written: int
    write_seconds: float
    parts: int
    failures: list[str]
    gpu_idle_pct: float
    selftest: dict[str, Any] = field(default_factory=dict)
    token_budget: int = 0  # of the batches as planned
    token_budget_lowered: str = ""  # why it is less than was given, if it is

    @property
    def waste_pct(self) -> float:
        """Padding among the computed tokens, as the batches really ran, in percent."""
        tokens = sum(batch.tokens for batch in self.batches)
        return 100 * (1 - tokens / self.padded_tokens) if self.padded_tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Real tokens a second of the run, self-test excluded; 0 when there was nothing to do."""
        return sum(batch.tokens for batch in self.batches) / self.seconds if self.seconds else 0.0

    @property
    def limited_by(self) -> str:
        """What the run waited for: the writer when it was busy most of the time, else the model."""
        return "disk" if self.seconds and self.write_seconds > 0.8 * self.seconds else "model"

    def figures(self) -> dict[str, float | int | str]:
        """Return the flat headline numbers; those of the device's clock only where there was one (CUDA)."""
        clock = {
            "forward_seconds": round(self.forward_seconds, 3),
            "gpu_idle_pct": round(self.gpu_idle_pct, 3),
        }
        return {
            "samples_in": self.samples_in,
            "samples_stored_before": self.stored_before,
            "samples_stored": self.samples_stored,
            "samples_quarantined": len(self.quarantined),
            "duplicates": self.duplicates,
            "tokens_stored_before": self.tokens_before,
            "tokens_stored": self.tokens_stored,
            "extract_tokens_per_s": round(self.tokens_per_s, 2),
            "padding_waste_pct": round(self.waste_pct, 3),
            "seconds": round(self.seconds, 3),
            "batches": len(self.batches),
            "memory_failures": len(self.failures),
            "bytes_written": self.bytes_written,
            "write_gb_per_s": round(self.bytes_written / self.seconds / 1e9, 4) if self.seconds else 0.0,
            "limited_by": self.limited_by,
            "token_budget": self.token_budget,
            **({"token_budget_lowered": self.token_budget_lowered} if self.token_budget_lowered else {}),
            **(clock if self.forward_seconds else {}),
        }

    def raise_for_quarantine(self, allowed: int = 0) -> None:
        """Raise `QuarantineError` listing id, length and reason when more than `allowed` samples were
        quarantined.
        """
        if len(self.quarantined) <= allowed:
            return
        shown = "\n  ".join(f"{one.id} ({one.length} tokens): {one.reason}" for one in self.quarantined[:50])
        more = len(self.quarantined) - 50
        raise QuarantineError(
            f"{len(self.quarantined)} of {self.samples_in} samples could not be stored; everything "
            f"else is sealed.\n  {shown}"
            + (f"\n  and {more} more, all in the shard's manifest" if more > 0 else "")
            + "\nRun again to retry them, or accept them with max_quarantined."
        )


# ----------------------------------------------------------------------------------------------------
# The samples of one shard: who gets which, what is already stored, and their tokens.
#
# The shard of a sample follows from the set of samples and the shard count alone (costliest first onto the
# least loaded shard, ties by content hash), so that processes started apart agree without talking. What is
# stored already is found by content hash, whatever shard count, budget or order wrote it.


@dataclass(frozen=True, eq=False)
class SampleIndex:
    """Every distinct sample of a samples file without its tokens, in file order."""

    path: Path
    row: np.ndarray  # [N] position in the file
    ids: list[str]
    lengths: np.ndarray  # [N] i64
    content_hashes: list[str]  # [N] hex
    heldout: np.ndarray  # [N] bool
    duplicates: int  # rows of the file left out because an equal one stands before them

    @property
    def set_hash(self) -> str:
        """Xxh3-128 of the sorted content hashes: equal for equal sets in any order."""
        return xxhash.xxh3_128("\n".join(sorted(self.content_hashes)).encode()).hexdigest()


def read_index(path: Path | str) -> SampleIndex:
    """Read ids, lengths and hashes of a samples file; `InputError` when it has no sample or one without a
    token.
    """
    path = Path(path)
    columns = ("id", "length", "content_hash", "split")
    with reading_samples(path):
        frame = (
            scan_samples(path).select(columns).with_row_index("row").collect(engine="in-memory").sort("row")
        )
    kept = checked(frame, path).unique("content_hash", keep="first", maintain_order=True)
    if not kept.height:
        raise InputError(f"{path} holds no sample. Run prepare on data that has some.")
    lengths = kept["length"].to_numpy().astype(np.int64)
    if lengths.min() < 1:
        raise InputError(
            f"{path}: sample {kept['id'][int(lengths.argmin())]!r} has no token. Run prepare again."
        )
    return SampleIndex(
        path,
        kept["row"].to_numpy(),
        kept["id"].to_list(),
        lengths,
        kept["content_hash"].to_list(),
        (kept["split"] == "heldout").to_numpy(),
        frame.height - kept.height,
    )


def shard_rows(index: SampleIndex, shard: int, num_shards: int, *, chunk: int, hidden: int) -> np.ndarray:
    """Return the sample numbers of a shard, rising. Costs grow with whole chunks and with
    attention's square.
    """
    if num_shards == 1:
        return np.arange(len(index.lengths))
    cost = predicted_cost(index.lengths, chunk=chunk, attention_per_token=1 / (6 * hidden))
    keys = np.asarray([int(digest[:16], 16) for digest in index.content_hashes], dtype=np.uint64)
    return np.flatnonzero(balance_shards(cost, num_shards, keys=keys) == shard)


def drawn(index: SampleIndex, max_samples: int, seed: int) -> np.ndarray:
    """Return which samples [N] bool a trial of `max_samples` takes (0: all): those whose content hash, hashed
    again with the seed, is smallest. So a larger trial holds the smaller, and both splits are drawn alike.
    """
    found = np.ones(len(index.lengths), bool)
    if max_samples:
        ranks = [xxhash.xxh3_64_intdigest(digest.encode(), seed) for digest in index.content_hashes]
        found[np.argsort(np.asarray(ranks, np.uint64), kind="stable")[max_samples:]] = False
    return found


def not_stored(index: SampleIndex, rows: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """Return those of `rows` whose content hash is not among the sorted 16-byte keys `stored`."""
    if not len(stored) or not len(rows):
        return rows
    keys = as_keys(hex_to_hashes([index.content_hashes[row] for row in rows]))
    return rows[~np.isin(keys, stored)]


class Tokens:
    """Token ids and masks of some samples, read once and asked for by sample number."""

    def __init__(self, index: SampleIndex, rows: np.ndarray) -> None:
        self._flat = FlatTokens(read_samples(index.path, index.row[rows]))
        self.id_range = self._flat.id_range
        self._at = np.full(len(index.lengths), -1, np.int64)
        self._at[rows] = np.arange(len(rows))

    def of(self, rows: Sequence[int] | np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return input_ids (int32) and loss_mask (uint8) of sample numbers `rows`, as views."""
        pairs = [self._flat.of(at) for at in self._at[rows]]
        return [ids for ids, _ in pairs], [mask for _, mask in pairs]


# ----------------------------------------------------------------------------------------------------
# One pass over the batches of a shard: attempt, split, retry, quarantine, and never lose one.
#
# Batches wait in a deque, longest first. One that does not fit is split in place and its length bucket's
# budget lowered; one sample that does not fit alone is tried again at the very end, with the memory as
# empty as it gets, then quarantined. A few of those in a row raise the question whether what fitted before
# still fits: if not, someone else took the memory, and the run waits for it a while, then stops. Nothing is
# handed to the writer before a batch's states are complete, so a failed attempt leaves no half.


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


# ----------------------------------------------------------------------------------------------------
# Extract one shard: lock it, trust what is stored, plan the rest, run it, and account for every sample.


GRID = 65_535  # blocks of a CUDA grid in its second and third dimension
BUFFERS = 3  # on the host, of one batch each; the device runs as many batches ahead of their copies


def store_identity(
    target: dict[str, Any], dtype: torch.dtype, layout: Layout, samples_hash: str
) -> dict[str, Any]:
    """What every shard of a store must agree on: the target's identity, its dtype, what is kept (both
    spellings of the layer ids), and the set of samples.
    """
    return {
        "schema": manifests.SCHEMA,
        "target": target,
        "compute_dtype": str(dtype).removeprefix("torch."),
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
    max_samples: int = 0,
    seed: int = 0,
    token_budget: int,
    max_batch: int,
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

    max_samples: how many of all shards' samples are drawn by `seed` (0: all); what more is stored stays.
    token_budget: padded tokens of a batch; lowered where few samples would make it mostly padding, which the
    report says. max_batch: rows of one; lowered to what kernels can launch (`most_rows`). part_gib: the most
    unsealed bytes a crash can lose. recheck: read the checksum of every sealed part before trusting it.
    notes: goes into the manifest's run line.

    Raises `InputError` for parameters that fit neither target nor data and for a shard in use, `StoreError`
    naming the differences when the store was made by another setup, `SelfTestError`, and, after sealing what
    was done, `DeviceLost` and `MemoryShort` (another process keeps the device's memory). Quarantined samples
    do not raise here: the report lists them.
    """
    store, index = Path(store), read_index(samples)
    last = target.num_layers - 1
    layers = [*check_tap_ids(tap_ids, target.num_layers), *([last] if store_final else [])]
    layout = Layout(tuple(tap_ids), target.hidden_size, store_final, find_codec(storage))
    folder = store / manifests.shard_name(shard, num_shards)
    files.make_folder(store)
    refuse_other_counts(store, num_shards)
    with shard_lock(folder):
        with store_lock(store):
            identity = manifests.plain(store_identity(target.identity, target.dtype, layout, index.set_hash))
            manifests.open_identity(store, identity)
        clean(folder)
        chunk = 64 if target.is_hybrid else 1
        mine = shard_rows(index, shard, num_shards, chunk=chunk, hidden=target.hidden_size)
        some = drawn(index, max_samples, seed)
        mine = mine[some[mine]]
        todo = not_stored(index, mine, _trusted(store, folder, recheck))
        max_batch = min(max_batch, most_rows(target))
        fitted = fit_batches(
            index.lengths[todo], token_budget=token_budget, max_batch=max_batch, window=window, chunk=chunk
        )
        plan = fitted.plan
        if fitted.lowered:
            logger.info("%s", fitted.lowered)
        candidates = _candidates(index.lengths) if len(todo) else todo
        tokens = _tokens(index, np.union1d(todo, candidates), target)
        run = Run(
            target,
            layout,
            index,
            todo,
            plan,
            tokens,
            folder,
            part_gib,
            BUFFERS,
            seal_seconds,
            on_progress,
            examples=tokens.of(candidates)[0],
        )
        manifests.append(
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
        written = run.all(layers) if len(todo) else Written()
        return _account(run, written, index, mine, folder, fitted)


def most_rows(target: Target) -> int:
    """The most rows of a batch that every attention kernel's grid holds. Those of softmax attention count
    rows in one dimension and heads in another, those of the gated delta rule rows x heads in one.
    """
    names = ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads")
    return max(1, GRID // max(getattr(target.config, name, None) or 1 for name in names))


def clean(folder: Path) -> None:
    """Make a shard folder ready for appending after a crash: torn and broken lines, temporary files and
    unnamed parts go.
    """
    for line in manifests.mend(folder):
        logger.warning("%s", line.told(folder))
    named = {part.file for part in manifests.sealed_parts(folder)}
    for path in folder.iterdir():
        unnamed = path.name.startswith("part-") and path.name not in named
        if unnamed or (path.name.startswith(".part-") and path.name.endswith(".tmp")):
            path.unlink()


def _trusted(store: Path, folder: Path, recheck: bool) -> np.ndarray:
    """The keys of samples that are soundly stored; damaged parts are given up, so that their samples are
    redone.

    Ours, and those of shards of another count, which nobody runs any more; the rest is their own shards'
    business.
    """
    keys, faults = stored_keys(store, check_bytes=recheck)
    count = folder.name.rsplit("-", 1)[1]
    for fault in faults:
        path = store / fault.file
        theirs = path.parent.name.rsplit("-", 1)[1] == count and path.parent != folder
        if theirs and not fault.part:
            logger.warning("%s", fault.what)  # that shard's next run mends it
        elif path.parent == folder:
            drop_part(path, fault.what)
        elif not theirs:
            with shard_lock(path.parent):
                if fault.part:
                    drop_part(path, fault.what)
                else:
                    clean(path.parent)
    return keys


def _candidates(lengths: np.ndarray) -> np.ndarray:
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


def _account(
    run: Run, written: Written, index: SampleIndex, mine: np.ndarray, folder: Path, fitted: Fitted
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
        tokens_before=int(index.lengths[mine].sum()) - run.total,
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
        token_budget=fitted.plan.token_budget,
        token_budget_lowered=fitted.lowered,
    )
    manifests.append(folder, "end", **report.figures())
    return report
