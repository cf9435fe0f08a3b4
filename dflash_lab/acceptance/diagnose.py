"""Why offline and decoded tau disagree, or why tau is far below training accuracy: every known cause checked.
People have trained to 70 % accuracy and served a tau of 1.02 with each of these faults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import polars as pl
import torch

from dflash_lab.acceptance.decode import Proposer, TargetRun
from dflash_lab.acceptance.offline import answer_segments, blocks_at, context_of
from dflash_lab.data.samples import FeatureItem, read_provenance
from dflash_lab.drafter.config import resolve_mask_token_id
from dflash_lab.drafter.model import Drafter
from dflash_lab.models.load import Target
from dflash_lab.models.source import template_hash, tokenizer_hash
from dflash_lab.models.template import render_prompt

CHECKS_SCHEMA = {"name": pl.String, "verdict": pl.String, "value": pl.Float64, "detail": pl.String}


@torch.no_grad()
def diagnose(
    target: Target,
    drafter: Drafter,
    items: Iterable[FeatureItem],
    *,
    samples: Path | None = None,
    thinking: bool | None = None,
    progress: Callable[..., None] | None = None,
) -> list[Check]:
    """Run every check on the first four items. `samples`: the file whose provenance names a template;
    `thinking`: how prompts were rendered that are not from it.
    """
    case = Case(target, drafter, list(islice(items, 4)))
    checks = [
        greedy_answers,
        lambda case: rendered_alike(case.target, samples, thinking),
        tap_states,
        tap_layers,
        final_norm,
        mask_token,
        anchor_position,
        label_shift,
        precision,
        target_rollback,
        draft_cache,
    ]
    found = []
    for number, check in enumerate(checks, start=1):
        found.append(check(case))
        if progress is not None:
            progress("diagnose", number, len(checks))
    return found


def likely_cause(checks: Sequence[Check], disagree: bool) -> str:
    """Return one sentence: the suspects, or that none was found."""
    suspects = [f"{c.name} ({c.detail})" for c in checks if c.verdict == SUSPECT]
    if suspects:
        return "Likely cause: " + "; ".join(suspects)
    if disagree:
        return "No check found a cause. With few short answers it may be chance: see the intervals of tau."
    return "No check found anything wrong."


def checks_frame(checks: Sequence[Check]) -> pl.DataFrame:
    """Return the checks as a table."""
    return pl.DataFrame([vars(check) for check in checks], schema=CHECKS_SCHEMA)


# The known causes, one check each: it computes something on the target, drafter and items at hand and
# compares it with what would hold if its cause were absent; none reads a setting and guesses.

_ON = {True: "on", False: "off", None: "not recorded"}
FINE, SUSPECT, SKIPPED = "fine", "suspect", "not checked"
MOST_ANCHORS = 48  # of an item
MARGIN = 0.05  # by how much a wrong variant must be more accurate at slot 1 to be named the cause


@dataclass(frozen=True)
class Check:
    """One cause looked for."""

    name: str
    verdict: str  # fine, suspect or not checked
    value: float  # the number looked at
    detail: str  # what it means


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative L2 error."""
    ours, theirs = ours.float(), theirs.float().to(ours.device)
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-12))


def greedy_answers(case: Case) -> Check:
    hits = total = 0
    for ids, segments, normed in zip(case.ids, case.segments, case.normed):
        for start, stop in segments:
            best = case.head.logits(normed[max(start, 1) - 1 : stop - 1]).argmax(-1)
            hits += int((best == ids[max(start, 1) : stop]).sum())
            total += len(best)
    share = hits / max(1, total)
    verdict = FINE if share > 0.97 else SUSPECT
    what = "of the stored answer tokens are this target's first choice"
    why = (
        ""
        if verdict == FINE
        else ": they were not generated greedily by it, or under another template or thinking mode"
    )
    return Check("answers of the target", verdict, share, f"{100 * share:.1f} % {what}{why}")


