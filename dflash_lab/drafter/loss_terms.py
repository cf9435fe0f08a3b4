"""What the draft loss is made of: its settings, the terms of a row, and how slots are weighted."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from dflash_lab.errors import InputError, near

LABEL_SOURCES = ("data", "argmax")
ACCEPTANCES = ("label", "overlap")
WEIGHTINGS = ("given", "dpace")


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Terms and options of the draft loss; every weight is a plain factor, 0 leaves the term out.

    Per live row with drafter logits z, target logits s, label y and weight w:

        w * [ hard * CE(z, y)  +  soft * T^2 * KL(softmax(s/T) || softmax(z/T))
              + cap * 1[argmax z = y] * H(softmax z)  +  tv * TV(softmax s, softmax z)
              + lk * (lam * KL + (1 - lam) * TV),   lam = exp(-lk_decay * (1 - TV)) held constant
              + length * (1 - A_1 A_2 ... A_k) ]

    The third term is the confidence-aware parallel loss of LLaDA 2.0 (arXiv:2512.15745), the fifth the LK
    hybrid of arXiv:2602.23881. The last is the expected accepted length itself: A_j is the probability that
    slot j is accepted (1 where it is not live), so with weights of 1 its sum over a block is the number of
    live slots minus (E[tau] - 1).

    Args:
        hard_weight: factor of the cross-entropy with the label.
        soft_weight: factor of T^2 KL(target || drafter), both at `temperature`.
        temperature: T of the soft term; cross-entropy, entropy and TV are always at 1.
        cap_weight: factor of the drafter's entropy (nats) on rows whose argmax is the label.
        tv_weight: factor of the total variation distance, 1 - sum min(p, q).
        lk_weight, lk_decay: factor of the LK hybrid and its decay; needs temperature 1.
        length_weight: factor of the expected length term; not with D-PACE, which is another form of it.
        acceptance: A_j of the length term: 'label', greedy decoding's softmax(z)[y], or 'overlap', rejection
            sampling's 1 - TV.
        label_source: 'data' takes the labels given; 'argmax' takes the target's argmax, found in the same
            pass.
        weighting: 'given' takes the weights as they are; 'dpace' multiplies them by `dpace_weights`. With
            dpace_alpha = 0 and the hard term alone the gradient is then that of minus the expected accepted
            length.
        dpace_alpha: least confidence of a slot in D-PACE, in [0, 1].
        logit_scale: logits are multiplied by it before anything else (a model's output multiplier), both
            sides.
        logit_softcap: c > 0 replaces logits by c * tanh(logit / c), both sides; 0 is off.
    """

    hard_weight: float = 1.0
    soft_weight: float = 0.0
    temperature: float = 1.0
    cap_weight: float = 0.0
    tv_weight: float = 0.0
    lk_weight: float = 0.0
    lk_decay: float = 3.0
    length_weight: float = 0.0
    acceptance: Literal["label", "overlap"] = "label"
    label_source: Literal["data", "argmax"] = "data"
    weighting: Literal["given", "dpace"] = "given"
    dpace_alpha: float = 0.5
    logit_scale: float = 1.0
    logit_softcap: float = 0.0

    def __post_init__(self) -> None:
        for name in (
            "hard_weight",
            "soft_weight",
            "cap_weight",
            "tv_weight",
            "lk_weight",
            "lk_decay",
            "length_weight",
            "logit_softcap",
        ):
            _number(name, getattr(self, name), low=0.0)
        for name in ("temperature", "logit_scale"):
            _number(name, getattr(self, name), above=0.0)
        _number("dpace_alpha", self.dpace_alpha, low=0.0, high=1.0)
        for name, known in (
            ("label_source", LABEL_SOURCES),
            ("weighting", WEIGHTINGS),
            ("acceptance", ACCEPTANCES),
        ):
            value = getattr(self, name)
            if value not in known:
                raise InputError(
                    f"LossConfig.{name} = {value!r}: choose one of {', '.join(known)}"
                    f"{near(str(value), known)}."
                )
        terms = (self.hard_weight, self.soft_weight, self.cap_weight, self.tv_weight, self.lk_weight)
        if not any((*terms, self.length_weight)):
            raise InputError(
                "LossConfig: every term has weight 0; give hard_weight or soft_weight a positive value."
            )
        if self.lk_weight and self.temperature != 1.0:
            raise InputError(
                f"LossConfig.lk_weight needs temperature 1, not {self.temperature}: use soft_weight there."
            )
        if self.length_weight and self.weighting == "dpace":
            raise InputError(
                "LossConfig.length_weight with weighting='dpace': both weigh a slot by what hangs "
                "on it. Use one of them."
            )

    @property
    def needs_target(self) -> bool:
        """Whether the loss cannot be computed without the target's hidden states."""
        return (
            bool(self.soft_weight or self.tv_weight or self.lk_weight)
            or self.label_source == "argmax"
            or self.overlaps
        )

    @property
    def overlaps(self) -> bool:
        """Whether the length term counts acceptances of rejection sampling."""
        return self.length_weight > 0 and self.acceptance == "overlap"

    @property
    def needs_overlap(self) -> bool:
        """Whether a term compares p and q element by element, which takes one more pass over the logits."""
        return bool(self.tv_weight or self.lk_weight) or self.overlaps


