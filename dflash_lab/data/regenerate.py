"""Answers written by the target itself: what it says, token for token, is what a drafter must learn to guess.

The last answer keeps the very token ids that were generated (text that is decoded and encoded again may come
out as other tokens); earlier answers enter the next prompt as text, as they would in a chat. Every answer is
appended to a file when its batch is done, keyed by prompt and settings, so that a stopped run goes on where
it was. The model is behind three functions: this module knows no target.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from dflash_lab import files
from dflash_lab.data.conversations import Conversation, Message
from dflash_lab.data.problems import BadRecord, Problem
from dflash_lab.file_errors import naming

_KEY = re.compile("[0-9a-f]{32}")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Speaker:
    """The target as functions, and the settings that its answers depend on. The first two may raise
    `BadRecord`."""

    prompt_of: Callable[[list[Message]], list[int]]  # messages -> ids up to where the answer begins
    masked: Callable[[list[Message]], tuple[list[int], list[int]]]  # messages -> ids, assistant mask
    generate: Callable[[list[list[int]]], list[list[int]]]  # prompts -> new ids, closing token included
    text_of: Callable[[list[int]], str]  # new ids -> text of the answer
    stop_ids: frozenset[int]
    settings: str  # target, decoding and limits in words: answers made otherwise are not reused


@dataclass(frozen=True)
class Answered:
    """One conversation with new answers as tokens [L] and mask [L]; `cut`: the last one met the token
    limit."""

    id: str
    source: str
    input_ids: list[int]
    loss_mask: list[int]
    cut: bool


class AnswerFile:
    """Answers on disk by key, one JSON line each; memory holds 24 bytes and a number for each, not the
    answers."""

    def __init__(self, path: Path | str, settings: str) -> None:
        self.path = Path(path)
        self.settings = settings
        self.reused = 0
        self._offsets: dict[bytes, int] = {}
        if self.path.exists():
            self._index()

    def _index(self) -> None:
        """Find the lines. A last one torn by a crash is cut off, since what follows would be appended to it;
        a damaged one is left where it is, and its answer generated again.
        """
        offset = damaged = 0
        with naming(self.path), open(self.path, "rb+") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    log.warning("%s: the last line was torn and is dropped", self.path)
                    file.truncate(offset)
                    break
                key = str((files.unsealed(line) or {}).get("key"))
                if _KEY.fullmatch(key):
                    self._offsets[bytes.fromhex(key)] = offset
                else:
                    damaged += 1
                offset += len(line)
        if damaged:
            log.warning("%s: %d damaged lines, whose answers are generated again", self.path, damaged)

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


@dataclass
class _Dialogue:
    """A conversation on the way: what was said, the user's turns still to come, and the last prompt and
    answer."""

    conversation: Conversation
    ahead: list[list[Message]]
    said: list[Message] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)


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

    Prompts of a window of conversations are sorted by length and generated `batch` at a time. Conversations
    with tool turns, that the template refuses, or with a prompt over `max_prompt` tokens (0: any) go to
    `problems`. `on_answers` is told the number of new answers after every batch; it may raise to stop.
    """
    source = iter(conversations)
    while chunk := list(itertools.islice(source, window)):
        dialogues = []
        for conversation in chunk:
            try:
                dialogues.append(_Dialogue(conversation, _questions(conversation.messages)))
            except BadRecord as error:
                problems.append(problem_of(conversation.id, error))
        lost: set[int] = set()
        while active := [one for one in dialogues if one.ahead and id(one) not in lost]:
            for one in active:
                try:
                    _ask(one, speaker, max_prompt)
                except BadRecord as error:
                    problems.append(problem_of(one.conversation.id, error))
                    lost.add(id(one))
            _answer([one for one in active if id(one) not in lost], speaker, answers, batch, on_answers)
        for one in dialogues:
            if id(one) in lost:
                continue
            try:
                yield _finished(one, speaker)
            except BadRecord as error:
                problems.append(problem_of(one.conversation.id, error))


def problem_of(conversation_id: str, error: BadRecord) -> Problem:
    """Return the problem of a conversation whose id is ``file:line``."""
    file, _, line = conversation_id.rpartition(":")
    return error.at(file, int(line))


def _questions(messages: list[Message]) -> list[list[Message]]:
    """Split into what precedes each answer; answers themselves are left out."""
    if any(message["role"] == "tool" for message in messages):
        raise BadRecord("tools", "a tool turn answers a call of the old answer and cannot follow a new one")
    groups: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] != "assistant":
            groups[-1].append(message)
        elif any(earlier["role"] == "user" for earlier in groups[-1]):
            groups.append([])
    return [group for group in groups if any(message["role"] == "user" for message in group)]


def _ask(one: _Dialogue, speaker: Speaker, max_prompt: int) -> None:
    one.said = [*one.said, *one.ahead.pop(0)]
    one.prompt = speaker.prompt_of(one.said)
    if max_prompt and len(one.prompt) > max_prompt:
        raise BadRecord(
            "too long",
            f"a prompt of {len(one.prompt):,} tokens leaves no room to answer; the limit is {max_prompt:,}",
        )


def _answer(
    dialogues: list[_Dialogue],
    speaker: Speaker,
    answers: AnswerFile,
    batch: int,
    on_answers: Callable[[int], None] | None,
) -> None:
    keys = {id(one): answers.key(one.prompt) for one in dialogues}
    missing: dict[bytes, list[int]] = {}
    for one in dialogues:
        if keys[id(one)] in answers:
            answers.reused += 1
        else:
            missing.setdefault(keys[id(one)], one.prompt)
    for group in _groups(sorted(missing.items(), key=lambda item: len(item[1])), batch):
        new = speaker.generate([prompt for _, prompt in group])
        for (key, _), answer in zip(group, new, strict=True):
            answers.put(key, answer)
        if on_answers is not None:
            on_answers(len(group))
    for one in dialogues:
        one.answer = answers.get(keys[id(one)])
        one.said = [*one.said, {"role": "assistant", "content": speaker.text_of(one.answer)}]


def _groups(items: list, size: int) -> Iterator[list]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _finished(one: _Dialogue, speaker: Speaker) -> Answered:
    """Mask the last answer by its own tokens, earlier ones where the template shows them at the prompt's
    start."""
    earlier, mask = speaker.masked(one.said[:-1])
    if one.prompt[: len(earlier)] != earlier:
        mask = []
    mask = [*mask, *[0] * (len(one.prompt) - len(mask)), *[1] * len(one.answer)]
    cut = not one.answer or one.answer[-1] not in speaker.stop_ids
    return Answered(one.conversation.id, one.conversation.source, [*one.prompt, *one.answer], mask, cut)
