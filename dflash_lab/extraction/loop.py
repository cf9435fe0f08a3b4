"""Extract one shard: lock it, trust what is stored, plan the rest, run it, and account for every sample."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_lab import files, provenance
from dflash_lab.data.batching import Fitted, fit_batches
from dflash_lab.errors import InputError, StoreError
from dflash_lab.extraction import manifest as manifests
from dflash_lab.extraction.codecs import find_codec
from dflash_lab.extraction.layout import Layout
from dflash_lab.extraction.lock import refuse_other_counts, shard_lock, store_lock
from dflash_lab.extraction.report import ExtractionReport, Quarantined
from dflash_lab.extraction.run import Run
from dflash_lab.extraction.selftest import AROUND_A_CHUNK, CANDIDATES
from dflash_lab.extraction.shard import SampleIndex, Tokens, drawn, not_stored, read_index, shard_rows
from dflash_lab.extraction.verify import drop_part, stored_keys
from dflash_lab.extraction.writer import Written
from dflash_lab.models.hooks import check_tap_ids
from dflash_lab.models.load import Target

logger = logging.getLogger(__name__)
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
