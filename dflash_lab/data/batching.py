"""Which samples go into one forward: sorted windows under a token budget; and what other ways would waste."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from numbers import Integral
from typing import Any

import numpy as np
import polars as pl

from dflash_lab.errors import InputError, near


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Batches over samples 0..N-1, ``for batch in plan``: index arrays, the longest sample first.

    Batch b is ``order[offsets[b]:offsets[b + 1]]``.
    """

    order: np.ndarray  # [N] i64, every sample exactly once
    offsets: np.ndarray  # [batches + 1] i64
    lengths: np.ndarray  # [N] i64, as given
    token_budget: int
    chunk: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.batches)

    def __repr__(self) -> str:
        limit = f"of at most {self.token_budget:,} tokens"
        whole = f"{len(self.lengths):,} samples in {len(self):,} batches {limit}"
        return f"<Plan: {whole}, {self.waste_pct:.1f} % padding>"

    @cached_property
    def batches(self) -> list[np.ndarray]:
        """Index arrays, one a batch, in the order to run them."""
        return np.split(self.order, self.offsets[1:-1]) if len(self) else []

    @cached_property
    def sizes(self) -> np.ndarray:
        """Rows of each batch, [batches]."""
        return np.diff(self.offsets)

    @cached_property
    def longest(self) -> np.ndarray:
        """Padded length L of each batch in tokens, [batches]."""
        return self.lengths[self.order[self.offsets[:-1]]]

    @property
    def real_tokens(self) -> int:
        """Tokens that are asked for."""
        return int(self.lengths.sum())

    @property
    def padded_tokens(self) -> int:
        """Tokens that are computed: sum of B * L."""
        return int((self.sizes * self.longest).sum())

    @property
    def waste_pct(self) -> float:
        """Share of the computed tokens that is padding, in percent."""
        return 100 * (1 - self.real_tokens / self.padded_tokens) if self.padded_tokens else 0.0

    @cached_property
    def costs(self) -> np.ndarray:
        """Budget tokens of each batch, B * chunk * ceil(L / chunk), [batches]."""
        return self.sizes * round_up(self.longest, self.chunk)

    @property
    def over_budget(self) -> int:
        """Batches above the budget: samples longer than it, each alone in its batch."""
        return int((self.costs > self.token_budget).sum())


