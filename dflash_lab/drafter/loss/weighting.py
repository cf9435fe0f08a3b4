"""From a chunk's terms to each row's coefficients: the given weights, D-PACE's block weights, the LK hybrid's
mixture, the length term.

This step stands between the pass that computes the terms and the pass that writes the gradient, because
D-PACE and the length term need the acceptances of a whole block and the LK hybrid the row's TV. D-PACE's and
LK's numbers are held constant (no gradient flows through them). The length term needs no more than that
either: a product's derivative by one factor is the product of the others, so in each row its gradient is a
number times that of the row's own acceptance, which is that of CE or of TV.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_lab.drafter.loss.config import LossConfig
from dflash_lab.drafter.loss.terms import Terms


@dataclass(frozen=True)
class Coefficients:
    """What multiplies each term's gradient in each row, [n], weight included; None for a term that is off.

    `cap` is for every row; the row pass applies it where the rank is 0.
    """

    hard: Tensor | None
    soft: Tensor | None
    cap: Tensor | None
    tv: Tensor | None

    def slice(self, start: int, end: int) -> Coefficients:
        """Views of rows [start, end)."""
        values = (self.hard, self.soft, self.cap, self.tv)
        return Coefficients(*(None if value is None else value[start:end] for value in values))


@dataclass(frozen=True)
class Places:
    """Where live rows stand within whole blocks of `size` slots."""

    block: Tensor  # [n] int64, counted from 0 within these rows
    slot: Tensor  # [n] int64
    back: Tensor  # [n] int64: slots after it
    blocks: int
    size: int

    def spread(self, value: Tensor, fill: float) -> Tensor:
        """[blocks, size]: `value` [n] at its slots, `fill` where no row is live."""
        out = value.new_full((self.blocks, self.size), fill)
        out[self.block, self.slot] = value
        return out

    def hanging(self, value: Tensor) -> Tensor:
        """[n]: sums of `value` [n] over a block's live rows from each on."""
        out = value.new_zeros(self.blocks, self.size)
        out[self.block, self.back] = value
        return out.cumsum(1)[self.block, self.back]


def dpace_weights(ce: Tensor, places: Places, alpha: float) -> Tensor:
    """D-PACE: w_k = sum over live j >= k of P_j, P_j = prod over i <= j of s_i, s_i = (1 - alpha) e^-CE_i +
    alpha, for the live rows [n] of whole blocks.

    s_i = 1 where slot i is not live. w_k is d(sum_j P_j) / d(log s_k), the marginal gain of confidence in
    slot k.
    """
    confidence = places.spread((1 - alpha) * torch.exp(-ce) + alpha, 1.0)
    return places.hanging(confidence.cumprod(1)[places.block, places.slot])


@dataclass(frozen=True)
class Length:
    """The length term of whole blocks, all [n]: `reached` P_k = A_1 ... A_k, and `gain` -d(sum of weight *
    P) / d(minus log A_k) = the weighted P_j that hang on slot k, sum over live j >= k.
    """

    reached: Tensor
    gain: Tensor
    acceptance: Tensor


SMALLEST = 1e-30  # acceptance: what hangs on a slot is divided by it


def length(acceptance: Tensor, weight: Tensor, places: Places) -> Length:
    """The length term for the live rows of whole blocks."""
    acceptance = acceptance.clamp_min(SMALLEST)
    reached = places.spread(acceptance, 1.0).cumprod(1)[places.block, places.slot]
    return Length(reached, places.hanging(reached * weight), acceptance)


def lk_mixture(tv: Tensor, config: LossConfig) -> Tensor:
    """The LK hybrid's share of KL, lam = exp(-decay * (1 - TV)), [n]."""
    return torch.exp(-config.lk_decay * (1 - tv))


def coefficients(
    terms: Terms, config: LossConfig, scale: Tensor | None, hanging: Length | None = None
) -> Coefficients:
    """Coefficients of scale * gradient with respect to the logits before `logit_scale`."""
    weight = terms.weight * config.logit_scale if config.logit_scale != 1.0 else terms.weight
    weight = weight if scale is None else weight * scale
    hard = config.hard_weight * weight if config.hard_weight else None
    soft = config.soft_weight * config.temperature * weight if config.soft_weight else None
    cap = config.cap_weight * weight if config.cap_weight else None
    tv = config.tv_weight * weight if config.tv_weight else None
    if config.lk_weight:
        assert terms.tv is not None
        lam = lk_mixture(terms.tv, config)
        soft = config.lk_weight * weight * lam + (0 if soft is None else soft)
        tv = config.lk_weight * weight * (1 - lam) + (0 if tv is None else tv)
    if hanging is not None:
        gain = config.length_weight * config.logit_scale * hanging.gain
        gain = gain if scale is None else gain * scale
        if config.overlaps:  # A = 1 - TV: -d log A = dTV / A
            tv = gain / hanging.acceptance + (0 if tv is None else tv)
        else:  # -d log A = dCE
            hard = gain + (0 if hard is None else hard)
    return Coefficients(hard, soft, cap, tv)
