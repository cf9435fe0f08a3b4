"""Readers: the three forms from every container, and every wrong record and file told by name and line."""

from __future__ import annotations

import datetime
import json
import os
import sys
import tracemalloc
import types
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.wording import check_wording, refused

from dflash_lab import files
from dflash_lab.data.conversations import FORMS, form, read_conversations, to_messages, tools_of
from dflash_lab.data.records import CONTAINERS, container, parse, split_values
from dflash_lab.errors import InputError

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
MESSAGES = {"messages": TURNS}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}
ALPACA = {"instruction": "Hi", "input": "", "output": "Hello."}
GOOD = json.dumps(MESSAGES).encode()


def read(path, **options):
    conversations, problems = read_conversations(path, **options)
    return list(conversations), problems


def write(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def check_told(problems):
    """Hold what is told of files and records against the recorded words."""
    check_wording("\n".join(f"{p.file}:{p.line} {p.kind}, {p.records}: {p.reason}" for p in problems))


@pytest.mark.parametrize("record", [MESSAGES, SHAREGPT, ALPACA], ids=["messages", "sharegpt", "alpaca"])
def test_every_form_from_every_container(tmp_path, record):
    line, many = json.dumps(record), [record] * 3
    pl.DataFrame(many).write_parquet(tmp_path / "d.parquet")
    texts = {
        "lines.jsonl": "\n".join([line] * 3),
        "list.json": json.dumps(many, indent=1),
        "object.json": json.dumps(record, indent=2),
        "lines.json": "\n".join([line] * 3),
    }
    for name, text in texts.items():
        write(tmp_path, name, text.encode())
    for name in ("d.parquet", *texts):
        found, problems = read(tmp_path / name)
        count = 1 if name == "object.json" else 3
        assert not problems
        assert [c.messages for c in found] == [TURNS] * count
        assert len({c.id for c in found}) == count
        assert {c.source for c in found} == {name}


def test_alpaca_joins_input_and_keeps_system_and_history(tmp_path):
    record = {**ALPACA, "input": "there", "system": "Be brief", "history": [["a", "b"]]}
    (found,), problems = read(write(tmp_path, "d.jsonl", json.dumps(record).encode()))
    assert not problems
    assert [(m["role"], m["content"]) for m in found.messages] == [
        ("system", "Be brief"),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "Hi\n\nthere"),
        ("assistant", "Hello."),
    ]


def test_text_parts_are_joined_and_reasoning_has_one_name():
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    for name in ("reasoning_content", "reasoning", "thinking"):
        messages = to_messages(talk(content=parts, **{name: "hm"}))
        assert messages[1] == {"role": "assistant", "content": "AB", "reasoning_content": "hm"}


