"""Nothing is lost and nothing is stored twice, whatever fails on the way."""

from __future__ import annotations

import errno
import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from support.extraction_faults import MEMORY_ERRORS, Saboteur, memory_error
from support.sample_files import TAP_IDS, make_samples

from dflash_lab import files
from dflash_lab.extraction import writer as writer_module
from dflash_lab.extraction.loop import extract
from dflash_lab.extraction.manifest import read_lines, shard_folders
from dflash_lab.extraction.oom import DeviceLost
from dflash_lab.extraction.report import QuarantineError
from dflash_lab.extraction.store import open_store
from dflash_lab.extraction.verify import verify
from dflash_lab.target.model import Target

LENGTHS = [int(length) for length in np.random.default_rng(3).integers(2, 90, 70)]
PLAN = {"tap_ids": TAP_IDS, "token_budget": 400, "max_batch": 8, "part_gib": 0.0003, "seal_seconds": 0.05}


@pytest.fixture(autouse=True)
def quick_collection():
    """Everything imported so far is left out of collections: fifty of them a test would take most
    of its time.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def stored_once(samples: Path, store: Path, missing: set[str] = frozenset()) -> None:
    """Every sample but `missing` (ids) is stored exactly once, counted over all parts, and the
    store is sound.
    """
    table = pl.read_parquet(samples)
    wanted = {digest for name, digest in zip(table["id"], table["content_hash"]) if name not in missing}
    lines = [line for folder in shard_folders(store) for line in read_lines(folder)]
    opened = open_store(store)
    assert {row.tobytes().hex() for row in opened.hashes} == wanted
    assert sum(line["samples"] for line in lines if line["kind"] == "part") == len(wanted)
    assert verify(store) == []


def at_random(name: str, times: int, seed: int) -> Callable[[torch.Tensor], BaseException | None]:
    """Raise a memory error `times` times, at calls decided by a coin; a sample alone fails twice at most."""
    coin = random.Random(seed)
    left, alone = [times], Counter[bytes]()

    def decide(ids: torch.Tensor) -> BaseException | None:
        key = ids.numpy().tobytes()
        if not left[0] or coin.random() < 0.3 or (len(ids) == 1 and alone[key] == 2):
            return None
        left[0] -= 1
        alone[key] += len(ids) == 1
        return memory_error(name)

    return decide


def after_selftest(decide: Callable[[torch.Tensor], BaseException | None], folder: Path):
    """Let the self-test pass first: it has ended when the manifest says so."""

    def later(ids: torch.Tensor) -> BaseException | None:
        if not any(line["kind"] == "selftest" for line in read_lines(folder)):
            return None
        return decide(ids)

    return later


def shard(store: Path) -> Path:
    return store / "shard-00000-of-00001"


@pytest.mark.parametrize("name", MEMORY_ERRORS)
def test_fifty_memory_errors_of_each_form_lose_nothing(name: str, tiny, tmp_path: Path) -> None:
    target, samples, store = tiny("llama"), make_samples(tmp_path / "s.parquet", LENGTHS), tmp_path / "store"
    decide = after_selftest(at_random(name, 50, seed=len(name)), shard(store))
    with Saboteur(target, decide) as saboteur:
        report = extract(target, samples, store, **PLAN)
    assert saboteur.raised == len(report.failures) == 50
    assert report.samples_stored == len(LENGTHS) and not report.quarantined
    stored_once(samples, store)


def test_a_sample_that_never_fits_is_quarantined_and_the_rest_stored(tiny, tmp_path: Path) -> None:
    target, samples, store = (
        tiny("llama"),
        make_samples(tmp_path / "s.parquet", [*LENGTHS, 97]),
        tmp_path / "store",
    )
    decide = after_selftest(lambda ids: memory_error("cuda") if ids.shape[1] == 97 else None, shard(store))
    with Saboteur(target, decide) as saboteur:
        report = extract(target, samples, store, **PLAN)
    assert saboteur.raised < 10
    assert [(one.id, one.length) for one in report.quarantined] == [(f"s{len(LENGTHS)}", 97)]
    assert "out of memory" in report.quarantined[0].reason
    assert report.samples_in == report.samples_stored + 1
    with pytest.raises(QuarantineError, match=r"s70 \(97 tokens\)"):
        report.raise_for_quarantine()
    report.raise_for_quarantine(allowed=1)
    stored_once(samples, store, {f"s{len(LENGTHS)}"})
    again = extract(target, samples, store, **PLAN)  # on a larger device, say
    assert again.samples_stored == 1 and not again.quarantined
    stored_once(samples, store)


def test_tensors_of_a_failed_attempt_are_gone_before_the_next(tiny, tmp_path: Path) -> None:
    target, samples, store = tiny("llama"), make_samples(tmp_path / "s.parquet", LENGTHS), tmp_path / "store"
    seen: list[weakref.ref[torch.Tensor]] = []
    leaks: list[int] = []
    failed = [False]

    def keep(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> None:
        seen.append(weakref.ref(output))

    def decide(ids: torch.Tensor) -> BaseException | None:
        if failed[0]:
            # seen[-3:] are this attempt's first layers; everything older belongs to the one that failed
            leaks.append(sum(ref() is not None for ref in seen[:-3]))
        failed[0] = not failed[0] and len(ids) > 1
        return memory_error("wrapped") if failed[0] else None

    handles = [target.layers[layer].register_forward_hook(keep) for layer in (0, 1, 2)]
    with Saboteur(target, after_selftest(decide, shard(store))):
        report = extract(target, samples, store, **PLAN)
    for handle in handles:
        handle.remove()
    assert report.failures and len(leaks) == len(report.failures)
    assert leaks == [0] * len(leaks)


@pytest.mark.parametrize("call", [1, 3, 6])
def test_a_full_disk_stops_the_run_and_the_next_one_finishes(
    call: int, tiny, tmp_path: Path, monkeypatch
) -> None:
    target, samples, store = tiny("llama"), make_samples(tmp_path / "s.parquet", LENGTHS), tmp_path / "store"
    calls, real = [0], files.os.replace

    def full(source: Path, goal: Path) -> None:
        if "part-" in str(goal):
            calls[0] += 1
            if calls[0] == call:
                raise OSError(errno.ENOSPC, "No space left on device")
        real(source, goal)

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(OSError, match="the disk is full"):
        extract(target, samples, store, **PLAN)
    assert not list(shard(store).glob("*.tmp"))
    monkeypatch.setattr(files.os, "replace", real)
    report = extract(target, samples, store, **PLAN)
    assert report.stored_before + report.samples_stored == len(LENGTHS)
    assert (report.stored_before > 0) == (call > 1)
    stored_once(samples, store)


def test_an_error_in_the_writer_thread_reaches_the_caller(tiny, tmp_path: Path, monkeypatch) -> None:
    target, samples, store = tiny("llama"), make_samples(tmp_path / "s.parquet", LENGTHS), tmp_path / "store"
    real, calls = writer_module.PartWriter.add, [0]

    def add(self, batch) -> None:
        calls[0] += 1
        if calls[0] == 4:
            raise ZeroDivisionError("a defect of the writer")
        real(self, batch)

    monkeypatch.setattr(writer_module.PartWriter, "add", add)
    with pytest.raises(ZeroDivisionError, match="a defect of the writer"):
        extract(target, samples, store, **PLAN)
    monkeypatch.setattr(writer_module.PartWriter, "add", real)
    extract(target, samples, store, **PLAN)
    stored_once(samples, store)


def test_a_dead_device_is_not_retried_and_what_was_done_is_sealed(tiny, tmp_path: Path) -> None:
    target, samples, store = tiny("llama"), make_samples(tmp_path / "s.parquet", LENGTHS), tmp_path / "store"
    calls = [0]

    def decide(ids: torch.Tensor) -> BaseException | None:
        calls[0] += 1
        return RuntimeError("CUDA error: an illegal memory access was encountered") if calls[0] == 9 else None

    with (
        Saboteur(target, after_selftest(decide, shard(store))) as saboteur,
        pytest.raises(DeviceLost, match="start this shard"),
    ):
        extract(target, samples, store, **PLAN)
    assert saboteur.raised == 1
    assert len(open_store(store)) > 0
    report = extract(target, samples, store, **PLAN)
    assert report.stored_before > 0
    stored_once(samples, store)


def test_an_interrupt_seals_what_is_done(tiny, tmp_path: Path) -> None:
    target, samples, store = tiny("llama"), make_samples(tmp_path / "s.parquet", LENGTHS), tmp_path / "store"

    def stop(description: str, done: int, total: int, **fields: object) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extract(target, samples, store, **PLAN, on_progress=stop)
    report = extract(target, samples, store, **PLAN)
    assert report.stored_before >= len(LENGTHS) // 3
    stored_once(samples, store)


@pytest.mark.parametrize(
    ("value", "word"),
    [(float("nan"), "NaN"), (float("inf"), "infinite"), (0.0, "all zero"), (2.5, "constant")],
)
def test_unsound_states_are_quarantined_by_layer_and_id(
    value: float, word: str, tiny, tmp_path: Path
) -> None:
    target, samples, store = (
        tiny("qwen3"),
        make_samples(tmp_path / "s.parquet", [40, 41, 42, 50]),
        tmp_path / "store",
    )
    marked = torch.tensor(pl.read_parquet(samples)["input_ids"][2].to_list())

    def spoil(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        for row in range(len(ids_seen[0])):
            if torch.equal(ids_seen[0][row, : len(marked)], marked) and is_running():
                output = output.clone()
                output[row, 7] = value
        return output

    def is_running() -> bool:
        return any(line["kind"] == "selftest" for line in read_lines(shard(store)))

    ids_seen: list[torch.Tensor] = [torch.empty(0)]
    see = target.body.register_forward_pre_hook(
        lambda module, args, kwargs: ids_seen.__setitem__(0, kwargs["input_ids"]), with_kwargs=True
    )
    handle = target.layers[3].register_forward_hook(spoil)
    try:
        report = extract(target, samples, store, tap_ids=[1, 3], token_budget=400, max_batch=8)
    finally:
        see.remove()
        handle.remove()
    assert [one.id for one in report.quarantined] == ["s2"]
    assert report.quarantined[0].reason == f"{word} row in tap 3"
    assert report.samples_stored == 3
    stored_once(samples, store, {"s2"})


def test_no_hook_of_ours_is_left_behind(tiny, tmp_path: Path) -> None:
    target: Target = tiny("llama")
    before = [len(layer._forward_hooks) for layer in target.layers]
    samples = make_samples(tmp_path / "s.parquet", LENGTHS[:5])
    with (
        Saboteur(target, lambda ids: ValueError("a defect of the model")),
        pytest.raises(ValueError, match="defect"),
    ):
        extract(target, samples, tmp_path / "store", **PLAN)
    assert [len(layer._forward_hooks) for layer in target.layers] == before
    assert type(target.final_norm).__name__ != "Identity"
    assert target.body.norm is target.final_norm
