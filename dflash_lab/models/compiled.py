"""Functions made cheap to launch: CUDA graphs, recorded in this one place, and torch.compile where it fails.

A small forward is bound by launching kernels, not by running them; a graph launches them all at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dflash_lab.errors import LabError, chain

Call = Callable[[], None]


def new_pool(device: torch.device) -> Any:
    """Return a memory pool that graphs replayed one after the other may share; None where there are none."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def captured(
    call: Call, device: torch.device, *, pool: Any = None, generator: torch.Generator | None = None
) -> Call:
    """Return `call` as a CUDA graph on a CUDA device, itself elsewhere, so that it is tested without a GPU.

    `call` takes and returns nothing: it reads and writes tensors that outlive it, and never looks at one from
    the host. It runs three times here, on whatever these hold. generator: the one that `call` draws from.
    """
    if device.type != "cuda":
        return call
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # kernels choose tiles and allocate workspaces first, which a capture forbids
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if generator is not None:
            graph.register_generator_state(generator)
        # A prefetch thread may pin memory meanwhile, which a recording of all threads would not survive.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            call()
    return graph.replay


# ---- When torch.compile cannot compile a part of ours here ----
# A kernel may need more of a device than it has (flex attention of wide heads on cards with little shared
# memory), or a compiler may be missing. The compiler says so with errors of its own, from deep inside, at
# the first call of the part or of its backward pass: here they become a sentence with a way out.

_COMPILERS = ("torch._inductor.", "torch._dynamo.", "triton.")


class NotCompiled(LabError, RuntimeError):
    """A part of ours could not be compiled here; the message names it and what to give instead."""


def why_not_compiled(error: BaseException) -> str:
    """The compiler's reason in a line, or "" for an error that is none of a compiler's.

    Memory that ran out while kernels were tried is none: the same part would have fitted elsewhere.
    """
    links = list(chain(error))
    links += [inner for link in links if (inner := getattr(link, "inner_exception", None)) is not None]
    if any(isinstance(link, torch.OutOfMemoryError) for link in links):
        return ""
    told = [link for link in links if (type(link).__module__ + ".").startswith(_COMPILERS) or _raised(link)]
    if not told:
        return ""
    reason = getattr(told[0], "inner_exception", told[0])
    lines = [line.strip() for line in str(reason).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(reason).__name__


def _raised(error: BaseException) -> bool:
    """Whether Triton itself raised it: where no C compiler is found, say, as a plain RuntimeError."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith("triton.")


@contextlib.contextmanager
def compiling(what: str, instead: str) -> Iterator[None]:
    """A compiler's error within becomes `NotCompiled`: `what` does not compile here, and `instead`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, NotCompiled) or not (why := why_not_compiled(error)):
            raise
        raise NotCompiled(f"{what} does not compile on this machine ({why}). {instead}") from error
