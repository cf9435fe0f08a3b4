"""The target as the data room sees it: functions that render and answer, and prompts it writes itself.

Prompts and answers are appended to files as they come, so that a stopped `prepare` goes on where it was.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_lab import files
from dflash_lab.file_errors import naming
from dflash_lab.workbench.progress import ProgressCallback

if TYPE_CHECKING:
    from dflash_lab.data.conversations import Message
    from dflash_lab.data.regenerate import Speaker
    from dflash_lab.target.model import Target

logger = logging.getLogger(__name__)
_EXTRA_ROUNDS = 8  # of drawing prompts again where the target repeated itself


def rendered(tokenizer: Any, messages: list[Message], thinking: bool) -> tuple[list[int], list[int]]:
    """Return ids [L] and assistant mask [L]; `BadRecord` when the template refuses."""
    from dflash_lab.data.problems import BadRecord
    from dflash_lab.target.template import TemplateFailure, render

    try:
        found = render(tokenizer, messages, thinking=thinking)
    except TemplateFailure as error:
        raise BadRecord("template", str(error)) from error
    return found.input_ids, found.loss_mask


def speaker_of(
    target: Target, *, thinking: bool, temperature: float, max_new_tokens: int, batch: int, seed: int
) -> Speaker:
    """Return the functions of `target`; each batch of answers has its own seed, made from the prompts in
    it."""
    import numpy as np
    import xxhash

    from dflash_lab.data.problems import BadRecord
    from dflash_lab.data.regenerate import Speaker
    from dflash_lab.target.generation import generate
    from dflash_lab.target.template import TemplateFailure, render_prompt

    tokenizer, stop_ids = target.tokenizer, frozenset(target.stop_ids)

    def prompt_of(messages: list[Message]) -> list[int]:
        try:
            return render_prompt(tokenizer, messages, thinking=thinking)
        except TemplateFailure as error:
            raise BadRecord("template", str(error)) from error

    def answers_to(prompts: list[list[int]]) -> list[list[int]]:
        digest = xxhash.xxh3_64(
            np.concatenate([np.asarray(ids, "<i4") for ids in prompts]).tobytes(), seed=seed
        )
        return generate(
            target,
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=digest.intdigest() >> 1,
            batch=batch,
        )

    def text_of(answer: list[int]) -> str:
        return str(tokenizer.decode(answer[:-1] if answer and answer[-1] in stop_ids else answer))

    settings = {
        "target": target.identity,
        "dtype": str(target.dtype),
        "thinking": thinking,
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "seed": seed if temperature else 0,
    }
    return Speaker(
        prompt_of=prompt_of,
        masked=lambda messages: rendered(tokenizer, messages, thinking),
        generate=answers_to,
        text_of=text_of,
        stop_ids=stop_ids,
        settings=json.dumps(settings, sort_keys=True),
    )


def own_prompts(
    target: Target,
    count: int,
    path: Path,
    *,
    max_new_tokens: int,
    batch: int,
    seed: int,
    report: ProgressCallback,
) -> list[str]:
    """Return up to `count` different user turns sampled by the target; rounds that `path` holds are not drawn
    again."""
    from dflash_lab.target.prompting import self_prompts

    settings = json.dumps([target.identity, max_new_tokens, batch, seed], sort_keys=True)
    stored = _stored_rounds(path, settings)
    found: dict[str, None] = {}
    rounds = -(-count // batch) + _EXTRA_ROUNDS
    for number in range(rounds):
        if len(found) >= count:
            break
        if number not in stored:
            stored[number] = self_prompts(
                target, batch, seed=seed * 100_003 + number, max_new_tokens=max_new_tokens, batch=batch
            )
            record = {"settings": settings, "round": number, "texts": stored[number]}
            files.append_line(path, files.sealed(record))
        found.update(dict.fromkeys(stored[number]))
        report("prompts", min(len(found), count), count)
    return list(found)[:count]


def _stored_rounds(path: Path, settings: str) -> dict[int, list[str]]:
    """Read finished rounds; what follows the last whole line was torn by a crash and is cut off, and a
    damaged line is a round to be drawn again.
    """
    if not path.exists():
        return {}
    with naming(path):
        data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        files.write_bytes(path, whole)
    rounds = [files.unsealed(line) or {} for line in whole.split(b"\n")[:-1]]
    sound = [one for one in rounds if {"settings", "round", "texts"} <= one.keys()]
    if damaged := len(rounds) - len(sound):
        logger.warning("%s: %d damaged lines, whose prompts are written again", path, damaged)
    return {one["round"]: one["texts"] for one in sound if one["settings"] == settings}
