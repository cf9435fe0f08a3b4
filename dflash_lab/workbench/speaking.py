"""The target as the data room sees it: functions that render and answer, and prompts it writes itself.

Prompts and answers are appended to files as they come, so that a stopped `prepare` goes on where it was.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_lab import files
from dflash_lab.file_errors import naming
from dflash_lab.workbench.progress import ProgressCallback

if TYPE_CHECKING:
    from dflash_lab.data.conversations import Conversation
    from dflash_lab.data.regenerate import Speaker
    from dflash_lab.models.load import Target
    from dflash_lab.models.template import Dialogue, Rendered

logger = logging.getLogger(__name__)
_EXTRA_ROUNDS = 8  # of drawing prompts again where the target repeated itself


def rendered(tokenizer: Any, conversation: Conversation, thinking: bool, date: str) -> Rendered:
    """Return ids and assistant mask; `BadRecord` when the template refuses."""
    from dflash_lab.models.template import render

    with _bad_record():
        return render(
            tokenizer, conversation.messages, tools=conversation.tools, thinking=thinking, date=date
        )


@contextlib.contextmanager
def _bad_record() -> Iterator[None]:
    """Turn a template's refusal into a record that cannot be used."""
    from dflash_lab.data.records import BadRecord
    from dflash_lab.models.template import TemplateFailure

    try:
        yield
    except TemplateFailure as error:
        raise BadRecord(error.kind, str(error)) from error


class AskedRecord:
    """A dialogue whose refusals are bad records."""

    def __init__(self, dialogue: Dialogue) -> None:
        self.dialogue = dialogue
        self.notes = dialogue.notes

    def prompt(self) -> list[int] | None:
        with _bad_record():
            return self.dialogue.prompt()

    def answer(self, tokens: list[int]) -> None:
        with _bad_record():
            self.dialogue.answer(tokens)

    def finished(self) -> tuple[list[int], list[int], bool]:
        with _bad_record():
            return self.dialogue.finished()


def speaker_of(
    target: Target,
    *,
    thinking: bool,
    date: str,
    temperature: float,
    max_new_tokens: int,
    batch: int,
    seed: int,
) -> Speaker:
    """Return the functions of `target`; each batch of answers has its own seed, made from the prompts in
    it."""
    import numpy as np
    import xxhash

    from dflash_lab.data.regenerate import Speaker
    from dflash_lab.models.generate import generate
    from dflash_lab.models.template import Dialogue

    stop_ids = frozenset(target.stop_ids)

    def ask(conversation: Conversation) -> AskedRecord:
        return AskedRecord(
            Dialogue(
                target.tokenizer,
                conversation.messages,
                tools=conversation.tools,
                thinking=thinking,
                date=date,
                stop_ids=stop_ids,
            )
        )

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

    settings = {
        "target": target.identity,
        "dtype": str(target.dtype),
        "thinking": thinking,
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "seed": seed if temperature else 0,
    }
    return Speaker(ask=ask, generate=answers_to, settings=json.dumps(settings, sort_keys=True))


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
    from dflash_lab.models.generate import self_prompts

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
