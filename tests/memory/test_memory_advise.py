"""Advice and budgets: what fits, what helps, what does not, and a plan checked against the account."""

from dataclasses import replace

import pytest
from support.wording import refused

from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.errors import InputError
from dflash_lab.machine import device_budget_gib
from dflash_lab.memory.account import predict_extraction
from dflash_lab.memory.advice import _plan, advise
from dflash_lab.memory.planner import (
    MARGIN,
    extraction_budget,
    knee,
    largest,
    length_buckets,
    training_fits,
    usable,
)
from dflash_lab.memory.shapes import GIB, ExtractionSetup, TrainingSetup, target_shape
from dflash_lab.memory.training import predict_training
from dflash_lab.models.source import shape_config

TAPS = (1, 16, 31, 46, 61)
CONFIG = shape_config("qwen3.6-27b")
SHAPE = target_shape(CONFIG)
DRAFTER = DrafterConfig.from_target(
    CONFIG, mask_token_id=248070, num_layers=5, block_size=24, num_heads=32, num_kv_heads=8, head_dim=128
)


def test_largest_is_the_last_true():
    for last in (0, 1, 7, 63, 100):
        assert largest(lambda n, last=last: n <= last, 100) == last


def test_buckets_cover_every_length():
    assert length_buckets(4096) == [64, 128, 256, 512, 1024, 2048, 4096]
    assert length_buckets(335) == [64, 128, 256, 335]
    assert length_buckets(20) == [20]


@pytest.mark.parametrize("budget_gib", [94.97, 80.0, 60.0])
def test_every_batch_of_a_budget_fits_it_and_one_more_row_does_not(budget_gib):
    budget = extraction_budget(CONFIG, ExtractionSetup(batch=1, length=4096, tap_ids=TAPS), budget_gib)
    room = usable(budget_gib)
    for length, batch in budget.batches.items():
        setup = ExtractionSetup(batch=batch, length=length, tap_ids=TAPS)
        assert predict_extraction(SHAPE, setup).peak <= room
        assert budget.accounts[length].peak == predict_extraction(SHAPE, setup).peak
        if batch < budget.max_batch:
            assert predict_extraction(SHAPE, replace(setup, batch=batch + 1)).peak > room
            assert "gated delta net" in budget.limited_by[length]
        else:
            assert budget.limited_by[length] == "max_batch"
    assert budget.token_budget <= budget.fits_tokens or budget.token_budget == 4096


def test_a_token_budget_alone_cannot_break_a_bucket():
    """Rows are padded to 64 inside the delta rule: many short rows need the cap on rows."""
    budget = extraction_budget(
        CONFIG, ExtractionSetup(batch=1, length=4096, tap_ids=TAPS, kernels="torch"), 55, knee_tokens=10**9
    )
    assert budget.batch(8) * 64 <= budget.token_budget and budget.batch(65) * 128 <= budget.token_budget
    for length in (8, 65, 100, 335, 1000, 4096):
        setup = ExtractionSetup(batch=budget.batch(length), length=length, tap_ids=TAPS, kernels="torch")
        assert predict_extraction(SHAPE, setup).peak <= usable(55)


def test_memory_beyond_the_knee_is_not_asked_for():
    assert (
        extraction_budget(CONFIG, ExtractionSetup(batch=1, length=4096, tap_ids=TAPS), 94.97).token_budget
        == 8192
    )
    assert knee(target_shape(shape_config("qwen3-8b"))) == pytest.approx(16600, rel=0.1)
    assert knee(target_shape(shape_config("smollm2-135m"))) == 65536
    assert knee(SHAPE, cuda=False) == 2048
    assert (
        extraction_budget(
            CONFIG, ExtractionSetup(batch=1, length=4096, tap_ids=TAPS), 94.97, knee_tokens=10**9
        ).token_budget
        > 150_000
    )


def test_a_budget_too_small_for_one_sample_is_refused_with_the_reason():
    with refused(InputError):
        extraction_budget(CONFIG, ExtractionSetup(batch=1, length=4096, tap_ids=TAPS), 40)
    with refused(InputError):
        usable(0)


