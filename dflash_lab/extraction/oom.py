"""Is an error a lack of memory? One classifier for every form it takes, asked wherever that matters.

Three answers, three actions. `memory`: fewer rows mend it, so try again with fewer; a launch beyond a
kernel's grid counts as well. `dead`: the device context is lost, every later call fails while the process
looks alive, so seal what is on the host and leave with an error. `other`:
not ours to retry. An exception keeps its frames, and the frames keep their tensors: classify inside `except`,
keep only the strings, and retry *after* the block.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from typing import Literal

import torch

from dflash_lab.errors import LabError, chain

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
    """The device context is dead: nothing in this process can use it again. What was sealed stays; run again
    to go on.
    """


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


def alive(device: torch.device | str) -> Failure | None:
    """Return None when `device` still answers, else why it does not."""
    if torch.device(device).type != "cuda":
        return None
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return Failure("dead", classify(error).message)
    return None
