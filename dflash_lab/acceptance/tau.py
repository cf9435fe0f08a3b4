"""The acceptance length tau as published, with what surrounds the number: pooling, conventions, intervals.

A round of speculative decoding yields its accepted drafts plus one token of the target's own (the bonus),
1..B tokens. An answer's tau is the mean over its rounds; the reported tau is the mean over answers of those
means, so a long answer counts no more than a short one. vLLM's figure pools all rounds instead; it stands
beside it.

The last round is where tools differ: `overshoot` counts all B tokens that it verified even past the end of
the answer (z-lab's git version), `truncated` counts only the tokens the answer kept (the dflash 0.1.0
package). Short answers read lower under the second. `truncated` is the default here, because sum(lengths) is
then exactly the number of tokens produced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_lab.errors import InputError


@dataclass(frozen=True)
class Interval:
    """A percentile bootstrap interval of a mean over answers."""

    low: float
    high: float
    level: float = 0.95


@dataclass(frozen=True)
class Tau:
    """Acceptance lengths of a set of answers; see the module's text for the two conventions and the two
    averages."""

    per_answer: np.ndarray  # [answers] float64, truncated convention
    mean: float  # the published average: over answers, of the mean over rounds (truncated)
    pooled: float  # over all rounds of all answers (truncated)
    overshoot: float  # like `mean`, the last round counted in full
    pooled_overshoot: float
    interval: Interval  # of `mean`
    answers: int
    rounds: int
    histogram: np.ndarray  # [B+1] int64: rounds by acceptance length (overshoot, i.e. 1 + accepted drafts)

    def figures(self, prefix: str) -> dict[str, Any]:
        """Return the headline numbers as a flat dictionary."""
        return {
            prefix: round(self.mean, 4),
            f"{prefix}_low": round(self.interval.low, 4),
            f"{prefix}_high": round(self.interval.high, 4),
            f"{prefix}_pooled": round(self.pooled, 4),
            f"{prefix}_overshoot": round(self.overshoot, 4),
            f"{prefix}_rounds": self.rounds,
        }


def summarize(
    produced: Sequence[Sequence[int]], lengths: Sequence[Sequence[int]] | None = None, *, seed: int = 0
) -> Tau:
    """Summarise rounds by answer: `produced` tokens kept of each round, `lengths` = 1 + accepted drafts
    (default: the same).

    Answers without a round (their first token, which the prefill gives, was the last) have no tau and are
    left out.
    """
    lengths = produced if lengths is None else lengths
    kept = [
        (np.asarray(p, float), np.asarray(full, float))
        for p, full in zip(produced, lengths, strict=True)
        if len(p)
    ]
    if not kept:
        raise InputError("no answer has a round of speculative decoding: raise max_new_tokens above 1.")
    per_answer = np.asarray([p.mean() for p, _ in kept])
    all_produced = np.concatenate([p for p, _ in kept])
    all_lengths = np.concatenate([full for _, full in kept])
    return Tau(
        per_answer=per_answer,
        mean=float(per_answer.mean()),
        pooled=float(all_produced.mean()),
        overshoot=float(np.mean([full.mean() for _, full in kept])),
        pooled_overshoot=float(all_lengths.mean()),
        interval=bootstrap(per_answer, seed=seed),
        answers=len(kept),
        rounds=len(all_produced),
        histogram=np.bincount(all_lengths.astype(int)),
    )


def bootstrap(values: np.ndarray, *, seed: int = 0, draws: int = 2000, level: float = 0.95) -> Interval:
    """Return the percentile bootstrap interval of the mean of `values` [n], resampled over answers."""
    values = np.asarray(values, float)
    chosen = np.random.default_rng(seed).integers(len(values), size=(draws, len(values)))
    means = values[chosen].mean(1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high), level)


@dataclass(frozen=True)
class Paired:
    """Two drafters on the same answers: the mean difference of tau, second minus first, with its interval."""

    difference: float
    interval: Interval
    wins: int
    losses: int
    answers: int


def compare(first: np.ndarray, second: np.ndarray, *, seed: int = 0) -> Paired:
    """Compare two per-answer taus [n] of the same answers in the same order; pairs are resampled together.

    Answers without a tau (NaN) under either are left out, as `summarize` leaves them out.
    """
    if len(first) != len(second):
        raise InputError(f"paired comparison needs the same answers: {len(first)} and {len(second)} given.")
    change = np.asarray(second, float) - np.asarray(first, float)
    change = change[~np.isnan(change)]
    if not len(change):
        raise InputError("paired comparison: no answer has a round of both drafters; decode longer answers.")
    return Paired(
        float(change.mean()),
        bootstrap(change, seed=seed),
        int((change > 0).sum()),
        int((change < 0).sum()),
        len(change),
    )