def rendered_alike(target: Target, samples: Path | None, thinking: bool | None = None) -> Check:
    """Hold the template and thinking mode of the samples trained on against the target's, and against how
    prompts were rendered now (`thinking`; None: they are the samples' own).
    """
    name = "chat template"
    if samples is None:
        return Check(name, SKIPPED, float("nan"), "no samples file says how the training text was rendered")
    made = read_provenance(samples)
    now = {
        "tokenizer_hash": tokenizer_hash(target.tokenizer),
        "template_hash": template_hash(target.tokenizer),
    }
    differs = [key for key, value in now.items() if made.get(key) not in (None, value)]
    if differs:
        return Check(name, SUSPECT, 1.0, f"the samples were made with another {' and '.join(differs)}")
    then = made["thinking"] if isinstance(made.get("thinking"), bool) else None
    if then is not None and thinking not in (None, then) and _prompt(target, True) != _prompt(target, False):
        detail = (
            f"the samples were made with thinking {_ON[then]}, these prompts with thinking {_ON[not then]}"
        )
        return Check(name, SUSPECT, 1.0, detail)
    detail = f"the samples' template and tokenizer are the target's; thinking {_ON[then]}"
    return Check(name, FINE, 0.0, detail)


def _prompt(target: Target, thinking: bool) -> list[int]:
    return render_prompt(target.tokenizer, [{"role": "user", "content": "?"}], thinking=thinking)


def tap_states(case: Case) -> Check:
    name, stored = "stored states", [item.taps.to(case.target.device) for item in case.items]

    def error(shift: int) -> float:
        return max(relative_error(taps, case.live_taps(i, shift)) for i, taps in enumerate(stored))

    own = error(0)
    if own < 0.05:
        return Check(name, FINE, own, f"stored and live states differ by {own:.1e} (relative L2)")
    for shift in case.shifted:
        if error(shift) < 0.05:
            told = f"the stored states are those of tap ids {shift:+d}: a layer off by one"
            return Check(name, SUSPECT, own, told)
    told = f"stored and live states differ by {own:.2f} (relative L2): another target or dtype"
    return Check(name, SUSPECT, own, told)


def final_norm(case: Case) -> Check:
    name, finals = "final norm", [(i, item.final) for i, item in enumerate(case.items)]
    pairs = [(i, final.to(case.target.device)) for i, final in finals if final is not None]
    if not pairs:
        told = "the store has no final states, so no teacher was made of them"
        return Check(name, SKIPPED, float("nan"), told)
    last = case.target.num_layers - 1
    before = max(relative_error(final, case.layers[i][last]) for i, final in pairs)
    if before < 0.05:
        told = f"stored final states are those before the final norm (error {before:.1e})"
        return Check(name, FINE, before, told)
    if max(relative_error(final, case.normed[i]) for i, final in pairs) < 0.05:
        told = "stored final states were taken after the final norm: the teacher normed twice"
    else:
        told = f"stored final states match neither side of the final norm ({before:.2f})"
    return Check(name, SUSPECT, before, told)


def compared(case: Case, name: str, fine: str, others: Iterable[tuple[str, dict[str, Any]]]) -> Check:
    """Draft in `others` of our way: one that is clearly more often right is how the drafter was trained.

    `fine` and the sentences of `others` (beside the options of `Case.accuracy`) have places for {own} and
    {other}.
    """
    own = case.own_accuracy
    for told, options in others:
        other = case.accuracy(**options)
        # Two standard errors of the difference: of few answers, chance alone makes ten points.
        chance = 2 * math.sqrt((own * (1 - own) + other * (1 - other)) / max(1, case.anchors))
        if other > own + max(MARGIN, chance):
            detail = told.format(own=f"{100 * own:.0f} %", other=f"{100 * other:.0f} %")
            return Check(name, SUSPECT, other - own, detail)
    return Check(name, FINE, own, fine.format(own=f"{100 * own:.0f} %"))


