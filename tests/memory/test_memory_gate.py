"""The question before a run: cleared, refused with advice, or forced."""

import pytest
import torch
from cases import CARD_GIB, CONFIG, DRAFTER, SHAPE, batch, step
from support.wording import check_wording, refused

from dflash_lab.memory.account import predict_extraction
from dflash_lab.memory.gate import (
    DoesNotFit,
    clear_extraction,
    clear_training,
    explained,
    outcome,
    worst_batch,
    would_have_given,
)
from dflash_lab.memory.planner import usable
from dflash_lab.memory.shapes import GIB


@pytest.mark.parametrize("budget_gib, kernels", [(CARD_GIB, "fla"), (52.0, "fla"), (60.0, "torch")])
def test_the_planners_own_budget_is_cleared_whatever_the_lengths(budget_gib, kernels):
    cleared = clear_extraction(CONFIG, batch(kernels=kernels), budget_gib)
    assert cleared.account.peak <= usable(budget_gib) and not cleared.forced
    for length in (1, 8, 63, 64, 65, 127, 129, 335, 1000, 4096):
        rows = max(1, min(cleared.max_batch, cleared.token_budget // (64 * -(-length // 64))))
        account = predict_extraction(SHAPE, batch(rows, length, kernels=kernels))
        assert account.peak <= cleared.account.peak * 1.001


def test_the_worst_batch_of_short_rows_is_found():
    setup = batch(kernels="torch")
    assert worst_batch(SHAPE, setup, 16384, 4096).batch == 256  # rows of one token count for 64 each
    assert worst_batch(SHAPE, setup, 16384, 16).length >= 1024


def test_a_budget_by_hand_that_is_too_large_is_refused_with_advice_or_forced():
    with refused(DoesNotFit) as caught:
        clear_extraction(CONFIG, batch(), 60.0, token_budget=262144)
    assert caught.value.details["predicted_peak_gib"] > 60 and caught.value.advice in str(caught.value)
    forced = clear_extraction(CONFIG, batch(), 60.0, token_budget=262144, force=True)
    assert forced.forced and forced.token_budget == 262144


def test_training_is_cleared_refused_or_forced():
    assert not clear_training(CONFIG, DRAFTER, step(), CARD_GIB).forced
    assert clear_training(CONFIG, DRAFTER, step(), 48.0, force=True).forced
    for setup, budget_gib in ((step(), 48.0), (step(compiled=True), 36.0), (step(8, 64), 5.0)):
        with refused(DoesNotFit):
            clear_training(CONFIG, DRAFTER, setup, budget_gib)


def test_the_outcome_on_a_cpu_is_the_prediction_alone():
    cleared = clear_training(CONFIG, DRAFTER, step(64, 1024), CARD_GIB)
    known = cleared.account.live - cleared.account.terms["outside torch"]
    assert outcome(cleared, "cpu") == {"predicted_peak_gib": round(known / GIB, 4)}


@pytest.mark.gpu
def test_the_outcome_on_a_device_has_both():
    cleared = clear_training(CONFIG, DRAFTER, step(64, 1024), CARD_GIB)
    torch.ones(2**20, device="cuda")  # figures have four digits of a GiB
    found = outcome(cleared, "cuda")
    assert set(found) == {
        "predicted_peak_gib", "measured_peak_gib", "reserved_peak_gib", "memory_error_pct"
    }  # fmt: skip
    assert 0 < found["measured_peak_gib"] <= found["reserved_peak_gib"]


def test_a_lack_of_memory_in_a_cleared_run_says_what_would_have_given_it():
    """From the message alone: what was asked for, as which tensor, and the changes that give what lacked."""
    cleared = clear_training(CONFIG, DRAFTER, step(loss="naive", chunk=512), 200.0)
    message = (
        "CUDA out of memory. Tried to allocate 11.37 GiB. GPU 0 has a total capacity of 94.97 GiB of which "
        "3.21 GiB is free."
    )
    sizes = {"anchors": 1024, "block": DRAFTER.block_size, "vocabulary": 248_320}
    with pytest.raises(torch.OutOfMemoryError) as caught, explained(cleared, sizes):
        raise torch.OutOfMemoryError(message)
    told = caught.value.advice
    check_wording(told)
    for change in cleared.advice.changes:
        if change.saves_gib < 8.16:
            assert f"{change.name} (" not in told
    check_wording(would_have_given(cleared.advice, 10**15))
    with pytest.raises(ValueError) as other, explained(cleared, sizes):
        raise ValueError("another fault")
    assert not hasattr(other.value, "advice")
