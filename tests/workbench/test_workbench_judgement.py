"""What a tau and a run of training amount to, in words from what was recorded, with what to type."""

from __future__ import annotations

import re

import pytest

from dflash_lab.runs import closing_figures, closing_lines, closing_rows
from dflash_lab.stages.judgement import FEW_STEPS, before_training, learned, of_acceptance, of_training
from dflash_lab.views.acceptance import checked, judged


def taus(trained, untrained=(1.0, 1.0, 1.006), prompts=16, available=16):
    figures = {"prompts": prompts, "prompts_available": available}
    for name, values in (("tau_trained", trained), ("tau_untrained", untrained)):
        if values:
            figures |= dict(zip((name, f"{name}_low", f"{name}_high"), values, strict=True))
    return figures


def trained(steps=12, **changes):
    base = dict(
        steps=steps, best_step=steps, time_limit_s=0.0, training_samples=50, training_tokens=4011,
        train_seconds=2.0 * steps, streak_first=1.0, streak_best=1.021,
    )  # fmt: skip
    return {**base, **changes}


def test_a_tau_above_the_untrained_one_is_said_to_be_that():
    figures = taus((1.249, 1.181, 1.332))
    told = of_acceptance(figures, trained(110))
    assert learned(figures)
    assert told == (
        "tau 1.249 (interval 1.181 to 1.332) over 16 answers lies above the untrained drafter's "
        "1.000 (1.000 to 1.006): the drafter learned."
    )


@pytest.mark.parametrize(
    "interval", [(1.02, 0.99, 1.06), (1.02, 1.006, 1.04), (1.0, 1.0, 1.0)], ids=["around", "touching", "same"]
)
def test_a_tau_that_is_not_above_says_what_was_too_few_and_what_to_type(interval):
    figures = taus(interval)
    told = of_acceptance(figures, trained(12))
    assert not learned(figures)
    assert f"tau {interval[0]:.3f} (interval {interval[1]:.3f} to {interval[2]:.3f}) over 16 answers" in told
    assert "does not lie above the untrained drafter's 1.000 (1.000 to 1.006)" in told
    assert "12 steps on 50 samples (4,011 tokens) are too few" in told
    assert "-p max_steps 120 -p force True (about 4 min 00 s)" in told


@pytest.mark.parametrize(
    ("training", "words"),
    [
        (trained(200, best_step=50), "step 50 was the best.*more conversations.*regenerate greedy"),
        (trained(200), r"it was still learning\. Run train_drafter with -p max_steps 800"),
        (trained(70, time_limit_s=100.0, train_seconds=105.0), "max_steps 280 -p time_limit_s 510 .*force"),
        (trained(9, time_limit_s=30.0, train_seconds=30.6), "9 steps .* max_steps 120 -p time_limit_s 490"),
        (None, "How it was trained is not recorded"),
    ],
)  # fmt: skip
def test_the_reason_is_what_the_training_recorded(training, words):
    assert re.search(words, of_acceptance(taus((1.0, 0.99, 1.01)), training))


def test_few_answers_are_said_to_make_a_rough_interval():
    for interval in ((1.3, 1.2, 1.4), (1.0, 1.0, 1.0)):
        told = of_acceptance(taus(interval, prompts=3), trained(200))
        assert "3 answers make a rough interval: raise num_prompts (16 prompts are there)" in told
        told = of_acceptance(taus(interval, prompts=3, available=3), trained(200))
        assert "3 answers make a rough interval: give more prompts, in their file or by" in told
        assert "rough" not in of_acceptance(taus(interval, prompts=16), trained(200))


def test_without_an_untrained_drafter_nothing_is_claimed():
    figures = taus((1.3, 1.2, 1.4), None)
    assert not learned(figures)
    assert "no untrained drafter was decoded" in of_acceptance(figures, trained(200))


def test_no_check_was_needed_is_said_only_of_a_tau_that_shows_something():
    good, bad = taus((1.249, 1.181, 1.332)), taus((1.02, 0.99, 1.06))
    assert checked(good, {}, "auto").startswith("No check was needed")
    told = checked({**bad, "judgement": of_acceptance(bad, trained(12))}, {}, "auto")
    assert "needed" not in told and "12 steps on 50 samples" in told and "too few" in told
    assert checked(bad, {"cause": "Likely cause: x"}, "auto") == "Likely cause: x"
    assert checked(good, {}, "never") == "No check ran: diagnose is never."
    assert judged(bad) == of_acceptance(bad, None)  # a result of before the sentence was kept


def test_too_few_steps_are_said_before_and_after():
    told = before_training(12, 50, 4011)
    assert "12 steps on 50 samples (4,011 tokens) are planned: too few" in told and "-p max_steps 120" in told
    assert before_training(FEW_STEPS, 50, 4011) == ""
    after = of_training(trained(12))
    assert (
        "12 steps on 50 samples (4,011 tokens) in 24 s took the held-out streak from 1.000 to 1.021" in after
    )
    assert "so few steps" in after and "-p max_steps 120" in after
    assert "1 step on 1 sample (9 tokens)" in before_training(1, 1, 9)


@pytest.mark.parametrize(
    ("training", "words"),
    [
        (
            trained(200),
            "its best at the last step: it was still learning. Run train_drafter with -p max_steps 800",
        ),
        (
            trained(200, best_step=150),
            "best at step 150: what came after taught it no more. More data would.",
        ),
        (trained(200, streak_first=None, streak_best=None), "no held-out row was measured"),
    ],
)
def test_a_finished_training_says_what_would_help(training, words):
    told = of_training(training)
    assert words in told and "too few" not in told


def test_the_closing_table_ends_with_the_sentence(tmp_path):
    from dflash_lab.files import write_json

    record = dict(
        schema_version=1, stage="acceptance", parameters={}, inputs={}, seconds=3.0,
        figures={**taus((1.02, 0.99, 1.06)), "judgement": "tau says nothing: 12 steps are too few."},
    )  # fmt: skip
    write_json(tmp_path / "acceptance" / "result.json", record)
    figures = closing_figures(tmp_path)
    assert closing_lines(figures)[-1] == "tau says nothing: 12 steps are too few."
    assert [name for name, _, _ in closing_rows(figures)] == [
        "tau_trained",
        "tau_untrained",
        "acceptance time",
    ]
    del record["figures"]["judgement"]
    write_json(tmp_path / "acceptance" / "result.json", record)
    assert len(closing_lines(closing_figures(tmp_path))) == 3


@pytest.mark.parametrize(("agreement", "told"), [(0.43, True), (0.95, False), (None, False)])
def test_answers_of_others_are_told_with_the_remedy(agreement, told):
    said = of_acceptance(taus((1.2, 1.1, 1.3)), {**trained(200), "agreement": agreement})
    assert ("would have said 43 %" in said and "regenerate greedy" in said) == told
