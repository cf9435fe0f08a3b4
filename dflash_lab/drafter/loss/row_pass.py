"""The contract of a row pass: what is done to a chunk's logits between the matmuls.

A backend provides sums, divergences and the logit gradient; a backend that can do a step of the sweep in
fewer kernels overrides that step too. Everything is per row, so chunks of any size give the same result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from dflash_lab.drafter.loss.config import LossConfig
from dflash_lab.drafter.loss.terms import (
    DrafterSums,
    Rows,
    TargetSums,
    TargetTerms,
    Terms,
    finish_drafter,
    finish_target,
)
from dflash_lab.drafter.loss.weighting import Coefficients


class RowPass(ABC):
    """One backend. -inf logits (padding) contribute 0; a row with NaN or +inf, or all -inf, becomes NaN."""

    one_pass_hard = False  # whether `hard_gradient` exists

    @abstractmethod
    def drafter_sums(self, rows: Rows, label_logit: Tensor, temperature: float) -> DrafterSums:
        """Sums of every drafter row over the slice."""

    @abstractmethod
    def target_sums(self, s: Tensor, offset: int, temperature: float) -> TargetSums:
        """Sums of every distinct target row s [u, V] over the slice."""

    @abstractmethod
    def divergence(self, rows: Rows, terms: Terms, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Sums over the slice, [n]: KL(q || p) at T; max(q - p, 0), which is TV; p where p < q; the last two
        at T = 1.
        """

    @abstractmethod
    def gradient(
        self, rows: Rows, terms: Terms, factors: Coefficients, config: LossConfig, out: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Write d loss / d (logits before the soft cap) of every row into `out` [n, V], in out's dtype:

            hard (p - 1[y]) + soft (p_T - q_T) - cap 1[rank 0] p (log p + H) + tv p (below - 1[p < q])

        times 1 - (z / softcap)^2. Returns

        - what rounding to out's dtype lost at the label's column, [n] in z's dtype (0 where another slice
        owns it). The
          label's entry is often half of the gradient; giving its rounding error back nearly halves that of
          the whole;
        - the KL sums of `divergence`, [n], which cost nothing here (None without a target).
        """

    def drafter_terms(self, rows: Rows, temperature: float, out: Terms) -> None:
        """Fill lse, ce, entropy, p_max, argmax and rank of rows that hold the whole vocabulary."""
        logit = rows.label_logit()
        sums = self.drafter_sums(rows, logit, temperature)
        finish_drafter(sums, logit, rows.label, rows.z.shape[1], temperature, out)

    def target_terms(self, s: Tensor, temperature: float) -> TargetTerms:
        """Terms of target rows that hold the whole vocabulary."""
        return finish_target(self.target_sums(s, 0, temperature), temperature)

    def hard_gradient(
        self, rows: Rows, terms: Terms, config: LossConfig, out: Tensor
    ) -> tuple[Tensor, Tensor]:
        """For backends with `one_pass_hard`: terms and an unnormalised gradient of the hard and CAP terms at
        once.

        Fills lse, ce, entropy, p_max, argmax, rank; writes into `out` [n, V] the gradient of (hard CE + cap
        H) / hard times a positive factor of each row. Returns (what rounding lost at the label's column, 1 /
        factor), both [n].
        """
        raise TypeError(f"{type(self).__name__} has no one-pass gradient")

    def deposit(
        self,
        grad: Tensor,
        place: tuple[Tensor, Tensor],
        part: Tensor,
        rows: Rows,
        head: Tensor,
        *,
        lost: Tensor | None,
        scale: Tensor | None,
    ) -> None:
        """grad[place] = scale * (part + lost * head[label]), in the accumulation dtype of part [n, H],
        rounded once.

        `lost` gives back what rounding lost at the label, a rank-one update a row; None of either leaves it
        out.
        """
        if lost is not None:
            part = part.addcmul(lost[:, None], head[rows.local_label].to(part.dtype))
        if scale is not None:
            part = part * scale[:, None]
        grad[place] = part.to(grad.dtype)
