"""The two row passes behind one contract, and the choice between them.

torch   plain operations on any device and dtype; the reference.
triton  hand-written kernels for CUDA; float32 logits, so not for float64 hidden states.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import torch

from dflash_lab.drafter.loss.row_pass import RowPass
from dflash_lab.errors import InputError, near


def _torch() -> RowPass:
    from dflash_lab.drafter.loss.rows_torch import TorchRows

    return TorchRows()


def _triton() -> RowPass:
    from dflash_lab.drafter.loss.rows_triton import TritonRows

    return TritonRows()


_BACKENDS: dict[str, Callable[[], RowPass]] = {"torch": _torch, "triton": _triton}


def choose_backend(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Resolve 'auto' to the fastest backend that works here; refuse one that cannot.

    Raises:
        InputError: unknown name, or a backend that this device, dtype or installation cannot run.
    """
    known = ("auto", *_BACKENDS)
    if name not in known:
        raise InputError(f"backend {name!r}: choose one of {', '.join(known)}{near(name, known)}.")
    reason = _no_triton(device, dtype)
    if name == "auto":
        return "torch" if reason else "triton"
    if name == "triton" and reason:
        raise InputError(f"backend 'triton' {reason}: use 'auto' or 'torch'.")
    return name


@functools.cache
def load_backend(name: str) -> RowPass:
    """Import and return a backend by its resolved name."""
    return _BACKENDS[name]()


def _no_triton(device: torch.device, dtype: torch.dtype) -> str:
    """Why the Triton pass cannot run, or an empty string. With TRITON_INTERPRET=1 it runs on the CPU too
    (tests).
    """
    if dtype == torch.float64:
        return "computes in float32 but the hidden states are float64"
    if not _installed("triton"):
        return "needs the triton package, which is not installed"
    if device.type != "cuda" and not _interpreted():
        return f"needs a CUDA device but the hidden states are on {device}"
    return ""


@functools.cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)
