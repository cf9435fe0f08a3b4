"""The row pass as Triton kernels: float32 logits are read once for the terms and once for the gradient.

With hard targets alone both come from one read (`hard_gradient`). Everything around the kernels, merging over
shards included, is the contract's own code. Tile sizes were chosen on an H200, where each kernel moves 3.8 to
4.0 TB/s of the 4.0 that a copy reaches. A single kernel for both reads with a barrier among the programs of a
row, so that the second read came from the L2 cache, was tried and was slower (0.68 ms against 0.57 a chunk):
the waiting costs more than it saves.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from dflash_lab.drafter.loss import kernels, kernels_gradient
from dflash_lab.drafter.loss.config import LossConfig
from dflash_lab.drafter.loss.row_pass import RowPass
from dflash_lab.drafter.loss.terms import DrafterSums, Rows, TargetSums, TargetTerms, Terms
from dflash_lab.drafter.loss.weighting import Coefficients

LANES, WARPS = 512, 8  # a tile of 4 * LANES columns
BLOCK = 2048
GRADIENT_TILES = 4  # tiles a program of the gradient kernel
DEPOSIT_BLOCK = 1024


class TritonRows(RowPass):
    """One launch a method."""

    one_pass_hard = True

    def drafter_sums(self, rows: Rows, label_logit: Tensor, temperature: float) -> DrafterSums:
        count, device = rows.z.shape[0], rows.z.device
        peak, mass, slope, mass_t = torch.empty(4, count, device=device)
        argmax, above = torch.empty(2, count, dtype=torch.int64, device=device)
        _launch_sums(
            rows.z, temperature, offset=rows.offset, label=rows.label, logit=label_logit, argmax=argmax,
            above=above,
            peak=peak, mass=mass, slope=slope, mass_t=mass_t,
        )  # fmt: skip
        return DrafterSums(peak, mass, slope, mass_t, argmax, above)

    def target_sums(self, s: Tensor, offset: int, temperature: float) -> TargetSums:
        peak, mass, mass_t = torch.empty(3, s.shape[0], device=s.device)
        argmax = torch.empty(s.shape[0], dtype=torch.int64, device=s.device)
        _launch_sums(s, temperature, offset=offset, argmax=argmax, peak=peak, mass=mass, mass_t=mass_t)
        return TargetSums(peak, mass, mass_t, argmax)

    def drafter_terms(self, rows: Rows, temperature: float, out: Terms) -> None:
        _launch_sums(
            rows.z, temperature, label=rows.label, lse=out.lse, lse_t=out.lse_t, ce=out.ce,
            entropy=out.entropy,
            p_max=out.p_max, argmax=out.argmax, above=out.rank,
        )  # fmt: skip

    def target_terms(self, s: Tensor, temperature: float) -> TargetTerms:
        lse, lse_t = torch.empty(2, s.shape[0], device=s.device)
        argmax = torch.empty(s.shape[0], dtype=torch.int64, device=s.device)
        _launch_sums(s, temperature, lse=lse, lse_t=lse_t, argmax=argmax)
        return TargetTerms(lse, lse_t, argmax)

    def divergence(self, rows: Rows, terms: Terms, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        assert rows.s is not None and rows.source is not None and rows.target is not None
        count, vocab = rows.z.shape
        kl, tv, below = torch.empty(3, count, device=rows.z.device)
        kernels_gradient.divergence_kernel[(count,)](
            rows.z, rows.s, rows.source, terms.lse, terms.lse_t, rows.target.lse, rows.target.lse_t, kl, tv,
            below,
            rows.z.stride(0), rows.s.stride(0), vocab, 1 / temperature,
            HOT=temperature != 1.0, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
        return kl, tv, below

    def gradient(
        self, rows: Rows, terms: Terms, factors: Coefficients, config: LossConfig, out: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        count, vocab = rows.z.shape
        span = BLOCK * GRADIENT_TILES
        parts = triton.cdiv(vocab, span)
        has_target = rows.s is not None
        lost = torch.empty(count, device=out.device)
        kl = torch.empty(count, parts, device=out.device) if has_target else None
        target = rows.target
        kernels_gradient.gradient_kernel[(count, parts)](
            rows.z, rows.s, rows.source, rows.label, terms.lse, terms.lse_t, terms.entropy, terms.rank,
            None if target is None else target.lse, None if target is None else target.lse_t, terms.below,
            factors.hard, factors.soft, factors.cap, factors.tv, out, lost, kl,
            rows.z.stride(0), 0 if rows.s is None else rows.s.stride(0), out.stride(0), vocab, rows.offset,
            1 / config.temperature, config.logit_softcap, span,
            HAS_HARD=factors.hard is not None, HAS_SOFT=factors.soft is not None,
            HAS_CAP=factors.cap is not None,
            HAS_TV=factors.tv is not None, TARGET=has_target, HOT=config.temperature != 1.0,
            CAPPED=config.logit_softcap != 0.0, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
        return lost, None if kl is None else kl.sum(1)

    def hard_gradient(
        self, rows: Rows, terms: Terms, config: LossConfig, out: Tensor
    ) -> tuple[Tensor, Tensor]:
        count, vocab = rows.z.shape
        lost, inverse = torch.empty(2, count, device=out.device)
        kernels_gradient.hard_kernel[(count,)](
            rows.z, rows.label, terms.lse, terms.ce, terms.entropy, terms.p_max, terms.argmax, terms.rank,
            out, lost,
            inverse, rows.z.stride(0), out.stride(0), vocab, config.cap_weight / config.hard_weight,
            HAS_CAP=config.cap_weight != 0.0, LANES=LANES, num_warps=WARPS,
        )  # fmt: skip
        return lost, inverse

    def deposit(
        self, grad: Tensor, place: tuple[Tensor, Tensor], part: Tensor, rows: Rows, head: Tensor, *,
        lost: Tensor | None, scale: Tensor | None,
    ) -> None:  # fmt: skip
        count, size = part.shape
        kernels_gradient.deposit_kernel[(count, triton.cdiv(size, DEPOSIT_BLOCK))](
            part, lost, scale, head, rows.label, *place, grad, part.stride(0), head.stride(0),
            *grad.stride()[:2], size,
            GIVE_BACK=lost is not None, SCALED=scale is not None, BLOCK=DEPOSIT_BLOCK, num_warps=4,
        )  # fmt: skip


def _launch_sums(
    logits: Tensor, temperature: float, *, argmax: Tensor, offset: int = 0, label: Tensor | None = None,
    logit: Tensor | None = None, lse: Tensor | None = None, lse_t: Tensor | None = None,
    ce: Tensor | None = None,
    entropy: Tensor | None = None, p_max: Tensor | None = None, above: Tensor | None = None,
    peak: Tensor | None = None,
    mass: Tensor | None = None, slope: Tensor | None = None, mass_t: Tensor | None = None,
) -> None:  # fmt: skip
    """Terms when `lse` is given, else sums; drafter rows when `label` is given, else target rows."""
    kernels.sums_kernel[(logits.shape[0],)](
        logits, label, logit, lse, lse_t, ce, entropy, p_max, argmax, above, peak, mass, slope, mass_t,
        logits.stride(0), logits.shape[1], offset, 1 / temperature,
        LABELLED=label is not None, HOT=temperature != 1.0, FINISH=lse is not None, TARGET=label is None,
        LANES=LANES, num_warps=WARPS,
    )  # fmt: skip
