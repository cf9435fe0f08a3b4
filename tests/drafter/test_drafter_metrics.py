"""Metrics against their definitions, counted by hand and by loops; sums add over rows and processes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dflash_lab.drafter.objective import TOP_K, Tally


def stats(correct, live, *, rank=None, confidence=None, agree=None):
    correct, live = torch.tensor(correct).bool(), torch.tensor(live).bool()
    label = torch.where(live, 7, 0)
    argmax = torch.where(correct, label, 3)
    shape = correct.shape
    return SimpleNamespace(
        live=live,
        label=label,
        argmax=argmax,
        ce=torch.full(shape, 2.0),
        entropy=torch.full(shape, 0.5),
        p_max=torch.full(shape, 0.5) if confidence is None else torch.tensor(confidence),
        rank=torch.where(correct, 0, 20) if rank is None else torch.tensor(rank),
        kl=None if agree is None else torch.full(shape, 0.25),
        target_argmax=None if agree is None else torch.where(torch.tensor(agree).bool(), label, 1),
    )


def row(*arguments, chosen=None, **values):
    """A row whose loss is 6 over 3."""
    found = stats(*arguments, **values)
    parts = torch.tensor([4.5, 0, 1.5, 0, 0, 0, 0])
    return SimpleNamespace(
        rows=found, total=parts.sum(), parts=parts, denominator=torch.tensor(3.0), chosen=chosen
    )


def test_streak_and_conditional_accuracy_by_hand():
    # right, right, wrong; wrong, right, right; one slot only, right; padding
    correct = [[0, 1, 1, 0], [0, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]]
    live = [[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]]
    tally = Tally(4, "cpu")
    tally.add(row(correct, live))
    report = tally.report()
    assert report["blocks"] == 3 and report["slots"] == 7
    assert report["accuracy"] == pytest.approx(5 / 7)
    assert report["streak"] == pytest.approx(1 + (2 + 0 + 1) / 3)
    assert report["position_accuracy"] == pytest.approx([2 / 3, 2 / 2, 1 / 2])
    assert report["conditional_accuracy"] == pytest.approx([2 / 3, 1 / 1, 0 / 1])
    assert report["loss"] == pytest.approx(2.0) and report["ce"] == pytest.approx(2.0)
    assert report["loss_ce"] == pytest.approx(1.5) and report["loss_cap"] == pytest.approx(0.5)
    assert "loss_kl" not in report
    assert report["agreement"] is None and report["kl"] is None
    nothing = Tally(4, "cpu").report()
    assert (
        nothing["streak"] is None and nothing["loss"] is None and nothing["position_accuracy"] == [None] * 3
    )


def test_a_slot_whose_loss_is_not_a_number_is_right_in_no_measure():
    """No logit is above one that is NaN, so its rank is 0, and its argmax may be the label."""
    whole, broken = (row([[0, 1, 1, 1]], [[0, 1, 1, 1]]) for _ in range(2))
    broken.rows.ce[0, 2] = float("nan")
    reports = []
    for found in (whole, broken):
        tally = Tally(4, "cpu")
        tally.add(found)
        reports.append(tally.report())
    assert [report["top4_streak"] for report in reports] == [4, 2]
    assert [report["streak"] for report in reports] == [4, 2]
    assert [report["accuracy"] for report in reports] == pytest.approx([1, 2 / 3])
    assert reports[1]["ce"] is None and reports[1]["slots"] == 3


def test_top_k_streak_needs_only_the_rank():
    tally = Tally(4, "cpu")
    rank = [[0, 3, 1, 9], [0, 0, 20, 0]]
    tally.add(row([[0, 0, 0, 0], [0, 1, 0, 1]], [[0, 1, 1, 1], [0, 1, 1, 1]], rank=rank))
    report = tally.report()
    assert report["streak"] == 1 + (0 + 1) / 2
    assert report["top2_streak"] == 1 + (0 + 1) / 2
    assert report["top4_streak"] == 1 + (2 + 1) / 2
    assert report["top16_streak"] == 1 + (3 + 1) / 2


def test_calibration_error_and_agreement():
    tally = Tally(3, "cpu")
    confidence = [[0.0, 0.9, 0.9], [0.0, 0.9, 0.1]]
    agree = [[0, 1, 0], [0, 1, 1]]
    tally.add(row([[0, 1, 0], [0, 0, 1]], [[0, 1, 1], [0, 1, 1]], confidence=confidence, agree=agree))
    report = tally.report()
    assert report["ece"] == pytest.approx((3 * (0.9 - 1 / 3) + (1 - 0.1)) / 4)  # they do not cancel
    assert report["agreement"] == pytest.approx(3 / 4) and report["kl"] == pytest.approx(0.25)


def test_random_rows_against_loops_and_sums_add():
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(3):
        lengths = torch.randint(0, 5, (6,), generator=generator)
        live = (torch.arange(5)[None] <= lengths[:, None]) & (torch.arange(5)[None] > 0)
        correct = (torch.rand(6, 5, generator=generator) < 0.6) & live
        rows.append(row(correct.int().tolist(), live.int().tolist()))
    whole, parts = Tally(5, "cpu"), [Tally(5, "cpu") for _ in rows]
    for each, part in zip(rows, parts, strict=True):
        whole.add(each)
        part.add(each)
    merged, bad = Tally(5, "cpu"), Tally(5, "cpu")
    bad.sums["ce"].fill_(float("nan"))
    merged.merge(bad, torch.tensor(False))  # a bad step's sums are left out
    for part in parts:
        merged.merge(part, torch.tensor(True))
    assert merged.report() == whole.report()
    doubled = whole.reduced(lambda flat: flat * 2).report()  # as two processes with the same rows
    assert doubled["streak"] == whole.report()["streak"] and doubled["slots"] == 2 * whole.report()["slots"]
    accepted = blocks = 0
    for each in (r.rows for r in rows):
        for live, correct in zip(each.live, (each.argmax == each.label) & each.live, strict=True):
            if not live.any():
                continue
            blocks += 1
            for k in range(1, 5):
                if not (live[k] and correct[k]):
                    break
                accepted += 1
    assert whole.report()["streak"] == pytest.approx(1 + accepted / blocks)
    assert TOP_K[0] == 1 and float(whole.sums["top_k"][0]) == accepted


def test_selector_counts_its_own_choices():
    chosen = torch.tensor([[-1, 7, 7, 2], [-1, 7, 3, 7]])
    tally = Tally(4, "cpu")
    tally.add(row([[0, 0, 0, 0]] * 2, [[0, 1, 1, 1]] * 2, chosen=chosen))
    report = tally.report()
    assert report["selector_accuracy"] == pytest.approx(4 / 6)
    assert report["selector_streak"] == pytest.approx(1 + (2 + 1) / 2) and report["streak"] == 1.0


def test_open_sums_of_another_version_begin_anew(caplog):
    tally, other = Tally(3, "cpu"), Tally(3, "cpu")
    for one, value in ((tally, 1.0), (other, 2.0)):
        one.flat.fill_(value)
    tally.load(other.sums)
    assert torch.equal(tally.flat, other.flat) and not caplog.records
    tally.load({name: value for name, value in other.sums.items() if name != "parts"})
    assert not tally.flat.any() and "begins anew" in caplog.text
