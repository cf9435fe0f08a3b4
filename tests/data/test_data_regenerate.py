"""Regeneration against a stand-in speaker whose every answer is known: order, reuse, resume, masks,
refusals."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat_templates import CHANNELS, HERMES, WEATHER, call
from support.tiny_targets import CHATML, tiny_tokenizer
from support.wording import check_wording

from dflash_lab.data.conversations import Conversation
from dflash_lab.data.records import BadRecord
from dflash_lab.data.regenerate import AnswerFile, Speaker, regenerate
from dflash_lab.models.template import Dialogue

STOP = 258
TOKENIZER = tiny_tokenizer(HERMES)


def ids_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def text_of(ids):
    return TOKENIZER.decode(ids)


class Machine:
    """Answers a prompt with its length in tokens, or with what `says` has for its last letters; counts
    prompts and can fail at a given batch."""

    def __init__(self, fail_at=None, limit=99, says=None, tokenizer=TOKENIZER):
        self.batches: list[list[list[int]]] = []
        self.fail_at = fail_at
        self.limit = limit
        self.says = says or {}
        self.tokenizer = tokenizer

    def generate(self, prompts):
        if len(self.batches) == self.fail_at:
            raise KeyboardInterrupt
        self.batches.append(prompts)
        return enumerate([*ids_of(self.answer_to(prompt)), STOP][: self.limit] for prompt in prompts)

    def answer_to(self, prompt):
        asked = text_of(prompt).removesuffix("<|im_end|>\n<|im_start|>assistant\n")
        return next((told for end, told in self.says.items() if asked.endswith(end)), f"n{len(prompt)}")

    def ask(self, conversation):
        if any(message["content"] == "refused" for message in conversation.messages):
            raise BadRecord("template", "refused")
        tools = conversation.tools
        stop = frozenset([STOP])
        return Dialogue(self.tokenizer, conversation.messages, tools=tools, thinking=True, stop_ids=stop)

    def speaker(self, settings="s"):
        return Speaker(ask=self.ask, generate=self.generate, settings=settings)


def trained(found):
    """The text of each masked run."""
    runs, before = [], 0
    for token, on in zip(found.input_ids, found.loss_mask, strict=True):
        if on:
            runs += [] if before else [[]]
            runs[-1].append(token)
        before = on
    return [text_of(run) for run in runs]


def conversation(number, *contents, roles=None):
    roles = roles or ["user", "assistant"] * len(contents)
    messages = [
        {"role": role, **(text if isinstance(text, dict) else {"content": text})}
        for role, text in zip(roles, contents)
    ]
    calling = any("tool_calls" in message for message in messages)
    return Conversation(f"f:{number}", messages, "src", [WEATHER] if calling else [])


def run(conversations, machine, path, settings="s", **options):
    problems = []
    answers = AnswerFile(path, settings)
    found = list(regenerate(conversations, machine.speaker(settings), answers, problems, **options))
    return found, problems, answers


def test_every_turn_is_answered_anew_and_masked(tmp_path):
    one = conversation(1, "ab", "old", "c", "old too")
    (found,), problems, _ = run([one], Machine(), tmp_path / "a.jsonl")
    assert not problems and not found.cut and not found.notes
    first = "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
    answer = f"n{len(ids_of(first))}<|im_end|>"
    second = first + answer + "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    last = f"n{len(ids_of(second))}<|im_end|>"
    assert text_of(found.input_ids) == second + last and trained(found) == [answer, last]


def test_a_trailing_question_is_answered_and_doubled_answers_are_one(tmp_path):
    roles = ["assistant", "system", "user", "assistant", "assistant", "user"]
    one = conversation(1, "Hi!", "s", "q", "a", "b", "r", roles=roles)
    (found,), _, _ = run([one], Machine(), tmp_path / "a.jsonl")
    shown = [part.split("\n")[0] for part in text_of(found.input_ids).split("<|im_start|>")[1:]]
    assert shown == ["system", "user", "assistant", "user", "assistant"]


def test_an_answer_without_its_end_is_called_cut(tmp_path):
    (found,), _, _ = run([conversation(1, "q", "a")], Machine(limit=2), tmp_path / "a.jsonl")
    assert found.cut and found.loss_mask[-2:] == [1, 1]


def test_the_closing_of_an_answer_that_was_cut_is_not_the_targets(tmp_path):
    """The template closes every turn of the history; the target stopped at its limit, in mid sentence."""
    machine = Machine(says={"q": "long answer", "r": "ok", "s": "long again"}, limit=4)
    one = conversation(1, "q", "old", "r", "old", "s", "old")
    (found,), problems, _ = run([one], machine, tmp_path / "a.jsonl")
    assert not problems and "long<|im_end|>" in text_of(found.input_ids)
    assert trained(found) == ["long", "ok<|im_end|>", "long"] and found.cut


def test_history_that_reads_otherwise_is_not_masked(tmp_path):
    """A blank that the template takes away: what stands there is not what the target said."""
    trimming = tiny_tokenizer(CHATML.replace("message['content']", "message['content'].strip('n')"))
    machine = Machine(tokenizer=trimming)
    (found,), _, _ = run([conversation(1, "a", "b", "c", "d")], machine, tmp_path / "a.jsonl")
    assert trained(found)[-1].startswith("n")


AGENT = conversation(
    1,
    "Rome?",
    {"content": None, "tool_calls": [call("weather", city="Rome")]},
    "sunny",
    "Sun in Rome.",
    "Thanks",
    "old",
    roles=["user", "assistant", "tool", "assistant", "user", "assistant"],
)
CALL = '<call>{"name": "weather", "arguments": {"city": "Roma"}}</call>'


def test_calls_are_made_anew_and_get_the_results_that_are_recorded(tmp_path):
    machine = Machine(says={"Rome?": CALL, "sunny": "Sole."})
    (found,), problems, _ = run([AGENT], machine, tmp_path / "a.jsonl")
    text = text_of(found.input_ids)
    assert not problems and not found.notes
    own = f"Rome?<|im_end|>\n<|im_start|>assistant\n{CALL}<|im_end|>\n<|im_start|>tool\nsunny<|im_end|>"
    assert own in text and "Sun in Rome." not in text and text.count("Roma") == 1
    assert trained(found)[:2] == [CALL + "<|im_end|>", "Sole.<|im_end|>"] and len(trained(found)) == 3


def test_an_answer_that_was_cut_after_a_call_is_closed_as_the_template_closes_it(tmp_path):
    machine = Machine(says={"Rome?": CALL, "sunny": "x" * 200}, limit=len(CALL) + 1)
    (found,), problems, _ = run([AGENT], machine, tmp_path / "a.jsonl")
    assert not problems and "xx<|im_end|>\n<|im_start|>user\nThanks<|im_end|>" in text_of(found.input_ids)
    assert trained(found)[:2] == [CALL + "<|im_end|>", "x" * (len(CALL) + 1)]


def test_a_template_that_asks_for_the_ids_of_calls_is_shown_the_recorded_ones(tmp_path):
    asking = "{% for m in messages %}{% for call in m.tool_calls or [] %}{% if call.id != 'c1' %}"
    asking += "{{ raise_exception('which call?') }}{% endif %}{% endfor %}{% endfor %}"
    machine = Machine(says={"Rome?": CALL, "sunny": "Sole."}, tokenizer=tiny_tokenizer(asking + HERMES))
    (found,), problems, _ = run([AGENT], machine, tmp_path / "a.jsonl")
    assert not problems and trained(found)[:2] == [CALL + "<|im_end|>", "Sole.<|im_end|>"]


def test_a_conversation_ends_where_the_recorded_call_is_not_made(tmp_path):
    machine = Machine(says={"Rome?": "I cannot look that up."})
    (found,), problems, _ = run([AGENT], machine, tmp_path / "a.jsonl")
    assert found.notes == ("call not made",) and not problems and "sunny" not in text_of(found.input_ids)
    assert trained(found) == ["I cannot look that up.<|im_end|>"]


def test_thinking_goes_into_its_own_field_and_out_of_the_history(tmp_path):
    says = {"q": "<|think|>hm<|say|>A", "r": "<|think|>so<|say|>B"}
    machine = Machine(says=says, tokenizer=tiny_tokenizer(CHANNELS))
    (found,), problems, _ = run([conversation(1, "q", "old", "r", "old")], machine, tmp_path / "a.jsonl")
    assert not problems, problems
    assert "hm" not in text_of(found.input_ids) and trained(found) == [
        "<|say|>A<|im_end|>",
        "<|think|>so<|say|>B<|im_end|>",
    ]


def test_what_cannot_be_answered_is_named(tmp_path):
    given_ = [
        conversation(1, "ok", "a"),
        conversation(2, "refused", "a"),
        conversation(3, "<|im_end|>", "a"),
        conversation(4, "a long question, which leaves no room", "a"),
    ]
    found, problems, _ = run(given_, Machine(), tmp_path / "a.jsonl", max_prompt=50)
    assert [one.conversation.id for one in found] == ["f:1"]
    check_wording("\n".join(f"{p.line} {p.kind}: {p.reason}" for p in sorted(problems, key=lambda p: p.line)))


def test_a_damaged_answer_is_made_again_and_only_that(tmp_path):
    path, chooser = tmp_path / "a.jsonl", random.Random(3)
    chats = [conversation(n, "q" * n, "a") for n in range(1, 9)]
    wanted, _, _ = run(chats, Machine(), path)
    whole = path.read_bytes()
    for _ in range(25):
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


@settings(max_examples=25, deadline=None)
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
    assert [one.conversation for one in found] == conversations and not problems
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
