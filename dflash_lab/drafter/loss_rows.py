"""What is done to a chunk's logits between the two matmuls: its contract, and in plain torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

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
        label = rows.label - rows.offset
        parts = [
            drafter_strip(rows.z[i:j], label_logit[i:j], label[i:j], rows.offset, temperature)
            for i, j in strips(rows.z)
        ]
        return DrafterSums(*(torch.cat(column) for column in zip(*parts)))

    def target_sums(self, s: Tensor, offset: int, temperature: float) -> TargetSums:
        parts = [target_strip(s[i:j], offset, temperature) for i, j in strips(s)]
        return TargetSums(*(torch.cat(column) for column in zip(*parts)))

    def divergence(self, rows: Rows, terms: Terms, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        assert rows.s is not None and rows.source is not None and rows.target is not None
        parts = []
        for i, j in strips(rows.z):
            source = rows.source[i:j]
            parts.append(
                divergence_strip(
                    rows.z[i:j], rows.s[source], terms.lse[i:j], terms.lse_t[i:j],
                    rows.target.lse[source], rows.target.lse_t[source], temperature,
                )
            )  # fmt: skip
        kl, tv, less_mass = (torch.cat(column) for column in zip(*parts))
        return kl, tv, less_mass

    def gradient(
        self, rows: Rows, terms: Terms, factors: Coefficients, config: LossConfig, out: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        lost, kl = torch.empty_like(terms.ce), None if rows.s is None else torch.empty_like(terms.ce)
        owned, label = rows.owned, rows.local_label
        for i, j in strips(rows.z):
            s, target_lse, target_lse_t = None, None, None
            if rows.s is not None and rows.source is not None and rows.target is not None:
                source = rows.source[i:j]
                s, target_lse, target_lse_t = (
                    rows.s[source],
                    rows.target.lse[source],
                    rows.target.lse_t[source],
                )
            grad, part = gradient_strip(
                rows.z[i:j], s, terms[i:j], target_lse, target_lse_t, factors[i:j],
                config.temperature,
                config.logit_softcap,
            )  # fmt: skip
            out[i:j] = grad
            at_label = grad.gather(1, label[i:j, None])[:, 0]
            lost[i:j] = subtract_label(
                out[i:j],
                at_label,
                rows.z[i:j],
                owned[i:j],
                label[i:j],
                factors[i:j],
                config.logit_softcap,
            )
            if kl is not None and part is not None:
                kl[i:j] = part
        return lost, kl


def drafter_strip(
    z: Tensor, label_logit: Tensor, label: Tensor, offset: int, temperature: float
) -> tuple[Tensor, ...]:
    """The fields of `DrafterSums` for rows z [n, V]; `label` counts from this slice."""
    column = torch.arange(z.shape[1], device=z.device)
    peak, argmax = z.max(1)
    distance = (z - peak[:, None]).clamp_min(_FAR)
    mass = distance.exp()
    mass_t = mass.sum(1) if temperature == 1.0 else (distance / temperature).exp().sum(1)
    tie = (z == label_logit[:, None]) & (column < label[:, None])
    above = ((z > label_logit[:, None]) | tie).sum(1)
    return peak, mass.sum(1), (mass * distance).sum(1), mass_t, argmax + offset, above


def target_strip(s: Tensor, offset: int, temperature: float) -> tuple[Tensor, ...]:
    """The fields of `TargetSums` for rows s [u, V]."""
    peak, argmax = s.max(1)
    distance = s - peak[:, None]
    mass = distance.exp().sum(1)
    mass_t = mass if temperature == 1.0 else (distance / temperature).exp().sum(1)
    return peak, mass, mass_t, argmax + offset


def divergence_strip(
    z: Tensor,
    s: Tensor,
    lse: Tensor,
    lse_t: Tensor,
    target_lse: Tensor,
    target_lse_t: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`RowPass.divergence` for rows z, s [n, V]."""
    p, q = (z - lse[:, None]).exp(), (s - target_lse[:, None]).exp()
    kl = _kl(z, s, lse_t, target_lse_t, temperature)
    return kl, (q - p).clamp_min(0).sum(1), torch.where(p < q, p, 0).sum(1)


def gradient_strip(
    z: Tensor,
    s: Tensor | None,
    terms: Terms,
    target_lse: Tensor | None,
    target_lse_t: Tensor | None,
    factors: Coefficients,
    temperature: float,
    softcap: float,
) -> tuple[Tensor, Tensor | None]:
    """(d loss / d z [n, V] but for the label's own entry, KL [n] or None) for rows z, s [n, V]."""
    log_p = (z - terms.lse[:, None]).clamp_min(_FAR)
    p = log_p.exp()
    grad = torch.zeros_like(z) if factors.hard is None else factors.hard[:, None] * p
    if factors.soft is not None:
        assert s is not None and target_lse_t is not None
        p_t = p if temperature == 1.0 else (z / temperature - terms.lse_t[:, None]).exp()
        grad = grad + factors.soft[:, None] * (p_t - (_over(s, temperature) - target_lse_t[:, None]).exp())
    if factors.cap is not None:
        cap = torch.where(terms.rank == 0, factors.cap, 0)
        grad = grad - cap[:, None] * p * (log_p + terms.entropy[:, None])
    if factors.tv is not None:
        assert s is not None and target_lse is not None and terms.less_mass is not None
        less = (p < (s - target_lse[:, None]).exp()).to(p.dtype)
        grad = grad + factors.tv[:, None] * p * (terms.less_mass[:, None] - less)
    if softcap:
        grad = grad * (1 - (z / softcap) ** 2)
    if s is None or target_lse_t is None:
        return grad, None
    return grad, _kl(z, s, terms.lse_t, target_lse_t, temperature)


def subtract_label(
    out: Tensor,
    at_label: Tensor,
    z: Tensor,
    owned: Tensor,
    label: Tensor,
    factors: Coefficients,
    softcap: float,
) -> Tensor:
    """Write the label's own entry, at_label - hard, into out [n, V]; return what its rounding lost [n].

    `at_label` is the entry of `gradient_strip` before rounding. Rows whose label another slice owns stay.
    """
    column = label[:, None]
    if factors.hard is not None:
        hard = factors.hard
        if softcap:
            hard = hard * (1 - (z.gather(1, column)[:, 0] / softcap) ** 2)
        at_label = torch.where(owned, at_label - hard, at_label)
    rounded = at_label.to(out.dtype)
    out.scatter_(1, column, rounded[:, None])
    return torch.where(owned, at_label - rounded.to(at_label.dtype), 0)


def _kl(z: Tensor, s: Tensor, lse_t: Tensor, target_lse_t: Tensor, temperature: float) -> Tensor:
    log_q = _over(s, temperature) - target_lse_t[:, None]
    q = log_q.exp()
    return torch.where(q == 0, 0, q * (log_q - (_over(z, temperature) - lse_t[:, None]))).sum(1)


def _over(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1.0 else logits / temperature


def strips(z: Tensor) -> Iterator[tuple[int, int]]:
    """(start, end) of strips of rows, at most STRIP_ELEMENTS elements each."""
    rows = max(1, STRIP_ELEMENTS.get(z.device.type, 1 << 20) // z.shape[1])
    for start in range(0, z.shape[0], rows):
        yield start, min(start + rows, z.shape[0])
