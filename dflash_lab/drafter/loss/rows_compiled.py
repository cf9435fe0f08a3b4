"""The row pass of `rows_torch` fused by torch.compile: a few generated kernels a chunk, no strips, no
temporaries.

Only the row pass is compiled; the matmuls stay with the vendor's library. The number of rows is marked as
dynamic, so the last, shorter chunk does not compile again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dflash_lab.drafter.loss.config import LossConfig
from dflash_lab.drafter.loss.row_pass import RowPass
from dflash_lab.drafter.loss.rows_torch import (
    divergence_strip,
    drafter_strip,
    gradient_strip,
    subtract_label,
    target_strip,
)
from dflash_lab.drafter.loss.terms import DrafterSums, Rows, TargetSums, TargetTerms, Terms
from dflash_lab.drafter.loss.weighting import Coefficients


class CompiledRows(RowPass):
    """The strip functions, compiled, on whole chunks."""

    def __init__(self) -> None:
        self._drafter: Callable[..., Any] = torch.compile(drafter_strip)
        self._target: Callable[..., Any] = torch.compile(target_strip)
        self._divergence: Callable[..., Any] = torch.compile(_divergence)
        self._gradient: Callable[..., Any] = torch.compile(_gradient)

    def drafter_sums(self, rows: Rows, label_logit: Tensor, temperature: float) -> DrafterSums:
        label = rows.label - rows.offset
        _dynamic(rows.z, label_logit, label)
        return DrafterSums(*self._drafter(rows.z, label_logit, label, rows.offset, temperature))

    def target_sums(self, s: Tensor, offset: int, temperature: float) -> TargetSums:
        _dynamic(s)
        return TargetSums(*self._target(s, offset, temperature))

    def divergence(self, rows: Rows, terms: Terms, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        assert rows.s is not None and rows.source is not None and rows.target is not None
        _dynamic(rows.z, rows.s, rows.source, terms.lse, terms.lse_t, rows.target.lse, rows.target.lse_t)
        kl, tv, below = self._divergence(
            rows.z,
            rows.s,
            rows.source,
            terms.lse,
            terms.lse_t,
            rows.target.lse,
            rows.target.lse_t,
            temperature,
        )
        return kl, tv, below

    def gradient(
        self, rows: Rows, terms: Terms, factors: Coefficients, config: LossConfig, out: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        owned, label, target = rows.owned, rows.local_label, rows.target
        _dynamic(rows.z, rows.s, rows.source, label, out)
        _dynamic(*vars(terms).values(), *vars(factors).values(), *(vars(target).values() if target else ()))
        at_label, kl = self._gradient(
            rows.z,
            rows.s,
            rows.source,
            label,
            terms,
            target,
            factors,
            config.temperature,
            config.logit_softcap,
            out,
        )
        # outside the compiled code, which would fuse rounding and widening again into nothing
        lost = subtract_label(out, at_label, rows.z, owned, label, factors, config.logit_softcap)
        return lost, kl


def _divergence(
    z: Tensor,
    s: Tensor,
    source: Tensor,
    lse: Tensor,
    lse_t: Tensor,
    target_lse: Tensor,
    target_lse_t: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return divergence_strip(z, s[source], lse, lse_t, target_lse[source], target_lse_t[source], temperature)


def _gradient(
    z: Tensor,
    s: Tensor | None,
    source: Tensor | None,
    label: Tensor,
    terms: Terms,
    target: TargetTerms | None,
    factors: Coefficients,
    temperature: float,
    softcap: float,
    out: Tensor,
) -> tuple[Tensor, Tensor | None]:
    own = target_lse = target_lse_t = None
    if s is not None and source is not None and target is not None:
        own, target_lse, target_lse_t = s[source], target.lse[source], target.lse_t[source]
    grad, kl = gradient_strip(z, own, terms, target_lse, target_lse_t, factors, temperature, softcap)
    out.copy_(grad)
    # the label's column once more by itself: gathered from `grad`, all of grad would be stored in float32
    z, own = z.gather(1, label[:, None]), None if own is None else own.gather(1, label[:, None])
    at_label, _ = gradient_strip(z, own, terms, target_lse, target_lse_t, factors, temperature, softcap)
    return at_label[:, 0], kl


def _dynamic(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
