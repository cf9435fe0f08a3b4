"""Which errors are a lack of memory, which a dead device, which neither."""

from __future__ import annotations

import errno
import gc
import weakref

import numpy as np
import pytest
import torch
from support.extraction_faults import MEMORY_ERRORS, memory_error

from dflash_lab.extraction.oom import PATIENCE, BucketBudgets, DeviceLost, Failure, classify, halving
from dflash_lab.machine import release

DEAD = [
    "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be "
    "asynchronously reported",
    "CUDA error: device-side assert triggered",
    "CUDA error: unspecified launch failure",
    "Triton Error [CUDA]: an illegal memory access was encountered",
    "CUDA error: uncorrectable ECC error encountered",
    "CUDA error: misaligned address",
    "CUDA driver error: an illegal memory access was encountered",
    "NCCL error: unhandled cuda error\nLast error:\nCuda failure 700 'an illegal memory access was "
    "encountered'",
]
OTHER: list[BaseException] = [
    ValueError("sample 7: CUDA out of memory. is what its text says"),
    RuntimeError("the template of sample 9 reads: CUDA error: out of memory"),
    RuntimeError("the user wrote about an illegal memory access"),
    OSError(errno.ENOSPC, "No space left on device"),
    RuntimeError("out of resource: shared memory, Required: 300000, Hardware limit: 232448"),
    RuntimeError("CUDA error: invalid device ordinal"),
    RuntimeError("CUDA driver error: invalid device context"),
    RuntimeError("cuDNN error: CUDNN_STATUS_BAD_PARAM"),
    RuntimeError("sample 3 says CUDA error: invalid configuration argument"),
    KeyError("out of memory"),
]


@pytest.mark.parametrize("name", MEMORY_ERRORS)
def test_every_form_of_memory_error_is_retried(name: str) -> None:
    assert classify(memory_error(name)).kind == "memory"


@pytest.mark.parametrize("message", DEAD)
def test_a_dead_device_is_never_retried(message: str) -> None:
    assert classify(RuntimeError(message)).kind == "dead"


@pytest.mark.parametrize("error", OTHER, ids=lambda error: str(error)[:40])
def test_other_errors_are_not_memory(error: BaseException) -> None:
    assert classify(error).kind == "other"


def test_the_chain_of_causes_is_walked() -> None:
    try:
        try:
            raise memory_error("cuda")
        except RuntimeError as cause:
            raise ValueError("layer 3 failed") from cause
    except ValueError as error:
        assert classify(error).kind == "memory"
    try:
        try:
            raise memory_error("cuda")
        except RuntimeError:
            raise ValueError("bad parameter") from None
    except ValueError as error:
        assert classify(error).kind == "other"


def test_a_full_disk_met_while_handling_memory_stays_a_full_disk() -> None:
    try:
        try:
            raise memory_error("cuda")
        except RuntimeError:
            raise OSError(errno.ENOSPC, "No space left on device")  # noqa: B904
    except OSError as error:
        assert classify(error).kind == "other"


def test_dead_beats_memory_in_one_chain() -> None:
    try:
        try:
            raise RuntimeError(DEAD[0])
        except RuntimeError as cause:
            raise memory_error("cublas not initialized") from cause
    except RuntimeError as error:
        assert classify(error).kind == "dead"


def test_a_cycle_of_causes_ends() -> None:
    one, other = RuntimeError("a"), RuntimeError("b")
    one.__cause__, other.__cause__ = other, one
    assert classify(one).kind == "other"


def test_a_real_cpu_allocation_failure_is_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.float64)
    assert classify(caught.value).kind == "memory"
    with pytest.raises(MemoryError) as numpy_caught:
        np.empty(1 << 50, np.float64)
    assert classify(numpy_caught.value).kind == "memory"


def test_a_failure_holds_no_frame_and_release_frees_the_last_error() -> None:
    """The failure is strings; an error kept by the interpreter holds its tensors until `release`."""
    import sys

    def fail() -> None:
        big = torch.ones(10)
        alive.append(weakref.ref(big))
        raise memory_error("cuda")

    alive: list[weakref.ref[torch.Tensor]] = []
    failure = None
    try:
        fail()
    except RuntimeError as error:
        failure = classify(error)
        sys.last_value = error
    gc.collect()
    assert alive[0]() is not None
    release()
    assert alive[0]() is None
    assert failure is not None and failure.kind == "memory"


