"""What is done to a chunk's logits between the two matmuls: its contract, and in plain torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dflash_lab.drafter.loss_terms import (
    Coefficients,
    DrafterSums,
    LossConfig,
    Rows,
    TargetSums,
    TargetTerms,
    Terms,
    finish_drafter,
    finish_target,
)


class RowPass(ABC):
    """One backend: sums, divergences and the logit gradient; one that can do a step of the sweep in fewer
    kernels overrides that step too.

    Everything is per row, so chunks of any size give the same result. -inf logits (padding) contribute 0; a
    row with NaN or +inf, or all -inf, becomes NaN.
    """

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

            hard (p - 1[y]) + soft (p_T - q_T) - cap 1[rank 0] p (log p + H) + tv p (less_mass - 1[p < q])

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


STRIP_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 22}
_FAR = -1e4  # e^-10000 = 0 in every dtype: stands for -inf where 0 * -inf would be NaN


class TorchRows(RowPass):
    """Plain torch: any device, any float dtype; the reference that other passes must equal.

    It walks a chunk in strips of rows, so that its temporaries (about six strips) stay small beside the
    chunk, and within a CPU's cache.
    """

    def drafter_sums(self, rows: Rows, label_logit: Tensor, temperature: float) -> DrafterSums:
        column = torch.arange(rows.z.shape[1], device=rows.z.device)
        label = rows.label - rows.offset

        def sums(strip: slice) -> tuple[Tensor, ...]:
            z, logit = rows.z[strip], label_logit[strip, None]
            peak, argmax = z.max(1)
            distance = (z - peak[:, None]).clamp_min(_FAR)
            mass = distance.exp()
            mass_t = mass.sum(1) if temperature == 1.0 else (distance / temperature).exp().sum(1)
            tie = (z == logit) & (column < label[strip, None])
            above = ((z > logit) | tie).sum(1)
            return peak, mass.sum(1), (mass * distance).sum(1), mass_t, argmax + rows.offset, above

        return DrafterSums(*_by_strips(sums, rows.z))

    def target_sums(self, s: Tensor, offset: int, temperature: float) -> TargetSums:
        def sums(strip: slice) -> tuple[Tensor, ...]:
            peak, argmax = s[strip].max(1)
            distance = s[strip] - peak[:, None]
            mass = distance.exp().sum(1)
            mass_t = mass if temperature == 1.0 else (distance / temperature).exp().sum(1)
            return peak, mass, mass_t, argmax + offset

        return TargetSums(*_by_strips(sums, s))

    def divergence(self, rows: Rows, terms: Terms, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        assert rows.s is not None and rows.source is not None and rows.target is not None
        all_s, source, target = rows.s, rows.source, rows.target

        def sums(strip: slice) -> tuple[Tensor, ...]:
            z, which = rows.z[strip], source[strip]
            s = all_s[which]
            p, q = (z - terms.lse[strip, None]).exp(), (s - target.lse[which, None]).exp()
            kl = _kl(z, s, terms.lse_t[strip], target.lse_t[which], temperature)
            return kl, (q - p).clamp_min(0).sum(1), torch.where(p < q, p, 0).sum(1)

        kl, tv, less_mass = _by_strips(sums, rows.z)
        return kl, tv, less_mass

    def gradient(
        self, rows: Rows, terms: Terms, factors: Coefficients, config: LossConfig, out: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        lost, kl = torch.empty_like(terms.ce), None if rows.s is None else torch.empty_like(terms.ce)
        temperature, softcap = config.temperature, config.logit_softcap
        owned, label = rows.owned, rows.local_label[:, None]

        def fill(strip: slice) -> None:
            z, term, factor = rows.z[strip], terms[strip], factors[strip]
            s = target_lse = target_lse_t = None
            if rows.s is not None and rows.source is not None and rows.target is not None:
                source = rows.source[strip]
                s, target_lse, target_lse_t = (
                    rows.s[source],
                    rows.target.lse[source],
                    rows.target.lse_t[source],
                )
            log_p = (z - term.lse[:, None]).clamp_min(_FAR)
            p = log_p.exp()
            grad = torch.zeros_like(z) if factor.hard is None else factor.hard[:, None] * p
            if factor.soft is not None:
                assert s is not None and target_lse_t is not None
                p_t = p if temperature == 1.0 else (z / temperature - term.lse_t[:, None]).exp()
                q_t = (_over(s, temperature) - target_lse_t[:, None]).exp()
                grad = grad + factor.soft[:, None] * (p_t - q_t)
                del p_t, q_t
            if factor.cap is not None:
                cap = torch.where(term.rank == 0, factor.cap, 0)
                grad = grad - cap[:, None] * p * (log_p + term.entropy[:, None])
            if factor.tv is not None:
                assert s is not None and target_lse is not None and term.less_mass is not None
                less = (p < (s - target_lse[:, None]).exp()).to(p.dtype)
                grad = grad + factor.tv[:, None] * p * (term.less_mass[:, None] - less)
            if softcap:
                grad = grad * (1 - (z / softcap) ** 2)
            if kl is not None and s is not None and target_lse_t is not None:
                kl[strip] = _kl(z, s, term.lse_t, target_lse_t, temperature)
            out[strip] = grad
            # The label's own entry, p - 1, from the numbers before rounding, and what its rounding loses.
            at_label = grad.gather(1, label[strip])[:, 0]
            if factor.hard is not None:
                hard = factor.hard
                if softcap:
                    hard = hard * (1 - (z.gather(1, label[strip])[:, 0] / softcap) ** 2)
                at_label = torch.where(owned[strip], at_label - hard, at_label)
            rounded = at_label.to(out.dtype)
            out[strip].scatter_(1, label[strip], rounded[:, None])
            lost[strip] = torch.where(owned[strip], at_label - rounded.to(at_label.dtype), 0)

        for strip in strips(rows.z):
            fill(strip)
        return lost, kl


def _by_strips(sums: Callable[[slice], tuple[Tensor, ...]], z: Tensor) -> list[Tensor]:
    """What `sums` returns of each strip of rows, put together."""
    return [torch.cat(column) for column in zip(*map(sums, strips(z)))]


def _kl(z: Tensor, s: Tensor, lse_t: Tensor, target_lse_t: Tensor, temperature: float) -> Tensor:
    """KL(q || p) of rows of logits z, s [n, V]. (From sums alone, sum q (s - z) - lse + lse, it would cancel
    near convergence.)
    """
    log_q = _over(s, temperature) - target_lse_t[:, None]
    q = log_q.exp()
    return torch.where(q == 0, 0, q * (log_q - (_over(z, temperature) - lse_t[:, None]))).sum(1)


def _over(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1.0 else logits / temperature


def strips(z: Tensor) -> Iterator[slice]:
    """Strips of rows, at most STRIP_ELEMENTS elements each."""
    rows = max(1, STRIP_ELEMENTS.get(z.device.type, 1 << 20) // z.shape[1])
    for start in range(0, z.shape[0], rows):
        yield slice(start, min(start + rows, z.shape[0]))
