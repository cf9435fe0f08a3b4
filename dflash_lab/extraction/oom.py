"""Batches that run out of memory: halved, tried again, and the budget learned from it."""

from __future__ import annotations

import errno
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from dflash_lab.errors import LabError, chain
from dflash_lab.machine import release

T = TypeVar("T")


def halving(
    batches: Iterable[Any],
    run: Callable[[Any], T],
    *,
    longest: Callable[[Any], int] = lambda rows: 1,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[Any, T | Failure]]:
    """Call `run` on each batch, a sequence that can be sliced; yield each attempt: the batch, and what `run`
    returned or, where the memory lacked, the `Failure`.

    A batch that did not fit is yielded as such, then tried again in two halves; a single row that did not fit
    is the caller's to deal with. What failed is remembered (`BucketBudgets`): later batches of a like padded
    length, `longest(rows)` tokens, are cut before they fail. Raises `DeviceLost` when `device` is dead, and
    whatever else `run` raises.
    """
    budgets = BucketBudgets()
    for batch in batches:
        waiting: deque[Any] = deque([batch])
        while waiting:
            rows = waiting.popleft()
            allowed = budgets.rows(longest(rows), len(rows))
            if allowed < len(rows):
                waiting.appendleft(rows[allowed:])
                rows = rows[:allowed]
            found = attempt(run, rows, device=device)
            if not isinstance(found, Failure):
                budgets.fitted(longest(rows), len(rows))
            elif len(rows) > 1:
                budgets.failed(longest(rows), len(rows))
                waiting.extendleft(reversed(halves(rows)))
            yield rows, found
            del found  # or the next batch would have to fit beside it


def halves(rows: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """The two batches that `halving` makes of one, the first at most one row larger."""
    half = (len(rows) + 1) // 2
    return rows[:half], rows[half:]


def attempt(run: Callable[..., T], *args: Any, device: torch.device | str = "cpu") -> T | Failure:
    """Return ``run(*args)`` or, where the memory lacks, why, with what it held given back. Raises
    `DeviceLost` when `device` is dead, and every other error of `run`.
    """
    try:
        return run(*args)
    except Exception as error:
        failure = classify(error)
        if failure.kind == "other":
            raise
    # Only here, after the `except`, is the exception gone, and with it the frames that held tensors.
    if failure.kind == "memory":
        release()
    if lost := failure.message if failure.kind == "dead" else _dead(device):
        raise DeviceLost(
            f"{device} is lost ({lost}). Start again in a new process: what an extraction sealed stays, and "
            "it goes on from there."
        )
    return failure


def _dead(device: torch.device | str) -> str:
    """Why a device no longer answers; "" if it does."""
    if torch.device(device).type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            return classify(error).message
    return ""


# Is an error a lack of memory? ----------------------------------------------------------------------------
#
# Three answers, three actions. `memory`: fewer rows mend it, so try again with fewer; a launch beyond a
# kernel's grid counts as well. `dead`: the device context is lost, every later call fails while the process
# looks alive, so seal what is on the host and leave with an error. `other`: not ours to retry.


# Anchored at the start of a line of the library's own message: text of a user that quotes such words is no
# lack of memory.
_MEMORY = re.compile(
    r"^(?:"
    r"CUDA out of memory\."
    r"|HIP out of memory\."
    r"|MPS backend out of memory"
    # Outside the caching allocator: pinned host memory, the context, the driver's own calls.
    r"|(?:CUDA|HIP)(?: driver)? error: out of memory"
    r"|(?:CUDA|HIP) error: (?:CUBLAS|HIPBLAS)_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)"
    r"|cuDNN (?:Frontend )?error: .{0,80}CUDNN_STATUS_"
    r"(?:ALLOC_FAILED|INTERNAL_ERROR_(?:DEVICE|HOST)_ALLOCATION_FAILED)"
    r"|Triton Error \[(?:CUDA|HIP)\]: out of memory"
    # A grid above 65,535: of a Triton kernel, of flash attention, of other kernels.
    r"|Triton Error \[(?:CUDA|HIP)\]: invalid argument"
    r"|(?:CUDA|HIP)(?: driver)? error: invalid (?:configuration )?argument"
    r"|(?:\[enforce fail at [^\]]*\] )?.{0,40}DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    r"|.{0,200}Cuda failure (?:\d+ )?'out of memory'"  # NCCL
    r")",
    re.MULTILINE,
)
_DEAD = re.compile(
    r"^(?:.{0,80}(?:CUDA|HIP)(?: driver)? error: |Triton Error \[(?:CUDA|HIP)\]: "
    r"|.{0,200}Cuda failure (?:\d+ )?')"
    r"(?:an illegal memory access|device-side assert|unspecified launch failure|misaligned address"
    r"|an illegal instruction|uncorrectable ECC|hardware stack error|the launch timed out"
    r"|invalid program counter|operation not supported on global/shared address space)",
    re.MULTILINE,
)
_UNRELATED = (OSError, KeyboardInterrupt, SystemExit, AssertionError)


@dataclass(frozen=True)
class Failure:
    """What went wrong, in strings alone: holding this holds no frame and no tensor."""

    kind: Literal["memory", "dead", "other"]
    message: str


class DeviceLost(LabError, RuntimeError):
    """The device context is dead: nothing in this process can use it again. What was sealed stays."""


class MemoryShort(LabError, RuntimeError):
    """What fitted before does not fit any more. What was sealed stays; run again when the memory is free.
    `advice` goes into the failure record.
    """

    advice = (
        "Free the memory and start the same command again, or give token_budget=0 to plan with what is left."
    )


def classify(error: BaseException) -> Failure:
    """Sort `error` into memory, dead or other, looking through ``raise ... from`` and implicit contexts.

    An `OSError` (a full disk) stays what it is even when it was raised while an out-of-memory was being
    handled.
    """
    message = f"{type(error).__name__}: {_first_line(error)}"
    links = list(chain(error))
    if any(isinstance(link, RuntimeError) and _DEAD.search(str(link)) for link in links):
        return Failure("dead", message)
    if isinstance(error, _UNRELATED) and getattr(error, "errno", None) != errno.ENOMEM:
        return Failure("other", message)
    return Failure("memory" if any(_is_memory(link) for link in links) else "other", message)


def _is_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _MEMORY.search(str(error)) is not None


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:400] if text else "(no message)"


