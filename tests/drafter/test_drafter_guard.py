"""Steps that do not count: judged by tensors as a person would by a list, skipped, kept, and never many."""

from __future__ import annotations

import dataclasses
import statistics

import pytest
import torch
from safetensors import safe_open
from support.tiny_drafters import (
    ItemList,
    Killed,
    killed_at,
    learner,
    records,
    tiny_head,
    tiny_items,
    tiny_settings,
)
from support.wording import refused

from dflash_lab.drafter.distributed import total_norm
from dflash_lab.drafter.train import HISTORY, TRUSTED, Diverged, Guard, StepFault, train


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
    for norm in [1.0, 1e3, *[1.0] * (TRUSTED - 2)]:  # too early to call a norm exploding
        assert judged(guard, norm)[0] == StepFault.NONE
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


def spoilt(items: ItemList, numbers, value=float("inf"), name="taps", where=slice(None)) -> ItemList:
    """The samples, those of `numbers` with states that are not numbers."""
    for number in numbers:
        states = getattr(items[number], name).clone()
        states[where] = value
        items[number] = dataclasses.replace(items[number], **{name: states})
    return items


def test_rows_that_are_not_numbers_are_skipped_counted_and_saved(tmp_path):
    items, drafter = spoilt(tiny_items(12, heldout=0), [5], float("nan"), where=slice(2)), learner()
    chosen = tiny_settings(max_steps=4, eval_rows=0, checkpoint_every=9)
    report = train(items, tiny_head(), drafter, chosen, folder=tmp_path)
    skipped = [r for r in records(tmp_path, "step") if r["skipped"]]
    assert report.skipped == len(skipped) >= 1
    assert all("nan" in r["skipped"] and r["loss"] is None for r in skipped)
    assert all(torch.isfinite(p).all() for p in drafter.parameters())
    saved = sorted((tmp_path / "bad").iterdir())
    assert len(saved) == report.skipped
    with safe_open(saved[0], framework="pt") as file:
        assert items[5].hash in file.metadata()["hashes"].split(",")
        assert any(torch.isnan(file.get_tensor(n)).any() for n in file.keys() if n.endswith("taps"))  # noqa: SIM118


@pytest.mark.parametrize(("name", "value"), [("taps", float("nan")), ("final", float("inf"))])
def test_a_held_out_sample_that_is_not_a_number_is_named_and_the_others_are_measured(
    tmp_path, name, value, caplog
):
    items = spoilt(tiny_items(), [1], value, name, where=3)
    chosen = tiny_settings(max_steps=2, eval_every=1, context_tokens=96)
    report = train(items, tiny_head(), learner(), chosen, folder=tmp_path)
    (left,) = records(tmp_path, "note")
    assert f"sample {items[1].hash} in held-out row 0" in left["text"]
    assert left["text"] in caplog.text and items[0].hash not in caplog.text
    blocks = [record["blocks"] for record in records(tmp_path, "heldout")]
    assert len(blocks) == 3 and 0 < blocks[0] < 12  # the third sample had a share of the anchors
    assert report.last["loss"] is not None and (report.best / "metrics.json").exists()


def test_too_many_bad_steps_in_a_row_counted_over_a_kill_end_the_run(tmp_path):
    items = spoilt(tiny_items(6, heldout=0), range(6))
    chosen = tiny_settings(max_bad_steps=3, eval_rows=0, checkpoint_every=1)
    with pytest.raises(Killed):
        train(items, tiny_head(), learner(), chosen, folder=tmp_path, on_progress=killed_at(2))
    with refused(Diverged) as caught:
        train(items, tiny_head(), learner(), chosen, folder=tmp_path)
    assert caught.value.details["skipped"] == 3 and "learning rate" in caught.value.advice
    assert len(list((tmp_path / "bad").iterdir())) == 3


def test_bad_steps_that_good_ones_part_do_not_end_a_run(tmp_path):
    """One sample a row and one of the two bad: every other step on average, seldom three in a row."""
    items = ItemList(spoilt(tiny_items(6, heldout=0), [0])[:2])
    chosen = tiny_settings(context_tokens=30, accumulate=1, max_steps=12, max_bad_steps=3, eval_rows=0)
    report = train(items, tiny_head(), learner(), chosen, folder=tmp_path)
    skipped = [bool(r["skipped"]) for r in records(tmp_path, "step")]
    assert report.skipped == sum(skipped) == 6  # more than may follow each other
    assert not all(skipped[:3])
