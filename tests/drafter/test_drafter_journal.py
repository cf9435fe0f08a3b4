"""The journal: read on from where it was, damaged lines named."""

from __future__ import annotations

import pytest
from support.wording import refused

from dflash_lab.drafter.journal import Journal, Reader, read_journal
from dflash_lab.errors import StoreError


def test_a_journal_is_read_on_from_where_it_was(tmp_path):
    journal, reader = Journal(tmp_path, 0), Reader(tmp_path)
    assert reader.read() == []
    for step in (1, 2):
        journal.write("step", step, loss=1.0 / step)
    journal.flush()
    first = reader.read()[0]
    assert [record["step"] for record in reader.read()] == [1, 2]
    with open(journal.path, "ab") as file:
        file.write(b'{"kind": "step", "st')  # still being written
    assert len(reader.read()) == 2
    with open(journal.path, "ab") as file:
        file.write(b'ep": 3, "loss": 0.5}\n')
    assert [record["step"] for record in reader.read()] == [1, 2, 3]
    assert reader.read()[0] is first, "lines read before are not parsed again"
    journal.close()
    Journal(tmp_path, 1).close()  # a resumed run drops what is behind its checkpoint
    assert [record["step"] for record in reader.read()] == [1]
    assert read_journal(tmp_path) == reader.read()


@pytest.mark.parametrize(
    "line",
    [b"\0" * 40, b"[]", b'{"kind": "step"}', b'{"kind": 3, "step": 1}', b"[" * 9999],
    ids=["zeros", "a list", "no step", "a kind that is no word", "too deep"],
)
def test_a_damaged_line_of_the_journal_is_named_with_what_to_do(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"kind": "step", "step": 1}\n' + line + b"\n")
    with refused(StoreError):
        read_journal(tmp_path)
