"""What fits a budget: the largest batch of each length bucket, the largest number of anchors, yes or no. From
the formulas, in milliseconds and without a device.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash_lab.errors import InputError
from dflash_lab.memory.account import STATIC_TERMS, Account, predict_extraction
from dflash_lab.memory.shapes import (
    CHUNK,
    GIB,
    MIB,
    ExtractionSetup,
    Placement,
    TargetShape,
    TrainingSetup,
    target_shape,
)
from dflash_lab.memory.training import predict_training

# Of a budget, left free for what no account sees: 4 % for fragmentation and kernel scratch, and what the
# formulas were further off, at worst 2.1 % (steps of the 27B shape on an H200: docs/memory.md).
MARGIN = 0.061
KNEE_TOKENS = (8192, 65536)
_KNEE_FLOP = 6.4e12  # of one layer: 16 ms at 400 TFLOP/s, beside which launches vanish
CPU_KNEE_TOKENS = 2048
MOST_ROWS = 4096  # of a batch that is looked for


@dataclass(frozen=True)
class ExtractionBudget:
    """What `extract` may put into a batch.

    Of each length bucket (its longest sample, in tokens): the largest of `batches` that fits, the term that
    it is `limited_by` (or "max_batch"), and its account there. `fits_tokens` is what memory allows
    everywhere, `token_budget` the smaller of that and the knee.
    """

    token_budget: int
    max_batch: int
    fits_tokens: int
    batches: dict[int, int]
    limited_by: dict[int, str]
    accounts: dict[int, Account]
    chunk: int = 1  # rows are padded to multiples of this where the budget counts them

    def batch(self, length: int) -> int:
        """Return the largest batch of samples of at most `length` tokens under this budget (at least 1)."""
        bucket = min((edge for edge in self.batches if edge >= length), default=max(self.batches))
        rows = min(self.batches[bucket], self.max_batch)
        return max(1, min(rows, self.token_budget // (self.chunk * -(-length // self.chunk))))


@dataclass(frozen=True)
class TrainingFit:
    """Whether a step fits, its account, and the most anchors (a multiple of 8; 0: none) that would."""

    fits: bool
    account: Account
    largest_anchors: int


def usable(budget_gib: float, margin: float = MARGIN) -> int:
    """Return the bytes of a budget that may be planned with."""
    if not budget_gib > 0:
        raise InputError(f"budget_gib={budget_gib}: a positive number of GiB.")
    return int(budget_gib * GIB * (1 - margin))


def knee(shape: TargetShape, *, cuda: bool = True) -> int:
    """Return the tokens a batch beyond which the rate of `shape` is flat: they keep a layer busy enough."""
    if not cuda:
        return CPU_KNEE_TOKENS
    low, high = KNEE_TOKENS
    layer = shape.flops_per_token() / shape.layers
    return int(min(high, max(low, _KNEE_FLOP / layer))) // 1024 * 1024


def padded(shape: TargetShape, length: int) -> int:
    """Return the tokens a row of `length` counts for: whole chunks of 64 where there are linear layers."""
    return CHUNK * -(-length // CHUNK) if shape.delta else length


def length_buckets(longest: int) -> list[int]:
    """Return bucket edges in tokens: 64, 128, 256, ... and `longest` itself as the last."""
    edges = [64 << power for power in range(max(0, (longest - 1).bit_length() - 6)) if 64 << power < longest]
    return [*edges, longest]


def largest(fits: Callable[[int], bool], high: int) -> int:
    """Return the largest n in 0..`high` with ``fits(n)``, which is true up to some n and false beyond."""
    return bisect.bisect(range(1, high + 1), 0, key=lambda n: not fits(n))


def extraction_budget(
    target: Any,
    setup: ExtractionSetup,
    budget_gib: float,
    *,
    max_batch: int = 512,
    knee_tokens: int = 0,
    cuda: bool = True,
    margin: float = MARGIN,
) -> ExtractionBudget:
    """Plan the batches of an extraction of samples of up to `setup.length` tokens under `budget_gib`.

    target, cuda: as in `predict_extraction`; the batch of `setup` does not count. Raises `InputError` if not
    even one sample of that length fits, saying what fills the memory.
    """
    shape, longest = target_shape(target), setup.length
    room = usable(budget_gib, margin)
    batches, limited_by, accounts = {}, {}, {}
    for length in length_buckets(longest):

        def account(batch: int, length: int = length) -> Account:
            return predict_extraction(shape, replace(setup, batch=batch, length=length), cuda=cuda)

        found = largest(lambda batch, account=account: account(batch).peak <= room, max_batch)  # type: ignore[misc]
        one = account(max(found, 1))
        if found == 0:
            raise InputError(
                f"Not one sample of {length:,} tokens fits {budget_gib:g} GiB "
                f"({100 * margin:.0f}% kept free): {one.explain()}"
            )
        batches[length], accounts[length] = found, one
        limited_by[length] = "max_batch" if found == max_batch else _largest_moving(one)
    whole = [rows * padded(shape, length) for length, rows in batches.items() if rows < max_batch]
    fits_tokens = min(whole, default=max_batch * longest)
    return ExtractionBudget(
        token_budget=max(longest, min(fits_tokens, knee_tokens or knee(shape, cuda=cuda))),
        max_batch=max_batch,
        fits_tokens=fits_tokens,
        batches=batches,
        limited_by=limited_by,
        accounts=accounts,
        chunk=CHUNK if shape.delta else 1,
    )


def training_fits(
    target: Any,
    drafter: Any,
    setup: TrainingSetup,
    budget_gib: float,
    *,
    cuda: bool = True,
    margin: float = MARGIN,
) -> TrainingFit:
    """Say whether a training step fits `budget_gib`, and how many anchors would (see `predict_training`)."""
    shape = target_shape(target)
    room = usable(budget_gib, margin)
    asked = predict_training(shape, drafter, setup, cuda=cuda)
    most = most_anchors(shape, drafter, setup, room, cuda=cuda)
    return TrainingFit(asked.peak <= room, asked, most)


def most_anchors(shape: TargetShape, drafter: Any, setup: TrainingSetup, room: int, *, cuda: bool) -> int:
    """Return the most anchors, in eights and within the context, that take at most `room` bytes."""

    def fits(eighths: int) -> bool:
        sized = replace(setup, anchors=8 * eighths)
        return predict_training(shape, drafter, sized, cuda=cuda).peak <= room

    return 8 * largest(fits, max(1, (setup.context - 1) // 8))


def expandable_segments() -> bool:
    """Whether this process's CUDA allocator was told to expand its segments."""
    settings = (os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return any("expandable_segments:true" in text.replace(" ", "").lower() for text in settings)


def _largest_moving(account: Account) -> str:
    moving = {name: size for name, size in account.terms.items() if name not in STATIC_TERMS and size > MIB}
    return max(moving, key=lambda name: moving[name]) if moving else "target weights"


# A slider's question


@dataclass(frozen=True)
class Question:
    """What the sliders say. `vocabulary` 0 keeps the target's."""

    budget_gib: float
    batch: int
    length: int
    anchors: int
    block_size: int
    vocabulary: int
    chunk: int
    placement: Placement


@dataclass(frozen=True)
class Answer:
    """Both accounts, whether each fits, and the largest batch and number of anchors that would."""

    extraction: Account
    training: Account
    extraction_fits: bool
    training_fits: bool
    largest_batch: int
    largest_anchors: int


def answer(
    question: Question,
    shape: TargetShape,
    drafter: Any,
    extraction: ExtractionSetup,
    training: TrainingSetup,
    *,
    cuda: bool = True,
    margin: float = MARGIN,
) -> Answer:
    """Answer `question`; `extraction` and `training` hold what no slider moves."""
    room = usable(question.budget_gib, margin)
    target = replace(shape, vocab=question.vocabulary) if question.vocabulary else shape
    step = replace(
        training,
        anchors=question.anchors,
        block_size=question.block_size,
        chunk=question.chunk,
        placement=question.placement,
        context=max(training.context, question.anchors + 1),
    )

    def extracted(batch: int) -> Account:
        setup = replace(extraction, batch=batch, length=question.length)
        return predict_extraction(target, setup, cuda=cuda)

    batch, anchors = extracted(question.batch), predict_training(target, drafter, step, cuda=cuda)
    return Answer(
        extraction=batch,
        training=anchors,
        extraction_fits=batch.peak <= room,
        training_fits=anchors.peak <= room,
        largest_batch=largest(lambda count: extracted(count).peak <= room, MOST_ROWS),
        largest_anchors=most_anchors(target, drafter, step, room, cuda=cuda),
    )


def predicted_peaks(
    shape: TargetShape,
    setup: ExtractionSetup,
    batches: Sequence[int],
    lengths: Sequence[int],
    *,
    cuda: bool = True,
) -> list[list[float]]:
    """Return predicted peaks in GiB, one row a length, one column a batch."""

    def peak(batch: int, length: int) -> float:
        sized = replace(setup, batch=batch, length=length)
        return predict_extraction(shape, sized, cuda=cuda).peak / GIB

    return [[peak(batch, length) for batch in batches] for length in lengths]


def ladder(low: int, high: int, steps: int) -> list[int]:
    """Return about `steps` whole numbers from `low` to `high` in even ratios, both ends among them."""
    span = max(steps - 1, 1)
    return sorted({round(low * (high / low) ** (step / span)) for step in range(steps)} | {low, high})