def _number(
    name: str, value: object, *, low: float = -math.inf, above: float = -math.inf, high: float = math.inf
) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"LossConfig.{name} = {value!r}: give a finite number.")
    if value < low or value <= above or value > high:
        bound = (
            f"> {above:g}"
            if above > -math.inf
            else f">= {low:g}" + (f" and <= {high:g}" if high < math.inf else "")
        )
        raise InputError(f"LossConfig.{name} = {value!r}: must be {bound}.")


# ---- sums over the vocabulary, which may be taken over slices of it and merged, and the terms they yield


@dataclass(frozen=True)
class DrafterSums:
    """Sums over a slice of the vocabulary for each drafter row of logits z, all [n]."""

    peak: Tensor  # max z
    mass: Tensor  # sum e^(z - peak)
    slope: Tensor  # sum e^(z - peak) (z - peak)
    mass_t: Tensor  # sum e^((z - peak) / T)
    argmax: Tensor  # int64, in the whole vocabulary
    above: Tensor  # int64: tokens before the label


@dataclass(frozen=True)
class TargetSums:
    """Sums over a slice of the vocabulary for each distinct target row, all [u]."""

    peak: Tensor  # max s
    mass: Tensor  # sum e^(s - peak)
    mass_t: Tensor  # sum e^((s - peak) / T)
    argmax: Tensor  # int64, in the whole vocabulary


@dataclass(frozen=True)
class TargetTerms:
    """What the loss needs of each distinct target row, all [u]."""

    lse: Tensor
    lse_t: Tensor  # of s / T
    argmax: Tensor  # int64


@dataclass(frozen=True)
class Rows:
    """One chunk for the row pass: n drafter rows, u distinct target rows, tokens [offset, offset + V) of the
    vocabulary.
    """

    z: Tensor  # [n, V] drafter logits, float32 or float64
    label: Tensor  # [n] int64, in the whole vocabulary
    s: Tensor | None = None  # [u, V] target logits
    source: Tensor | None = None  # [n] int64: which row of s belongs to a drafter row
    target: TargetTerms | None = None
    offset: int = 0

    @property
    def owned(self) -> Tensor:
        """[n] bool: the label lies in this slice."""
        return (self.label >= self.offset) & (self.label < self.offset + self.z.shape[1])

    @property
    def local_label(self) -> Tensor:
        """[n] int64: the label's column in this slice, clamped into it where another slice owns it."""
        return (self.label - self.offset).clamp(0, self.z.shape[1] - 1)

    def label_logit(self) -> Tensor:
        """[n]: z at the label, -inf where another slice owns it."""
        return self.z.gather(1, self.local_label[:, None])[:, 0].masked_fill(~self.owned, -torch.inf)


@dataclass(frozen=True)
class Terms:
    """The terms of each live row, all [n]; None for what the sweep does not compute."""

    label: Tensor  # int64
    weight: Tensor  # the weight used
    lse: Tensor
    lse_t: Tensor  # of z / T
    ce: Tensor
    entropy: Tensor
    p_max: Tensor
    argmax: Tensor  # int64
    rank: Tensor  # int64
    kl: Tensor | None = None
    target_argmax: Tensor | None = None  # int64
    tv: Tensor | None = None
    less_mass: Tensor | None = None  # sum of p over tokens with p < q
    reached: Tensor | None = None  # probability that the block is accepted up to this slot

    @classmethod
    def empty(
        cls, label: Tensor | None, weight: Tensor, *, target: bool, overlap: bool, length: bool = False
    ) -> Terms:
        """Allocate the terms of all live rows; chunks write into slices of them. `label` and `weight` are
        kept if final.
        """

        def floats() -> Tensor:
            return torch.empty_like(weight)

        def whole() -> Tensor:
            return torch.empty(weight.shape, dtype=torch.int64, device=weight.device)

        return cls(
            label=whole() if label is None else label,
            weight=weight.clone(),
            lse=floats(),
            lse_t=floats(),
            ce=floats(),
            entropy=floats(),
            p_max=floats(),
            argmax=whole(),
            rank=whole(),
            kl=floats() if target else None,
            target_argmax=whole() if target else None,
            tv=floats() if overlap else None,
            less_mass=floats() if overlap else None,
            reached=floats() if length else None,
        )

    def __getitem__(self, part: slice) -> Terms:
        """Views of some rows."""
        values = (getattr(self, field.name) for field in fields(self))
        return Terms(*(None if value is None else value[part] for value in values))  # type: ignore[arg-type]


