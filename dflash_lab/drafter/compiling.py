"""What to do when torch.compile cannot compile a part of ours on this machine.

A kernel may need more of a device than it has (flex attention of wide heads on cards with little shared
memory), or a compiler may be missing. The compiler says so with errors of its own, from deep inside, at the
first call of the part or of its backward pass: here they become a sentence with a way out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from dflash_lab.errors import LabError, chain

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
