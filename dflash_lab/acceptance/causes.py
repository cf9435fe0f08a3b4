"""The known causes of a low or disagreeing tau, one check each.

Each check computes something on the target, drafter and items at hand and compares it with what would hold if
its cause were absent; none reads a setting and guesses.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_lab.acceptance.diagnosis_case import Case
from dflash_lab.acceptance.proposals import Proposer
from dflash_lab.acceptance.target_run import TargetRun
from dflash_lab.data.samples import read_provenance
from dflash_lab.drafter.config import resolve_mask_token_id
from dflash_lab.target.identity import template_hash, tokenizer_hash
from dflash_lab.target.model import Target
from dflash_lab.target.template import render_prompt

_ON = {True: "on", False: "off", None: "not recorded"}
FINE, SUSPECT, SKIPPED = "fine", "suspect", "not checked"
MARGIN = 0.05  # by how much a wrong variant must be more accurate at slot 1 to be named the cause


@dataclass(frozen=True)
class Check:
    """One cause: `verdict` fine, suspect or not checked; `value` is the number looked at, `detail` what it
    means.
    """

    name: str
    verdict: str
    value: float
    detail: str


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


def template(target: Target, samples: Path | None, thinking: bool | None = None) -> Check:
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
    name = "stored states"
    stored = [item.taps.to(case.target.device) for item in case.items]
    own = max(relative_error(taps, case.live_taps(i)) for i, taps in enumerate(stored))
    if own < 0.05:
        return Check(name, FINE, own, f"stored and live states differ by {own:.1e} (relative L2)")
    for shift in case.shifted:
        other = max(relative_error(taps, case.live_taps(i, shift)) for i, taps in enumerate(stored))
        if other < 0.05:
            return Check(
                name, SUSPECT, own, f"the stored states are those of tap ids {shift:+d}: a layer off by one"
            )
    return Check(
        name,
        SUSPECT,
        own,
        f"stored and live states differ by {own:.2f} (relative L2): another target or dtype",
    )


def tap_layers(case: Case) -> Check:
    own = case.accuracy()
    for shift in case.shifted:
        other = case.accuracy(taps=lambda index, shift=shift: case.live_taps(index, shift))  # type: ignore[misc]
        if other > own + MARGIN:
            detail = (
                f"slot 1 is right {100 * other:.0f} % with tap ids {shift:+d}, {100 * own:.0f} % with its own"
            )
            return Check(
                "tap layers", SUSPECT, other - own, f"{detail}: the drafter was trained on layers off by one"
            )
    return Check(
        "tap layers", FINE, own, f"slot 1 is right {100 * own:.0f} %, and no better one layer up or down"
    )


def final_norm(case: Case) -> Check:
    name = "final norm"
    pairs = [(i, item.final) for i, item in enumerate(case.items) if item.final is not None]
    if not pairs:
        return Check(
            name, SKIPPED, float("nan"), "the store has no final states, so no teacher was made of them"
        )
    last = case.target.num_layers - 1
    before = max(relative_error(final.to(case.target.device), case.layers[i][last]) for i, final in pairs)
    if before < 0.05:
        return Check(
            name, FINE, before, f"stored final states are those before the final norm (error {before:.1e})"
        )
    after = max(relative_error(final.to(case.target.device), case.normed[i]) for i, final in pairs)
    if after < 0.05:
        return Check(
            name,
            SUSPECT,
            before,
            "stored final states were taken after the final norm: the teacher normed twice",
        )
    return Check(
        name, SUSPECT, before, f"stored final states match neither side of the final norm ({before:.2f})"
    )


def mask_token(case: Case) -> Check:
    name, own = "mask token", case.drafter.config.mask_token_id
    seen = sum(int((ids == own).sum()) for ids in case.ids)
    tokenizer = None if case.target.name.startswith("random:") else case.target.tokenizer
    usual, why = resolve_mask_token_id(case.target.vocab_size, tokenizer=tokenizer)
    base = case.accuracy()
    if usual != own and (other := case.accuracy(mask=usual)) > base + MARGIN:
        detail = (
            f"slot 1 is right {100 * other:.0f} % with mask token {usual} ({why}), {100 * base:.0f} % with "
            f"{own}"
        )
        return Check(name, SUSPECT, other - base, detail)
    if own in case.target.stop_ids:
        detail = f"mask token {own} ends a turn: a masked slot and the end of an answer look alike"
        return Check(name, SUSPECT, 1.0, detail)
    if seen:
        return Check(
            name, SUSPECT, seen, f"mask token {own} occurs {seen} times in the text: it is an ordinary token"
        )
    return Check(name, FINE, own, f"token {own} is in no sample, and no other candidate drafts better")


def anchor_position(case: Case) -> Check:
    own = case.accuracy()
    for shift, what in ((1, "up to and including the anchor"), (-1, "without the token before the anchor")):
        other = case.accuracy(context_shift=shift)
        if other > own + MARGIN:
            detail = (
                f"slot 1 is right {100 * other:.0f} % with context {what}, {100 * own:.0f} % with context "
                "before it"
            )
            return Check(
                "anchor position", SUSPECT, other - own, f"{detail}: it was trained with another context"
            )
    return Check("anchor position", FINE, own, "context strictly before the anchor drafts best")


def label_shift(case: Case) -> Check:
    own, other = case.accuracy(), case.accuracy(label_shift=1)
    if other > own + MARGIN:
        detail = f"slot 1 gives the token at a+2 {100 * other:.0f} % of the time, at a+1 {100 * own:.0f} %"
        return Check(
            "slot labels", SUSPECT, other - own, f"{detail}: it was trained with labels shifted by one"
        )
    return Check("slot labels", FINE, own, "slot k predicts the token at a+k")


def precision(case: Case) -> Check:
    stored = case.accuracy(taps=lambda index: case.items[index].taps.to(case.target.device))
    live = case.accuracy()
    if abs(stored - live) > MARGIN:
        detail = f"slot 1 is right {100 * stored:.0f} % on stored states, {100 * live:.0f} % on live ones"
        return Check(
            "precision of states", SUSPECT, stored - live, f"{detail}: storage or dtype changes the drafts"
        )
    return Check("precision of states", FINE, stored - live, "stored and live states draft alike")


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
    bound = 1e-3 if case.target.dtype == torch.float32 else 0.05
    kind = "recurrent states and cache" if case.target.is_hybrid else "cache"
    verdict = FINE if error < bound else SUSPECT
    outcome = "are rolled back" if verdict == FINE else "are not what they were"
    return Check(
        "rollback of the target", verdict, error, f"{kind} {outcome} after a partial acceptance ({error:.1e})"
    )


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
    bound = 1e-3 if hidden[0].dtype == torch.float32 else 0.05
    verdict = FINE if error < bound else SUSPECT
    return Check(
        "draft cache", verdict, error, f"incremental and whole context differ by {error:.1e} (relative L2)"
    )
