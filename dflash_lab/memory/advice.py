"""What to change so that it fits: each change tried on the account, with the GiB it gives and its time.

Ranked: what leaves the run the same and fits alone comes first, cheapest first; then what gives most. Changes
that are often tried and give nothing are listed with the reason, since those cost people days.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash_lab.memory.account import Account, extraction_account
from dflash_lab.memory.planner import MARGIN, largest, usable
from dflash_lab.memory.shapes import GIB, ExtractionSetup, TargetShape, TrainingSetup
from dflash_lab.memory.training import training_account, with_chunk

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
) -> Advice:
    """Advise on one extraction batch under `budget_gib`."""
    room = usable(budget_gib, margin)

    def account(changed: ExtractionSetup) -> Account:
        return extraction_account(shape, changed, cuda=cuda)

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
) -> Advice:
    """Advise on a training step of `drafter` (a `DrafterConfig`) under `budget_gib`."""
    room = usable(budget_gib, margin)
    setup = with_chunk(setup, shape.vocab, cuda=cuda)

    def account(changed: TrainingSetup) -> Account:
        return training_account(shape, drafter, changed, cuda=cuda)

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


# The changes -----------------------------------------------------------------------------------------------
# Times are shares of a batch or step: from operation counts, and for the loss from rates measured on an H200
# (24,576 x 248,320 x 5,120, hard and soft targets), weighed with the loss's share of a step.

_LOSS_MS = {"naive": 389, "concat": 389, "loop": 388, "checkpoint": 644, "fused": 318}
_LOSS_SHARE = 0.3
_EXPANDABLE = (
    "PYTORCH_ALLOC_CONF=expandable_segments:True before CUDA starts: batches of changing shape then share "
    "one growing segment (not together with max_split_size_mb, with which it grows without bound)"
)


@dataclass(frozen=True)
class Option:
    """A change to try: fields to replace, time in percent, and whether it is the same training afterwards.

    `same_goal` is false where the run would be another one (fewer anchors, hard labels); `built_in` is
    false for what the lab's trainer does not offer.
    """

    name: str
    setting: Mapping[str, Any]
    time_pct: float
    why: str
    same_goal: bool = True
    built_in: bool = True


def extraction_options(
    shape: TargetShape, setup: ExtractionSetup, most: int, *, cuda: bool = True
) -> list[Option]:
    """Return what can be changed in an extraction batch; `most` rows of this length fit as it is."""
    options = []
    taps = len(setup.tap_ids)
    if setup.capture != "hooks":
        why = f"keep {taps} tapped layers instead of all {shape.layers + 1} tensors"
        options.append(Option("hooks on the tapped layers", {"capture": "hooks"}, 0.0, why))
    if setup.logits:
        options.append(Option("no logits", {"logits": False}, -5.0, "the states are taken before the head"))
    if setup.use_cache:
        why = "nothing is decoded, and a linear layer's state costs the same for every row, however short"
        options.append(Option("no cache", {"use_cache": False}, 0.0, why))
    if setup.mask:
        why = "exact for causal layers, and no [L, L] tensor is built"
        options.append(Option("right padding, no mask", {"mask": False}, -5.0, why))
    if cuda and setup.kernels == "torch" and shape.delta is not None:
        why = "no fp32 tensors of whole chunks"
        options.append(Option("flash-linear-attention kernels", {"kernels": "fla"}, -40.0, why))
    if not setup.stop_early:
        why = "later layers, final norm and head never run"
        options.append(Option("stop after the last tap", {"stop_early": True}, -7.9, why))
    if 1 <= most < setup.batch:
        options.append(batch_cap(setup, most))
    if setup.batch > 1:
        why = "the rate is flat above a few thousand tokens"
        options.append(Option("half the batch", {"batch": setup.batch // 2}, 2.0, why))
    if taps > 3:
        kept = tuple(setup.tap_ids[round(place * (taps - 1) / 2)] for place in range(3))
        why = "drafts get shorter: 5.38 against 5.64 tokens a round with 3 taps against 5 in the DFlash paper"
        options.append(Option("capture 3 layers", {"tap_ids": kept}, 0.0, why, same_goal=False))
    if cuda and not setup.expandable:
        options.append(Option("expandable segments", {"expandable": True}, 0.0, _EXPANDABLE))
    return options


def batch_cap(setup: ExtractionSetup, most: int) -> Option:
    """Return the change to the largest batch that fits."""
    why = f"for samples of {setup.length:,} tokens; shorter ones are still batched wider"
    return Option(f"bucket by length, at most {most} rows here", {"batch": most}, 1.0, why)


def anchor_cap(setup: TrainingSetup, most: int) -> Option:
    """Return the change to the largest number of anchors that fits."""
    why = "fewer blocks a step; a block takes as long as before"
    return Option(f"{most} anchors", {"anchors": most}, 0.0, why, same_goal=False)


def training_options(setup: TrainingSetup, most: int, *, cuda: bool = True) -> list[Option]:
    """Return what can be changed in a training step; `most` anchors fit as it is."""
    options = []
    if cuda and not setup.compiled:
        why = "compile: true; norms, SwiGLU and rotation keep only what products and attention read again"
        options.append(Option("compile the draft layers", {"compiled": True}, 0.0, why))
    if setup.loss != "fused":
        faster = 100 * (_LOSS_MS["fused"] / _LOSS_MS[setup.loss] - 1) * _LOSS_SHARE
        why = "the gradient is finished inside the chunk, so one chunk's logits exist at a time"
        options.append(Option("chunked loss", {"loss": "fused"}, round(faster, 1), why))
    for chunk in (512, 256):
        if setup.chunk > chunk:
            why = (
                "matrix products of 512 rows still run at full rate"
                if chunk == 512
                else "they lose rate here"
            )
            options.append(
                Option(f"loss chunks of {chunk}", {"chunk": chunk}, 0.0 if chunk == 512 else 3.0, why)
            )
    if setup.checkpointing == "none":
        why = "each draft layer keeps its input and runs twice"
        options.append(Option("checkpoint the draft layers", {"checkpointing": "layers"}, 22.0, why))
        why = "the feed-forwards keep their input and run twice"
        option = Option("checkpoint the feed-forwards", {"checkpointing": "mlp"}, 13.0, why, built_in=False)
        options.append(option)
    if setup.placement == "same device":
        why = "the target's layers leave this device"
        options.append(Option("target on another device", {"placement": "other device"}, 2.0, why))
        why = "the states come from a feature store made before"
        options.append(Option("extract first, train from the store", {"placement": "cached"}, -50.0, why))
    if setup.vocabulary_shards == 1:
        why = "two GPUs hold half of the head each and make half of the logits"
        change = {"vocabulary_shards": 2}
        options.append(Option("vocabulary-parallel head over 2 GPUs", change, 3.0, why, built_in=False))
    if setup.soft_targets and not setup.target_logits_elsewhere:
        why = "the target's side is projected there; with chunks, one chunk of its logits still comes here"
        change = {"target_logits_elsewhere": True}
        options.append(Option("target logits on a second GPU", change, -8.0, why, built_in=False))
    if cuda and not setup.head_elsewhere:
        why = "head: N; embedding, head and loss leave this device, block states cross over and back"
        options.append(Option("head and loss on another GPU", {"head_elsewhere": True}, 2.0, why))
    if setup.optimizer == "adamw":
        why = "moments: int8, a byte each with a scale a block; making the codes takes room for a moment"
        options.append(Option("8-bit optimizer", {"optimizer": "adamw8bit"}, 1.0, why))
        why = "offload: true; moments and masters stay on the host, a matrix at a time comes here"
        options.append(Option("optimizer on the CPU", {"optimizer": "cpu-offload"}, 30.0, why))
    if 8 <= most < setup.anchors:
        options.append(anchor_cap(setup, most))
    for block in (16, 8):
        if setup.block_size > block:
            why = "shorter drafts; a drafter trained on long blocks serves short ones better than the reverse"
            option = Option(f"blocks of {block}", {"block_size": block}, 0.0, why, same_goal=False)
            options.append(option)
    if setup.soft_targets:
        why = "no target logits and no final states, but no KL to the target either"
        option = Option("hard labels only", {"soft_targets": False}, -15.0, why, same_goal=False)
        options.append(option)
    if cuda and not setup.expandable:
        options.append(Option("expandable segments", {"expandable": True}, 0.0, _EXPANDABLE))
    return options