def round_up(lengths: np.ndarray, chunk: int) -> np.ndarray:
    """Round token counts up to whole chunks."""
    return -(-lengths // chunk) * chunk


def plan_batches(
    lengths: np.ndarray, *, token_budget: int, max_batch: int, window: int = 32768, chunk: int = 1
) -> Plan:
    """Cut samples into batches of at most `max_batch` rows and `token_budget` padded tokens.

    lengths: [N] token counts, all >= 1. window: samples sorted together, in file order; 0 sorts all. chunk:
    rows count as whole chunks of this many tokens (64 where the target has gated delta-net layers, whose
    kernels hold a state a chunk). A sample longer than the budget gets a batch of its own. Each window runs
    from long to short and the one with the longest sample first, so that a run which will not fit fails in
    its first minute. Raises `InputError` on a length below 1.
    """
    lengths = _checked(lengths)
    for name, value in (("token_budget", token_budget), ("max_batch", max_batch), ("chunk", chunk)):
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise InputError(f"{name}={value!r}: give a whole number, at least 1.")
    count = len(lengths)
    # Sorting all would leave the least padding, but reads the file in random order and, on resume, changes
    # every batch; windows of 32,768 samples lose under 1 % and keep reads local.
    window = window if window > 0 else max(count, 1)
    starts = np.arange(0, count, window)
    longest = np.maximum.reduceat(lengths, starts) if count else starts
    windows = np.argsort(-longest, kind="stable")  # in the order to run them
    rank = np.argsort(windows)
    order = np.lexsort((-lengths, rank[np.arange(count) // window]))  # stable: equal ones stay in file order
    # Rows of a batch in which a sample is the longest; the device computes each padded to whole chunks.
    rows = np.minimum(max_batch, np.maximum(token_budget // round_up(lengths[order], chunk), 1)).tolist()
    offsets, position = [], 0
    for end in np.cumsum(np.minimum(window, count - starts)[windows]).tolist():
        while position < end:
            offsets.append(position)
            position = min(position + rows[position], end)
    return Plan(order, np.array([*offsets, count], np.int64), lengths, token_budget, chunk)


def _checked(lengths: np.ndarray) -> np.ndarray:
    lengths = np.asarray(lengths)
    if lengths.ndim != 1 or (lengths.size and lengths.dtype.kind not in "iu"):
        raise InputError(
            f"lengths must be whole numbers in one dimension, not {lengths.dtype} of {lengths.shape}."
        )
    lengths = lengths.astype(np.int64)
    if lengths.size and lengths.min() < 1:
        where = int(lengths.argmin())
        raise InputError(
            f"sample {where} has length {lengths[where]}: every sample needs at least one token."
        )
    return lengths


def balance_shards(costs: np.ndarray, num_shards: int, *, keys: np.ndarray | None = None) -> np.ndarray:
    """Return the shard of each item, [N] i32, so that the summed costs of shards differ as little as
    possible.

    Longest processing time first: the costliest item goes to the least loaded shard; shards then differ by at
    most one item's cost, in practice by far less. `keys` (such as content hashes) break ties, so that the
    shard of a sample depends on the set of samples and not on their order in the file; without, ties go by
    position.
    """
    costs = np.asarray(costs, dtype=np.float64)
    if num_shards < 1:
        raise InputError(f"num_shards={num_shards}: give at least 1.")
    if costs.size and not (np.isfinite(costs).all() and costs.min() >= 0):
        raise InputError("costs must be finite and not negative.")
    shards = np.zeros(len(costs), dtype=np.int32)
    order = np.argsort(-costs, kind="stable") if keys is None else np.lexsort((np.asarray(keys), -costs))
    loads = [(0.0, shard) for shard in range(num_shards)]
    assigned = []
    for cost in costs[order].tolist():
        load, shard = loads[0]
        assigned.append(shard)
        heapq.heapreplace(loads, (load + cost, shard))
    shards[order] = assigned
    return shards


def predicted_cost(lengths: np.ndarray, *, chunk: int = 1, attention_per_token: float = 0.0) -> np.ndarray:
    """Return each sample's relative forward cost: padded tokens x (1 + attention_per_token x tokens), [N]
    f64.

    `attention_per_token` is the attention work of one more token of context, as a share of the work of the
    matrices for one token; for a decoder with full attention in every layer about 1 / (6 x hidden_size), 0
    leaves it out.
    """
    tokens = round_up(np.asarray(lengths, dtype=np.int64), chunk).astype(np.float64)
    return tokens * (1 + attention_per_token * tokens)


# ---- For few samples, a token budget that padding does not eat ----

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


def _batches(plan: Plan) -> str:
    return "one batch" if len(plan) == 1 else f"{len(plan):,} batches"


def fit_batches(lengths: np.ndarray, *, token_budget: int, **limits: Any) -> Fitted:
    """Plan batches under `token_budget`, or under the part of it that padding allows.

    A budget that holds most of a data set makes one or two batches of it, padded to their longest sample: 57
    chats under 16,384 tokens are one batch of which half is padding. Where the plan wastes more than
    `WASTE_PCT`, the cheapest of its halves, quarters and so on is taken. Large data sets waste a percent or
    two under any budget and keep theirs. `lengths` and `limits` as `plan_batches` takes them. No batch is
    larger than the largest that the given budget makes, so nothing that fitted the memory stops fitting.
    """

    def cost(plan: Plan) -> int:
        return plan.padded_tokens + BATCH_TOKENS * len(plan)

    asked = best = plan_batches(lengths, token_budget=token_budget, **limits)
    if asked.waste_pct > WASTE_PCT:
        while token_budget > BATCH_TOKENS:
            token_budget //= 2
            lower = plan_batches(lengths, token_budget=token_budget, **limits)
            if cost(lower) < cost(best):
                best = lower
    return Fitted(best, asked)


# ---- What each way of batching would waste: the policies people use beside ours, on the same lengths ----


@dataclass(frozen=True)
class Limits:
    """What a policy may use; those that batch by count ignore the budget, and the others `fixed_batch`."""

    token_budget: int = 32768
    max_batch: int = 512
    fixed_batch: int = 32
    chunk: int = 1
    seed: int = 0


def _shuffled(lengths: np.ndarray, limits: Limits) -> Plan:
    return _fixed(lengths, np.random.default_rng(limits.seed).permutation(len(lengths)), limits)


def _grouped(lengths: np.ndarray, limits: Limits) -> Plan:
    """Random groups of 50 batches, each sorted, as the Hugging Face trainer's `group_by_length` does."""
    order = np.random.default_rng(limits.seed).permutation(len(lengths))
    group = np.arange(len(lengths)) // (50 * limits.fixed_batch)
    return _fixed(lengths, order[np.lexsort((-lengths[order], group))], limits)


def _fixed(lengths: np.ndarray, order: np.ndarray, limits: Limits) -> Plan:
    """Cut `order` [N] into batches of `fixed_batch`; the longest of each first, as a Plan has it."""
    lengths = np.asarray(lengths, dtype=np.int64)
    size = limits.fixed_batch
    order = order[np.lexsort((-lengths[order], np.arange(len(order)) // size))].astype(np.int64)
    offsets = np.append(np.arange(0, len(order), size), len(order)).astype(np.int64)
    return Plan(order, offsets, lengths, size * int(lengths.max(initial=1)), limits.chunk)


def _windows(lengths: np.ndarray, limits: Limits, *, window: int) -> Plan:
    budget, rows = limits.token_budget, limits.max_batch
    return plan_batches(lengths, token_budget=budget, max_batch=rows, window=window, chunk=limits.chunk)


# Comparison and explorer go over these; another one is one more entry.
POLICIES: dict[str, Callable[[np.ndarray, Limits], Plan]] = {
    "shuffled, fixed batch": _shuffled,
    "group by length, fixed batch": _grouped,
    "sort in 8,192 windows": partial(_windows, window=8192),
    "sort in 32,768 windows": partial(_windows, window=32768),
    "sort all": partial(_windows, window=0),
}


def plan_by(policy: str, lengths: np.ndarray, limits: Limits) -> Plan:
    """Plan with the policy of that name; `InputError` with the near match if there is none."""
    if policy not in POLICIES:
        known = "; ".join(POLICIES)
        raise InputError(f"policy {policy!r} is not known{near(policy, POLICIES)}. Known: {known}.")
    return POLICIES[policy](lengths, limits)


def policy_waste(lengths: np.ndarray, limits: Limits) -> pl.DataFrame:
    """Compare all policies on `lengths` [N], a row each."""
    plans = {name: plan_by(name, lengths, limits) for name in POLICIES}
    return pl.DataFrame(
        {
            "policy": list(plans),
            "waste_pct": [plan.waste_pct for plan in plans.values()],
            "batches": [len(plan) for plan in plans.values()],
            "largest_batch": [int(plan.sizes.max(initial=0)) for plan in plans.values()],
            "padded_tokens": [plan.padded_tokens for plan in plans.values()],
        }
    )


@dataclass(frozen=True)
class Exploration:
    """What one choice of limits and policy would give; counts are of samples, `hours` at the assumed rate."""

    kept: int
    dropped: int
    truncated: int
    tokens: int
    kept_tokens_pct: float  # of all tokens before the limit
    waste_pct: float
    batches: int
    largest_batch: int
    over_budget: int
    hours: float


def explore(
    lengths: np.ndarray,
    *,
    max_length: int,
    over_long: str = "drop",
    policy: str = "sort in 32,768 windows",
    limits: Limits | None = None,
    tokens_per_s: float = 9000.0,
) -> Exploration:
    """Apply a length limit (0: none) to `lengths` [N] and plan; `tokens_per_s` counts computed (padded)
    tokens.

    over_long: ``drop`` leaves longer samples out, ``truncate`` cuts them.
    """
    if over_long not in ("drop", "truncate") or max_length < 0 or not tokens_per_s > 0:
        raise InputError(
            f"over_long={over_long!r}, max_length={max_length}, tokens_per_s={tokens_per_s}: give drop or "
            "truncate, a limit from 0 up (0: none) and a rate above 0."
        )
    lengths = np.asarray(lengths, dtype=np.int64)
    over = lengths > (max_length or np.iinfo(np.int64).max)
    kept = np.minimum(lengths, max_length) if over_long == "truncate" and max_length else lengths[~over]
    plan = plan_by(policy, kept, limits or Limits())
    beyond = int(over.sum())
    return Exploration(
        kept=len(kept),
        dropped=len(lengths) - len(kept),
        truncated=beyond if len(kept) == len(lengths) else 0,
        tokens=plan.real_tokens,
        kept_tokens_pct=100 * plan.real_tokens / max(int(lengths.sum()), 1),
        waste_pct=plan.waste_pct,
        batches=len(plan),
        largest_batch=int(plan.sizes.max(initial=0)),
        over_budget=plan.over_budget,
        hours=plan.padded_tokens / tokens_per_s / 3600,
    )
