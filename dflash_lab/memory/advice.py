"""What to change so that it fits: each change tried on the account, with the GiB it gives and its time; and
what is often tried and gives nothing, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash_lab.memory.account import Account, predict_extraction
from dflash_lab.memory.planner import MARGIN, MOST_ROWS, largest, most_anchors, usable
from dflash_lab.memory.shapes import GIB, ExtractionSetup, TargetShape, TrainingSetup, target_shape
from dflash_lab.memory.training import predict_training, with_chunk

_NO_HELP = 1e-3  # GiB
LEAST = {"batch": 1, "anchors": 8}  # a cap below this is no change that a run could take
USELESS_EXTRACTION = {
    "more GPUs (data parallel)": "each holds a whole copy of the target and whole batches",
    "empty_cache() between batches": "it frees nothing live, and the allocator reuses its cache anyway",
}
USELESS_TRAINING = {
    "checkpoint the head alone": "the backward makes all its logits again ({logits:.1f} GiB at the peak): "
    "only what lies between is spared, at the price of its input",
    "chunks of logits, concatenated": "together they are the whole tensor again",
    "a loop of chunks under autograd": "the logits of every chunk wait for the backward",
    "more GPUs (data parallel)": "each replica holds all of this; only more batches run at once",
}


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


def advise(
    target: Any,
    setup: ExtractionSetup | TrainingSetup,
    budget_gib: float,
    *,
    drafter: Any = None,
    margin: float = MARGIN,
    cuda: bool = True,
) -> Advice:
    """Say what to change so that one extraction batch, or one training step of `drafter`, fits `budget_gib`.

    target: a transformers config or a `TargetShape`. drafter: a `DrafterConfig`, needed for a
    `TrainingSetup`. Of the budget `margin`, a share, is kept free.
    """
    shape, room = target_shape(target), usable(budget_gib, margin)

    def predict(changed: Any) -> Account:
        if isinstance(changed, ExtractionSetup):
            return predict_extraction(shape, changed, cuda=cuda)
        return predict_training(shape, drafter, changed, cuda=cuda)

    def cap(changed: Any) -> Option:
        if isinstance(changed, TrainingSetup):
            return anchor_cap(most_anchors(shape, drafter, changed, room, cuda=cuda))
        rows = largest(
            lambda n: predict(replace(changed, batch=n)).peak <= room, max(changed.batch, MOST_ROWS)
        )
        return batch_cap(changed, rows)

    if isinstance(setup, ExtractionSetup):
        unit, field, wanted, useless = "batch", "batch", setup.batch, USELESS_EXTRACTION
        options = extraction_options(shape, setup, cuda=cuda)
    else:
        setup = with_chunk(setup, shape.vocab, cuda=cuda)
        unit, field, wanted = "number of anchors", "anchors", setup.anchors
        whole = predict(replace(setup, loss="naive")).terms
        logits = (whole.get("logits", 0) + whole.get("softmax and its gradient", 0)) / GIB
        useless = {name: why.format(logits=logits) for name, why in USELESS_TRAINING.items()}
        options = training_options(shape, drafter, setup, cuda=cuda)
    asked, capped = predict(setup), cap(setup)
    most, fits = capped.setting[field], asked.peak <= room
    if LEAST[field] <= most < wanted:
        options.append(capped)
    changes = sorted((_tried(option, setup, predict, asked, room) for option in options), key=_rank)
    changes += [
        Change(name, {}, 0.0, asked.peak_gib, 0.0, fits, f"no help: {why}") for name, why in useless.items()
    ]
    plan, after = ((), asked) if fits else _plan(changes, setup, predict, cap, room)
    verdict = "fits" if fits else f"is {(asked.peak - room) / GIB:.2f} GiB too much for"
    text = (
        f"{asked.explain()} That {verdict} {budget_gib:.4g} GiB ({100 * margin:.0f}% kept free); the largest "
        f"{unit} that fits as it is, is {most:,} (asked: {wanted:,})."
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
    """What leaves the run the same and fits alone comes first, cheapest first; then what gives most."""
    ready = change.fits and change.built_in and change.same_goal
    cost = max(change.time_pct, 0.0) if ready else 0.0
    return (change.saves_gib <= _NO_HELP, not ready, not change.same_goal, cost, -change.saves_gib)


def _plan(
    changes: Sequence[Change],
    setup: Any,
    account: Callable[[Any], Account],
    cap: Callable[[Any], Option],
    room: int,
) -> tuple[tuple[str, ...], Account]:
    """Make changes one after another until it fits: free ones first, then by time a GiB, other goals last.

    A cap on rows or anchors is computed where it comes, with what was changed before it. A later change takes
    the place of those that it excludes.
    """
    helpful = [c for c in changes if c.setting and c.built_in and c.saves_gib > _NO_HELP]
    order = sorted(helpful, key=lambda c: (not c.same_goal, max(c.time_pct, 0.0) / c.saves_gib, -c.saves_gib))
    current, made = setup, list[Change | Option]()
    for change in order:
        tried: Change | Option = change
        if LEAST.keys() & change.setting.keys():
            tried = cap(current)
            if min(tried.setting.values()) < 1:
                continue
        kept = [one for one in made if not _excludes(tried.setting, one.setting)]
        changed = setup
        for one in (*kept, tried):
            changed = replace(changed, **one.setting)
        if account(changed).peak >= account(current).peak:
            continue
        current, made = changed, [*kept, tried]
        if account(current).peak <= room:
            return tuple(one.name for one in made), account(current)
    return (), account(setup)


def _excludes(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two settings are values of the same choice, or train_drafter refuses them together: slices of
    a head (head_parallel) lie with their drafters.
    """
    elsewhere = {"head_elsewhere", "target_logits_elsewhere"}
    sliced = any("vocabulary_shards" in a and elsewhere & b.keys() for a, b in ((one, other), (other, one)))
    return one.keys() == other.keys() or sliced


