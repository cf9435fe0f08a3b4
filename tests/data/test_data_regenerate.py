"""Regeneration against a stand-in speaker whose every answer is known: order, reuse, resume, masks,
refusals."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_lab.data.conversations import Conversation
from dflash_lab.data.problems import BadRecord
from dflash_lab.data.regenerate import AnswerFile, Speaker, regenerate

STOP = 0
MARK = {"system": 1001, "user": 1002, "assistant": 1003, "tool": 1004}


def encode(messages):
    """Role mark, the letters, stop; the mask is on letters and stop of the assistant."""
    ids, mask = [], []
    for message in messages:
        if message["content"] == "refused":
            raise BadRecord("template", "refused")
        letters = [ord(letter) for letter in message["content"]]
        answer = int(message["role"] == "assistant")
        ids += [MARK[message["role"]], *letters, STOP]
        mask += [0, *[answer] * (len(letters) + 1)]
    return ids, mask


class Machine:
    """Answers a prompt with its length in letters; counts prompts and can fail at a given batch."""

    def __init__(self, fail_at=None, limit=99):
        self.batches: list[list[list[int]]] = []
        self.fail_at = fail_at
        self.limit = limit

    def generate(self, prompts):
        if len(self.batches) == self.fail_at:
            raise KeyboardInterrupt
        self.batches.append(prompts)
        return [[*map(ord, f"n{len(prompt)}"), STOP][: self.limit] for prompt in prompts]

    def speaker(self, settings="s"):
        return Speaker(
            prompt_of=lambda messages: [*encode(messages)[0], MARK["assistant"]],
            masked=encode,
            generate=self.generate,
            text_of=lambda answer: "".join(chr(token) for token in answer if token),
            stop_ids=frozenset([STOP]),
            settings=settings,
        )


def conversation(number, *contents, roles=None):
    roles = roles or ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents)]
    return Conversation(f"f:{number}", messages, "src")


def run(conversations, machine, path, settings="s", **options):
    problems = []
    answers = AnswerFile(path, settings)
    found = list(regenerate(conversations, machine.speaker(settings), answers, problems, **options))
    return found, problems, answers


def test_every_turn_is_answered_anew_and_masked(tmp_path):
    one = conversation(1, "ab", "old", "c", "old too")
    (found,), problems, _ = run([one], Machine(), tmp_path / "a.jsonl")
    assert not problems and not found.cut
    first = [MARK["user"], *map(ord, "ab"), STOP, MARK["assistant"]]
    answer = [*map(ord, "n5"), STOP]
    second = [*first, *answer, MARK["user"], ord("c"), STOP, MARK["assistant"]]
    last = [*map(ord, f"n{len(second)}"), STOP]
    assert found.input_ids == [*second, *last]
    trained = [token for token, on in zip(found.input_ids, found.loss_mask, strict=True) if on]
    assert trained == [*answer, *last]


def test_a_trailing_question_is_answered_and_doubled_answers_are_one(tmp_path):
    roles = ["system", "user", "assistant", "assistant", "user"]
    one = conversation(1, "s", "q", "a", "b", "r", roles=roles)
    (found,), _, _ = run([one], Machine(), tmp_path / "a.jsonl")
    assert [t for t in found.input_ids if t in MARK.values()] == [
        MARK[role] for role in ("system", "user", "assistant", "user", "assistant")
    ]


def test_an_answer_without_its_end_is_called_cut(tmp_path):
    (found,), _, _ = run([conversation(1, "q", "a")], Machine(limit=2), tmp_path / "a.jsonl")
    assert found.cut and found.loss_mask[-2:] == [1, 1]


def test_history_that_reads_otherwise_is_not_masked(tmp_path):
    machine = Machine()
    speaker = machine.speaker()
    other = Speaker(**{**vars(speaker), "masked": lambda messages: ([7, 7], [1, 1])})
    answers = AnswerFile(tmp_path / "a.jsonl", "s")
    (found,) = regenerate([conversation(1, "a", "b", "c", "d")], other, answers, [])
    assert sum(found.loss_mask) == len(found.input_ids) - found.loss_mask.index(1)  # the last answer only


def test_what_cannot_be_answered_is_named(tmp_path):
    given_ = [
        conversation(1, "ok", "a"),
        conversation(2, "refused", "a"),
        conversation(3, "q", "a", "result", roles=["user", "assistant", "tool"]),
        conversation(4, "a long question", "a"),
    ]
    found, problems, _ = run(given_, Machine(), tmp_path / "a.jsonl", max_prompt=10)
    assert [one.id for one in found] == ["f:1"]
    assert sorted((p.line, p.kind) for p in problems) == [(2, "template"), (3, "tools"), (4, "too long")]


def test_a_damaged_answer_is_made_again_and_only_that(tmp_path):
    path, chooser = tmp_path / "a.jsonl", random.Random(3)
    chats = [conversation(n, "q" * n, "a") for n in range(1, 9)]
    wanted, _, _ = run(chats, Machine(), path)
    whole = path.read_bytes()
    for _ in range(60):
        data, at = bytearray(whole), chooser.randrange(len(whole))
        data[at] ^= 1 << chooser.randrange(8)
        path.write_bytes(data)
        machine = Machine()
        found, problems, answers = run(chats, machine, path)
        assert found == wanted and not problems
        again = sum(map(len, machine.batches))
        assert again <= 2 and answers.reused == len(chats) - again, "a newline holds two lines together"
    path.write_bytes(b"".join(line + b"\n" for line in old_lines(whole)))
    machine = Machine()
    assert run(chats, machine, path)[0] == wanted and not machine.batches, "answers of earlier versions stay"


def old_lines(data):
    """The lines as they were before they had checksums."""
    for line in data.splitlines():
        yield json.dumps({k: v for k, v in json.loads(line).items() if k != "check"}).encode()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4), max_size=12),
    st.integers(1, 5),
    st.integers(1, 6),
)
def test_order_is_kept_and_no_prompt_is_answered_twice(tmp_path_factory, texts, batch, window):
    folder = tmp_path_factory.mktemp("r")
    machine = Machine()
    conversations = [
        conversation(number, *[part for text in turns for part in (text, "old")])
        for number, turns in enumerate(texts)
    ]
    found, problems, _ = run(conversations, machine, folder / "a.jsonl", batch=batch, window=window)
    assert [one.id for one in found] == [one.id for one in conversations] and not problems
    asked = [tuple(prompt) for group in machine.batches for prompt in group]
    assert len(set(asked)) == len(asked)
    assert all(1 <= len(group) <= batch for group in machine.batches)
    again, _, reused = run(conversations, Machine(fail_at=0), folder / "a.jsonl", batch=batch, window=window)
    assert again == found and reused.reused == sum(len(turns) for turns in texts)


def test_a_stopped_run_goes_on_and_other_settings_start_anew(tmp_path):
    path = tmp_path / "a.jsonl"
    conversations = [conversation(number, "q" * number, "old") for number in range(1, 9)]
    with pytest.raises(KeyboardInterrupt):
        run(conversations, Machine(fail_at=2), path, batch=2)
    with open(path, "a") as file:
        file.write('{"key": "torn')
    machine = Machine()
    found, _, answers = run(conversations, machine, path, batch=2)
    assert len(found) == 8 and answers.reused == 4 and sum(map(len, machine.batches)) == 4
    assert all(json.loads(line) for line in path.read_text().splitlines())
    machine = Machine()
    run(conversations, machine, path, settings="another temperature", batch=2)
    assert sum(map(len, machine.batches)) == 8
