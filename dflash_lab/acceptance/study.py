"""Decode a set of prompts one after the other, as the published protocol does, and keep what figures need as
tables.

`plain` comes first; every speculative run is held against it token for token. Under greedy choice the two
must be equal; where they are not, the margin between the target's two best tokens at the first difference
tells a tie (numerics of another kernel or batch shape decided it) from a fault.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import torch

from dflash_lab.acceptance.clock import PHASES
from dflash_lab.acceptance.decode import Decoded
from dflash_lab.acceptance.offline_report import OfflineReport
from dflash_lab.acceptance.prompts import Prompt, dialogue_of
from dflash_lab.acceptance.tau import Tau, summarize
from dflash_lab.target.model import Target
from dflash_lab.target.template import TemplateFailure

log = logging.getLogger(__name__)

# In logits; a few units in the last place.
TIE_MARGIN = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}


@dataclass
class Study:
    """Answers of one method, in prompt order; with several turns a prompt has several answers."""

    method: str
    answers: list[Decoded] = field(default_factory=list)
    asked: list[tuple[int, ...]] = field(default_factory=list)  # the exact ids each answer continues
    prompt: list[int] = field(default_factory=list)  # index of the prompt of each answer

    def tau(self, seed: int = 0) -> Tau:
        """Summarise the acceptance lengths of all answers."""
        return summarize([a.produced for a in self.answers], [a.lengths for a in self.answers], seed=seed)

    @property
    def answer_taus(self) -> np.ndarray:
        """Tau of each answer [answers]; NaN for those without a round, whose first token was their last."""
        return np.asarray([sum(a.produced) / len(a.rounds) if a.rounds else np.nan for a in self.answers])

    @property
    def seconds_per_token(self) -> float:
        """Mean over answers of the wall-clock a token after the first."""
        timed = [a.seconds_per_token for a in self.answers if len(a.tokens) > 1]
        return sum(timed) / len(timed)

    def phase_share(self) -> dict[str, float]:
        """Return each phase's share of the decoding time."""
        total = sum(sum(a.phase_seconds.values()) for a in self.answers) or 1.0
        return {phase: sum(a.phase_seconds[phase] for a in self.answers) / total for phase in PHASES}


def run_study(
    method: str,
    prompts: Sequence[Prompt],
    answer: Callable[[Sequence[int], int, Callable[[int], None]], Decoded],
    *,
    max_new_tokens: int,
    follow: Callable[[Prompt, list[list[int]]], list[int] | None] | None = None,
    progress: Callable[..., None] | None = None,
) -> Study:
    """Call `answer(ids, max_new_tokens, on_round)` for every prompt; an answer is never longer than a stored
    one.

    on_round(tokens of the answer so far) reports progress, which may raise to stop: a slow machine takes
    minutes for a prompt.
    follow: given a prompt and its answers so far, return the ids of its next turn, or None after the last.
    """
    study = Study(method)
    tokens = done = 0

    def tick(new: int = 0) -> None:
        if progress is not None:
            progress(f"decode {method}", done, len(prompts), tokens=tokens + new)

    for index, prompt in enumerate(prompts):
        limit = min(max_new_tokens, len(prompt.answer)) if prompt.answer else max_new_tokens
        ids: list[int] | None = list(prompt.input_ids)
        given: list[list[int]] = []
        while ids is not None:
            study.answers.append(answer(ids, limit, tick))
            study.asked.append(tuple(ids))
            study.prompt.append(index)
            given.append(study.answers[-1].tokens)
            tokens += len(given[-1])
            ids = follow(prompt, given) if follow is not None else None
        done = index + 1
        tick()
    return study


def next_turn(
    target: Target, thinking: bool, date: str = ""
) -> Callable[[Prompt, list[list[int]]], list[int] | None]:
    """Return the `follow` of `run_study` for prompts of several turns: the model's own answers go into the
    dialogue. Where the template refuses one (that holds a control token, say), the dialogue ends: what was
    decoded stays, and the log says why.
    """

    def follow(prompt: Prompt, given: list[list[int]]) -> list[int] | None:
        stop_ids = frozenset(target.stop_ids)
        dialogue = dialogue_of(prompt, target.tokenizer, thinking=thinking, date=date, stop_ids=stop_ids)
        ids = dialogue.prompt()
        try:
            for tokens in given:
                dialogue.answer(tokens)
                ids = dialogue.prompt()
        except TemplateFailure as error:
            log.warning("%s ends after %d of its answers: %s", prompt.id, len(given), error)
            return None
        return ids

    return follow


@dataclass(frozen=True)
class Difference:
    """Where an answer first leaves plain decoding, and by how much the target preferred plain's token, in
    logits."""

    answer: int
    place: int
    margin: float
    tie: bool


@torch.no_grad()
def differences(target: Target, plain: Study, other: Study) -> list[Difference]:
    """Return the first difference of every answer that is not plain decoding's (the shorter of two cut
    answers rules)."""
    found = []
    for index, (a, b, asked) in enumerate(zip(plain.answers, other.answers, plain.asked)):
        length = min(len(a.tokens), len(b.tokens))
        place = next((i for i in range(length) if a.tokens[i] != b.tokens[i]), None)
        if place is None:
            continue
        ids = torch.tensor([[*asked, *a.tokens[:place]]], device=target.device)
        hidden = target.body(input_ids=ids, use_cache=False).last_hidden_state[0, -1:]
        best = target.head.logits(hidden)[0].float()
        margin = abs(float(best[a.tokens[place]] - best[b.tokens[place]]))
        found.append(Difference(index, place, margin, margin <= TIE_MARGIN[target.dtype]))
    return found


