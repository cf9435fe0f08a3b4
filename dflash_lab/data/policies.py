"""What each way of batching would waste: the policies people use beside ours, on the same lengths.

A policy is registered by name (`@policy("sort all")`) and turns lengths into a `Plan`; comparison and
explorer go over the registry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import polars as pl

from dflash_lab.data.batching import Plan, plan_batches
from dflash_lab.errors import InputError, near


@dataclass(frozen=True)
class Limits:
    """What a policy may use; those that batch by count ignore the budget, and the others `fixed_batch`."""

    token_budget: int = 32768
    max_batch: int = 512
    fixed_batch: int = 32
    chunk: int = 1
    seed: int = 0


Policy = Callable[[np.ndarray, Limits], Plan]
POLICIES: dict[str, Policy] = {}


def policy(name: str) -> Callable[[Policy], Policy]:
    """Register a policy."""

    def register(plan: Policy) -> Policy:
        POLICIES[name] = plan
        return plan

    return register


def plan_by(name: str, lengths: np.ndarray, limits: Limits) -> Plan:
    """Plan with the policy of that name; `InputError` with the near match if there is none."""
    if name not in POLICIES:
        raise InputError(f"policy {name!r} is not known{near(name, POLICIES)}. Known: {'; '.join(POLICIES)}.")
    return POLICIES[name](lengths, limits)


def policy_waste(
    lengths: np.ndarray,
    *,
    token_budget: int = 32768,
    max_batch: int = 512,
    fixed_batch: int = 32,
    chunk: int = 1,
    seed: int = 0,
) -> pl.DataFrame:
    """Compare all policies on `lengths` [N]: `policy`, `waste_pct`, `batches`, `largest_batch`,
    `padded_tokens`."""
    limits = Limits(token_budget, max_batch, fixed_batch, chunk, seed)
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


@policy("shuffled, fixed batch")
def shuffled_fixed(lengths: np.ndarray, limits: Limits) -> Plan:
    """Random order, the same number of samples in every batch."""
    return _fixed(lengths, _shuffle(lengths, limits), limits)


@policy("group by length, fixed batch")
def grouped_fixed(lengths: np.ndarray, limits: Limits) -> Plan:
    """Random groups of 50 batches, each sorted, as the Hugging Face trainer's `group_by_length` does."""
    order = _shuffle(lengths, limits)
    group = np.arange(len(lengths)) // (50 * limits.fixed_batch)
    return _fixed(lengths, order[np.lexsort((-lengths[order], group))], limits)


@policy("sort in 8,192 windows")
def windows_8k(lengths: np.ndarray, limits: Limits) -> Plan:
    """Token budget, windows of 8,192."""
    return _windows(lengths, 8192, limits)


@policy("sort in 32,768 windows")
def windows_32k(lengths: np.ndarray, limits: Limits) -> Plan:
    """Token budget, windows of 32,768."""
    return _windows(lengths, 32768, limits)


@policy("sort all")
def sorted_all(lengths: np.ndarray, limits: Limits) -> Plan:
    """Token budget, one window: the least padding, but reads the file in random order."""
    return _windows(lengths, 0, limits)


def _windows(lengths: np.ndarray, window: int, limits: Limits) -> Plan:
    return plan_batches(
        lengths,
        token_budget=limits.token_budget,
        max_batch=limits.max_batch,
        window=window,
        chunk=limits.chunk,
    )


def _shuffle(lengths: np.ndarray, limits: Limits) -> np.ndarray:
    return np.random.default_rng(limits.seed).permutation(len(lengths))


def _fixed(lengths: np.ndarray, order: np.ndarray, limits: Limits) -> Plan:
    """Cut `order` [N] into batches of `fixed_batch`; inside each the longest comes first, as a Plan has
    it."""
    lengths = np.asarray(lengths, dtype=np.int64)
    size = limits.fixed_batch
    order = order[np.lexsort((-lengths[order], np.arange(len(order)) // size))].astype(np.int64)
    offsets = np.append(np.arange(0, len(order), size), len(order)).astype(np.int64)
    return Plan(order, offsets, lengths, size * int(lengths.max(initial=1)), limits.chunk)


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
