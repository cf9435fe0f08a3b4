"""The three row passes behind one contract, and the choice between them.

torch    plain operations on any device and dtype; the reference.
compile  the same operations fused by torch.compile; portable, needs a compiler on the machine.
triton   two hand-written kernels; CUDA, float32 logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from dflash_lab.drafter.loss.terms import Partials, Rows, Terms
from dflash_lab.drafter.loss.weighting import Coefficients
from dflash_lab.errors import InputError, near


class RowPass(Protocol):
    """What a backend offers; `rows_torch` documents each function and is what the others must equal."""

    def argmax(self, s: Tensor, offset: int) -> tuple[Tensor, Tensor]: ...

    def partials(self, rows: Rows, label_logit: Tensor, temperature: float) -> Partials: ...

    def overlap(self, rows: Rows, terms: Terms) -> tuple[Tensor, Tensor]: ...

    def gradient(
        self,
        rows: Rows,
        terms: Terms,
        coefficients: Coefficients,
        temperature: float,
        softcap: float,
        out: Tensor,
    ) -> Tensor: ...


def _torch() -> RowPass:
    from dflash_lab.drafter.loss import rows_torch

    return rows_torch


_BACKENDS: dict[str, Callable[[], RowPass]] = {"torch": _torch}


def choose_backend(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Resolve 'auto' to the fastest backend that works here; refuse one that cannot.

    Raises:
        InputError: unknown name, or a backend that this device, dtype or installation cannot run.
    """
    if name == "auto":
        return "torch"
    if name not in _BACKENDS:
        known = ("auto", *_BACKENDS)
        raise InputError(f"backend {name!r}: choose one of {', '.join(known)}{near(name, known)}.")
    return name


def load_backend(name: str) -> RowPass:
    """Import and return a backend by its resolved name."""
    return _BACKENDS[name]()