def test_a_bucket_is_halved_at_once_and_raised_slowly() -> None:
    budgets = BucketBudgets()
    assert budgets.rows(100, 64) == 64
    budgets.failed(100, 64)
    assert budgets.rows(100, 64) == 32
    assert budgets.rows(120, 64) == 3200 // 120  # the same bucket
    assert budgets.rows(500, 64) == 64  # another one
    budgets.failed(100, 32)
    assert budgets.rows(100, 64) == 16
    for _ in range(PATIENCE - 1):
        budgets.fitted(100, 16)
    assert budgets.rows(100, 64) == 16
    budgets.fitted(100, 16)
    assert budgets.rows(100, 64) == 20
    for _ in range(10):
        budgets.failed(100, 1)
    assert budgets.rows(100, 64) == 1


def refusing(beyond: int):
    """A run that takes up to `beyond` rows, and what it was called with."""
    called: list[list[int]] = []

    def run(rows: list[int]) -> int:
        called.append(rows)
        if len(rows) > beyond:
            raise memory_error("cuda")
        return sum(rows)

    return run, called


@pytest.mark.parametrize("beyond", [1, 2, 3, 5, 8])
def test_batches_are_halved_until_they_fit_in_order_and_lose_no_row(beyond: int) -> None:
    run, called = refusing(beyond)
    batches = [list(range(at, at + 8)) for at in range(0, 24, 8)]
    attempts = list(halving(batches, run))
    assert [rows for rows, _ in attempts] == called
    kept = [(rows, found) for rows, found in attempts if not isinstance(found, Failure)]
    assert [row for rows, _ in kept for row in rows] == list(range(24))
    assert all(found == sum(rows) and len(rows) <= beyond for rows, found in kept)
    failed = [rows for rows, found in attempts if isinstance(found, Failure)]
    assert [len(rows) for rows in failed] == {1: [8, 4, 2], 2: [8, 4], 3: [8, 4], 5: [8], 8: []}[beyond]
    assert not failed or attempts[1][0] == [0, 1, 2, 3]


def test_a_row_that_never_fits_is_given_back_as_a_failure_and_the_others_run() -> None:
    def run(rows: list[int]) -> list[int]:
        if 6 in rows:
            raise memory_error("wrapped")
        return rows

    attempts = list(halving([[1, 2, 3], [4, 5, 6, 7], [8]], run))
    kept = [row for rows, found in attempts if not isinstance(found, Failure) for row in rows]
    assert kept == [1, 2, 3, 4, 5, 7, 8]
    assert [found.kind for rows, found in attempts if rows == [6]] == ["memory"]


def test_what_did_not_fit_limits_batches_of_a_like_length_alone() -> None:
    lengths = dict(enumerate([500] * 8 + [20] * 8 + [400] * 8))
    asked: list[int] = []

    def run(rows: list[int]) -> None:
        asked.append(len(rows))
        if len(rows) * max(lengths[row] for row in rows) > 2100:
            raise memory_error("triton")

    batches = [list(range(at, at + 8)) for at in (0, 8, 16)]
    done = list(halving(batches, run, longest=lambda rows: max(lengths[row] for row in rows)))
    assert asked == [8, 4, 4, 8, 5, 3] and len(done) == 6


@pytest.mark.parametrize(
    ("error", "raised"), [(RuntimeError(DEAD[0]), DeviceLost), (ValueError("a defect"), ValueError)]
)
def test_what_is_no_lack_of_memory_ends_the_batches(error: Exception, raised: type[Exception]) -> None:
    def run(rows: list[int]) -> None:
        raise error

    attempts = halving([[1, 2], [3]], run)
    with pytest.raises(raised):
        next(attempts)
    assert list(attempts) == []


def test_neither_a_failed_attempt_nor_a_result_is_held_while_the_next_runs() -> None:
    tensors: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def run(rows: list[int]) -> torch.Tensor:
        alive.append(sum(ref() is not None for ref in tensors))
        big = torch.ones(10)
        tensors.append(weakref.ref(big))
        if len(rows) > 2:
            raise memory_error("cuda")
        return big

    for _ in halving([[1, 2, 3, 4], [5, 6]], run):
        _ = None
    assert alive == [0, 0, 0, 0]
