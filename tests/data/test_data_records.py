"""Readers that hold out: memory bounded by a record, damage told with the rows that it costs."""

from __future__ import annotations

import base64
import contextlib
import os
import random
import subprocess
import sys
import types

import polars as pl
import pytest
from support.wording import check_wording

from dflash_lab.data.conversations import FORMS, read_conversations, to_messages
from dflash_lab.data.records import FIELDS, BadRecord, columns_read, row_groups


def chat(number, answer="Hello."):
    return {
        "messages": [{"role": "user", "content": f"Hi {number}"}, {"role": "assistant", "content": answer}]
    }


def read(source, **options):
    conversations, problems = read_conversations(source, **options)
    return list(conversations), problems


def noise(number, size=6000):
    """Text that does not compress, so that a byte of the file belongs to one row."""
    return base64.b64encode(random.Random(number).randbytes(size)).decode()


CHILD = """
import re, sys
import polars as pl
from dflash_lab.data.conversations import read_conversations

def peak():  # ru_maxrss is that of the parent, too, whose memory a child shares until it starts
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) >> 10

pl.scan_parquet(sys.argv[1]).select(pl.len()).collect()
before = peak()
for path in sys.argv[1:]:
    found, problems = read_conversations(path, max_record_bytes=4 << 20)
    print(sum(1 for _ in found), len(problems))
print(peak() - before)
"""


def test_parquet_is_read_in_a_part_of_its_size(tmp_path):
    large = ["x" * (1 << 20) + str(number) for number in range(100)]
    rows = {
        "conversations": [chat(number, text) for number, text in enumerate(large)],
        "a column nobody needs": [{**chat(number), "page": text} for number, text in enumerate(large)],
    }
    paths = [tmp_path / f"{name}.parquet" for name in rows]
    for path, frame in zip(paths, rows.values(), strict=True):
        pl.DataFrame(frame).write_parquet(path)
    two = {**os.environ, "POLARS_MAX_THREADS": "2"}  # each thread has buffers of its own
    words = [sys.executable, "-c", CHILD, *map(str, paths)]
    told = subprocess.run(words, capture_output=True, text=True, check=True, env=two).stdout.splitlines()
    assert told[:2] == ["100 0", "100 0"]
    assert int(told[2]) < 70  # MiB: ranges of 4 MiB, as large as a record may be; a whole file is 100


GIANT = "x" * (3 << 20)


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (0, {"messages": chat(0, GIANT)["messages"]}),
        (7, {"instruction": GIANT, "output": "b"}),
        (19, {"input_ids": [1] * (1 << 20), "loss_mask": [0, 1, 1]}),
        (7, {**chat(7), "source": GIANT}),
    ],
    ids=["messages", "instruction", "input_ids", "source"],
)
def test_a_giant_cell_is_counted_and_its_neighbours_are_read(tmp_path, place, wrong):
    small = {"instruction": "a", "input_ids": [1, 2], "loss_mask": [0, 1], "output": "b", "source": "here"}
    rows = [{**chat(n), **{key: small[key] for key in wrong if key in small}} for n in range(20)]
    rows = [{key: row[key] for key in wrong} for row in rows]
    rows[place] = wrong
    pl.DataFrame(rows).write_parquet(tmp_path / "d.parquet")
    found, problems = read(tmp_path / "d.parquet", max_record_bytes=1 << 20)
    assert [(p.file, p.line, p.kind, p.records) for p in problems] == [
        ("d.parquet", place + 1, "too large", 1)
    ]
    check_wording(problems[0].reason)
    assert [c.id for c in found] == [f"d.parquet:{row}" for row in range(1, 21) if row != place + 1]


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_from_the_first_row_that_cannot_be_decoded_on_the_rest_is_counted(tmp_path, share):
    path = tmp_path / "d.parquet"
    rows = [chat(number, noise(number)) for number in range(100)]
    pl.DataFrame(rows).write_parquet(path, row_group_size=10)
    data = bytearray(path.read_bytes())
    at, much = int(share * len(data)), len(data) // 8  # more than a row group, so that a page's header is hit
    data[at : at + much] = bytes(much)
    path.write_bytes(data)
    found, problems = read(path)
    assert 10 < len(found) < 90 and [c.id for c in found] == [f"d.parquet:{n + 1}" for n in range(len(found))]
    (problem,) = problems
    assert (problem.line, problem.records) == (len(found) + 1, 100 - len(found))
    assert problem.kind == "unreadable" and f"from row {len(found) + 1} on" in problem.reason


