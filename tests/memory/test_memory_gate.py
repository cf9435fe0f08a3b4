"""The question before a run: cleared, refused with advice, or forced."""

import pytest
import torch
from support.wording import refused

from dflash_lab.drafter.config import DrafterConfig
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
from dflash_lab.memory.shapes import GIB, ExtractionSetup, TrainingSetup, target_shape
from dflash_lab.models.source import shape_config

CONFIG = shape_config("qwen3.6-27b")
TAPS = (1, 16, 31, 46, 61)
DRAFTER = DrafterConfig.from_target(
    CONFIG, mask_token_id=0, num_layers=5, block_size=24, num_heads=32, num_kv_heads=8, head_dim=128
)


def test_the_planners_own_budget_is_cleared_whatever_the_lengths():
    for budget_gib in (94.97, 60.0, 52.0):
        for kernels in ("fla", "torch"):
            cleared = clear_extraction(
                CONFIG, ExtractionSetup(batch=1, length=4096, tap_ids=TAPS, kernels=kernels), budget_gib
            )
            assert cleared.account.peak <= usable(budget_gib) and not cleared.forced
            for length in (1, 8, 63, 64, 65, 127, 129, 335, 1000, 4096):
                batch = max(1, min(cleared.max_batch, cleared.token_budget // (64 * -(-length // 64))))
                account = predict_extraction(
                    CONFIG, ExtractionSetup(batch=batch, length=length, tap_ids=TAPS, kernels=kernels)
                )
                assert account.peak <= cleared.account.peak * 1.001


def test_the_worst_batch_of_short_rows_is_found():
    setup = ExtractionSetup(batch=1, length=4096, tap_ids=TAPS, kernels="torch")
    assert (
        worst_batch(target_shape(CONFIG), setup, 16384, 4096).batch == 256
    )  # rows of one token count for 64 each
    assert worst_batch(target_shape(CONFIG), setup, 16384, 16).length >= 1024


def test_a_budget_by_hand_that_is_too_large_is_refused_with_advice():
    with refused(DoesNotFit) as caught:
        clear_extraction(
            CONFIG, ExtractionSetup(batch=1, length=4096, tap_ids=TAPS), 60.0, token_budget=262144
        )
    error = caught.value
    assert error.details["predicted_peak_gib"] > 60 and "bucket by length" in error.advice
    assert error.advice in str(error)
    forced = clear_extraction(
        CONFIG, ExtractionSetup(batch=1, length=4096, tap_ids=TAPS), 60.0, token_budget=262144, force=True
    )
    assert forced.forced and forced.token_budget == 262144


def test_training_is_cleared_refused_or_forced():
    cleared = clear_training(
        CONFIG, DRAFTER, TrainingSetup(anchors=1024, context=4096, block_size=DRAFTER.block_size), 94.97
    )
    assert not cleared.forced
    with refused(DoesNotFit):
        clear_training(
            CONFIG, DRAFTER, TrainingSetup(anchors=1024, context=4096, block_size=DRAFTER.block_size), 48.0
        )
    with refused(DoesNotFit):
        clear_training(
            CONFIG,
            DRAFTER,
            TrainingSetup(anchors=1024, context=4096, compiled=True, block_size=DRAFTER.block_size),
            36.0,
        )
    assert clear_training(
        CONFIG,
        DRAFTER,
        TrainingSetup(anchors=1024, context=4096, block_size=DRAFTER.block_size),
        48.0,
        force=True,
    ).forced
    with refused(DoesNotFit):
        clear_training(
            CONFIG, DRAFTER, TrainingSetup(anchors=8, context=64, block_size=DRAFTER.block_size), 5.0
        )


def test_the_outcome_on_a_cpu_is_the_prediction_alone():
    cleared = clear_training(
        CONFIG, DRAFTER, TrainingSetup(anchors=64, context=1024, block_size=DRAFTER.block_size), 94.97
    )
    account = cleared.account
    known = account.live - account.terms["outside torch"]
    assert outcome(cleared, "cpu") == {"predicted_peak_gib": round(known / GIB, 4)}


@pytest.mark.gpu
def test_the_outcome_on_a_device_has_both():
    cleared = clear_training(
        CONFIG, DRAFTER, TrainingSetup(anchors=64, context=1024, block_size=DRAFTER.block_size), 94.97
    )
    torch.ones(1, device="cuda")
    found = outcome(cleared, "cuda")
    assert set(found) == {
        "predicted_peak_gib", "measured_peak_gib", "reserved_peak_gib", "memory_error_pct"
    }  # fmt: skip
    assert 0 < found["measured_peak_gib"] <= found["reserved_peak_gib"]


def test_a_lack_of_memory_in_a_cleared_run_says_what_would_have_given_it():
    """From the message alone: what was asked for, as which tensor, and the changes that give what lacked."""
    cleared = clear_training(
        CONFIG,
        DRAFTER,
        TrainingSetup(anchors=1024, context=4096, loss="naive", chunk=512, block_size=DRAFTER.block_size),
        200.0,
    )
    message = (
        "CUDA out of memory. Tried to allocate 11.37 GiB. GPU 0 has a total capacity of 94.97 GiB of which "
        "3.21 GiB is free."
    )
    sizes = {"anchors": 1024, "block": DRAFTER.block_size, "vocabulary": 248_320}
    with pytest.raises(torch.OutOfMemoryError) as caught, explained(cleared, sizes):
        raise torch.OutOfMemoryError(message)
    told = caught.value.advice
    assert "11.37 GiB were asked for" in told and "8.16 GiB lacked" in told and "chunked loss" in told
    for change in cleared.advice.changes:
        if change.saves_gib * GIB < 8.16 * GIB:
            assert f"{change.name} (" not in told
    assert "No change listed" in would_have_given(cleared.advice, 10**15)
    with pytest.raises(ValueError) as other, explained(cleared, sizes):
        raise ValueError("another fault")
    assert not hasattr(other.value, "advice")