def test_training_fits_says_how_many_anchors_would():
    answer = training_fits(
        CONFIG, DRAFTER, TrainingSetup(anchors=1024, context=4096, block_size=DRAFTER.block_size), 94.97
    )
    assert answer.fits and answer.largest_anchors >= 1024
    tight = training_fits(
        CONFIG, DRAFTER, TrainingSetup(anchors=1024, context=4096, block_size=DRAFTER.block_size), 60.0
    )
    assert not tight.fits and 0 < tight.largest_anchors < 1024
    again = training_fits(
        CONFIG,
        DRAFTER,
        TrainingSetup(anchors=tight.largest_anchors, context=4096, block_size=DRAFTER.block_size),
        60.0,
    )
    assert again.fits
    assert not training_fits(
        CONFIG,
        DRAFTER,
        TrainingSetup(anchors=tight.largest_anchors + 8, context=4096, block_size=DRAFTER.block_size),
        60.0,
    ).fits


def test_output_hidden_states_is_undone_first_then_the_batch_is_capped():
    setup = ExtractionSetup(
        batch=128, length=3316, tap_ids=TAPS, capture="output_hidden_states", stop_early=False
    )
    advice = advise(SHAPE, setup, 94.97)
    assert not advice.fits
    assert advice.plan[0] == "hooks on the tapped layers"
    assert advice.plan[-1].startswith("bucket by length, at most ")
    assert advice.after.peak <= usable(94.97)
    hooks = next(change for change in advice.changes if change.name == "hooks on the tapped layers")
    assert hooks.saves_gib > 200 and not hooks.fits  # what the layers hold does not fit either
    assert "65 tensors of 282.5 GB" in advice.paragraph


@pytest.mark.parametrize("loss", ["naive", "loop", "concat"])
def test_the_chunked_loss_is_what_makes_1024_by_24_fit(loss):
    setup = TrainingSetup(anchors=1024, context=4096, block_size=24, loss=loss)
    advice = advise(SHAPE, setup, 94.97, drafter=DRAFTER)
    assert advice.plan == ("chunked loss",)
    assert advice.changes[0].name == "chunked loss" and advice.changes[0].fits
    assert advice.after.peak <= usable(94.97) < advice.account.peak


def test_what_gives_nothing_is_listed_with_its_reason():
    setup = TrainingSetup(anchors=1024, context=4096, block_size=24, loss="naive")
    useless = {
        c.name: c for c in advise(SHAPE, setup, 94.97, drafter=DRAFTER).changes if c.why.startswith("no help")
    }
    assert set(useless) == {
        "checkpoint the head alone",
        "chunks of logits, concatenated",
        "a loop of chunks under autograd",
        "more GPUs (data parallel)",
    }
    assert all(change.saves_gib == 0 for change in useless.values())
    assert "its input" in useless["checkpoint the head alone"].why


def test_changes_predict_what_the_account_of_the_changed_setup_says():
    setup = TrainingSetup(anchors=1024, context=4096, block_size=24, loss="naive", placement="same device")
    advice = advise(SHAPE, setup, 94.97, drafter=DRAFTER)
    names = {change.name for change in advice.changes}
    assert {
        "8-bit optimizer",
        "optimizer on the CPU",
        "target logits on a second GPU",
        "target on another device",
        "checkpoint the draft layers",
        "blocks of 16",
        "hard labels only",
        "expandable segments",
    } <= names
    for change in advice.changes:
        if change.setting and change.saves_gib > 0.01:
            assert change.peak_gib == pytest.approx(advice.account.peak_gib - change.saves_gib)


def test_another_goal_is_never_first_where_the_same_one_fits():
    setup = TrainingSetup(anchors=1024, context=4096, block_size=24)
    advice = advise(SHAPE, setup, 48, drafter=DRAFTER)
    assert advice.plan and advice.after.peak <= usable(48)
    assert not {"hard labels only", "blocks of 8"} & set(advice.plan)


def test_nothing_helps_when_the_static_part_is_too_large():
    advice = advise(SHAPE, TrainingSetup(anchors=8, context=64, block_size=8), 5, drafter=DRAFTER)
    assert not advice.fits and advice.plan == () and "None of the changes" in advice.paragraph
    assert advice.largest == 0


def step(**changes):
    return TrainingSetup(**{"anchors": 8, "context": 64, "block_size": 8} | changes)


def changes_of(setup, budget_gib=10.0, drafter=DRAFTER, **options):
    return {c.name: c for c in advise(SHAPE, setup, budget_gib, drafter=drafter, **options).changes}


