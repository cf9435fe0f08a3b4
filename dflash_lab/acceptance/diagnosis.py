"""Why offline and decoded tau disagree, or why tau is far below training accuracy: every known cause checked.

People have trained to 70 % accuracy and served a tau of 1.02 with each of these faults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import polars as pl
import torch

from dflash_lab.acceptance import causes
from dflash_lab.acceptance.causes import SUSPECT, Check
from dflash_lab.acceptance.diagnosis_case import Case
from dflash_lab.data.items import FeatureItem
from dflash_lab.drafter.model import Drafter
from dflash_lab.target.model import Target

SCHEMA = {"name": pl.String, "verdict": pl.String, "value": pl.Float64, "detail": pl.String}


@torch.no_grad()
def diagnose(
    target: Target,
    drafter: Drafter,
    items: Sequence[FeatureItem],
    *,
    samples: Path | None = None,
    thinking: bool | None = None,
    max_items: int = 4,
    progress: Callable[..., None] | None = None,
) -> list[Check]:
    """Run every check on the first `max_items` items; `samples` is the file whose provenance names a
    template, `thinking` how prompts were rendered that are not from it.
    """
    case = Case(target, drafter, list(items[:max_items]))
    checks = [
        causes.greedy_answers,
        lambda case: causes.template(case.target, samples, thinking),
        causes.tap_states,
        causes.tap_layers,
        causes.final_norm,
        causes.mask_token,
        causes.anchor_position,
        causes.label_shift,
        causes.precision,
        causes.target_rollback,
        causes.draft_cache,
    ]
    found = []
    for number, check in enumerate(checks, start=1):
        found.append(check(case))
        if progress is not None:
            progress("diagnose", number, len(checks))
    return found


def likely_cause(checks: Sequence[Check], disagree: bool) -> str:
    """Return one sentence: the suspects, or that none was found."""
    suspects = [f"{c.name} ({c.detail})" for c in checks if c.verdict == SUSPECT]
    if suspects:
        return "Likely cause: " + "; ".join(suspects)
    if disagree:
        return "No check found a cause. With few short answers it may be chance: see the intervals of tau."
    return "No check found anything wrong."


def checks_frame(checks: Sequence[Check]) -> pl.DataFrame:
    """Return the checks as a table."""
    return pl.DataFrame([vars(check) for check in checks], schema=SCHEMA)
