"""What the draft loss is made of: one frozen set of weights, checked when it is built.

Per live row with drafter logits z, target logits s, label y and weight w:

    w * [ hard * CE(z, y)  +  soft * T^2 * KL(softmax(s/T) || softmax(z/T))
          + cap * 1[argmax z = y] * H(softmax z)  +  tv * TV(softmax s, softmax z)
          + lk * (lam * KL + (1 - lam) * TV),   lam = exp(-lk_decay * (1 - TV)) held constant
          + length * (1 - A_1 A_2 ... A_k) ]

The third term is the confidence-aware parallel loss of LLaDA 2.0 (arXiv:2512.15745), the fifth the LK hybrid
of arXiv:2602.23881. The last is the expected accepted length itself: A_j is the probability that slot j is
accepted (1 where it is not live), so with weights of 1 its sum over a block is the number of live slots minus
(E[tau] - 1). Greedy decoding accepts slot j if it is the label, A_j = softmax(z)[y] (`acceptance="label"`);
rejection sampling accepts it with A_j = 1 - TV (`"overlap"`).

`weighting="dpace"` multiplies the given weights of a block by D-PACE's: with s_k = (1-alpha) exp(-CE_k) +
alpha (1 where the slot is not live) and P_k = s_1 ... s_k, slot k weighs the sum of P_j over the live j >= k.
With alpha = 0 and the hard term alone the gradient is then that of minus the expected accepted length too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from dflash_lab.errors import InputError, near

LABEL_SOURCES = ("data", "argmax")
ACCEPTANCES = ("label", "overlap")
WEIGHTINGS = ("given", "dpace")


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Terms and options of the draft loss; every weight is a plain factor, 0 leaves the term out.

    Args:
        hard_weight: factor of the cross-entropy with the label.
        soft_weight: factor of T^2 KL(target || drafter), both at `temperature`.
        temperature: T of the soft term; cross-entropy, entropy and TV are always at 1.
        cap_weight: factor of the drafter's entropy (nats) on rows whose argmax is the label.
        tv_weight: factor of the total variation distance, 1 - sum min(p, q).
        lk_weight, lk_decay: factor of the LK hybrid and its decay; needs temperature 1.
        length_weight: factor of the expected length term; not with D-PACE, which is another form of it.
        acceptance: of a slot in the length term, 'label' or 'overlap'.
        label_source: 'data' takes the labels given; 'argmax' takes the target's argmax, found in the same
            pass.
        weighting: 'given' takes the weights as they are; 'dpace' multiplies them by D-PACE's block weights.
        dpace_alpha: floor of D-PACE's confidences, in [0, 1].
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