# What a batch may cost, learnt from failures --------------------------------------------------------------


PATIENCE = 32  # batches in a row at a limit, before it grows


class BucketBudgets:
    """Limits in padded tokens (rows x longest) by length bucket; no entry means no limit was ever needed.

    A batch that did not fit halves its bucket's limit; after `PATIENCE` at the limit it grows by a quarter,
    up to where it limits nothing. One bad batch so costs one bucket a few splits, not the run its speed.
    """

    def __init__(self) -> None:
        self._limit: dict[int, int] = {}
        self._streak: dict[int, int] = {}

    @staticmethod
    def bucket(longest: int) -> int:
        """The bucket of a padded length: 64, 128, 256, ... tokens."""
        return 1 << max(6, math.ceil(math.log2(max(longest, 1))))

    def rows(self, longest: int, rows: int) -> int:
        """How many of `rows` samples padded to `longest` tokens may run together; at least one."""
        limit = self._limit.get(self.bucket(longest))
        return rows if limit is None else max(1, min(rows, limit // longest))

    def failed(self, longest: int, rows: int) -> None:
        """A batch did not fit: half of it is the limit now."""
        bucket, tokens = self.bucket(longest), rows * longest
        self._limit[bucket] = max(min(self._limit.get(bucket, tokens), tokens) // 2, 1)
        self._streak[bucket] = 0

    def fitted(self, longest: int, rows: int) -> None:
        """A batch fitted; only batches that would have been larger count towards raising the limit."""
        bucket = self.bucket(longest)
        limit = self._limit.get(bucket)
        if limit is None or (rows + 1) * longest <= limit:
            return
        self._streak[bucket] += 1
        if self._streak[bucket] >= PATIENCE:
            self._limit[bucket], self._streak[bucket] = limit + limit // 4 + 1, 0
