"""The row pass in plain torch: any device, any float dtype; the reference that the compiled and Triton passes must equal.

Every function works on a whole [n, V] chunk but walks it in strips of rows, so that its temporaries (about six strips)
stay small beside the chunk, and within a CPU's cache. -inf logits (padding) contribute 0 instead of NaN; a row of NaN, of
+inf, or of -inf alone stays NaN.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dflash_lab.drafter.loss.terms import Partials, Rows, Terms
from dflash_lab.drafter.loss.weighting import Coefficients

STRIP_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 24}
_FAR = -1e4  # e^-10000 = 0 in every dtype: stands for -inf where 0 * -inf would be NaN


def partials(rows: Rows, label_logit: Tensor, temperature: float) -> Partials:
    """Partial sums of every row of the chunk over its slice of the vocabulary."""
    parts = [
        partial_strip(
            rows.z[i:j],
            _gather(rows, i, j),
            label_logit[i:j],
            rows.label[i:j] - rows.offset,
            rows.offset,
            temperature,
        )
        for i, j in _strips(rows.z)
    ]
    return Partials(*(None if column[0] is None else torch.cat(column) for column in zip(*parts)))


def partial_strip(
    z: Tensor, s: Tensor | None, label_logit: Tensor, label: Tensor, offset: int, temperature: float
) -> tuple[Tensor | None, ...]:
    """The fields of `Partials` for rows z [n, V] and their own target rows s [n, V]; `label` counts from this slice."""
    column = torch.arange(z.shape[1], device=z.device)
    peak, argmax = z.max(1)
    distance = (z - peak[:, None]).clamp_min(_FAR)
    mass = distance.exp()
    slope = (mass * distance).sum(1)
    mass_t = mass.sum(1) if temperature == 1.0 else (distance / temperature).exp().sum(1)
    tie = (z == label_logit[:, None]) & (column < label[:, None])
    above = ((z > label_logit[:, None]) | tie).sum(1)
    drafter = (peak, mass.sum(1), slope, mass_t, argmax + offset, above)
    if s is None:
        return (*drafter, None, None, None, None, None)
    target_peak, target_argmax = s.max(1)
    target = s - target_peak[:, None]
    share = (target / temperature).exp()
    cross = torch.where(share == 0, 0, share * (s - z) / temperature).sum(1)
    target_mass = share.sum(1) if temperature == 1.0 else target.exp().sum(1)
    return (*drafter, target_peak, target_mass, share.sum(1), cross, target_argmax + offset)


def overlap(rows: Rows, terms: Terms) -> tuple[Tensor, Tensor]:
    """Sums over the slice of max(q - p, 0) (the total variation distance) and of p where p < q, both [n], at T = 1."""
    assert terms.target_lse is not None
    parts = [
        overlap_strip(rows.z[i:j], _gather(rows, i, j), terms.lse[i:j], terms.target_lse[i:j])
        for i, j in _strips(rows.z)
    ]
    tv, below = zip(*parts)
    return torch.cat(tv), torch.cat(below)


def overlap_strip(z: Tensor, s: Tensor, lse: Tensor, target_lse: Tensor) -> tuple[Tensor, Tensor]:
    p, q = (z - lse[:, None]).exp(), (s - target_lse[:, None]).exp()
    return (q - p).clamp_min(0).sum(1), torch.where(p < q, p, 0).sum(1)


def gradient(
    rows: Rows, terms: Terms, coefficients: Coefficients, temperature: float, softcap: float, out: Tensor
) -> Tensor:
    """Write d(sum of weighted terms) / d(logits before the soft cap) of every row into `out` [n, V], in out's dtype.

    Returns what rounding to out's dtype lost at the label's column, [n] in z's dtype (0 where another slice owns it).
    The label's entry is often half of the gradient; giving its rounding error back nearly halves that of the whole.
    """
    lost = torch.empty(rows.z.shape[0], dtype=rows.z.dtype, device=rows.z.device)
    for i, j in _strips(rows.z):
        strip = terms.slice(i, j)
        grad = gradient_strip(
            rows.z[i:j], _gather(rows, i, j), rows.owned[i:j], rows.local_label[i:j], strip.lse, strip.lse_t, strip.entropy,
            strip.target_lse, strip.target_lse_t, strip.below, *coefficients.slice(i, j), temperature, softcap,
        )  # fmt: skip
        out[i:j] = grad
        lost[i:j] = rounding_at_label(grad, out[i:j], rows.owned[i:j], rows.local_label[i:j])
    return lost


def rounding_at_label(grad: Tensor, rounded: Tensor, owned: Tensor, label: Tensor) -> Tensor:
    error = grad.gather(1, label[:, None]) - rounded.gather(1, label[:, None]).to(grad.dtype)
    return torch.where(owned, error[:, 0], 0)


def gradient_strip(
    z: Tensor, s: Tensor | None, owned: Tensor, label: Tensor, lse: Tensor, lse_t: Tensor, entropy: Tensor,
    target_lse: Tensor | None, target_lse_t: Tensor | None, below: Tensor | None,
    hard: Tensor | None, soft: Tensor | None, cap: Tensor | None, tv: Tensor | None, temperature: float, softcap: float,
) -> Tensor:  # fmt: skip
    """d loss / d z [n, V] in z's dtype, with

    hard (p - 1[y]) + soft (p_T - q_T) - cap p (log p + H) + tv p (below - 1[p < q]),  times 1 - (z / softcap)^2.
    """
    log_p = (z - lse[:, None]).clamp_min(_FAR)
    p = log_p.exp()
    grad = torch.zeros_like(z) if hard is None else hard[:, None] * p
    if soft is not None:
        assert s is not None and target_lse_t is not None
        p_t = p if temperature == 1.0 else (z / temperature - lse_t[:, None]).exp()
        grad = grad + soft[:, None] * (p_t - (s / temperature - target_lse_t[:, None]).exp())
    if cap is not None:
        grad = grad - cap[:, None] * p * (log_p + entropy[:, None])
    if tv is not None:
        assert s is not None and target_lse is not None and below is not None
        grad = grad + tv[:, None] * p * (below[:, None] - (p < (s - target_lse[:, None]).exp()).to(p.dtype))
    if hard is not None:
        column = torch.arange(z.shape[1], device=z.device)
        grad = torch.where((column == label[:, None]) & owned[:, None], grad - hard[:, None], grad)
    return grad * (1 - (z / softcap) ** 2) if softcap else grad


def argmax(s: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """(largest value, its token) of each row of s, both [u]; the first of equals."""
    value, index = s.max(1)
    return value, index + offset


def _strips(z: Tensor) -> Iterator[tuple[int, int]]:
    rows = max(1, STRIP_ELEMENTS.get(z.device.type, 1 << 20) // z.shape[1])
    for start in range(0, z.shape[0], rows):
        yield start, min(start + rows, z.shape[0])


def _gather(rows: Rows, start: int, end: int) -> Tensor | None:
    if rows.s is None or rows.source is None:
        return None
    return rows.s[rows.source[start:end]]
