"""Nothing is lost and nothing is stored twice, whatever fails on the way."""

from __future__ import annotations

import contextlib
import errno
import gc
import random
import re
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
from support.wording import refused

from dflash_lab import files
from dflash_lab.data.batching import plan_batches
from dflash_lab.extraction import checks, loop, writer
from dflash_lab.extraction.checks import SelfTestError, discard, rel_l2, verify
from dflash_lab.extraction.loop import extract
from dflash_lab.extraction.manifest import read_lines, shard_folders
from dflash_lab.extraction.oom import DeviceLost, MemoryShort
from dflash_lab.extraction.report import QuarantineError
from dflash_lab.extraction.store import open_store
from dflash_lab.models.load import Target

LENGTHS = [int(length) for length in np.random.default_rng(3).integers(2, 90, 70)]
PLAN = {"tap_ids": TAP_IDS, "token_budget": 400, "max_batch": 8, "part_gib": 0.0003, "seal_seconds": 0.05}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(loop, "WAITS_S", (0,) * 6)


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
        return decide(ids) if selftest_ended(folder) else None

    return later


def selftest_ended(folder: Path) -> bool:
    return any(line["kind"] == "selftest" for line in read_lines(folder))


@contextlib.contextmanager
def spoiling(
    target: Target,
    samples: Path,
    number: int,
    value: float,
    *,
    channel: int | None = None,
    when: Callable[[], bool] = lambda: True,
):
    """Write `value` into a row (or one channel of it) of sample `number` in layer 3, wherever it runs."""
    marked = torch.tensor(pl.read_parquet(samples)["input_ids"][number].to_list())
    ids_seen = [torch.empty(0)]

    def spoil(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        for row, ids in enumerate(ids_seen[0]):
            if len(ids) > 7 and torch.equal(ids[:8], marked[:8]) and when():
                output = output.clone()
                output[row, 7, slice(None) if channel is None else channel] = value
        return output

    see = target.body.register_forward_pre_hook(
        lambda module, args, kwargs: ids_seen.__setitem__(0, kwargs["input_ids"]), with_kwargs=True
    )
    handle = target.layers[3].register_forward_hook(spoil)
    try:
        yield
    finally:
        see.remove()
        handle.remove()


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
    with refused(QuarantineError):
        report.raise_for_quarantine()
    report.raise_for_quarantine(allowed=1)
    stored_once(samples, store, {f"s{len(LENGTHS)}"})
    again = extract(target, samples, store, **PLAN)  # on a larger device, say
    assert again.samples_stored == 1 and not again.quarantined
    stored_once(samples, store)


def test_memory_that_stays_short_ends_the_run_after_a_few_tries(tiny, tmp_path: Path, monkeypatch) -> None:
    """Sixty samples took 185 failed attempts; what was stored before another process came stays."""
    target, samples, store = tiny("llama"), make_samples(tmp_path / "s.parquet", LENGTHS), tmp_path / "store"
    monkeypatch.setattr(loop, "others_on", lambda device: "process 4242 (python3) 71.30 GiB")
    forwards = [0]

    def taken(ids: torch.Tensor) -> BaseException | None:
        forwards[0] += 1
        return memory_error("cuda") if forwards[0] > 8 else None

    with (
        Saboteur(target, after_selftest(taken, shard(store))) as saboteur,
        pytest.raises(MemoryShort, match=r"fitted before .*process 4242 .*goes on from there") as stopped,
    ):
        extract(target, samples, store, **PLAN)
    assert "3 samples in a row" in str(stopped.value) and "out of memory" in str(stopped.value)
    assert saboteur.raised < 20
    assert 0 < len(open_store(store)) < len(LENGTHS)
    assert not [line for line in read_lines(shard(store)) if line["kind"] == "quarantine"]
    report = extract(target, samples, store, **PLAN)
    assert report.stored_before > 0
    stored_once(samples, store)


def test_memory_that_comes_back_is_waited_for(tiny, tmp_path: Path, monkeypatch) -> None:
    target, samples, store = tiny("llama"), make_samples(tmp_path / "s.parquet", LENGTHS), tmp_path / "store"
    monkeypatch.setattr(loop, "WAITS_S", (1, 2, 4))
    slept: list[float] = []
    monkeypatch.setattr(loop.time, "sleep", slept.append)
    free = iter([10.0, *[1.0] * 9, *[9.5] * 99])
    monkeypatch.setattr(loop, "device_budget_gib", lambda device: next(free))
    came_back = lambda: len(slept) > 0  # noqa: E731
    with Saboteur(
        target, after_selftest(lambda ids: None if came_back() else memory_error("driver"), shard(store))
    ):
        report = extract(target, samples, store, **PLAN)
    assert report.samples_stored == len(LENGTHS) and not report.quarantined and slept
    stored_once(samples, store)


def test_samples_too_long_for_the_device_do_not_end_a_run(tiny, tmp_path: Path) -> None:
    """Seven in a row do not fit, and shorter ones do: nobody took the memory."""
    lengths = [*LENGTHS, *range(101, 108)]
    target, samples, store = tiny("llama"), make_samples(tmp_path / "s.parquet", lengths), tmp_path / "store"
    beyond = after_selftest(lambda ids: memory_error("cuda") if ids.shape[1] > 100 else None, shard(store))
    with Saboteur(target, beyond):
        report = extract(target, samples, store, **PLAN)
    assert sorted(one.length for one in report.quarantined) == [*range(101, 108)]
    assert report.samples_stored == len(LENGTHS)


def test_each_retry_leaves_a_line_in_the_log_and_in_the_manifest(tiny, tmp_path: Path, caplog) -> None:
    target, store = tiny("llama"), tmp_path / "store"
    samples = make_samples(tmp_path / "s.parquet", [*LENGTHS, 97])
    beyond = after_selftest(
        lambda ids: memory_error("cuda") if ids.shape[1] == 97 or len(ids) > 6 else None, shard(store)
    )
    with Saboteur(target, beyond) as saboteur:
        extract(target, samples, store, **PLAN)
    lines = [line for line in read_lines(shard(store)) if line["kind"] == "retry"]
    told = [record.getMessage() for record in caplog.records if "did not fit" in record.getMessage()]
    assert len(lines) == len(told) == saboteur.raised > 4
    for line, text in zip(lines, told, strict=True):
        assert text.startswith(f"{line['samples']} x {line['longest']} tokens did not fit (")
        assert f"next: {line['next']}; {line['free_gib']:.2f} GiB" in text and line["free_gib"] > 0
        assert "out of memory" in line["error"] and line["error"] in text
    alone = [line["next"] for line in lines if line["samples"] == 1]
    assert alone == ["again at the end", "the same again", "nothing: quarantined"]
    assert {line["next"] for line in lines if line["samples"] == 8} == {"4 and 4 samples"}


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
    real, calls = writer.HostBuffers.give_back, [0]

    def give_back(self, buffer) -> None:  # the writer's thread does
        calls[0] += 1
        if calls[0] == 4:
            raise ZeroDivisionError("a defect of the writer")
        real(self, buffer)

    with monkeypatch.context() as patch:
        patch.setattr(writer.HostBuffers, "give_back", give_back)
        with pytest.raises(ZeroDivisionError, match="a defect of the writer"):
            extract(target, samples, store, **PLAN)
    assert calls[0] == 4
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
        pytest.raises(DeviceLost, match="illegal memory access"),
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
    with spoiling(target, samples, 2, value, when=lambda: selftest_ended(shard(store))):
        report = extract(target, samples, store, tap_ids=[1, 3], token_budget=400, max_batch=8)
    assert [one.id for one in report.quarantined] == ["s2"]
    assert report.quarantined[0].reason == f"{word} row in tap 3"
    assert report.samples_stored == 3
    stored_once(samples, store, {"s2"})


@pytest.mark.parametrize("storage", ["bf16", "fp8", "int8"])
def test_a_value_that_only_the_stored_type_cannot_hold_is_quarantined(
    storage: str, tiny, tmp_path: Path
) -> None:
    target, store = tiny("qwen3"), tmp_path / "store"
    samples = make_samples(tmp_path / "s.parquet", [40, 41, 42, 50])
    plan = dict(tap_ids=[1, 3], token_budget=400, max_batch=8, storage=storage)
    most, ended = torch.finfo(torch.float32).max, lambda: selftest_ended(shard(store))
    with spoiling(target, samples, 2, most, channel=5, when=ended):
        report = extract(target, samples, store, **plan)
    assert [(one.id, one.reason[-12:]) for one in report.quarantined] == [("s2", "row in tap 3")]
    stored_once(samples, store, {"s2"})


@pytest.mark.parametrize("storage", ["bf16", "fp8"])
def test_verify_names_stored_states_that_are_not_numbers_and_their_samples_are_redone(
    storage: str, tiny, tmp_path: Path, monkeypatch
) -> None:
    target, store = tiny("qwen3"), tmp_path / "store"
    samples = make_samples(tmp_path / "s.parquet", [40, 41, 42, 50])
    plan = dict(tap_ids=[1, 3], token_budget=400, max_batch=8, storage=storage)
    with spoiling(target, samples, 2, float("inf"), channel=5), monkeypatch.context() as patch:
        patch.setattr(writer, "check_rows", lambda rows, owner, count: torch.zeros(count).byte())
        patch.setattr(loop, "self_test", lambda *_: {"lengths": [1]})
        patch.setattr(checks.SpotChecks, "choose", lambda self, lengths: [])
        extract(target, samples, store, **plan)
    (fault,) = verify(store)
    digest = pl.read_parquet(samples)["content_hash"][2]
    assert fault.part and fault.what == f"states of sample {digest} are not numbers"
    assert discard(store, [fault]) == 1
    assert extract(target, samples, store, **plan).samples_stored == 4
    assert verify(store) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_an_unsound_sample_that_the_self_test_meets_is_quarantined_and_another_tried(
    value: float, tiny, tmp_path: Path
) -> None:
    """Nothing shows that the target is at fault; of a whole shard of such samples something would."""
    target, store = tiny("qwen3"), tmp_path / "store"
    samples = make_samples(tmp_path / "s.parquet", [40, 41, 42, 50])
    plan = dict(tap_ids=[1, 3], token_budget=400, max_batch=8)
    with spoiling(target, samples, 1, value):
        report = extract(target, samples, store, **plan)
        assert [one.id for one in report.quarantined] == ["s1"] and report.selftest["unsound"] == 1
        again = extract(target, samples, store, **plan)  # the sample that is left shows nothing either
        assert [one.id for one in again.quarantined] == ["s1"]
    stored_once(samples, store, {"s1"})
    assert extract(target, samples, store, **plan).samples_stored == 1


def test_a_shard_of_nothing_but_an_unsound_sample_is_no_fault_of_the_target(tiny, tmp_path: Path) -> None:
    target, store = tiny("qwen3"), tmp_path / "store"
    samples = make_samples(tmp_path / "s.parquet", [40, 41, 42])
    plan = dict(tap_ids=[1, 3], token_budget=400, max_batch=8, num_shards=3)
    with spoiling(target, samples, 1, float("nan")):
        reports = [extract(target, samples, store, shard=shard, **plan) for shard in range(3)]
    assert [[one.id for one in report.quarantined] for report in reports].count(["s1"]) == 1
    stored_once(samples, store, {"s1"})


def test_a_sample_that_is_unsound_in_a_batch_alone_stops_the_run(tiny, tmp_path: Path) -> None:
    target, store = tiny("qwen3"), tmp_path / "store"
    samples = make_samples(tmp_path / "s.parquet", [40, 41, 42, 50])

    def spoil(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        return torch.cat((output[:-1], output[-1:] * float("nan"))) if len(output) > 1 else output

    handle = target.layers[3].register_forward_hook(spoil)
    try:
        with refused(SelfTestError):
            extract(target, samples, store, tap_ids=[1, 3], token_budget=400, max_batch=8)
    finally:
        handle.remove()


@contextlib.contextmanager
def mixing_rows(target: Target, when: Callable[[torch.Tensor], bool]):
    """Give every row of a batch the states of the one before it."""
    handle = target.layers[2].register_forward_hook(
        lambda module, args, output: output.roll(1, 0) if len(output) > 1 and when(output) else output
    )
    try:
        yield
    finally:
        handle.remove()


def test_a_fault_of_large_batches_alone_stops_the_run_in_its_first_minute(tiny, tmp_path: Path) -> None:
    target, samples, store = tiny("llama"), make_samples(tmp_path / "s.parquet", LENGTHS), tmp_path / "store"
    plan = {**PLAN, "part_gib": 1.0, "seal_seconds": 300.0}
    with (
        mixing_rows(target, lambda states: len(states) > 6),  # the self-test runs three
        refused(SelfTestError) as stopped,
    ):
        extract(target, samples, store, **plan)
    assert len(set(re.findall(r"\n  (s\d+): layer 3", str(stopped.value)))) == 2
    for words in ("layer 3: batched states differ", "max_batch", "fast=off", "parts from part-000000"):
        assert words in str(stopped.value)
    assert not list(shard(store).glob("part-*"))
    assert extract(target, samples, store, **PLAN).samples_stored == len(LENGTHS)
    stored_once(samples, store)


def test_a_fault_that_begins_later_is_found_and_what_was_sealed_before_stays(
    tiny, tmp_path: Path, monkeypatch
) -> None:
    target, samples, store = tiny("llama"), make_samples(tmp_path / "s.parquet", LENGTHS), tmp_path / "store"
    monkeypatch.setattr(checks, "SHARE", 0.2)

    def later(states: torch.Tensor) -> bool:
        kinds = [line["kind"] for line in read_lines(shard(store))]
        return kinds.count("check") > 3 and "part" in kinds

    with mixing_rows(target, later), refused(SelfTestError) as stopped:
        extract(target, samples, store, **PLAN)
    doubted = re.search(r"parts from (part-\d+\.safetensors) on", str(stopped.value))
    sealed = sorted(path.name for path in shard(store).glob("part-*"))
    assert doubted and sealed and sealed[0] < doubted[1]
    for name in sealed:
        if name >= doubted[1]:
            (shard(store) / name).unlink()
    report = extract(target, samples, store, **PLAN)
    assert report.stored_before > 0 and verify(store) == []
    alone = tmp_path / "alone"
    extract(target, samples, alone, **{**PLAN, "max_batch": 1})
    one, other = open_store(store), open_store(alone)
    assert len(one) == len(other) == len(LENGTHS)
    for index in range(len(one)):
        same = other[other.find(one[index].hash)]
        assert rel_l2(one[index].taps, same.taps) < 5e-3  # bf16


def test_comparisons_of_a_long_run_cost_less_than_a_thousandth_of_its_tokens_and_go_on_to_its_end() -> None:
    lengths = np.random.default_rng(0).lognormal(5.5, 0.8, 60_000).clip(4, 4096).astype(np.int64)
    plan = plan_batches(lengths, token_budget=16384, max_batch=512)
    spots, compared, alone, forwarded = checks.SpotChecks(), [], 0, 0
    for number, batch in enumerate(loop._largest_early(plan)):
        chosen = spots.choose(lengths[batch])
        spots.ran(lengths[batch], chosen)
        forwarded += len(batch) * int(lengths[batch].max())
        alone += int(lengths[batch][chosen].sum())
        compared += [number] if chosen else []
    most = {int(np.argmax(plan.sizes)), int(np.argmax(plan.costs)), 0}
    assert compared[: len(most)] == list(range(len(most)))  # the largest ones come first
    assert alone <= 0.001 * forwarded
    assert len(compared) > 25 and compared[-1] > 0.9 * len(plan)


def test_what_comparisons_forward_is_what_the_rule_counts(tiny, tmp_path: Path, monkeypatch) -> None:
    target, store = tiny("llama"), tmp_path / "store"
    samples = make_samples(tmp_path / "s.parquet", LENGTHS)
    monkeypatch.setattr(checks, "SHARE", 0.3)
    tokens = Counter[str]()

    def count(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        if selftest_ended(shard(store)):
            ids = kwargs["input_ids"]
            tokens["alone" if len(ids) == 1 else "batched"] += ids.numel()

    handle = target.body.register_forward_pre_hook(count, with_kwargs=True)
    report = extract(target, samples, store, **PLAN)
    handle.remove()
    assert all(batch.samples > 1 for batch in report.batches)
    lines = [line for line in read_lines(shard(store)) if line["kind"] == "check"]
    drawn = sum(len(line["samples"]) == 1 for line in lines)
    assert drawn >= 2 and len(lines) - drawn in (1, 2, 3)
    assert all(max(line["batched_error"]) < 1e-4 for line in lines)
    table = dict(pl.read_parquet(samples).select("id", "length").iter_rows())
    assert tokens["alone"] == sum(table[name] for line in lines for name in line["samples"])
    assert tokens["alone"] <= 0.3 * tokens["batched"]


@pytest.mark.parametrize(("kind", "rows"), [("llama", 5), ("qwen3_5_moe", 4)])  # of 4 heads, of 5 linear ones
def test_no_batch_is_planned_beyond_the_grid_of_a_kernel(kind: str, rows: int, tiny, tmp_path, monkeypatch):
    target, samples = tiny(kind), make_samples(tmp_path / "s.parquet", LENGTHS[:30])
    monkeypatch.setattr(loop, "GRID", 20)
    if target.is_hybrid:
        monkeypatch.setattr(target.config, "linear_num_value_heads", 5)
    store, plan = tmp_path / "store", {**PLAN, "token_budget": 9999, "max_batch": 99}
    beyond = after_selftest(lambda ids: memory_error("cuda grid") if len(ids) > rows else None, shard(store))
    with Saboteur(target, beyond) as saboteur:
        report = extract(target, samples, store, **plan)
    assert saboteur.raised == 0 and max(batch.samples for batch in report.batches) == rows
    (run,) = [line for line in read_lines(shard(store)) if line["kind"] == "run"]
    assert run["plan"]["max_batch"] == rows


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