# The changes. Times are shares of a batch or step: from operation counts, and for the loss from rates
# measured on an H200 (24,576 x 248,320 x 5,120, hard and soft targets), weighed with the loss's share of a
# step.

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


def extraction_options(shape: TargetShape, setup: ExtractionSetup, *, cuda: bool = True) -> list[Option]:
    """Return what can be changed in an extraction batch, but for a cap on its rows."""
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


def anchor_cap(most: int) -> Option:
    """Return the change to the largest number of anchors that fits."""
    why = "fewer blocks a step; a block takes as long as before"
    return Option(f"{most} anchors", {"anchors": most}, 0.0, why, same_goal=False)


def training_options(
    shape: TargetShape, drafter: Any, setup: TrainingSetup, *, cuda: bool = True
) -> list[Option]:
    """Return what can be changed in a training step, but for a cap on its anchors."""
    options = []
    if cuda and not setup.compiled:
        why = "compile: true; norms, SwiGLU and rotation keep only what products and attention read again"
        options.append(Option("compile the draft layers", {"compiled": True}, 0.0, why))
    if setup.loss != "fused":
        faster = 100 * (_LOSS_MS["fused"] / _LOSS_MS[setup.loss] - 1) * _LOSS_SHARE
        why = "the gradient is finished inside the chunk, so one chunk's logits exist at a time"
        options.append(Option("chunked loss", {"loss": "fused"}, round(faster, 1), why))
    for chunk, time_pct, why in (
        (512, 0.0, "matrix products of 512 rows still run at full rate"),
        (256, 3.0, "they lose rate here"),
    ):
        if setup.chunk > chunk:
            options.append(Option(f"loss chunks of {chunk}", {"chunk": chunk}, time_pct, why))
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
    whole = setup.vocabulary_shards == 1
    placed = setup.head_elsewhere or setup.target_logits_elsewhere  # train_drafter refuses slices beside it
    needed = shape.tied or setup.live or drafter.selector_rank  # these keep the whole head here
    if cuda and whole and not placed and not needed:
        gpus = max(2, setup.data_parallel, setup.shards)
        change: dict[str, Any] = {"vocabulary_shards": gpus}
        if setup.data_parallel == setup.shards == 1:  # a second process, whose gradients lie in DDP's buckets
            change |= {"data_parallel": gpus, "gradients_kept": True}
        why = "head_parallel: true, gpus: N, tau_samples: 0; each GPU holds a slice of the head for all rows"
        options.append(Option(f"vocabulary-parallel head over {gpus} GPUs", change, 3.0, why))
    if cuda and whole and setup.soft_targets and not placed:
        why = "target_head_gpu: N; its side is projected there, one chunk of its logits at a time comes here"
        change = {"target_logits_elsewhere": True}
        options.append(Option("target logits on a second GPU", change, -8.0, why))
    if cuda and whole and not setup.head_elsewhere:
        why = "head: N; embedding, head and loss leave this device, block states cross over and back"
        options.append(Option("head and loss on another GPU", {"head_elsewhere": True}, 2.0, why))
    if setup.optimizer == "adamw":
        why = "moments: int8, a byte each with a scale a block; making the codes takes room for a moment"
        options.append(Option("8-bit optimizer", {"optimizer": "adamw8bit"}, 1.0, why))
        why = "offload: true; moments and masters stay on the host, a matrix at a time comes here"
        options.append(Option("optimizer on the CPU", {"optimizer": "cpu-offload"}, 30.0, why))
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
