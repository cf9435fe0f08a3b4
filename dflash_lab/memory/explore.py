"""One question of a slider: accounts of an extraction batch and a training step, and what they do to a
budget.

Everything here is analytic, so that a figure can follow a slider: an account takes a fraction of a
millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash_lab.memory.account import Account
from dflash_lab.memory.extraction_account import extraction_account
from dflash_lab.memory.planner import MARGIN, largest, usable
from dflash_lab.memory.setups import ExtractionSetup, Placement, TrainingSetup
from dflash_lab.memory.shapes import GIB, TargetShape
from dflash_lab.memory.training_account import training_account


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
    one = replace(extraction, batch=question.batch, length=question.length)
    step = replace(
        training,
        anchors=question.anchors,
        block_size=question.block_size,
        chunk=question.chunk,
        placement=question.placement,
        context=max(training.context, question.anchors + 1),
    )

    def batch_fits(batch: int) -> bool:
        return extraction_account(target, replace(one, batch=batch), cuda=cuda).peak <= room

    def anchors_fit(eighth: int) -> bool:
        return training_account(target, drafter, replace(step, anchors=8 * eighth), cuda=cuda).peak <= room

    extracted = extraction_account(target, one, cuda=cuda)
    trained = training_account(target, drafter, step, cuda=cuda)
    return Answer(
        extraction=extracted,
        training=trained,
        extraction_fits=extracted.peak <= room,
        training_fits=trained.peak <= room,
        largest_batch=largest(batch_fits, 4096),
        largest_anchors=8 * largest(anchors_fit, (step.context - 1) // 8),
    )


def peak_map(
    shape: TargetShape,
    setup: ExtractionSetup,
    batches: Sequence[int],
    lengths: Sequence[int],
    *,
    cuda: bool = True,
) -> list[list[float]]:
    """Return predicted peaks in GiB, one row a length, one column a batch."""
    return [
        [
            extraction_account(shape, replace(setup, batch=batch, length=length), cuda=cuda).peak / GIB
            for batch in batches
        ]
        for length in lengths
    ]


def ladder(low: int, high: int, steps: int) -> list[int]:
    """Return about `steps` whole numbers from `low` to `high` in even ratios, both ends among them."""
    span = max(steps - 1, 1)
    return sorted({round(low * (high / low) ** (step / span)) for step in range(steps)} | {low, high})
