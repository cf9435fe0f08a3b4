"""One question of a slider: accounts of an extraction batch and a training step, and what they do to a
budget.

Everything here is formulas (calibrated, where something was measured), so that a figure can follow a slider:
an account takes a fraction of a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash_lab.memory.account import Account
from dflash_lab.memory.calibrated import extraction_prediction, training_prediction
from dflash_lab.memory.fit import Calibration
from dflash_lab.memory.planner import MARGIN, largest, usable
from dflash_lab.memory.setups import ExtractionSetup, Placement, TrainingSetup
from dflash_lab.memory.shapes import GIB, TargetShape


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
    calibrated: tuple[Calibration | None, Calibration | None] = (None, None),
) -> Answer:
    """Answer `question`; `extraction` and `training` hold what no slider moves, `calibrated` the
    calibrations of the two.
    """
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

    def extracted(batch: int) -> Account:
        setup = replace(one, batch=batch)
        return extraction_prediction(target, setup, cuda=cuda, calibration=calibrated[0])

    def trained(anchors: int) -> Account:
        setup = replace(step, anchors=anchors)
        return training_prediction(target, drafter, setup, cuda=cuda, calibration=calibrated[1])

    batch, anchors = extracted(question.batch), trained(question.anchors)
    return Answer(
        extraction=batch,
        training=anchors,
        extraction_fits=batch.peak <= room,
        training_fits=anchors.peak <= room,
        largest_batch=largest(lambda count: extracted(count).peak <= room, 4096),
        largest_anchors=8 * largest(lambda n: trained(8 * n).peak <= room, (step.context - 1) // 8),
    )


def peak_map(
    shape: TargetShape,
    setup: ExtractionSetup,
    batches: Sequence[int],
    lengths: Sequence[int],
    *,
    cuda: bool = True,
    calibration: Calibration | None = None,
) -> list[list[float]]:
    """Return predicted peaks in GiB, one row a length, one column a batch."""

    def peak(batch: int, length: int) -> float:
        sized = replace(setup, batch=batch, length=length)
        return extraction_prediction(shape, sized, cuda=cuda, calibration=calibration).peak / GIB

    return [[peak(batch, length) for batch in batches] for length in lengths]


def ladder(low: int, high: int, steps: int) -> list[int]:
    """Return about `steps` whole numbers from `low` to `high` in even ratios, both ends among them."""
    span = max(steps - 1, 1)
    return sorted({round(low * (high / low) ** (step / span)) for step in range(steps)} | {low, high})
