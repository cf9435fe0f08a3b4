"""Do offline and decoded tau agree?

Offline metrics walk along stored answers, decoding along what the target says now. Where the two texts are
the same, the two taus must be: every round is the same question. Where they are not (another precision, or
sampled answers, sends a text another way at one token), their taus are of two different texts, and a gap
between them says nothing about the drafter. So agreement is judged on the answers whose text is the stored
one, if there are any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from dflash_lab.acceptance.offline_report import OfflineReport
from dflash_lab.acceptance.study import Study
from dflash_lab.errors import InputError


@dataclass(frozen=True)
class Agreement:
    """Decoded and offline tau of the same prompts [n], and for which the texts are the same [n] bool."""

    decoded: np.ndarray
    offline: np.ndarray
    same: np.ndarray

    @property
    def gap(self) -> float:
        """Offline over decoded tau, minus 1, over all answers."""
        return _gap(self.decoded, self.offline)

    @property
    def judged_gap(self) -> float:
        """The same over the answers whose text is the stored one, if there are any, else over all."""
        return _gap(self.decoded[self.same], self.offline[self.same]) if self.same.any() else self.gap

    def sentence(self, tolerance: float) -> str:
        """Say both taus and the verdict."""
        text = (
            f"Offline tau {self.offline.mean():.3f}, decoded {self.decoded.mean():.3f} on the same prompts "
            f"({100 * self.gap:+.1f} %"
        )
        verdict = "disagree" if abs(self.judged_gap) > tolerance else "agree"
        if self.same.all() or not self.same.any():
            return f"{text}): they {verdict}."
        return (
            f"{text}). {int((~self.same).sum())} of {len(self.same)} decoded answers are not the stored "
            f"ones; on the others the gap is {100 * self.judged_gap:+.1f} %: they {verdict}."
        )


def _gap(decoded: np.ndarray, offline: np.ndarray) -> float:
    return float(offline.mean() / decoded.mean() - 1)


def compare_taus(
    trained: Study, report: OfflineReport, samples: Sequence[str], texts: Sequence[Sequence[int]], limit: int
) -> Agreement:
    """Compare each decoded answer with the offline walk along its text, cut at `limit` tokens.

    `samples` and `texts` hold the hash and the tokens of what was analysed offline, one for each answer.
    Answers without a round on either side are left out.
    """
    firsts = report.anchors.group_by("sample", maintain_order=True).agg(pl.col("answer").first())
    number_of = dict(firsts.iter_rows())
    rounds = report.rounds(limit=limit)
    rows = [
        (tau, sum(rounds[number_of[sample]]) / len(rounds[number_of[sample]]), same)
        for answer, sample, text in zip(trained.answers, samples, texts, strict=True)
        if sample in number_of and answer.rounds and rounds[number_of[sample]]
        for tau, same in [(sum(answer.produced) / len(answer.rounds), answer.tokens == list(text[:limit]))]
    ]
    if not rows:
        raise InputError("no answer has a round of speculative decoding: raise max_new_tokens above 1.")
    decoded, offline, same = (np.asarray(column) for column in zip(*rows))
    return Agreement(decoded, offline, same)
