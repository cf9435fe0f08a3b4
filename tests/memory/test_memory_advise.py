"""Advice and budgets: what fits, what helps, what does not, and a plan checked against the account."""

from dataclasses import replace

import pytest
from cases import CARD_GIB, CONFIG, DRAFTER, SHAPE, batch, step
from support.wording import check_wording, refused

from dflash_lab.errors import InputError
from dflash_lab.machine import device_budget_gib
from dflash_lab.memory.account import predict_extraction
from dflash_lab.memory.advice import _plan, advise
from dflash_lab.memory.planner import (
    MARGIN,
    expandable_segments,
    extraction_budget,
    knee,
    largest,
    length_buckets,
    training_fits,
    usable,
)
from dflash_lab.memory.shapes import GIB, target_shape
from dflash_lab.memory.training import predict_training
from dflash_lab.models.source import shape_config

HEAD = "vocabulary-parallel head over 2 GPUs"
LOGITS = "target logits on a second GPU"
APART = "head and loss on another GPU"


def small(**changes):
    return step(**{"anchors": 8, "context": 64, "block_size": 8} | changes)


def advice_of(setup, budget_gib=CARD_GIB, drafter=DRAFTER, **options):
    return advise(SHAPE, setup, budget_gib, drafter=drafter, **options)


def changes_of(setup, budget_gib=10.0, **options):
    return {change.name: change for change in advice_of(setup, budget_gib, **options).changes}


def test_largest_is_the_last_true():
    for last in (0, 1, 7, 63, 100):
        assert largest(lambda n, last=last: n <= last, 100) == last


def test_buckets_cover_every_length():
    assert length_buckets(4096) == [64, 128, 256, 512, 1024, 2048, 4096]
    assert length_buckets(335) == [64, 128, 256, 335]
    assert length_buckets(20) == [20]


@pytest.mark.parametrize("budget_gib", [CARD_GIB, 60.0])
def test_every_batch_of_a_budget_fits_it_and_one_more_row_does_not(budget_gib):
    budget = extraction_budget(CONFIG, batch(), budget_gib)
    room = usable(budget_gib)
    for length, rows in budget.batches.items():
        account = predict_extraction(SHAPE, batch(rows, length))
        assert budget.accounts[length].peak == account.peak <= room
        if rows < budget.max_batch:
            assert predict_extraction(SHAPE, batch(rows + 1, length)).peak > room
            assert "gated delta net" in budget.limited_by[length]
        else:
            assert budget.limited_by[length] == "max_batch"
    assert budget.token_budget <= budget.fits_tokens or budget.token_budget == 4096


def test_a_token_budget_alone_cannot_break_a_bucket():
    """Rows are padded to 64 inside the delta rule: many short rows need the cap on rows."""
    budget = extraction_budget(CONFIG, batch(kernels="torch"), 55, knee_tokens=10**9)
    assert budget.batch(8) * 64 <= budget.token_budget and budget.batch(65) * 128 <= budget.token_budget
    for length in (8, 65, 100, 335, 1000, 4096):
        account = predict_extraction(SHAPE, batch(budget.batch(length), length, kernels="torch"))
        assert account.peak <= usable(55)


def test_memory_beyond_the_knee_is_not_asked_for():
    assert extraction_budget(CONFIG, batch(), CARD_GIB).token_budget == 8192
    assert extraction_budget(CONFIG, batch(), CARD_GIB, knee_tokens=10**9).token_budget > 150_000
    assert knee(target_shape(shape_config("qwen3-8b"))) == pytest.approx(16600, rel=0.1)
    assert knee(target_shape(shape_config("smollm2-135m"))) == 65536
    assert knee(SHAPE, cuda=False) == 2048


def test_a_budget_too_small_for_one_sample_is_refused_with_the_reason():
    with refused(InputError):
        extraction_budget(CONFIG, batch(), 40)
    with refused(InputError):
        usable(0)
    assert usable(100) == int(100 * GIB * (1 - MARGIN))
    assert 0.1 < device_budget_gib("cpu") < 10_000


@pytest.mark.parametrize("value, on", [("", False), ("max_split_size_mb:64,expandable_segments: True", True)])
def test_the_allocators_setting_is_read(monkeypatch, value, on):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", value)
    assert expandable_segments() == on


def test_training_fits_says_how_many_anchors_would():
    def fits(anchors, budget_gib=60.0):
        return training_fits(CONFIG, DRAFTER, step(anchors), budget_gib)

    most, tight = fits(1024, CARD_GIB), fits(1024)
    assert most.fits and most.largest_anchors >= 1024
    assert not tight.fits and 0 < tight.largest_anchors < 1024
    assert fits(tight.largest_anchors).fits and not fits(tight.largest_anchors + 8).fits


def test_output_hidden_states_is_undone_first_then_the_batch_is_capped():
    setup = batch(128, 3316, capture="output_hidden_states", stop_early=False)
    advice = advise(SHAPE, setup, CARD_GIB)
    assert not advice.fits and advice.after.peak <= usable(CARD_GIB)
    assert advice.plan[0] == "hooks on the tapped layers"
    assert advice.plan[-1].startswith("bucket by length, at most ")
    hooks = next(change for change in advice.changes if change.name == "hooks on the tapped layers")
    assert hooks.saves_gib > 200 and not hooks.fits  # what the layers hold does not fit either
    check_wording(advice.paragraph)