def test_a_plan_names_what_can_be_done_and_each_choice_once():
    """Not what the trainer does not offer, and of two optimizers the one that it ends with."""
    advice = advise(SHAPE, step(), 10, drafter=DRAFTER)
    assert "optimizer on the CPU" in advice.plan and "8-bit optimizer" not in advice.plan
    assert "head and loss on another GPU" in advice.plan and advice.after.peak <= usable(10)
    assert [name for name, change in changes_of(step()).items() if not change.built_in] == [
        "checkpoint the feed-forwards"
    ]
    batch = ExtractionSetup(batch=8, length=64, tap_ids=TAPS, kernels="torch")
    names = {change.name for change in advise(SHAPE, batch, 60, cuda=False).changes}
    names |= set(changes_of(step(), cuda=False))
    assert not [name for name in names if "GPU" in name and "data parallel" not in name]
    assert not names & {"expandable segments", "flash-linear-attention kernels"}


HEAD = "vocabulary-parallel head over 2 GPUs"
LOGITS = "target logits on a second GPU"
APART = "head and loss on another GPU"


def test_what_a_head_can_do_names_its_parameter():
    found = changes_of(step(anchors=1024, context=4096, block_size=24), 48)
    for name, parameter in (
        (HEAD, "head_parallel: true"),
        (LOGITS, "target_head_gpu: N"),
        (APART, "head: N"),
    ):
        assert found[name].built_in and found[name].why.startswith(parameter)
    assert found[HEAD].setting["gradients_kept"]  # of a second process, in DDP's buckets
    sharded = changes_of(step(shards=4))["vocabulary-parallel head over 4 GPUs"]
    assert sharded.setting == {"vocabulary_shards": 4}


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        ({"head_elsewhere": True}, {HEAD, LOGITS, APART}),
        ({"target_logits_elsewhere": True}, {HEAD, LOGITS}),
        ({"vocabulary_shards": 2, "data_parallel": 2}, {HEAD, LOGITS, APART}),
        ({"placement": "same device"}, {HEAD}),  # a live target holds the whole head
        ({"soft_targets": False}, {LOGITS}),
    ],
)
def test_what_the_stage_refuses_beside_a_setting_is_not_offered(asked, refused):
    assert {HEAD, LOGITS, APART} - set(changes_of(step(**asked))) == refused
    tied = replace(SHAPE, tied=True)
    assert HEAD not in {c.name for c in advise(tied, step(), 10, drafter=DRAFTER).changes}
    second = replace(DRAFTER, conv_kernel_size=2, conv_group_size=16, selector_rank=8, selector_top_k=4)
    assert HEAD not in changes_of(step(), drafter=second)


@pytest.mark.parametrize("budget_gib", [8, 10, 12, 14, 18, 22, 26, 30, 36])
@pytest.mark.parametrize("sizes", [{}, {"anchors": 1024, "context": 4096, "block_size": 24}])
@pytest.mark.parametrize("already", [{}, {"shards": 2}])
def test_a_plan_combines_nothing_that_the_stage_refuses(budget_gib, sizes, already):
    plan = advise(SHAPE, step(**sizes, **already, loss="naive"), budget_gib, drafter=DRAFTER).plan
    assert not (HEAD in plan and {LOGITS, APART} & set(plan))


def test_a_change_takes_the_place_of_those_that_it_excludes():
    """At these sizes slices of the head give more than the target's logits elsewhere, which come first."""
    sizes = step(anchors=1024, context=4096, block_size=24, loss="naive", shards=8, compiled=True)
    found = changes_of(sizes, 60)
    sliced, elsewhere = found["vocabulary-parallel head over 8 GPUs"], found[LOGITS]
    changes = [replace(elsewhere, time_pct=0.0), sliced]
    room = predict_training(SHAPE, DRAFTER, replace(sizes, **sliced.setting)).peak
    plan, after = _plan(
        changes, sizes, lambda setup: predict_training(SHAPE, DRAFTER, setup), lambda setup: None, room
    )
    assert plan == (sliced.name,) and after.peak == room


def test_margin_is_kept_and_the_machine_tells_what_is_free():
    assert usable(100) == int(100 * GIB * (1 - MARGIN))
    assert 0.1 < device_budget_gib("cpu") < 10_000
