"""Which errors are a lack of memory, which a dead device, which neither."""

from __future__ import annotations

import errno
import gc
import weakref

import numpy as np
import pytest
import torch
from support.extraction_faults import MEMORY_ERRORS, memory_error

from dflash_lab.extraction.oom import PATIENCE, BucketBudgets, classify
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
