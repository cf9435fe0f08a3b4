"""The non-negative fit: exact on exact data, never negative, judged on points it did not see."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_targets import tiny_config

from dflash_lab.errors import InputError
from dflash_lab.file_errors import FileError
from dflash_lab.memory.account import BEYOND, Account
from dflash_lab.memory.calibrated import extraction_prediction, extraction_scope, find_calibration
from dflash_lab.memory.extraction_account import extraction_account
from dflash_lab.memory.fit import LARGEST_BYTES, Calibration, Point, fit, nnls
from dflash_lab.memory.setups import ExtractionSetup
from dflash_lab.memory.shapes import target_shape


def setup(batch, length):
    return ExtractionSetup(batch=batch, length=length, tap_ids=(1, 3))


def test_exact_data_give_exact_coefficients():
    rng = np.random.default_rng(0)
    matrix = rng.uniform(0, 1, (30, 4)) * np.array([1e9, 1e3, 1.0, 1e6])
    wanted = np.array([2.0, 0.0, 5e5, 3.0])
    assert nnls(matrix, matrix @ wanted) == pytest.approx(wanted, rel=1e-6, abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(5, 20))
def test_the_solution_meets_the_conditions_of_optimality(seed, width, height):
    """Karush-Kuhn-Tucker: x >= 0, no gain in raising a zero, no slope where x > 0."""
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(height, width)), rng.normal(size=height)
    x = nnls(matrix, target)
    slope = matrix.T @ (target - matrix @ x)
    assert (x >= 0).all()
    assert (slope <= 1e-6).all()
    assert np.abs(slope[x > 1e-12]).max(initial=0.0) < 1e-6


def points(noise=0.0, constant=3e7, seed=0):
    rng = np.random.default_rng(seed)
    found = []
    for batch in (1, 4, 16, 64, 256):
        for length in (8, 65, 335, 1000, 4096):
            item = setup(batch, length)
            padded = batch * 64 * -(-length // 64)
            truth = 1.1 * 1e5 * item.tokens + 2e4 * padded + constant
            truth *= 1 + noise * rng.uniform(-1, 1)
            found.append(Point(item, predicted=100_000 * item.tokens, measured=int(truth)))
    return found


def test_held_out_points_are_predicted_and_counted():
    calibration = fit(points(noise=0.01), scope={"device": "a card"})
    assert calibration.fitted_points + calibration.heldout_points == 25
    assert calibration.heldout_points >= 14
    assert len(calibration.heldout) == calibration.heldout_points
    assert calibration.median_error_pct < 1.5 and calibration.worst_error_pct < 4
    assert calibration.worst_error_pct == max(abs(error) for error in calibration.heldout)


def test_an_uncalibrated_prediction_is_further_off():
    raw = [100 * abs(p.predicted / p.measured - 1) for p in points()]
    found = fit(points())
    assert np.median(raw) > 5 > found.worst_error_pct
    assert found.formulas_worst_error_pct >= found.formulas_median_error_pct > 5


def test_a_calibrated_account_says_so_and_adds_up():
    calibration = fit(points(), scope={"device": "a card"})
    item = setup(32, 335)
    account = Account("analytic", "x", {"target weights": 10**9, "MLP": 100_000 * item.tokens})
    better = calibration.account(account, item, account)
    assert better.kind == "calibrated" and "a card" in better.notes[-1]
    assert better.moving == calibration.predict(item, account.moving) > account.moving
    assert better.terms[BEYOND] == better.moving - account.moving and BEYOND in better.formulas
    assert better.terms["target weights"] == 10**9


def test_what_was_not_measured_keeps_the_gain_of_its_formulas():
    """A fit may explain bytes by tokens alone; a setup that holds more by formula must still be larger."""
    calibration = fit(points())
    shape = target_shape(tiny_config("qwen3"))
    one = setup(8, 64)
    flying, wide = replace(one, in_flight=3), replace(one, tap_ids=(1, 2, 3))
    bare, more = (extraction_account(shape, item, cuda=False) for item in (one, flying))
    plain, other = (
        extraction_prediction(shape, item, cuda=False, calibration=calibration) for item in (one, flying)
    )
    assert plain.kind == "calibrated" and calibration.measured(wide) == one
    assert other.peak - plain.peak == more.peak - bare.peak > 0


def test_a_calibration_below_the_formulas_shrinks_what_moves_and_nothing_else():
    halved = [Point(p.setup, p.predicted, p.predicted // 2) for p in points()]
    account = Account("analytic", "x", {"target weights": 10**9, "MLP": 4 * 10**8, "workspace": 10**7})
    better = fit(halved).account(account, setup(32, 335), account)
    assert better.terms["target weights"] == 10**9 and better.terms["workspace"] == 10**7
    assert better.terms["MLP"] == pytest.approx(2 * 10**8, rel=0.01)


def test_a_calibration_holds_for_what_it_was_measured_for_and_says_why_not(tmp_path):
    shape = target_shape(tiny_config("qwen3"))
    here = extraction_scope(shape, setup(1, 1), "a card")
    path = tmp_path / "calibration.json"
    fit(points(), scope=here).save(path)
    found = find_calibration(path, here)
    assert found.calibration == fit(points(), scope=here)
    assert "calibrated on" in found.words and path.name in found.words
    others = {
        "target": extraction_scope(target_shape(tiny_config("llama")), setup(1, 1), "a card"),
        "dtype": extraction_scope(shape, replace(setup(1, 1), dtype="float32"), "a card"),
        "device": extraction_scope(shape, setup(1, 1), "another card"),
        "layers": extraction_scope(shape, replace(setup(1, 1), fused=True), "a card"),
        "torch": {**here, "torch": "1.0"},
    }
    for name, scope in others.items():
        refused = find_calibration(path, scope)
        assert refused.calibration is None and f"another {name} (" in refused.words, name
        assert scope[name] in refused.words and here[name] in refused.words
    path.write_text("{}")
    damaged = find_calibration(path, here)
    assert damaged.calibration is None and "no calibration of this version" in damaged.words


def test_it_is_written_and_read(tmp_path):
    calibration = fit(points(noise=0.01))
    calibration.save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json") == calibration
    whole = json.loads((tmp_path / "c.json").read_text())
    unsealed = {name: value for name, value in whole.items() if name != "check"}
    damages = [
        {"coefficients": {"prediction": bad}} for bad in (float("nan"), -1.0, "1", None, True, 10**400)
    ]
    damages += [{"median_error_pct": "small"}, {"heldout": [float("inf")]}, {"fitted_points": None}]
    damages += [{"setup": {**whole["setup"], **bad}} for bad in ({"no_such": 1}, {"fused": "x"})]
    damages += [{"setup": {**whole["setup"], "tap_ids": ["a"]}}, {"setup": {"shards": 1, "mask": True}}]
    for wrong in (
        {"schema": 0},
        {"schema": 1},
        {},
        [],
        1,
        {**whole, "coefficients": [1]},
        {**whole, "heldout": 1},
        {**whole, "scope": None},
        {**whole, "coefficients": {**whole["coefficients"], "constant": 7.0}},  # not what was sealed
        *({**unsealed, **change} for change in damages),
    ):
        (tmp_path / "old.json").write_text(json.dumps(wrong))
        with pytest.raises(InputError, match=r"old\.json: no calibration .* measure again"):
            Calibration.load(tmp_path / "old.json")
    (tmp_path / "old.json").write_text(json.dumps(unsealed))  # as an earlier version wrote it
    assert Calibration.load(tmp_path / "old.json") == calibration
    os.mkfifo(tmp_path / "pipe.json")
    for odd in (tmp_path, tmp_path / "pipe.json"):
        with pytest.raises(FileError, match="nothing that can be read"):
            Calibration.load(odd)
    (tmp_path / "old.json").write_bytes(b" " * (LARGEST_BYTES + 1))
    with pytest.raises(InputError, match=r"no calibration .*more than"):
        Calibration.load(tmp_path / "old.json")


def test_too_few_points_are_refused():
    with pytest.raises(InputError, match="at least six"):
        fit(points()[:5])
