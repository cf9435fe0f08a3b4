"""Answers written by the target itself: what it says, token for token, is what a drafter must learn to guess.

The model is behind two functions (`Speaker`), and every answer is on disk when its batch is done: a stopped
run goes on where it was.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from dflash_lab import files
from dflash_lab.data.conversations import Conversation
from dflash_lab.data.records import BadRecord, Problem
from dflash_lab.errors import naming

log = logging.getLogger(__name__)
_KEY = re.compile("[0-9a-f]{32}")


class Answerable(Protocol):
    """A conversation whose answers are given anew, as the target's template has it (`template.Dialogue`). Any
    part of it may raise `BadRecord`.
    """

    notes: list[str]  # what could not be done as recorded, each at most once

    def prompt(self) -> list[int] | None:
        """Return the ids up to the next answer, None after the last."""

    def answer(self, tokens: list[int]) -> None:
        """Take the answer to the last prompt."""

    def finished(self) -> tuple[list[int], list[int], bool]:
        """Return ids [L], assistant mask [L], and whether the last answer met the token limit."""


@dataclass(frozen=True)
class Speaker:
    """The target as functions, and the settings that its answers depend on."""

    ask: Callable[[Conversation], Answerable]
    # prompts -> (number of the prompt, new ids with the closing token, or why there are none), as they come
    generate: Callable[[list[list[int]]], Iterable[tuple[int, list[int] | BadRecord]]]
    settings: str  # target, decoding and limits in words: answers made otherwise are not reused


@dataclass(frozen=True)
class Answered:
    """One conversation with new answers: ids [L], mask [L], whether the last answer met the token limit, and
    what could not be done as recorded.
    """

    conversation: Conversation
    input_ids: list[int]
    loss_mask: list[int]
    cut: bool
    notes: tuple[str, ...] = ()


def sealed_lines(path: Path, keys: set[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (offset, record) of the sound lines of a file of sealed JSON that have all of `keys`.

    A last line torn by a crash is cut off, since what follows would be appended to it; damaged ones are left
    where they are, and what they held is made again.
    """
    if not path.exists():
        return
    offset = damaged = 0
    with naming(path), open(path, "rb+") as file:
        for line in file:
            if not line.endswith(b"\n"):
                log.warning("%s: the last line was torn and is dropped", path)
                file.truncate(offset)
                break
            record = files.unsealed(line) or {}
            if keys <= record.keys():
                yield offset, record
            else:
                damaged += 1
            offset += len(line)
    if damaged:
        log.warning("%s: %d damaged lines; what they held is made again", path, damaged)


class AnswerFile:
    """Answers on disk by key, one JSON line each; memory holds 24 bytes and a number for each of them.

    `reused` counts the answers that a run found there.
    """

    def __init__(self, path: Path | str, settings: str) -> None:
        self.path = Path(path)
        self.settings = settings
        self.reused = 0
        lines = sealed_lines(self.path, {"key", "answer"})
        keys = ((str(record["key"]), offset) for offset, record in lines)
        self._offsets = {bytes.fromhex(key): offset for key, offset in keys if _KEY.fullmatch(key)}

    def key(self, prompt: list[int]) -> bytes:
        """Return the key of a prompt under these settings, 16 bytes."""
        return xxhash.xxh3_128_digest(self.settings.encode() + b"\0" + np.asarray(prompt, "<i4").tobytes())

    def __contains__(self, key: bytes) -> bool:
        return key in self._offsets

    def get(self, key: bytes) -> list[int]:
        """Return the stored answer."""
        with open(self.path, "rb") as file:
            file.seek(self._offsets[key])
            return json.loads(file.readline())["answer"]

    def put(self, key: bytes, answer: list[int]) -> None:
        """Append an answer."""
        offset = self.path.stat().st_size if self.path.exists() else 0
        files.append_line(self.path, files.sealed({"key": key.hex(), "answer": answer}))
        self._offsets[key] = offset


def regenerate(
    conversations: Iterable[Conversation],
    speaker: Speaker,
    answers: AnswerFile,
    problems: list[Problem],
    *,
    batch: int = 32,
    window: int = 1024,
    max_prompt: int = 0,
    on_answers: Callable[[int], None] | None = None,
) -> Iterator[Answered]:
    """Yield every conversation with all its answers written anew by `speaker`, in order.

    The last answer keeps the very ids that were generated (text decoded and encoded again may come out as
    other tokens); earlier ones enter the next prompt as text, as they would in a chat. Prompts of a window of
    conversations are sorted by length and generated `batch` at a time. Conversations that the template
    refuses, whose answer fails, or with a prompt over `max_prompt` tokens (0: any), go to `problems`.
    `on_answers` is told the number of new answers after every batch; it may raise to stop.
    """
    source = iter(conversations)
    while chunk := list(itertools.islice(source, window)):
        open_: list[tuple[Conversation, Answerable]] = []
        done: dict[int, Answered] = {}
        for conversation in chunk:
            with _problems(conversation, problems):
                open_.append((conversation, speaker.ask(conversation)))
        while open_:
            waiting = []
            for conversation, asked in open_:
                with _problems(conversation, problems):
                    prompt = asked.prompt()
                    if prompt is None:
                        ids, mask, cut = asked.finished()
                        done[id(conversation)] = Answered(conversation, ids, mask, cut, tuple(asked.notes))
                    elif max_prompt and len(prompt) > max_prompt:
                        raise BadRecord(
                            "too long",
                            f"a prompt of {len(prompt):,} tokens leaves no room to answer; the limit is "
                            f"{max_prompt:,}",
                        )
                    else:
                        waiting.append((conversation, asked, prompt))
            told = _answers([prompt for _, _, prompt in waiting], speaker, answers, batch, on_answers)
            open_ = []
            for (conversation, asked, _), tokens in zip(waiting, told, strict=True):
                with _problems(conversation, problems):
                    if isinstance(tokens, BadRecord):
                        raise tokens
                    asked.answer(tokens)
                    open_.append((conversation, asked))
        yield from (done[id(one)] for one in chunk if id(one) in done)


@contextlib.contextmanager
def _problems(conversation: Conversation, problems: list[Problem]) -> Iterator[None]:
    """Make a problem of a bad record met inside."""
    try:
        yield
    except BadRecord as error:
        problems.append(conversation.problem(error))


def _answers(
    prompts: list[list[int]],
    speaker: Speaker,
    answers: AnswerFile,
    batch: int,
    on_answers: Callable[[int], None] | None,
) -> list[list[int] | BadRecord]:
    """Return the answer to each prompt, generating and storing those that are not on disk."""
    keys = [answers.key(prompt) for prompt in prompts]
    missing: dict[bytes, list[int]] = {}
    for key, prompt in zip(keys, prompts, strict=True):
        if key in answers:
            answers.reused += 1
        else:
            missing.setdefault(key, prompt)
    by_length = sorted(missing.items(), key=lambda item: len(item[1]))
    failed: dict[bytes, BadRecord] = {}
    for start in range(0, len(by_length), batch):
        group = by_length[start : start + batch]
        for number, answer in speaker.generate([prompt for _, prompt in group]):
            if isinstance(answer, BadRecord):
                failed[group[number][0]] = answer
            else:
                answers.put(group[number][0], answer)
        if on_answers is not None:
            on_answers(len(group))
    return [failed[key] if key in failed else answers.get(key) for key in keys]
