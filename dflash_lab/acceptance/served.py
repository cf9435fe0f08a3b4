"""A running server measured: the run's prompts at each concurrency, tau from what it counts, its speed, and
what to check where that is not what decoding gives here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_lab.acceptance.diagnose import FINE, SKIPPED, SUSPECT, Check
from dflash_lab.data.records import BadRecord
from dflash_lab.errors import InputError
from dflash_lab.models.server import NATIVE, Drafting, ServedAnswer, Server

if TYPE_CHECKING:
    from dflash_lab.acceptance.evaluate import Difference

DTYPE_MARGIN = 1.0  # logits by which another precision of the same weights may prefer another token


@dataclass(frozen=True)
class Served:
    """What came of the prompts at one concurrency.

    `drafting`: of all answers, from each request where the server tells of it, else from its counters, which
    hold what others asked too: `others` tokens. None: it tells nothing.
    """

    concurrency: int
    answers: list[ServedAnswer | BadRecord]
    seconds: float
    drafting: Drafting | None
    by_request: bool
    others: int

    @property
    def good(self) -> list[ServedAnswer]:
        """The answers, failures left out."""
        return [answer for answer in self.answers if isinstance(answer, ServedAnswer)]

    @property
    def tau(self) -> float | None:
        """Tokens a round, pooled, the last round of an answer in full; None where nothing was counted."""
        return self.drafting.tau if self.drafting is not None and self.drafting.rounds else None

    def row(self) -> dict[str, Any]:
        """Return what is shown of it."""
        good = self.good
        tokens = sum(len(answer.tokens) for answer in good)
        middle, slow = np.quantile([answer.seconds for answer in good], (0.5, 0.95))
        first = float(np.median([answer.first_seconds for answer in good]))
        told = self.drafting or Drafting(0, 0, 0, 0)
        return {
            "concurrency": self.concurrency,
            "tau": None if self.tau is None else round(self.tau, 4),
            "answers": len(good),
            "failed": len(self.answers) - len(good),
            "tokens": tokens,
            "tokens_per_s": round(tokens / self.seconds, 2),
            "first_token_ms": round(1e3 * first, 2),
            "latency_p50_ms": round(1e3 * float(middle), 2),
            "latency_p95_ms": round(1e3 * float(slow), 2),
            "rounds": told.rounds,
            "drafted": told.drafted,
            "accepted": told.accepted,
            "counted": "each request" if self.by_request else "counters" if self.drafting else "not",
            "tokens_of_others": self.others,
        }


def measure(
    server: Server,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    concurrency: int,
    on_answer: Callable[[int], None],
    **sampling: Any,
) -> Served:
    """Send the prompts, so many at a time, between two looks at the server's counters.

    on_answer is told the number of answers so far, and may raise to stop. `InputError` if none succeeds.
    """
    before, answers = server.counters(), dict[int, Any]()
    start = time.perf_counter()
    found = server.answer_all(
        prompts,
        limits,
        requests=concurrency,
        on_wait=lambda: on_answer(len(answers)),
        stream=True,
        **sampling,
    )
    with contextlib.closing(found):
        for number, answer in found:
            answers[number] = answer
            on_answer(len(answers))
    seconds = time.perf_counter() - start
    good = [answer for answer in answers.values() if isinstance(answer, ServedAnswer)]
    if not good:
        raise InputError(f"{server.url} answered none of {len(prompts)} prompts: {answers[0].reason}")
    tokens = sum(len(answer.tokens) for answer in good)
    after = server.counters(before.tokens + tokens) if before else None
    counted = after - before if before and after else None
    others = max(0, counted.tokens - tokens) if counted else 0
    told = [answer.drafting for answer in good if answer.drafting is not None]
    if by_request := len(told) == len(good):
        counted = Drafting(*(sum(column) for column in zip(*(vars(one).values() for one in told))))
    ordered = [answers[number] for number in range(len(prompts))]
    return Served(concurrency, ordered, seconds, counted, by_request, others)


def different(served: Served, plain: Sequence[Sequence[int]]) -> int:
    """Count the answers that are not plain decoding's, the shorter of two cut ones ruling."""
    pairs = [(a.tokens, b) for a, b in zip(served.answers, plain) if isinstance(a, ServedAnswer)]
    return sum(list(a)[: len(b)] != list(b)[: len(a)] for a, b in pairs)