def talk(**assistant):
    """A record whose assistant turn is `assistant`."""
    return {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", **assistant}]}


FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
HALF = "\ud800"
NO_ANSWER = b'{"messages": [{"role": "user", "content": "x"}]}'
CUT_OFF = [GOOD[:-5], GOOD[:35], b"\0" * 100]  # in a list they cannot be told from what follows
BAD_LINES = [
    b"{'messages': []}",
    GOOD + b" x",
    b"",
    b"   ",
    b"[1, 2]",
    b"17",
    b"null",
    b'{"mesages": []}',
    b'{"messages": []}',
    b'{"messages": "hello"}',
    b'{"messages": ["hello"]}',
    b'{"messages": [{"role": "alien", "content": "x"}]}',
    b'{"messages": [{"role": ["user"], "content": "x"}]}',
    b'{"messages": [{"content": "x"}]}',
    b'{"messages": [{"role": "user"}]}',
    b'{"messages": [{"role": "user", "content": 3}]}',
    b'{"messages": [{"role": "assistant", "content": "x"}]}',
    NO_ANSWER,
    GOOD.replace(b"Hello.", b" "),
    b'{"messages": [], ' + GOOD[1:],
    GOOD.replace(b"Hi", b"H\0i"),
    GOOD.replace(b"Hi", b"H\\u0000i"),
    GOOD.replace(b"Hi", b"\\ud800"),
    GOOD.replace(b"Hi", "naïve".encode("latin-1")),
    b'{"messages": NaN}',
    b'{"messages": 1' + b"0" * 5000 + b"}",
    b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    GOOD.replace(b"Hi", b"H" * 300_000),
    b'{"instruction": 1, "output": "x"}',
    b'{"instruction": "a", "output": "x", "history": ["y"]}',
]
WRONG = [
    *(
        {**MESSAGES, "tools": tools}
        for tools in (
            5,
            "f(x)",
            "5",
            [5],
            [[FUNCTION]],
            [{"description": "f"}],
            [{"function": {"name": 5}}],
            [{"type": "function", "function": None}],
            [{"function": {**FUNCTION, "description": "a\0b"}}],
            [{"function": {**FUNCTION, "description": HALF}}],
        )
    ),
    *(
        talk(content=None, tool_calls=calls)
        for calls in (
            5,
            "weather()",
            [5],
            [{"id": "1"}],
            [{"function": {"arguments": {}}}],
            [{"function": {"name": ["weather"]}}],
            [{"function": {"name": "weather", "arguments": [1]}}],
            [{"function": {"name": "weather", "arguments": {"a": "x\0y"}}}],
            [{"function": {"name": "weather", "arguments": {HALF: 1}}}],
            [{"function": {"name": HALF, "arguments": {}}}],
        )
    ),
    {"messages": [*TURNS, {"role": "tool", "content": "r", "tool_call_id": 5}]},
    *(
        talk(content="A", **{name: thought})
        for name, thought in (("reasoning_content", 5), ("reasoning", ["a"]), ("thinking", "a\0b"))
    ),
    *(
        talk(content=[{"type": "text", "text": "see"}, part])
        for part in (
            {"type": "image_url", "image_url": {"url": "x"}},
            {"type": "text"},
            {"type": "text", "text": None},
            {"type": "text", "text": 5},
            "see",
            None,
        )
    ),
    {"input_ids": [1, 2]},
]


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_bad_record_costs_itself_only_and_is_told_with_its_line(tmp_path, suffix):
    bad = [*BAD_LINES, *(json.dumps(one).encode() for one in WRONG)]
    bad += CUT_OFF if suffix == ".jsonl" else []
    lines = [GOOD, *(line for one in bad for line in (one, GOOD))]
    data = b"[" + b",\n".join(lines) + b"]\n" if suffix == ".json" else b"\n".join(lines) + b"\n"
    found, problems = read(write(tmp_path, "d" + suffix, data), max_record_bytes=250_000)
    assert [c.messages for c in found] == [TURNS] * (len(bad) + 1)
    for problem, line, one in zip(problems, range(2, len(lines), 2), bad, strict=True):
        assert problem.line == line or (suffix == ".json" and not one.strip() and problem.line == line + 1)
        assert len(problem.reason) < 600
    check_told(problems)


@pytest.mark.parametrize(
    ("tools", "known"),
    [
        (None, 0),
        ("", 0),
        ("  ", 0),
        ("[]", 0),
        ("null", 0),
        ([], 0),
        ([FUNCTION], 1),
        (json.dumps([FUNCTION, {"type": "function", "function": FUNCTION}]), 2),
        (json.dumps({"type": "function", "function": FUNCTION}), 1),
    ],
)
def test_tools_mean_what_they_say(tools, known):
    found = tools_of({**MESSAGES, "tools": tools})
    assert found == [{"type": "function", "function": FUNCTION}] * known


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "tool_calls": json.dumps([CALL])},
        {"role": "assistant", "content": None, "function_call": CALL["function"]},
        {"role": "assistant", "tool_calls": [{"name": "weather", "parameters": {"city": "Rome"}}]},
        {"from": "function_call", "value": json.dumps(CALL["function"])},
        {"from": "tool_call", "value": json.dumps([CALL])},
    ],
)
def test_calls_come_in_one_form_however_they_are_spelled(turn):
    asked = {"role": "user", "content": "Rome?"}
    messages = to_messages(
        {"messages": [asked, turn, {"role": "function", "content": "sunny", "name": "weather"}]}
    )
    assert messages[1] == {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert messages[2] == {"role": "tool", "content": "sunny", "name": "weather"}


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 10, 39])
def test_a_list_that_is_cut_off_says_so(tmp_path, cut):
    whole = json.dumps([MESSAGES, MESSAGES], indent=1).encode()
    found, problems = read(write(tmp_path, "d.json", whole[:-cut]))
    assert 1 <= len(found) <= 2
    assert [p.kind for p in problems] == ["cut off"]
    check_told(problems)


def test_json_lines_of_elements_are_right(tmp_path):
    text = '[\n{"a": "x\\"],[{\\\\"},\n\n' + json.dumps(MESSAGES) + ",\n  7\n]"
    found, problems = read(write(tmp_path, "d.json", text.encode()))
    assert [c.id for c in found] == ["d.json:4"]
    assert [p.line for p in problems] == [2, 5]