def test_files_of_other_schemas_lie_in_one_folder(tmp_path):
    frames = {
        "a": [chat(1)],
        "b": [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}],
        "c": [{"instruction": "a", "output": "b", "input": None}],
        "d": [{"input_ids": [1, 2], "loss_mask": [False, True]}],
        "e": [{"mesages": "a", "source": "s"}],
        "f": [{"messages": 3}],
        "g": [{**chat(2), "extra": 1.5, "tools": None}],
        "h": [{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}],
    }
    for name, rows in frames.items():
        pl.DataFrame(rows).write_parquet(tmp_path / f"{name}.parquet")
    (tmp_path / "i.parquet").write_bytes(b"PAR1")
    (tmp_path / "j.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    found, problems = read(tmp_path)
    assert [c.id for c in found] == [f"{name}.parquet:1" for name in "abcdg"]
    check_wording("\n".join(f"{p.file}:{p.line} {p.kind}, {p.records}: {p.reason}" for p in problems))


def test_a_footer_tells_rows_and_decoded_bytes_of_every_row_group(tmp_path):
    path = tmp_path / "d.parquet"
    rows = [
        {**chat(number, "x" * 5000 + str(number)), "n": number, "input_ids": [7] * 2000, "on": number > 3}
        for number in range(25)
    ]
    frame = pl.DataFrame(rows)
    frame.write_parquet(path, row_group_size=10)
    found = row_groups(path, ["messages"])
    assert [count for count, _ in found] == [10, 10, 5]
    for number, (count, size) in enumerate(found):
        part = frame.slice(10 * number, count)
        assert 1 < size / part.select("messages").estimated_size() < 1.5
        ids = row_groups(path, ["input_ids", "on"])[number][1]  # encoded in a few bytes, eight each when read
        assert 1 <= ids / part.select("input_ids").estimated_size() < 1.1
        assert row_groups(path, [])[number] == (count, 0)
        assert row_groups(path, frame.columns)[number][1] > size + ids
    pl.DataFrame(schema={"messages": pl.String}).write_parquet(path)
    assert sum(count for count, _ in row_groups(path, ["messages"])) == 0


def test_a_footer_that_is_damaged_is_a_value_error_and_nothing_else(tmp_path):
    path = tmp_path / "d.parquet"
    pl.DataFrame([chat(number) for number in range(30)]).write_parquet(path, row_group_size=10)
    whole = path.read_bytes()
    length = int.from_bytes(whole[-8:-4], "little")
    draw = random.Random(0)
    refused = 0
    for data in [b"", b"PAR1", whole[:-1], whole[:-8] + b"\xff\xff\xff\x7fPAR1", *[None] * 100]:
        if data is None:
            data = bytearray(whole)
            for _ in range(20):
                data[-8 - draw.randint(1, length)] = draw.randrange(256)
        path.write_bytes(data)
        try:
            row_groups(path, ["messages"])
        except ValueError:
            refused += 1
    assert refused > 25


def test_of_parquet_only_columns_that_a_form_may_need_are_read():
    names = ["id", "messages", "page", "tools", "source", "input", "system"]
    assert columns_read(names) == ["messages", "tools", "source"]
    assert columns_read(["instruction", "output", "x", *names]) == [
        "instruction",
        "output",
        *("messages", "tools", "source", "input", "system"),
    ]
    assert columns_read(["mesages", "x"]) == ["mesages", "x"]  # so that it can be said what is there


class Spied(dict):
    """A record that remembers which of its keys were asked for."""

    def __init__(self, record):
        super().__init__(record)
        self.asked = set()

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)


@pytest.mark.parametrize("name", FORMS)
def test_every_key_that_a_form_looks_at_is_one_that_it_registered(name):
    some = {**chat(1), "conversations": chat(1)["messages"]}
    record = Spied({key: some.get(key, "text") for key in FORMS[name].needs})
    for convert in (FORMS[name].convert, to_messages):
        with contextlib.suppress(BadRecord):
            convert(record)
    assert {*FORMS[name].needs} <= record.asked <= FIELDS[FORMS[name].needs]


class Streamed:
    """A streamed data set of `rows` whose reading fails before row `at` (from 0), as often as `errors` has
    one.
    """

    def __init__(self, rows, at, errors, total=None, start=0):
        self.rows, self.at, self.errors, self.start = rows, at, errors, start
        splits = {"train": types.SimpleNamespace(num_examples=total)} if total else None
        self.info = types.SimpleNamespace(splits=splits)
        self.total = total

    def skip(self, count):
        return Streamed(self.rows, self.at, self.errors, self.total, self.start + count)

    def __iter__(self):
        for number in range(self.start, len(self.rows)):
            if number == self.at and self.errors:
                raise self.errors.pop(0)
            yield self.rows[number]


@pytest.fixture
def hub(monkeypatch):
    """A function that puts a data set on the hub, under any name."""

    def put(data):
        library = types.SimpleNamespace(load_dataset=lambda *_args, **_options: data)
        monkeypatch.setitem(sys.modules, "datasets", library)
        monkeypatch.setattr("dflash_lab.data.records.out_of_reach", lambda: "")

    return put


ERRORS = [
    ConnectionError("reset by peer"),
    TimeoutError(),
    OSError("Broken pipe"),
    ValueError("Couldn't cast string to struct"),
    RuntimeError("An error occurred while generating the dataset"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_data_set_that_fails_once_goes_on_from_its_row(hub, error, caplog):
    for at in (0, 3):
        caplog.clear()
        hub(Streamed([chat(number) for number in range(5)], at, [error]))
        found, problems = read("owner/name")
        assert [c.id for c in found] == [f"owner/name:{row}" for row in range(1, 6)] and not problems
        assert [c.messages[0]["content"] for c in found] == [f"Hi {number}" for number in range(5)]
        check_wording(caplog.messages[0])


@pytest.mark.parametrize("total", [None, 9])
@pytest.mark.parametrize("error", ERRORS[:2], ids=lambda error: type(error).__name__)
def test_a_data_set_that_fails_twice_keeps_what_came_before_and_counts_the_rest(hub, error, total):
    hub(Streamed([chat(number) for number in range(9)], 4, [error, error], total))
    found, problems = read("owner/name")
    assert [c.id for c in found] == [f"owner/name:{row}" for row in range(1, 5)]
    (problem,) = problems
    assert (problem.file, problem.line, problem.kind) == ("owner/name", 5, "unreadable")
    assert problem.records == (5 if total else 1)
    check_wording(problem.reason)
