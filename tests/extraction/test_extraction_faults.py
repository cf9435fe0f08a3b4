"""Nothing is lost and nothing is stored twice, whatever fails on the way."""

from __future__ import annotations

import contextlib
import errno
import random
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from support.extraction_faults import Saboteur, memory_error
from support.wording import refused

from dflash_lab import files
from dflash_lab.data.batching import plan_batches
from dflash_lab.extraction import checks, loop, writer
from dflash_lab.extraction.checks import SelfTestError, discard, rel_l2, verify
from dflash_lab.extraction.oom import DeviceLost, MemoryShort
from dflash_lab.extraction.report import QuarantineError
from dflash_lab.extraction.store import open_store
from dflash_lab.models.load import Target

LENGTHS = [int(length) for length in np.random.default_rng(3).integers(2, 90, 50)]
FOUR = [40, 41, 42, 50]
Decision = Callable[[torch.Tensor], BaseException | None]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(loop, "WAITS_S", (0,) * 6)


@pytest.fixture
def many(job):
    """Fifty samples in parts of a few batches."""
    return job("llama", LENGTHS, tap_ids=[1, 3, 5], part_gib=0.0003, seal_seconds=0.05)


@pytest.fixture
def four(job):
    return job("qwen3", FOUR)


def sabotaged(job, decide: Decision) -> Saboteur:
    """Raise what `decide` says, once the self-test has ended."""
    return Saboteur(job.target, lambda ids: decide(ids) if job.lines("selftest") else None)