SHOWN_TOKENS = 60  # of what was asked, its end


def answers_frame(
    studies: Sequence[Study], prompts: Sequence[Prompt], text_of: Callable[[Sequence[int]], str]
) -> pl.DataFrame:
    """Return one row an answer and method: `method`, `answer`, `prompt` (id), `source`, `asked` (the end of
    what it continues, as text), `tokens`, `rounds`, `tau`, `seconds`, `ms_per_token`, `prefill_ms`."""
    rows = [
        {
            "method": study.method,
            "answer": index,
            "prompt": prompts[study.prompt[index]].id,
            "source": prompts[study.prompt[index]].source,
            "asked": text_of(study.asked[index][-SHOWN_TOKENS:]),
            "tokens": len(a.tokens),
            "rounds": len(a.rounds),
            "tau": sum(a.produced) / len(a.rounds) if a.rounds else None,
            "seconds": a.seconds,
            "ms_per_token": 1e3 * a.seconds_per_token,
            "prefill_ms": 1e3 * a.prefill_seconds,
        }
        for study in studies
        for index, a in enumerate(study.answers)
    ]
    return pl.DataFrame(rows, infer_schema_length=None)


def rounds_frame(studies: Sequence[Study]) -> pl.DataFrame:
    """Return one row a round: `method`, `answer`, `round`, `place` (answer tokens before it), `accepted`,
    `produced`, `drafted`, `rejected` (token id or null)."""
    rows = []
    for study in studies:
        for index, answer in enumerate(study.answers):
            place = 0
            for number, r in enumerate(answer.rounds):
                rejected = r.rejected if r.rejected >= 0 else None
                rows.append((study.method, index, number, place, r.accepted, r.produced, r.drafted, rejected))
                place += r.produced
    names = ("method", "answer", "round", "place", "accepted", "produced", "drafted", "rejected")
    kinds: list[Any] = [pl.String, *[pl.Int64] * 7]
    return pl.DataFrame(rows, schema=dict(zip(names, kinds)), orient="row")


def tokens_frame(study: Study, decode_one: Callable[[int], str]) -> pl.DataFrame:
    """Return one row an answer token: `answer`, `place`, `text`, `kind` (``first``, ``accepted`` or
    ``target``: the target's own token of a round), and for the latter the text of the draft it `replaced`
    (null: all were accepted)."""
    rows = []
    for index, answer in enumerate(study.answers):
        kinds: list[tuple[str, int]] = [("first", -1)]
        for r in answer.rounds:
            kinds += [("accepted", -1)] * min(r.accepted, r.produced)
            kinds += [("target", r.rejected)] * (r.produced - min(r.accepted, r.produced))
        for place, (token, (kind, rejected)) in enumerate(zip(answer.tokens, kinds, strict=True)):
            replaced = decode_one(rejected) if rejected >= 0 else None
            rows.append((index, place, decode_one(token), kind, replaced))
    schema = {
        "answer": pl.Int64,
        "place": pl.Int64,
        "text": pl.String,
        "kind": pl.String,
        "replaced": pl.String,
    }
    return pl.DataFrame(rows, schema=schema, orient="row")


def breaks_frame(
    report: OfflineReport, text_of: Callable[[int], str], source_of: dict[str, str]
) -> pl.DataFrame:
    """Return one row for every round of the offline walk whose chain broke: `answer`, `place`, `accepted`,
    `entropy`, `p_top`, `p_label`, the texts `label` (the answer's token) and `drafted`, `source`, and
    `kind` (see `token_class`).
    """
    rows, _ = report.walk()
    frame = report.anchors[rows].filter(pl.col("label").is_not_null())
    ids = frame.select(pl.concat([pl.col("label"), pl.col("drafted")]).unique()).to_series().to_list()
    texts = {token: text_of(token) for token in ids}
    return frame.select(
        "answer",
        "place",
        "accepted",
        "entropy",
        "p_top",
        "p_label",
        label=pl.col("label").replace_strict(texts, return_dtype=pl.String),
        drafted=pl.col("drafted").replace_strict(texts, return_dtype=pl.String),
        source=pl.col("sample").replace_strict(source_of, default="unknown", return_dtype=pl.String),
    ).with_columns(kind=pl.col("label").map_elements(token_class, return_dtype=pl.String))


def token_class(text: str) -> str:
    """Return what kind of token a text is: where drafts die depends on it."""
    bare = text.strip()
    if not bare:
        return "line break" if "\n" in text else "space"
    if bare.startswith("<|") or (bare.startswith("<") and bare.endswith(">")):
        return "special"
    if any(character.isdigit() for character in bare):
        return "number"
    if any(character.isalpha() for character in bare):
        return "word start" if text[0].isspace() else "word piece"
    return "punctuation"