def sentence(served: Served, counted: float, judged: bool, tolerance: float) -> str:
    """Say served and decoded tau, and whether they agree; `counted`: the decoded one as a server counts."""
    if served.tau is None:
        return "The server counted no drafting: served tau is not known."
    gap = served.tau / counted - 1
    told = f"Served tau {served.tau:.3f}, decoded {counted:.3f} as a server counts ({100 * gap:+.1f} %)"
    if not judged:
        return f"{told}; sampled answers are not the same text, so this is not judged."
    return f"{told}: they {'disagree' if abs(gap) > tolerance else 'agree'}."


# ---- Why served tau is not the decoded one: every check looks at what the server answered or counted ----


def served_checks(
    served: Served, server: Server, differences: Sequence[Difference], block_size: int, greedy: bool
) -> list[Check]:
    """Return one check for each known cause, with the setting of the server that it names."""
    return [
        _drafts(served, server.form == NATIVE),
        _draft_tokens(served, server.form == NATIVE, block_size),
        _answers(served, differences, greedy),
        _others(served),
    ]


def _drafts(served: Served, native: bool) -> Check:
    name = "served drafting"
    flag = "--speculative-algorithm DFLASH" if native else "--speculative-config"
    if served.drafting is None:
        detail = "the server tells no counts of drafting" + (
            f": was it started with {flag}?"
            if native
            else ": is /metrics shut off, or is it another program?"
        )
        return Check(name, SUSPECT, float("nan"), detail)
    rounds = served.drafting.rounds
    if not rounds:
        return Check(name, SUSPECT, 0, f"the server drafted nothing: start it with {flag} (see serve.md)")
    return Check(name, FINE, rounds, f"the server drafted in {rounds} rounds")


def _draft_tokens(served: Served, native: bool, block_size: int) -> Check:
    name, told = "served draft tokens", served.drafting
    if told is None or not told.rounds or not told.drafted:
        return Check(name, SKIPPED, float("nan"), "the server does not tell how many tokens it drafts")
    each, wanted = told.drafted / told.rounds, block_size - 1
    if abs(each - wanted) < 0.5:
        return Check(name, FINE, each, f"{each:.3g} drafted tokens a round, a block of {block_size}")
    setting = f"--speculative-num-draft-tokens {block_size}" if native else f"num_speculative_tokens {wanted}"
    detail = f"the server drafts {each:.3g} tokens a round, decoding here {wanted}: start it with {setting}"
    return Check(name, SUSPECT, each, detail)


def _answers(served: Served, differences: Sequence[Difference], greedy: bool) -> Check:
    name = "served answers"
    if not greedy:
        return Check(name, SKIPPED, float("nan"), "sampled answers differ by chance")
    faults = [one for one in differences if not one.tie]
    if not faults:
        ties = f", but for {len(differences)} at ties of the target's logits" if differences else ""
        return Check(name, FINE, len(differences), f"they are plain decoding's{ties}")
    worst = max(faults, key=lambda one: one.margin)
    near = worst.margin < DTYPE_MARGIN
    why = "another dtype is suspected (--dtype)" if near else "other or quantised weights are suspected"
    detail = (
        f"{len(faults)} of {len(served.good)} answers leave plain decoding at no tie, answer {worst.answer} "
        f"at token {worst.place}, where the target prefers its own by {worst.margin:.2f} in logits: {why}"
    )
    return Check(name, SUSPECT, len(faults), detail)


def _others(served: Served) -> Check:
    name, mine = "requests of others", sum(len(answer.tokens) for answer in served.good)
    if served.by_request:
        return Check(name, FINE, 0, "the server counted each request by itself")
    if served.drafting is None:
        return Check(name, SKIPPED, float("nan"), "the server shows no counters")
    if served.others:
        detail = (
            f"the server's counters hold {served.others} tokens more than the {mine} asked for: others used "
            "it meanwhile. Measure it alone, or start vLLM with --per-request-spec-decode-metrics summary"
        )
        return Check(name, SUSPECT, served.others, detail)
    return Check(name, FINE, 0, "the counters hold what was asked for, and nothing else")