@contextlib.contextmanager
def hooked(target: Target, layer: int, hook: Callable[..., Any]) -> Iterator[None]:
    handle = target.layers[layer].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def spoiling(
    job, number: int, value: float, *, channel: int | None = None, when: Callable[[], object] = lambda: True
):
    """Write `value` into a row (or one channel of it) of sample `number` in layer 3, wherever it runs."""
    marked = torch.tensor(pl.read_parquet(job.samples)["input_ids"][number].to_list())
    ids_seen = [torch.empty(0)]

    def spoil(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        for row, ids in enumerate(ids_seen[0]):
            if len(ids) > 7 and torch.equal(ids[:8], marked[:8]) and when():
                output = output.clone()
                output[row, 7, slice(None) if channel is None else channel] = value
        return output

    see = job.target.body.register_forward_pre_hook(
        lambda module, args, kwargs: ids_seen.__setitem__(0, kwargs["input_ids"]), with_kwargs=True
    )
    with hooked(job.target, 3, spoil):
        yield
    see.remove()


def test_thirty_memory_errors_lose_nothing(many) -> None:
    coin, left, alone = random.Random(7), [30], Counter[bytes]()

    def at_random(ids: torch.Tensor) -> BaseException | None:
        key = ids.numpy().tobytes()
        if not left[0] or coin.random() < 0.3 or (len(ids) == 1 and alone[key] == 2):
            return None  # a sample alone fails twice at most
        left[0] -= 1
        alone[key] += len(ids) == 1
        return memory_error("wrapped")

    with sabotaged(many, at_random) as saboteur:
        report = many.run()
    assert saboteur.raised == len(report.failures) == 30
    assert report.samples_stored == len(LENGTHS) and not report.quarantined
    many.check_stored_once()


def test_samples_that_never_fit_are_quarantined_each_attempt_told_and_the_rest_stored(job, caplog) -> None:
    """Five in a row do not fit, and shorter ones do: nobody took the memory."""
    lengths = [*LENGTHS, *range(97, 102)]
    many = job("llama", lengths)

    def beyond(ids: torch.Tensor) -> BaseException | None:
        return memory_error("cuda") if ids.shape[1] > 96 or len(ids) > 6 else None

    with sabotaged(many, beyond) as saboteur:
        report = many.run()
    assert saboteur.raised < 40
    assert [(one.id, one.length) for one in report.quarantined] == [
        (f"s{len(LENGTHS) + n}", 97 + n) for n in range(5)
    ]
    assert report.samples_in == report.samples_stored + 5
    with refused(QuarantineError):
        report.raise_for_quarantine(allowed=4)
    report.raise_for_quarantine(allowed=5)
    told = [text for text in caplog.messages if "did not fit" in text]
    for line, text in zip(many.lines("retry"), told, strict=True):
        assert text.startswith(f"{line['samples']} x {line['longest']} tokens did not fit ({line['error']}")
        assert f"next: {line['next']}; {line['free_gib']:.2f} GiB" in text and line["free_gib"] > 0
        assert "out of memory" in line["error"]
    assert len(told) == saboteur.raised
    alone = [line["next"] for line in many.lines("retry") if line["samples"] == 1]
    assert alone == ["again at the end"] * 5 + ["the same again", "nothing: quarantined"] * 5
    assert {line["next"] for line in many.lines("retry") if line["samples"] == 8} == {"4 and 4 samples"}
    again = many.run()  # on a larger device, say
    assert again.samples_stored == 5 and not again.quarantined
    many.check_stored_once()


def test_memory_that_stays_short_ends_the_run_after_a_few_tries(many, monkeypatch) -> None:
    monkeypatch.setattr(loop, "others_on", lambda device: "process 4242 (python3) 71.30 GiB")
    forwards = [0]

    def taken(ids: torch.Tensor) -> BaseException | None:
        forwards[0] += 1
        return memory_error("cuda") if forwards[0] > 8 else None

    with sabotaged(many, taken) as saboteur, refused(MemoryShort):
        many.run()
    assert saboteur.raised < 20
    assert 0 < len(many.opened()) < len(LENGTHS) and not many.lines("quarantine")
    assert many.run().stored_before > 0
    many.check_stored_once()


def test_memory_that_comes_back_is_waited_for(many, monkeypatch) -> None:
    monkeypatch.setattr(loop, "WAITS_S", (1, 2, 4))
    slept: list[float] = []
    monkeypatch.setattr(loop.time, "sleep", slept.append)
    free = iter([10.0, *[1.0] * 9, *[9.5] * 99])
    monkeypatch.setattr(loop, "device_budget_gib", lambda device: next(free))
    with sabotaged(many, lambda ids: None if slept else memory_error("driver")):
        report = many.run()
    assert report.samples_stored == len(LENGTHS) and not report.quarantined and slept


def test_tensors_of_a_failed_attempt_are_gone_before_the_next(many) -> None:
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

    with contextlib.ExitStack() as stack:
        for layer in range(3):
            stack.enter_context(hooked(many.target, layer, keep))
        stack.enter_context(sabotaged(many, decide))
        report = many.run()
    assert leaks == [0] * len(report.failures) != []


@contextlib.contextmanager
def full_disk(job, call: int):
    calls, real = [0], files.os.replace

    def full(source: Path, goal: Path) -> None:
        calls[0] += "part-" in str(goal)
        if "part-" in str(goal) and calls[0] == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, goal)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.os, "replace", full)
        yield {}


@contextlib.contextmanager
def broken_writer(job, call: int):
    real, calls = writer.HostBuffers.give_back, [0]

    def give_back(self, buffer) -> None:  # the writer's thread does
        calls[0] += 1
        if calls[0] == call:
            raise ZeroDivisionError("a defect of the writer")
        real(self, buffer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer.HostBuffers, "give_back", give_back)
        yield {}
    assert calls[0] == call


@contextlib.contextmanager
def dead_device(job, call: int):
    calls = [0]

    def decide(ids: torch.Tensor) -> BaseException | None:
        calls[0] += 1
        lost = calls[0] == call
        return RuntimeError("CUDA error: an illegal memory access was encountered") if lost else None

    with sabotaged(job, decide) as saboteur:
        yield {}
    assert saboteur.raised == 1


@contextlib.contextmanager
def interrupt(job, percent: int):
    def stop(description: str, done: int, total: int, **fields: object) -> None:
        if done > total * percent / 100:
            raise KeyboardInterrupt

    yield {"on_progress": stop}


@contextlib.contextmanager
def defect_of_the_model(job, _number: int):
    with Saboteur(job.target, lambda ids: ValueError("a defect of the model")):
        yield {}