def test_prompts_without_an_answer_are_kept_for_regeneration(tmp_path):
    path = write(tmp_path, "d.jsonl", NO_ANSWER)
    assert len(read(path, need_answer=False)[0]) == 1
    assert [p.kind for p in read(path)[1]] == ["no answer"]


def test_byte_order_marks(tmp_path):
    assert len(read(write(tmp_path, "a.jsonl", b"\xef\xbb\xbf" + GOOD))[0]) == 1
    assert len(read(write(tmp_path, "a.json", b"\xef\xbb\xbf[" + GOOD + b"]"))[0]) == 1
    for mark, encoding in ((b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        found, problems = read(write(tmp_path, "b.jsonl", mark + GOOD.decode().encode(encoding)))
        assert not found
        check_told(problems)


def test_folder_reads_every_known_file_in_order_and_names_the_rest(tmp_path):
    write(tmp_path, "b/two.json", b"[" + GOOD + b"]")
    write(tmp_path, "a.jsonl", GOOD + b"\n")
    write(tmp_path, "notes.txt", b"x")
    write(tmp_path, ".git/x.jsonl", b"x")
    write(tmp_path, ".x.jsonl", b"x")
    write(tmp_path, "empty.jsonl", b"")
    write(tmp_path, "none.parquet", b"PAR1 no")
    write(tmp_path, "void.parquet", b"")
    os.mkfifo(tmp_path / "pipe.jsonl")  # is not waited for
    pl.DataFrame([MESSAGES]).write_parquet(tmp_path / "c.parquet")
    pl.DataFrame(schema={"messages": pl.String}).write_parquet(tmp_path / "d.parquet")
    found, problems = read(tmp_path)
    assert [c.id for c in found] == ["a.jsonl:1", "b/two.json:1", "c.parquet:1"]
    check_told(sorted(problems, key=lambda p: p.file))


@pytest.mark.parametrize("make", ["missing.jsonl", "missing", "folder", "unknown.txt", "pipe.jsonl"])
def test_nothing_to_read_is_an_input_error_with_a_remedy(tmp_path, make):
    path = tmp_path / make
    if make == "folder":
        path.mkdir()
    if make == "unknown.txt":
        path.write_text("x")
    if make == "pipe.jsonl":
        os.mkfifo(path)
    with refused(InputError):
        read_conversations(path)


def test_what_cannot_be_opened_or_listed_is_named_and_the_others_are_read(tmp_path, monkeypatch):
    for name in ("a.jsonl", "b.jsonl", "closed/c.jsonl"):
        write(tmp_path, name, GOOD)

    def refusing(real):
        def call(path, *args, **kwargs):
            if str(path).endswith(("a.jsonl", "closed")):
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *args, **kwargs)

        return call

    monkeypatch.setattr("builtins.open", refusing(open))
    monkeypatch.setattr(os, "scandir", refusing(os.scandir))
    found, problems = read(tmp_path)
    monkeypatch.undo()
    assert [c.id for c in found] == ["b.jsonl:1"]
    check_told(problems)


def test_parquet_with_wrong_types_names_each_row(tmp_path):
    pl.DataFrame({"messages": [1, 2, None]}).write_parquet(tmp_path / "a.parquet")
    pl.DataFrame({"instruction": [b"\xff"], "output": ["x"]}).write_parquet(tmp_path / "b.parquet")
    found, problems = read(tmp_path)
    assert not found
    check_told(problems)


def test_parquet_optional_columns_may_be_null(tmp_path):
    rows = [{**ALPACA, "input": None, "system": None}, {**ALPACA, "input": "x", "system": "s"}]
    pl.DataFrame(rows).write_parquet(tmp_path / "d.parquet")
    found, problems = read(tmp_path / "d.parquet")
    assert not problems and [len(c.messages) for c in found] == [2, 3]


def test_forms_and_containers_are_added_by_registering(tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_lab.data.conversations.FORMS", dict(FORMS))
    monkeypatch.setattr("dflash_lab.data.records.CONTAINERS", dict(CONTAINERS))

    @form("question", needs=("question", "answer"))
    def from_question(record):
        return [
            {"role": "user", "content": record["question"]},
            {"role": "assistant", "content": record["answer"]},
        ]

    @container(".tsv")
    def read_tsv(path, limit):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            yield number, dict(zip(("question", "answer"), line.split("\t"), strict=True))

    found, problems = read(write(tmp_path, "d.tsv", b"Hi\tHello.\n"))
    assert not problems and found[0].messages == TURNS


def test_a_tool_has_no_field_that_only_other_rows_have(tmp_path, monkeypatch):
    def record(name, **arguments):
        properties = {key: {"type": "string"} for key in arguments}
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        tool = {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        return {"messages": [{"role": "user", "content": "Q"}, answer], "tools": [tool]}

    rows = [record("weather", city="Rome"), record("time", zone="CET"), record("stop")]
    pl.DataFrame(rows, infer_schema_length=None).write_parquet(tmp_path / "d.parquet")
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    streamed = pl.read_parquet(tmp_path / "d.parquet").to_dicts()
    library = types.SimpleNamespace(load_dataset=lambda *_args, **_options: streamed)
    monkeypatch.setitem(sys.modules, "datasets", library)
    wanted, _ = read(tmp_path / "d.jsonl")
    for source in (tmp_path / "d.parquet", "owner/name"):
        found, problems = read(source)
        assert not problems and len(found) == 3
        assert [(one.messages, one.tools) for one in found] == [(one.messages, one.tools) for one in wanted]


def test_hub_data_sets_stream_and_the_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refused(InputError):
        read_conversations("owner/name")
    asked = []

    def load_dataset(name, config, *, split, streaming):
        asked.append((name, config, split, streaming))
        return [SHAREGPT, {"x": 1}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    found, problems = read("owner/name:config@train[:10]")
    assert asked == [("owner/name", "config", "train[:10]", True)]
    assert [c.id for c in found] == ["owner/name:config@train[:10]:1"] and problems[0].line == 2
    read("owner/name")
    assert asked[-1] == ("owner/name", None, "train", True)


def test_a_data_set_id_without_a_hub_is_answered_at_once(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=None))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    with refused(InputError):
        read_conversations("owner/name")


@pytest.mark.parametrize("shape", ["one huge line", "a long list"])
def test_a_large_file_is_read_in_bounded_memory(tmp_path, shape):
    path = tmp_path / ("d.json" if shape == "a long list" else "d.jsonl")
    if shape == "a long list":
        one = json.dumps({"messages": [{**TURNS[0], "content": "x" * 20_000}, TURNS[1]]})
        path.write_text("[" + ",".join([one] * 1000) + "]")  # 20 MB
    else:
        path.write_bytes(GOOD + b"\n" + b"x" * (20 << 20) + b"\n" + GOOD)
    conversations, problems = read_conversations(path, max_record_bytes=1 << 20)
    tracemalloc.start()
    count = sum(1 for _ in conversations)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == (1000 if shape == "a long list" else 2)
    assert [(p.line, p.kind) for p in problems] == ([] if shape == "a long list" else [(2, "too large")])
    assert peak < 8 << 20


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=()), max_size=8),  # half surrogates and NUL too
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["messages", "conversations", "role", "content", "from", "value", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None)
@given(st.lists(json_values, min_size=1, max_size=6), st.booleans())
def test_any_json_is_accounted_for(tmp_path_factory, values, as_list):
    folder = tmp_path_factory.mktemp("any")
    if as_list:
        path = write(folder, "d.json", json.dumps([values], indent=1)[1:-1].encode())
    else:
        path = write(folder, "d.jsonl", "\n".join(map(json.dumps, values)).encode())
    found, problems = read(path)
    assert len(found) + sum(p.records for p in problems) == len(values)
    storable(found, problems)


def storable(found, problems):
    """What was read must go into a table, whatever the input spelled."""
    pl.DataFrame(
        {"text": [c.source for c in found] + [p.reason for p in problems] + [p.file for p in problems]}
    )
    for conversation in found:
        [message["content"].encode() for message in conversation.messages]


def test_names_that_utf8_cannot_hold_are_spelled_out(tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9.jsonl")).write_bytes(GOOD + b"\n{bad\n")
    (tmp_path / os.fsdecode(b"\xff.txt")).write_bytes(b"")
    source = write(tmp_path, "s.jsonl", GOOD[:-1] + b', "source": "\\ud800"}')
    found, problems = read(tmp_path)
    assert sorted(c.id for c in found) == ["caf\\udce9.jsonl:1", "s.jsonl:1"]
    assert {p.file for p in problems} == {"caf\\udce9.jsonl", "\\udcff.txt"}
    assert read(source)[0][0].source == "\\ud800"
    storable(found, problems)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b.jsonl", "\ud800.jsonl"], ids=["long", "NUL", "half"])
def test_names_no_file_can_have(name):
    with refused(InputError):
        read_conversations(name)


@pytest.mark.parametrize("wide", ["/", "~", "/proc", "home's parent", "a link to /"])
def test_a_whole_disk_or_home_is_refused_before_it_is_walked(tmp_path, monkeypatch, wide):
    home = tmp_path / "homes" / "me"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    write(home, "chats/a.jsonl", GOOD)
    (tmp_path / "link").symlink_to("/")
    given = {"~": str(home), "home's parent": str(home.parent), "a link to /": str(tmp_path / "link")}
    monkeypatch.setattr(os, "walk", lambda *args, **options: pytest.fail("it was walked"))
    with refused(InputError):
        read_conversations(given.get(wide, wide))
    monkeypatch.undo()
    monkeypatch.setenv("HOME", str(home))
    assert len(read(home / "chats")[0]) == 1


def test_a_folder_of_too_many_files_is_refused_with_the_remedy(tmp_path, monkeypatch):
    for number in range(4):
        write(tmp_path, f"{number % 2}/{number}.jsonl", GOOD)
    monkeypatch.setattr(files, "MOST_FILES", 4)
    assert len(read(tmp_path)[0]) == 4
    write(tmp_path, "more.txt", b"x")
    with refused(InputError):
        read_conversations(tmp_path)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.binary(max_size=60) | st.sampled_from([GOOD, GOOD[:40], b"", b"\0", b"\xff\xfe"]), max_size=8)
)
def test_any_bytes_as_lines_are_accounted_for(tmp_path_factory, pieces):
    data = b"\n".join(piece.replace(b"\n", b" ") for piece in pieces)
    path = write(tmp_path_factory.mktemp("any"), "d.jsonl", data)
    found, problems = read(path)
    whole = any(p.line == 0 for p in problems)
    lines = data.count(b"\n") + (not data.endswith(b"\n") and bool(data))
    assert whole or len(found) + sum(p.records for p in problems) == lines


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.binary(max_size=30) | st.sampled_from([GOOD, b"[", b"]", b'"', b",", b"\\", b"{", b"}"]),
        max_size=12,
    )
)
def test_any_bytes_as_json_never_crash_and_name_a_line_of_the_file(tmp_path_factory, pieces):
    data = b"".join(pieces)
    found, problems = read(write(tmp_path_factory.mktemp("any"), "d.json", data))
    assert found or problems
    assert all(0 <= p.line <= data.count(b"\n") + 1 for p in problems)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 255), st.booleans())