def tap_layers(case: Case) -> Check:
    others: list[tuple[str, dict[str, Any]]] = [
        (
            f"slot 1 is right {{other}} with tap ids {shift:+d}, {{own}} with its own: the drafter was "
            "trained on layers off by one",
            {"taps": lambda index, shift=shift: case.live_taps(index, shift)},
        )
        for shift in case.shifted
    ]
    return compared(case, "tap layers", "slot 1 is right {own}, and no better one layer up or down", others)


def mask_token(case: Case) -> Check:
    name, own = "mask token", case.drafter.config.mask_token_id
    seen = sum(int((ids == own).sum()) for ids in case.ids)
    tokenizer = None if case.target.name.startswith("random:") else case.target.tokenizer
    usual, why = resolve_mask_token_id(case.target.vocab_size, tokenizer=tokenizer)
    told = f"slot 1 is right {{other}} with mask token {usual} ({why}), {{own}} with {own}"
    others: list[tuple[str, dict[str, Any]]] = [(told, {"mask": usual})] if usual != own else []
    found = compared(case, name, f"token {own} is in no sample, and no other candidate drafts better", others)
    if found.verdict == SUSPECT:
        return found
    if own in case.target.stop_ids:
        detail = f"mask token {own} ends a turn: a masked slot and the end of an answer look alike"
        return Check(name, SUSPECT, 1.0, detail)
    if seen:
        times = "once" if seen == 1 else f"{seen} times"
        detail = f"mask token {own} occurs {times} in the text: it is an ordinary token"
        return Check(name, SUSPECT, seen, detail)
    return Check(name, FINE, own, found.detail)


def anchor_position(case: Case) -> Check:
    others: list[tuple[str, dict[str, Any]]] = [
        (
            f"slot 1 is right {{other}} with context {what}, {{own}} with context before it: it was trained "
            "with another context",
            {"context_shift": shift},
        )
        for shift, what in ((1, "up to and including the anchor"), (-1, "without the token before it"))
    ]
    return compared(case, "anchor position", "context strictly before the anchor drafts best", others)


def label_shift(case: Case) -> Check:
    told = "slot 1 gives the token at a+2 {other} of the time, at a+1 {own}: it was trained with "
    others: list[tuple[str, dict[str, Any]]] = [(f"{told}labels shifted by one", {"label_shift": 1})]
    return compared(case, "slot labels", "slot k predicts the token at a+k", others)


def precision(case: Case) -> Check:
    name, live = "precision of states", case.own_accuracy
    stored = case.accuracy(taps=lambda index: case.items[index].taps.to(case.target.device))
    if abs(stored - live) <= MARGIN:
        return Check(name, FINE, stored - live, "stored and live states draft alike")
    detail = f"slot 1 is right {100 * stored:.0f} % on stored states, {100 * live:.0f} % on live ones"
    return Check(name, SUSPECT, stored - live, f"{detail}: storage or dtype changes the drafts")


def target_rollback(case: Case) -> Check:
    """A partial acceptance, then one more token: its logits against those of a fresh pass."""
    ids = case.ids[0][:64]
    keep = max(1, len(ids) - 4)
    with TargetRun(case.target) as run:
        run.step(ids[:keep], certain=True)
        run.commit(keep)
        run.step(torch.cat([ids[keep : keep + 1], ids[:4]]))
        run.commit(1)
        rolled = run.step(ids[keep + 1 : keep + 2], certain=True).normed
    error = relative_error(case.head.logits(rolled), case.head.logits(case.normed[0][keep + 1 : keep + 2]))
    verdict = FINE if error < (1e-3 if case.target.dtype == torch.float32 else 0.05) else SUSPECT
    kind = "recurrent states and cache" if case.target.is_hybrid else "cache"
    what = "are rolled back" if verdict == FINE else "are not what they were"
    detail = f"{kind} {what} after a partial acceptance ({error:.1e})"
    return Check("rollback of the target", verdict, error, detail)