NOTHING, SOME = range(1), range(1, len(LENGTHS))


@pytest.mark.parametrize(
    ("ending", "number", "error", "stored"),
    [
        (full_disk, 1, OSError, NOTHING),
        (full_disk, 3, OSError, SOME),
        (broken_writer, 4, ZeroDivisionError, range(len(LENGTHS))),
        (dead_device, 9, DeviceLost, SOME),
        (interrupt, 50, KeyboardInterrupt, SOME[len(LENGTHS) // 3 :]),
        (defect_of_the_model, 0, ValueError, NOTHING),
    ],
    ids=["disk full at once", "disk full later", "writer", "device", "interrupt", "model"],
)
def test_what_ends_a_run_is_told_what_was_done_is_sealed_and_the_next_run_finishes(
    ending, number: int, error: type[BaseException], stored: range, many
) -> None:
    with torch.inference_mode():  # the library keeps hooks of its own from its first such forward on
        many.target.body(input_ids=torch.ones(1, 2, dtype=torch.int64), output_hidden_states=True)
    before = [len(layer._forward_hooks) for layer in many.target.layers]
    with ending(many, number) as given, refused(error):
        many.run(**given)
    assert [len(layer._forward_hooks) for layer in many.target.layers] == before
    assert many.target.body.norm is many.target.final_norm
    assert not list(many.shard.glob("*.tmp"))
    report = many.run()
    assert report.stored_before + report.samples_stored == len(LENGTHS)
    assert report.stored_before in stored
    many.check_stored_once()


MOST = torch.finfo(torch.float32).max  # of float32: no stored type holds it


@pytest.mark.parametrize(
    ("value", "channel", "storage", "reason"),
    [
        (float("nan"), None, "bf16", "NaN"),
        (float("inf"), None, "bf16", "infinite"),
        (0.0, None, "bf16", "all zero"),
        (2.5, None, "bf16", "constant"),
        (MOST, 5, "bf16", "infinite"),
        (MOST, 5, "fp8", ""),
        (MOST, 5, "int8", ""),
    ],
)
def test_unsound_states_are_quarantined_by_layer_and_id(value, channel, storage, reason, four) -> None:
    with spoiling(four, 2, value, channel=channel, when=lambda: four.lines("selftest")):
        report = four.run(storage=storage)
    (one,) = report.quarantined
    assert one.id == "s2" and one.reason.startswith(reason) and one.reason.endswith(" row in tap 3")
    assert report.samples_stored == 3
    four.check_stored_once("s2")


@pytest.mark.parametrize("storage", ["bf16", "fp8"])
def test_verify_names_stored_states_that_are_not_numbers_and_their_samples_are_redone(storage, four) -> None:
    with spoiling(four, 2, float("inf"), channel=5), pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "check_rows", lambda rows, owner, count: torch.zeros(count).byte())
        patch.setattr(loop, "self_test", lambda *_: {"lengths": [1]})
        patch.setattr(checks.SpotChecks, "choose", lambda self, lengths: [])
        four.run(storage=storage)
    (fault,) = verify(four.store)
    digest = pl.read_parquet(four.samples)["content_hash"][2]
    assert fault.part and fault.what == f"states of sample {digest} are not numbers"
    assert discard(four.store, [fault]) == 1
    assert four.run(storage=storage).samples_stored == 4
    assert verify(four.store) == []


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_an_unsound_sample_that_the_self_test_meets_is_quarantined_and_another_tried(value, four) -> None:
    """Nothing shows that the target is at fault; of a whole shard of such samples something would."""
    with spoiling(four, 1, value):
        report = four.run()
        assert [one.id for one in report.quarantined] == ["s1"] and report.selftest["unsound"] == 1
        again = four.run()  # the sample that is left shows nothing either
        assert [one.id for one in again.quarantined] == ["s1"]
    four.check_stored_once("s1")
    assert four.run().samples_stored == 1


def test_a_shard_of_nothing_but_an_unsound_sample_is_no_fault_of_the_target(job) -> None:
    three = job("qwen3", FOUR[:3], num_shards=3)
    with spoiling(three, 1, float("nan")):
        reports = [three.run(shard=shard) for shard in range(3)]
    assert [[one.id for one in report.quarantined] for report in reports].count(["s1"]) == 1
    three.check_stored_once("s1")


def test_a_sample_that_is_unsound_in_a_batch_alone_stops_the_run(four) -> None:
    def spoil(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        return torch.cat((output[:-1], output[-1:] * float("nan"))) if len(output) > 1 else output

    with hooked(four.target, 3, spoil), refused(SelfTestError):
        four.run()


def mixing_rows(target: Target, when: Callable[[torch.Tensor], bool]):
    """Give every row of a batch the states of the one before it."""
    return hooked(
        target, 2, lambda _m, _a, output: output.roll(1, 0) if len(output) > 1 and when(output) else output
    )


def test_a_fault_of_large_batches_alone_stops_the_run_in_its_first_minute(many) -> None:
    large = mixing_rows(many.target, lambda states: len(states) > 6)  # the self-test runs three
    with large, refused(SelfTestError):
        many.run(part_gib=1.0, seal_seconds=300.0)
    assert not many.parts()
    assert many.run().samples_stored == len(LENGTHS)
    many.check_stored_once()


def test_a_fault_that_begins_later_is_found_and_what_was_sealed_before_stays(
    many, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(checks, "SHARE", 0.2)
    later = mixing_rows(
        many.target, lambda _states: len(many.lines("check")) > 3 and bool(many.lines("part"))
    )
    with later, pytest.raises(SelfTestError) as stopped:
        many.run()
    doubted = re.search(r"parts from (part-\d+\.safetensors) on", str(stopped.value))
    sealed = many.parts()
    assert doubted and sealed and sealed[0].name < doubted[1]
    for path in sealed:
        if path.name >= doubted[1]:
            path.unlink()
    assert many.run().stored_before > 0 and verify(many.store) == []
    many.run(store=tmp_path / "alone", max_batch=1)
    one, other = many.opened(), open_store(tmp_path / "alone")
    assert len(one) == len(other) == len(LENGTHS)
    for item in one:
        assert rel_l2(item.taps, other[other.find(item.hash)].taps) < 5e-3  # bf16


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


def test_what_comparisons_forward_is_what_the_rule_counts(many, monkeypatch) -> None:
    monkeypatch.setattr(checks, "SHARE", 0.3)
    tokens = Counter[str]()

    def count(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        if many.lines("selftest"):
            ids = kwargs["input_ids"]
            tokens["alone" if len(ids) == 1 else "batched"] += ids.numel()

    handle = many.target.body.register_forward_pre_hook(count, with_kwargs=True)
    report = many.run()
    handle.remove()
    assert all(batch.samples > 1 for batch in report.batches)
    lines = many.lines("check")
    drawn = sum(len(line["samples"]) == 1 for line in lines)
    assert drawn >= 2 and len(lines) - drawn in (1, 2, 3)
    assert all(max(line["batched_error"]) < 1e-4 for line in lines)
    table = dict(pl.read_parquet(many.samples).select("id", "length").iter_rows())
    assert tokens["alone"] == sum(table[name] for line in lines for name in line["samples"])
    assert tokens["alone"] <= 0.3 * tokens["batched"]


@pytest.mark.parametrize(("kind", "rows"), [("llama", 5), ("qwen3_5_moe", 4)])  # of 4 heads, of 5 linear ones
def test_no_batch_is_planned_beyond_the_grid_of_a_kernel(kind: str, rows: int, job, monkeypatch) -> None:
    some = job(kind, LENGTHS[:15], token_budget=9999, max_batch=99)
    monkeypatch.setattr(loop, "GRID", 20)
    if some.target.is_hybrid:
        monkeypatch.setattr(some.target.config, "linear_num_value_heads", 5)
    report = some.run()
    assert max(batch.samples for batch in report.batches) == rows
    assert some.lines("run")[0]["plan"]["max_batch"] == rows
