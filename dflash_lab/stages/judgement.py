"""What a run of training, and the tau measured after it, can tell, in a sentence.

Where the numbers mean nothing (few steps, no interval above the untrained drafter's), it says what to type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dflash_lab.progress import duration

Figures = Mapping[str, Any]

FEW_STEPS = (
    60  # on a CPU's small drafter, tau began to stand off the untrained one's about there (params/demo)
)
OWN_ANSWERS = 0.9  # share of tokens that are the target's first choice; of its own greedy answers, 1
FEW_ANSWERS = 6  # resampling fewer than these gives an interval in name only


def before_training(steps: int, samples: int, tokens: int) -> str:
    """Warn, before the first step, of a run that is too short to judge; empty if it is not.

    steps: those planned. samples, tokens: what is trained on, held-out ones left out.
    """
    if steps >= FEW_STEPS:
        return ""
    planned = f"{'is' if steps == 1 else 'are'} planned"
    return (
        f"{_data(steps, samples, tokens)} {planned}: too few to judge the drafter by its tau. "
        f"Give -p max_steps {_more(steps)}, and more conversations if you have them."
    )


def of_training(figures: Figures) -> str:
    """Say what a finished run of training taught, from its headline figures."""
    steps, best = figures["steps"], figures["best_step"]
    head = (
        f"{_data(steps, figures['training_samples'], figures['training_tokens'])} "
        f"in {duration(figures['train_seconds'])}"
    )
    if figures["streak_best"] is None:
        return (
            f"{head}; no held-out row was measured, so nothing tells what was learned. Give prepare more "
            "conversations or a larger heldout_fraction."
        )
    told = (
        f"{head} took the held-out streak from {figures['streak_first']:.3f} to {figures['streak_best']:.3f}"
    )
    if steps < FEW_STEPS:
        return f"{told}. After so few steps tau may not show it yet. {_longer(figures)}"
    if best < steps:
        return f"{told}, best at step {best}: what came after taught it no more. More data would."
    return f"{told}, its best at the last step: it was still learning. {_longer(figures)}"


def learned(figures: Figures) -> bool:
    """Whether tau of the trained drafter, in the figures of `acceptance`, lies above the untrained one's
    beyond chance: interval above interval.
    """
    return "tau_untrained" in figures and figures["tau_trained_low"] > figures["tau_untrained_high"]


def of_acceptance(figures: Figures, training: Figures | None) -> str:
    """Say whether the measured tau shows that the drafter learned; if not, why, and what to type.

    figures: the headline of `acceptance`. training: that of the run of training that made the drafter, None
    where it is not known.
    """
    answers = figures["prompts"]
    own = f"tau {_interval(figures, 'tau_trained', 'interval ')} over {_count(answers, 'answer')}"
    there = figures["prompts_available"]
    more = (
        f"raise num_prompts ({there:,} prompts are there)"
        if there > answers
        else "give more prompts, in their file or by a larger heldout_fraction in prepare"
    )
    few = f" {_count(answers, 'answer').capitalize()} make a rough interval: {more}."
    if "tau_untrained" not in figures:
        return f"{own} stands alone: no untrained drafter was decoded beside it. Give untrained_tokens."
    other = f"the untrained drafter's {_interval(figures, 'tau_untrained', '')}"
    if learned(figures):
        told = f"{own} lies above {other}: the drafter learned."
    else:
        told = f"{own} does not lie above {other}: {_why(training)}"
    return f"{told}{_foreign(training)}{few if answers < FEW_ANSWERS else ''}"


def _foreign(training: Figures | None) -> str:
    """A hint at answers that the target would not have given, which is what a drafter must learn to guess."""
    agreement = training.get("agreement") if training else None
    if agreement is None or agreement >= OWN_ANSWERS:
        return ""
    return (
        f" Of the tokens of its data the target itself would have said {100 * agreement:.0f} %: let it write "
        "the answers (prepare with -p regenerate greedy -p force True)."
    )


def _why(training: Figures | None) -> str:
    if training is None:
        return "nothing shows that it learned. How it was trained is not recorded in this run."
    steps, best = training["steps"], training["best_step"]
    data = _data(steps, training["training_samples"], training["training_tokens"])
    if steps < FEW_STEPS:
        return f"{data} are too few to judge it. {_longer(training)}"
    if best < steps:
        return (
            f"of {data}, step {best} was the best on held-out rows, so more steps would not help. Give more "
            "conversations, or answers of the target's own (-p regenerate greedy -p force True); if there "
            "are enough, -p diagnose always looks for faults."
        )
    return f"after {data} it was still learning. {_longer(training)}"


def _longer(training: Figures) -> str:
    """What to type for a run of some times the steps, and how long it would take at this one's pace."""
    more = _more(training["steps"])
    seconds = training["train_seconds"] / training["steps"] * more
    limit = f" -p time_limit_s {math.ceil(0.12 * seconds) * 10}" if training["time_limit_s"] else ""
    return (
        f"Run train_drafter with -p max_steps {more}{limit} -p force True (about {duration(seconds)}), and "
        "more conversations if you have them."
    )


def _more(steps: int) -> int:
    return max(4 * steps, 2 * FEW_STEPS)


def _data(steps: int, samples: int, tokens: int) -> str:
    return f"{_count(steps, 'step')} on {_count(samples, 'sample')} ({tokens:,} tokens)"


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _interval(figures: Figures, name: str, word: str) -> str:
    low, high = figures[f"{name}_low"], figures[f"{name}_high"]
    return f"{figures[name]:.3f} ({word}{low:.3f} to {high:.3f})"