@pytest.mark.parametrize("loss", ["naive", "loop", "concat"])
def test_the_chunked_loss_is_what_makes_1024_by_24_fit(loss):
    advice = advice_of(step(loss=loss))
    assert advice.plan == ("chunked loss",)
    assert advice.changes[0].name == "chunked loss" and advice.changes[0].fits
    assert advice.after.peak <= usable(CARD_GIB) < advice.account.peak


def test_every_change_says_what_it_gives_or_why_it_gives_nothing():
    advice = advice_of(step(loss="naive", placement="same device"))
    check_wording("\n".join(f"{c.name}: {c.saves_gib:.1f} GiB; {c.why}" for c in advice.changes))
    for change in advice.changes:
        if change.why.startswith("no help"):
            assert change.saves_gib == 0
        elif change.setting and change.saves_gib > 0.01:
            assert change.peak_gib == pytest.approx(advice.account.peak_gib - change.saves_gib)


def test_another_goal_is_never_first_where_the_same_one_fits():
    advice = advice_of(step(), 48)
    assert advice.plan and advice.after.peak <= usable(48)
    assert not {"hard labels only", "blocks of 8"} & set(advice.plan)


def test_nothing_helps_when_the_static_part_is_too_large():
    advice = advice_of(small(), 5)
    assert not advice.fits and advice.plan == () and advice.largest == 0
    check_wording(advice.paragraph)


def test_a_plan_names_what_can_be_done_and_each_choice_once():
    """Not what the trainer does not offer, and of two optimizers the one that it ends with."""
    advice = advice_of(small(), 10)
    assert "optimizer on the CPU" in advice.plan and "8-bit optimizer" not in advice.plan
    assert APART in advice.plan and advice.after.peak <= usable(10)
    planned = [name for name, change in changes_of(small()).items() if not change.built_in]
    assert planned == ["checkpoint the feed-forwards"]
    rows = batch(8, 64, kernels="torch")
    names = {change.name for change in advise(SHAPE, rows, 60, cuda=False).changes}
    names |= set(changes_of(small(), cuda=False))
    assert not [name for name in names if "GPU" in name and "data parallel" not in name]
    assert not names & {"expandable segments", "flash-linear-attention kernels"}


def test_what_a_head_can_do_names_its_parameter():
    found = changes_of(step(), 48)
    parameters = {HEAD: "head_parallel: true", LOGITS: "target_head_gpu: N", APART: "head: N"}
    for name, parameter in parameters.items():
        assert found[name].built_in and found[name].why.startswith(parameter)
    assert found[HEAD].setting["gradients_kept"]  # of a second process, in DDP's buckets
    sharded = changes_of(small(shards=4))["vocabulary-parallel head over 4 GPUs"]
    assert sharded.setting == {"vocabulary_shards": 4}


@pytest.mark.parametrize(
    ("asked", "excluded"),
    [
        ({"head_elsewhere": True}, {HEAD, LOGITS, APART}),
        ({"target_logits_elsewhere": True}, {HEAD, LOGITS}),
        ({"vocabulary_shards": 2, "data_parallel": 2}, {HEAD, LOGITS, APART}),
        ({"placement": "same device"}, {HEAD}),  # a live target holds the whole head
        ({"soft_targets": False}, {LOGITS}),
    ],
)
def test_what_the_stage_refuses_beside_a_setting_is_not_offered(asked, excluded):
    assert {HEAD, LOGITS, APART} - set(changes_of(small(**asked))) == excluded


def test_a_tied_head_and_a_second_drafter_have_no_slices():
    tied = advise(replace(SHAPE, tied=True), small(), 10, drafter=DRAFTER)
    assert HEAD not in {change.name for change in tied.changes}
    second = replace(DRAFTER, conv_kernel_size=2, conv_group_size=16, selector_rank=8, selector_top_k=4)
    assert HEAD not in changes_of(small(), drafter=second)


@pytest.mark.parametrize("setup", [small, step])
@pytest.mark.parametrize("already", [{}, {"shards": 2}])
def test_a_plan_combines_nothing_that_the_stage_refuses(setup, already):
    for budget_gib in (8, 10, 12, 14, 18, 22, 26, 30, 36):
        plan = advice_of(setup(loss="naive", **already), budget_gib).plan
        assert not (HEAD in plan and {LOGITS, APART} & set(plan))


def test_a_change_takes_the_place_of_those_that_it_excludes():
    """At these sizes slices of the head give more than the target's logits elsewhere, which come first."""
    sizes = step(loss="naive", shards=8, compiled=True)
    found = changes_of(sizes, 60)
    sliced, elsewhere = found["vocabulary-parallel head over 8 GPUs"], found[LOGITS]

    def predict(setup):
        return predict_training(SHAPE, DRAFTER, setup)

    room = predict(replace(sizes, **sliced.setting)).peak
    changes = [replace(elsewhere, time_pct=0.0), sliced]
    plan, after = _plan(changes, sizes, predict, lambda setup: None, room)
    assert plan == (sliced.name,) and after.peak == room