def draft_cache(case: Case) -> Check:
    """A block drafted after three extensions of the draft cache against one drafted after a single one."""
    taps, ids = case.live_taps(0), case.ids[0]
    place = len(ids) - 1
    hidden = []
    for cuts in ([place], [max(1, place // 2), max(2, place - 3), place]):
        proposer = Proposer(case.drafter, case.head)
        start = 0
        for cut in cuts:
            proposer.extend(taps[start:cut])
            start = max(start, cut)
        hidden.append(proposer.draft(ids[place : place + 1], case.drafter.config.block_size).hidden)
    error = relative_error(hidden[1], hidden[0])
    verdict = FINE if error < (1e-3 if hidden[0].dtype == torch.float32 else 0.05) else SUSPECT
    detail = f"incremental and whole context differ by {error:.1e} (relative L2)"
    return Check("draft cache", verdict, error, detail)


class Case:
    """What the checks look at: live states of each item from one forward, and drafts of any variant."""

    def __init__(self, target: Target, drafter: Drafter, items: list[FeatureItem]) -> None:
        self.target, self.drafter, self.items = target, drafter, items
        self.head = target.head
        self.ids = [item.input_ids.long().to(target.device) for item in items]
        self.segments = [answer_segments(item.loss_mask) for item in items]
        tap_ids, layers = drafter.config.tap_ids, range(target.num_layers)
        shifted = {shift: tuple(tap + shift for tap in tap_ids) for shift in (-1, 1)}
        self.shifted = {s: ids for s, ids in shifted.items() if min(ids) in layers and max(ids) in layers}
        wanted = sorted({*tap_ids, *(t for ids in self.shifted.values() for t in ids), target.num_layers - 1})
        self.layers: list[dict[int, torch.Tensor]] = []
        self.normed: list[torch.Tensor] = []
        for ids in self.ids:
            with TargetRun(target, tuple(wanted)) as run:
                step = run.step(ids, certain=True)
            assert step.taps is not None
            self.layers.append(dict(zip(wanted, step.taps.chunk(len(wanted), dim=-1))))
            self.normed.append(step.normed)

    def live_taps(self, index: int, shift: int = 0) -> torch.Tensor:
        ids = self.shifted[shift] if shift else self.drafter.config.tap_ids
        return torch.cat([self.layers[index][t] for t in ids], dim=-1)

    @property
    def anchors(self) -> int:
        """How many anchors an accuracy is of."""
        return sum(len(self._places(index, 0)) for index in range(len(self.ids)))

    def _places(self, index: int, label_shift: int) -> list[int]:
        spans = (range(max(start, 1), stop - 1 - label_shift) for start, stop in self.segments[index])
        return list(chain.from_iterable(spans))[:MOST_ANCHORS]

    @cached_property
    def own_accuracy(self) -> float:
        """The accuracy of our way of drafting, on live states."""
        return self.accuracy()

    def accuracy(
        self,
        *,
        taps: Callable[[int], torch.Tensor] | None = None,
        mask: int | None = None,
        context_shift: int = 0,
        label_shift: int = 0,
    ) -> float:
        """Return how often slot 1's best token is the answer's (by `label_shift`, the token after it).

        taps: item number -> states, live ones by default. mask: another mask token. context_shift: keep that
        many more (or fewer) context positions than those before the anchor.
        """
        config = self.drafter.config
        hits = total = 0
        for index, ids in enumerate(self.ids):
            states = self.live_taps(index) if taps is None else taps(index)
            context = context_of(self.drafter, states)
            places = self._places(index, label_shift)
            if not places:
                continue
            masked = config.mask_token_id if mask is None else mask
            block = torch.full((len(places), config.block_size), masked, device=ids.device)
            block[:, 0] = ids[places]
            hidden = blocks_at(context, places, self.head.embed(block), visible_shift=context_shift)[:, 1]
            best = self.drafter.logits(hidden.to(self.head.weight.dtype), self.head.weight).argmax(-1)
            hits += int((best == ids[[a + 1 + label_shift for a in places]]).sum())
            total += len(places)
        return hits / max(1, total)