def test_damaged_parquet_is_named(tmp_path_factory, position, value, cut):
    folder = tmp_path_factory.mktemp("any")
    path = folder / "d.parquet"
    pl.DataFrame([MESSAGES] * 50).write_parquet(path)
    data = bytearray(path.read_bytes())
    position %= len(data)
    data = data[:position] if cut else data[:position] + bytes([value]) + data[position + 1 :]
    path.write_bytes(data)
    found, problems = read(path)
    assert len(found) == 50 or problems


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), json_values)
def test_splitting_does_not_depend_on_where_chunks_end(size, value):
    data = json.dumps([value, {"a": '\\"[', "b": [1, {}]}, value], indent=1).encode()
    chunks = [data[start : start + size] for start in range(0, len(data), size)]
    assert list(split_values(chunks, 10_000)) == list(split_values([data], 10_000))
    assert [parse(piece) for _, piece in split_values(chunks, 10_000)] == [
        value,
        {"a": '\\"[', "b": [1, {}]},
        value,
    ]


def test_arguments_and_tools_nested_deeper_than_python_recurses_are_read():
    deep: dict = {}
    for _ in range(3000):
        deep = {"in": deep}
    calls = [{"name": "weather", "arguments": deep}]
    record = {
        "messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "tool_calls": calls}],
        "tools": [{"name": "weather", "parameters": deep}],
    }
    (_, answer) = to_messages(record)
    assert answer["tool_calls"][0]["function"]["arguments"] is deep
    assert tools_of(record)[0]["function"]["parameters"] is deep


def test_what_no_json_can_hold_is_named_in_calls_and_tools(tmp_path):
    """Columns of Parquet files can; a template would print <date>, or the run would end there."""
    day = datetime.date(2026, 1, 1)
    for number, value in enumerate((b"\xff", day, datetime.datetime(2026, 1, 1), float("nan"))):
        calls = [{"name": "f", "arguments": {"x": value}}]
        record = {**MESSAGES, "tools": [{"name": "f", "parameters": {"x": value}}]}
        rows = [talk(tool_calls=calls)]
        pl.DataFrame(rows, infer_schema_length=None).write_parquet(tmp_path / f"calls{number}.parquet")
        pl.DataFrame([record]).write_parquet(tmp_path / f"tools{number}.parquet")
    found, problems = read(tmp_path)
    assert not found
    check_told(problems)
