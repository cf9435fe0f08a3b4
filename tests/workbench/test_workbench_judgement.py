"""What a tau and a run of training amount to, in words from what was recorded, with what to type."""

from __future__ import annotations

import pytest
from support.wording import check_wording

from dflash_lab.runs import closing_figures, closing_lines, closing_rows
from dflash_lab.stages.judgement import (
    FEW_ANSWERS,
    FEW_STEPS,
    OWN_ANSWERS,
    before_training,
    learned,
    of_acceptance,
    of_training,
)
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


NOTHING = (1.0, 0.99, 1.01)  # of a drafter that learned nothing


@pytest.mark.parametrize(
    "case",
    {
        "above": (taus((1.249, 1.181, 1.332)), trained(110)),
        "around": (taus((1.02, 0.99, 1.06)), trained(12)),
        "touching": (taus((1.02, 1.006, 1.04)), trained(12)),
        "same": (taus((1.0, 1.0, 1.0)), trained(12)),
        "best-before-the-end": (taus(NOTHING), trained(200, best_step=50)),
        "still-learning": (taus(NOTHING), trained(200)),
        "just-enough": (taus(NOTHING, prompts=FEW_ANSWERS), trained(FEW_STEPS)),
        "timed": (taus(NOTHING), trained(70, time_limit_s=100.0, train_seconds=105.0)),
        "timed-and-few": (taus(NOTHING), trained(9, time_limit_s=30.0, train_seconds=30.6)),
        "not-recorded": (taus(NOTHING), None),
        "few-answers": (taus((1.3, 1.2, 1.4), prompts=3), trained(200)),
        "few-and-no-more-there": (taus((1.3, 1.2, 1.4), prompts=3, available=3), trained(200)),
        "few-and-nothing-learned": (taus((1.0, 1.0, 1.0), prompts=3), trained(200)),
        "no-untrained": (taus((1.3, 1.2, 1.4), None), trained(200)),
        "answers-of-others": (taus((1.2, 1.1, 1.3)), trained(200, agreement=0.87)),
        "answers-of-its-own": (taus((1.2, 1.1, 1.3)), trained(200, agreement=OWN_ANSWERS)),
        "agreement-not-known": (taus((1.2, 1.1, 1.3)), trained(200, agreement=None)),
    }.items(),
    ids=lambda case: case[0],
)
def test_a_tau_is_judged(case):
    name, (figures, training) = case
    assert learned(figures) == (figures["tau_trained"] > 1.1 and name != "no-untrained")
    check_wording(of_acceptance(figures, training))


def test_no_check_was_needed_is_said_only_of_a_tau_that_shows_something():
    good, bad = taus((1.249, 1.181, 1.332)), taus((1.02, 0.99, 1.06))
    assert checked(good, {}, "auto").startswith("No check was needed")
    check_wording(checked({**bad, "judgement": of_acceptance(bad, trained(12))}, {}, "auto"))
    assert checked(bad, {"cause": "Likely cause: x"}, "auto") == "Likely cause: x"
    assert checked(good, {}, "never") == "No check ran: diagnose is never."
    assert judged(bad) == of_acceptance(bad, None)  # a result of before the sentence was kept


def test_too_few_steps_are_said_before_the_first():
    check_wording(before_training(12, 50, 4011))
    check_wording(before_training(1, 2, 9))
    assert before_training(FEW_STEPS, 50, 4011) == ""


@pytest.mark.parametrize(
    "training",
    [
        trained(12),
        trained(FEW_STEPS),
        trained(200, best_step=150),
        trained(200, streak_first=None, streak_best=None),
    ],
    ids=["few-steps", "still-learning", "best-before-the-end", "nothing-measured"],
)
def test_a_finished_training_says_what_would_help(training):
    check_wording(of_training(training))


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
