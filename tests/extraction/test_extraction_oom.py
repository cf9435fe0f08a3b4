"""Which errors are a lack of memory, which a dead device, which neither; batches halved until they fit."""

from __future__ import annotations

import errno
import gc
import sys
import weakref

import numpy as np
import pytest
import torch
from support.extraction_faults import MEMORY_ERRORS, memory_error
from support.wording import refused

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


def linked(error: BaseException, link: str, other: BaseException, *, suppress: bool = False) -> BaseException:
    setattr(error, link, other)
    if suppress:
        error.__suppress_context__ = True
    return error


def cycle() -> BaseException:
    one = RuntimeError("a")
    return linked(one, "__cause__", linked(RuntimeError("b"), "__cause__", one))


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        *(pytest.param("memory", memory_error(name), id=name) for name in MEMORY_ERRORS),
        *(pytest.param("dead", RuntimeError(text), id=text[:40]) for text in DEAD),
        *(pytest.param("other", error, id=str(error)[:40]) for error in OTHER),
        pytest.param("memory", OSError(errno.ENOMEM, "Cannot allocate memory"), id="system"),
        pytest.param(
            "other",
            linked(ValueError("bad"), "__context__", memory_error("cuda"), suppress=True),
            id="raised from None",
        ),
        pytest.param(
            "other",
            linked(OSError(errno.ENOSPC, "No space"), "__context__", memory_error("cuda")),
            id="a full disk met while handling it",
        ),
        pytest.param(
            "dead",
            linked(memory_error("cublas not initialized"), "__cause__", RuntimeError(DEAD[0])),
            id="dead beats memory",
        ),
        pytest.param("other", cycle(), id="a cycle of causes"),
    ],
)
def test_errors_are_sorted_by_what_mends_them(kind: str, error: BaseException) -> None:
    assert classify(error).kind == kind


def test_a_real_cpu_allocation_failure_is_memory() -> None:
    for error, allocate in ((RuntimeError, torch.empty), (MemoryError, np.empty)):
        with pytest.raises(error) as caught:
            allocate(1 << 50)
        assert classify(caught.value).kind == "memory"


def test_release_frees_what_the_last_error_holds() -> None:
    """An error kept by the interpreter holds its tensors."""

    def fail() -> None:
        big = torch.ones(10)
        alive.append(weakref.ref(big))
        raise memory_error("cuda")

    alive: list[weakref.ref[torch.Tensor]] = []
    try:
        fail()
    except RuntimeError as error:
        sys.last_value = error
    gc.collect()
    assert alive[0]() is not None
    release()
    assert alive[0]() is None


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


@pytest.mark.parametrize(("beyond", "failed"), [(1, [8, 4, 2]), (2, [8, 4]), (3, [8, 4]), (5, [8]), (8, [])])
def test_batches_are_halved_until_they_fit_in_order_and_lose_no_row(beyond: int, failed: list[int]) -> None:
    called: list[list[int]] = []

    def run(rows: list[int]) -> int:
        called.append(rows)
        if len(rows) > beyond:
            raise memory_error("cuda")
        return sum(rows)

    attempts = list(halving([list(range(at, at + 8)) for at in range(0, 24, 8)], run))
    assert [rows for rows, _ in attempts] == called
    kept = [(rows, found) for rows, found in attempts if not isinstance(found, Failure)]
    assert [row for rows, _ in kept for row in rows] == list(range(24))
    assert all(found == sum(rows) and len(rows) <= beyond for rows, found in kept)
    assert [len(rows) for rows, found in attempts if isinstance(found, Failure)] == failed
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
    lengths = [500] * 8 + [20] * 8 + [400] * 8
    asked: list[int] = []

    def run(rows: list[int]) -> None:
        asked.append(len(rows))
        if len(rows) * lengths[rows[0]] > 2100:
            raise memory_error("triton")

    batches = [list(range(at, at + 8)) for at in (0, 8, 16)]
    done = list(halving(batches, run, longest=lambda rows: lengths[rows[0]]))
    assert asked == [8, 4, 4, 8, 5, 3] and len(done) == 6


@pytest.mark.parametrize(
    ("error", "raised"), [(RuntimeError(DEAD[0]), DeviceLost), (ValueError("a defect"), ValueError)]
)
def test_what_is_no_lack_of_memory_ends_the_batches(error: Exception, raised: type[Exception]) -> None:
    def run(rows: list[int]) -> None:
        raise error

    attempts = halving([[1, 2], [3]], run)
    with refused(raised):
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
