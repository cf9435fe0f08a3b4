"""A study of prompts decoded together: for throughput, where `run_study` is the published protocol."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from dflash_lab.acceptance.batch import decode_batch
from dflash_lab.acceptance.prompts import Prompt
from dflash_lab.acceptance.study import Study
from dflash_lab.drafter.model import Drafter
from dflash_lab.errors import InputError
from dflash_lab.target.model import Target


def run_together(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    *,
    batch: int,
    max_new_tokens: int,
    progress: Callable[..., None] | None = None,
    **options: Any,
) -> tuple[Study, float]:
    """Decode `prompts`, `batch` at a time, with chains; returns the study and tokens a second of all of it.

    `options` are those of `decode_batch`. An answer is never longer than a stored one. Raises `InputError`
    for prompts of several turns, whose next turn depends on the answer before.
    """
    several = next((prompt.id for prompt in prompts if prompt.several), None)
    if several is not None:
        raise InputError(
            f"batch {batch}: prompt {several} has several turns; set batch to 1 for such prompts."
        )
    study = Study("together")
    start = time.perf_counter()
    for first in range(0, len(prompts), batch):
        part = prompts[first : first + batch]
        limits = [min(max_new_tokens, len(p.answer)) if p.answer else max_new_tokens for p in part]

        def tick(tokens: int, first: int = first) -> None:
            if progress is not None:
                progress("decode together", first, len(prompts), tokens=tokens)

        study.answers += decode_batch(
            target,
            drafter,
            [prompt.input_ids for prompt in part],
            max_new_tokens=limits,
            on_round=tick,
            **options,
        )
        study.asked += [prompt.input_ids for prompt in part]
        study.prompt += range(first, first + len(part))
    seconds = time.perf_counter() - start
    return study, sum(len(answer.tokens) for answer in study.answers) / seconds
