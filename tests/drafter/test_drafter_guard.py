"""The verdict on a step, reached on tensors: the same as a person would reach on the list of norms."""

from __future__ import annotations

import statistics

import pytest
import torch

from dflash_lab.drafter.distributed import total_norm
from dflash_lab.drafter.objective import Tally
from dflash_lab.drafter.train import HISTORY, TRUSTED, Guard, StepFault


def judged(guard: Guard, norm: float, loss: float = 1.0, denominator: float = 5.0) -> tuple[int, float]:
    values = (torch.tensor(value, dtype=torch.float64) for value in (loss, norm, denominator))
    fault, usual = guard.judge(*values)
    return int(fault), float(usual)


def test_usual_norm_is_the_median_of_the_last_good_ones(tmp_path):
    guard, seen = Guard(10.0, 3, tmp_path), []
    generator = torch.Generator().manual_seed(0)
    for norm in torch.rand(100, generator=generator).tolist():
        fault, usual = judged(guard, norm)
        assert fault == StepFault.NONE
        if seen:
            assert usual == pytest.approx(statistics.median(seen[-HISTORY:]))
        seen.append(norm)
    assert guard.state()["norms"] == pytest.approx(seen[-HISTORY:])


def test_faults_are_told_apart_and_leave_the_norms_alone(tmp_path):
    guard = Guard(10.0, 3, tmp_path)
    for number in range(TRUSTED):
        assert (
            judged(guard, 1e3 if number == 1 else 1.0)[0] == StepFault.NONE
        )  # too early to call it exploding
    before = guard.state()
    assert judged(guard, 1.0, loss=float("nan"))[0] == StepFault.LOSS
    assert judged(guard, float("inf"))[0] == StepFault.NORM
    assert judged(guard, 10.5)[0] == StepFault.EXPLODED
    assert judged(guard, float("nan"), loss=float("nan"), denominator=0.0)[0] == StepFault.EMPTY
    assert guard.state() == before
    assert judged(guard, 9.5)[0] == StepFault.NONE
    other = Guard(10.0, 3, tmp_path)
    other.load(guard.state())
    assert other.state() == guard.state() and judged(other, 10.5)[0] == StepFault.EXPLODED


def test_norm_of_bf16_gradients_is_summed_in_fp32():
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(shape, generator=generator).bfloat16() for shape in ((300, 70), (5,), (0, 4))]
    wanted = sum(float(grad.double().square().sum()) for grad in grads) ** 0.5
    assert float(total_norm(grads)) == pytest.approx(wanted, rel=1e-5)


def test_sums_of_a_bad_step_are_left_out():
    window, step = Tally(4, "cpu"), Tally(4, "cpu")
    step.flat += 1
    step.sums["ce"].fill_(float("nan"))
    window.merge(step, torch.tensor(False))
    assert (window.flat == 0).all()
    window.merge(step, torch.tensor(True))
    assert window.sums["slots"].tolist() == [1, 1, 1, 1] and window.sums["ce"].isnan()