def finish_drafter(
    sums: DrafterSums, label_logit: Tensor, label: Tensor, vocab: int, temperature: float, out: Terms
) -> None:
    """Fill terms from sums over the whole vocabulary. With y the label of a row:

        lse = log sum e^z = peak + log mass    CE = lse - z_y    H = lse - sum p z = log mass - slope / mass

    A label outside [0, vocab) makes its row NaN instead of a wrong read.
    """
    log_mass = sums.mass.log()
    out.lse.copy_(sums.peak + log_mass)
    out.lse_t.copy_(sums.peak / temperature + sums.mass_t.log())
    out.ce.copy_(torch.where((label >= 0) & (label < vocab), out.lse - label_logit, torch.nan))
    out.entropy.copy_(log_mass - sums.slope / sums.mass)
    out.p_max.copy_(1 / sums.mass)
    out.argmax.copy_(sums.argmax)
    out.rank.copy_(sums.above)


def finish_target(sums: TargetSums, temperature: float) -> TargetTerms:
    """Terms of target rows from sums over the whole vocabulary."""
    return TargetTerms(
        lse=sums.peak + sums.mass.log(), lse_t=sums.peak / temperature + sums.mass_t.log(), argmax=sums.argmax
    )


# ---- what multiplies each row's gradient, once its terms are known


@dataclass(frozen=True)
class Coefficients:
    """What multiplies each term's gradient in each row, [n], weight included; None for a term that is off.

    `cap` is for every row; the row pass applies it where the rank is 0.
    """

    hard: Tensor | None
    soft: Tensor | None
    cap: Tensor | None
    tv: Tensor | None

    def __getitem__(self, part: slice) -> Coefficients:
        """Views of some rows."""
        values = (self.hard, self.soft, self.cap, self.tv)
        return Coefficients(*(None if value is None else value[part] for value in values))


@dataclass(frozen=True)
class Blocks:
    """Where the live rows [n] of whole blocks stand in them."""

    block: Tensor  # [n] int64, counted from 0 within these rows
    slot: Tensor  # [n] int64
    count: int  # blocks
    size: int  # slots of a block

    def prefix_products(self, value: Tensor) -> Tensor:
        """[n]: product of `value` [n] over a block's live rows up to each."""
        grid = value.new_ones(self.count, self.size)
        grid[self.block, self.slot] = value
        return grid.cumprod(1)[self.block, self.slot]

    def suffix_sums(self, value: Tensor) -> Tensor:
        """[n]: sum of `value` [n] over a block's live rows from each on."""
        back = self.size - 1 - self.slot
        grid = value.new_zeros(self.count, self.size)
        grid[self.block, back] = value
        return grid.cumsum(1)[self.block, back]


def dpace_weights(ce: Tensor, blocks: Blocks, alpha: float) -> Tensor:
    """D-PACE [n]: w_k = sum over live j >= k of P_j, P_j = prod over live i <= j of s_i, s_i =
    (1 - alpha) e^-CE_i + alpha, held constant.

    w_k is d(sum_j P_j) / d(log s_k), the marginal gain of confidence in slot k.
    """
    return blocks.suffix_sums(blocks.prefix_products((1 - alpha) * torch.exp(-ce) + alpha))


@dataclass(frozen=True)
class Length:
    """The length term of whole blocks, all [n]: `reached` P_k = A_1 ... A_k, and `gain` the weighted P_j that
    hang on slot k, sum over live j >= k.

    A product's derivative by one factor is the product of the others, so the term's gradient in a row is
    `gain` times that of -log A_k, which is that of CE, or of TV over A_k.
    """

    reached: Tensor
    gain: Tensor
    acceptance: Tensor


SMALLEST = 1e-30  # acceptance: what hangs on a slot is divided by it


def length_term(acceptance: Tensor, weight: Tensor, blocks: Blocks) -> Length:
    """The length term for the live rows of whole blocks."""
    acceptance = acceptance.clamp_min(SMALLEST)
    reached = blocks.prefix_products(acceptance)
    return Length(reached, blocks.suffix_sums(reached * weight), acceptance)


def lk_mixture(tv: Tensor, config: LossConfig) -> Tensor:
    """The LK hybrid's share of KL, lam = exp(-decay * (1 - TV)), [n], held constant."""
    return torch.exp(-config.lk_decay * (1 - tv))


def coefficients(
    terms: Terms, config: LossConfig, scale: Tensor | None, length: Length | None = None
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
    if length is not None:
        gain = config.length_weight * config.logit_scale * length.gain
        gain = gain if scale is None else gain * scale
        if config.overlaps:  # A = 1 - TV: -d log A = dTV / A
            tv = gain / length.acceptance + (0 if tv is None else tv)
        else:  # -d log A = dCE
            hard = gain + (0 if hard is None else hard)
    return Coefficients(hard, soft, cap, tv)
