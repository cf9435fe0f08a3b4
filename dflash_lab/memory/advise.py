"""What to change so that it fits: each change tried on the account, with the GiB it gives and the time it
takes.

A change is a setup with one field replaced, so its gain is a prediction like any other and not a rule of
thumb. Ranked: what leaves the run the same and fits alone comes first, cheapest first; then what gives
most. Changes that are often tried and give nothing are listed with the reason, since those cost people
days.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash_lab.memory.account import Account
from dflash_lab.memory.calibrated import extraction_prediction, training_prediction
from dflash_lab.memory.changes import Option, anchor_cap, batch_cap, extraction_options, training_options
from dflash_lab.memory.fit import Calibration
from dflash_lab.memory.planner import MARGIN, largest, usable
from dflash_lab.memory.setups import ExtractionSetup, TrainingSetup
from dflash_lab.memory.shapes import GIB, TargetShape
from dflash_lab.memory.training_account import with_chunk

_NO_HELP = 1e-3  # GiB


@dataclass(frozen=True)
class Change:
    """One change tried: what it gives, the peak after it, and its time (percent of a step, or of a sample).

    `same_goal`, `built_in`: see `Option`.
    """

    name: str
    setting: Mapping[str, Any]
    saves_gib: float
    peak_gib: float
    time_pct: float
    fits: bool
    why: str
    same_goal: bool = True
    built_in: bool = True


@dataclass(frozen=True)
class Advice:
    """The account as asked, whether it fits, the largest size that does, changes ranked, and a plan that
    fits.

    `largest` is a batch (extraction) or a number of anchors (training). `plan` are changes made one after
    another, cheapest first; empty if it fits as it is or if nothing listed is enough. `after` is the
    account with the plan.
    """

    account: Account
    budget_gib: float
    fits: bool
    largest: int
    changes: tuple[Change, ...]
    plan: tuple[str, ...]
    after: Account
    paragraph: str


def advise_extraction(
    shape: TargetShape,
    setup: ExtractionSetup,
    budget_gib: float,
    *,
    margin: float = MARGIN,
    cuda: bool = True,
    calibration: Calibration | None = None,
) -> Advice:
    """Advise on one extraction batch under `budget_gib`."""
    room = usable(budget_gib, margin)

    def account(changed: ExtractionSetup) -> Account:
        return extraction_prediction(shape, changed, cuda=cuda, calibration=calibration)

    def cap(changed: ExtractionSetup) -> tuple[int, Option]:
        most = largest(
            lambda batch: account(replace(changed, batch=batch)).peak <= room, max(changed.batch, 4096)
        )
        return most, batch_cap(changed, most)

    most, _ = cap(setup)
    useless = [
        ("more GPUs (data parallel)", "each holds a whole copy of the target and whole batches"),
        ("empty_cache() between batches", "it frees nothing live, and the allocator reuses its cache anyway"),
    ]
    options = extraction_options(shape, setup, most, cuda=cuda)
    return _advice("batch", setup.batch, most, setup, account, cap, options, useless, budget_gib, room)


def advise_training(
    shape: TargetShape,
    drafter: Any,
    setup: TrainingSetup,
    budget_gib: float,
    *,
    margin: float = MARGIN,
    cuda: bool = True,
    calibration: Calibration | None = None,
) -> Advice:
    """Advise on a training step of `drafter` (a `DrafterConfig`) under `budget_gib`."""
    room = usable(budget_gib, margin)
    setup = with_chunk(setup, shape.vocab, cuda=cuda)

    def account(changed: TrainingSetup) -> Account:
        return training_prediction(shape, drafter, changed, cuda=cuda, calibration=calibration)

    def cap(changed: TrainingSetup) -> tuple[int, Option]:
        high = max(1, (changed.context - 1) // 8)
        most = 8 * largest(lambda n: account(replace(changed, anchors=8 * n)).peak <= room, high)
        return most, anchor_cap(changed, most)

    most, _ = cap(setup)
    whole = account(replace(setup, loss="naive")).terms
    logits = (whole.get("logits", 0) + whole.get("softmax and its gradient", 0)) / GIB
    useless = [
        (
            "checkpoint the head alone",
            f"the backward makes all its logits again ({logits:.1f} GiB at the peak): only what lies "
            "between is spared, at the price of its input",
        ),
        ("chunks of logits, concatenated", "together they are the whole tensor again"),
        ("a loop of chunks under autograd", "the logits of every chunk wait for the backward"),
        ("more GPUs (data parallel)", "each replica holds all of this; only more batches run at once"),
    ]
    options = training_options(setup, most, cuda=cuda)
    return _advice(
        "number of anchors", setup.anchors, most, setup, account, cap, options, useless, budget_gib, room
    )


def _advice(
    unit: str,
    wanted: int,
    most: int,
    setup: Any,
    account: Callable[[Any], Account],
    cap: Callable[[Any], tuple[int, Option]],
    options: Sequence[Option],
    useless: Sequence[tuple[str, str]],
    budget_gib: float,
    room: int,
) -> Advice:
    asked = account(setup)
    fits = asked.peak <= room
    changes = sorted((_tried(option, setup, account, asked, room) for option in options), key=_rank)
    for name, why in useless:
        changes.append(Change(name, {}, 0.0, asked.peak_gib, 0.0, fits, f"no help: {why}"))
    plan, after = ((), asked) if fits else _plan(changes, setup, account, cap, room)
    verdict = "fits" if fits else f"is {(asked.peak - room) / GIB:.2f} GiB too much for"
    budget = f"{budget_gib:.4g} GiB ({100 * (1 - room / (budget_gib * GIB)):.0f}% kept free)"
    text = (
        f"{asked.explain()} That {verdict} {budget}; the largest {unit} that fits as it is, is {most:,} "
        f"(asked: {wanted:,})."
    )
    if plan:
        text += f" Cheapest way found: {'; then '.join(plan)}: {after.peak_gib:.2f} GiB."
    elif not fits:
        text += " None of the changes listed is enough."
    return Advice(asked, budget_gib, fits, most, tuple(changes), plan, after, text)


def _tried(
    option: Option, setup: Any, account: Callable[[Any], Account], asked: Account, room: int
) -> Change:
    changed = account(replace(setup, **option.setting))
    return Change(
        name=option.name,
        setting=option.setting,
        saves_gib=(asked.peak - changed.peak) / GIB,
        peak_gib=changed.peak_gib,
        time_pct=option.time_pct,
        fits=changed.peak <= room,
        why=option.why,
        same_goal=option.same_goal,
        built_in=option.built_in,
    )


def _rank(change: Change) -> tuple[Any, ...]:
    ready = change.fits and change.built_in and change.same_goal
    cost = max(change.time_pct, 0.0) if ready else 0.0
    return (change.saves_gib <= _NO_HELP, not ready, not change.same_goal, cost, -change.saves_gib)


def _plan(
    changes: Sequence[Change],
    setup: Any,
    account: Callable[[Any], Account],
    cap: Callable[[Any], tuple[int, Option]],
    room: int,
) -> tuple[tuple[str, ...], Account]:
    """Make changes one after another until it fits: free ones first, then by time a GiB, other goals last.

    A cap on rows or anchors is computed where it comes, with what was changed before it.
    """
    helpful = [c for c in changes if c.setting and c.built_in and c.saves_gib > _NO_HELP]
    order = sorted(helpful, key=lambda c: (not c.same_goal, max(c.time_pct, 0.0) / c.saves_gib, -c.saves_gib))
    current = setup
    names: dict[tuple[str, ...], str] = {}  # by the fields set: a later change of the same takes its place
    for change in order:
        name, setting = change.name, change.setting
        if set(setting) & {"batch", "anchors"}:
            most, option = cap(current)
            if most < 1:
                continue
            name, setting = option.name, option.setting
        changed = replace(current, **setting)
        if account(changed).peak >= account(current).peak:
            continue
        current = changed
        names.pop(tuple(setting), None)
        names[tuple(setting)] = name
        if account(current).peak <= room:
            return tuple(names.values()), account(current)
    return (), account(setup)
