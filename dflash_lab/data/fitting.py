"""A plan whose batches padding does not eat: for few samples a large token budget is lowered.

A budget that holds most of a data set makes one or two batches of it, padded to their longest sample; 57
chats under 16,384 tokens are one batch of which half is padding. Where the plan wastes more than `WASTE_PCT`,
the cheapest of its halves, quarters and so on is taken: fewer padded tokens, but `BATCH_TOKENS` more for each
batch more. Large data sets waste a percent or two under any budget and keep theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_lab.data.batching import Plan, plan_batches

WASTE_PCT = 10.0  # padding up to this is not worth a second thought
# What a batch costs beside its tokens, in tokens: the 27B shape ran at 96 % of its best rate at 8 x 335.
BATCH_TOKENS = 112


@dataclass(frozen=True)
class Fitted:
    """The plan to run, and the one that the budget as given would have made (often the same)."""

    plan: Plan
    asked: Plan

    @property
    def lowered(self) -> str:
        """Why the plan's budget is not the given one, in one sentence; empty if it is."""
        if self.plan.token_budget == self.asked.token_budget:
            return ""
        before, after = self.asked, self.plan
        return (
            f"token_budget lowered from {before.token_budget:,} to {after.token_budget:,}: "
            f"{before.real_tokens:,} tokens of {len(before.lengths):,} samples made {_batches(before)}, "
            f"{before.waste_pct:.0f} % padding, and make {_batches(after)}, {after.waste_pct:.0f} %."
        )


def fit_batches(lengths: np.ndarray, *, token_budget: int, **limits: Any) -> Fitted:
    """Plan batches under `token_budget`, or under the part of it that padding allows.

    `lengths` and `limits` as `plan_batches` takes them. No batch of the plan is larger than the largest that
    the given budget makes, so nothing that fitted the memory stops fitting.
    """
    asked = best = plan_batches(lengths, token_budget=token_budget, **limits)
    if asked.waste_pct > WASTE_PCT:
        while token_budget > BATCH_TOKENS:
            token_budget //= 2
            lower = plan_batches(lengths, token_budget=token_budget, **limits)
            if _cost(lower) < _cost(best):
                best = lower
    return Fitted(best, asked)


def _cost(plan: Plan) -> int:
    return plan.padded_tokens + BATCH_TOKENS * len(plan)


def _batches(plan: Plan) -> str:
    return "one batch" if len(plan) == 1 else f"{len(plan):,} batches"
