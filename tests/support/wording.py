"""Words for people, held in one place: tests/wording.json has what every refused test case is told.

`refused(kind)` stands where `pytest.raises(kind)` would and compares the message with the recorded one.
`WORDING=write pytest ...` records what is said now; read the difference as the person who meets it would.
In the file `…` stands for what another library, the system or the machine says there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
GOLDEN = TESTS / "wording.json"
_TEMPORARY = re.compile(r"[^\s'\"(,:;]*/pytest-of-[^/]+/pytest-\d+/(?:popen-gw\d+/)?[^/\s'\",:;)]+")


@contextlib.contextmanager
def refused(kind: type[BaseException] | tuple[type[BaseException], ...]) -> Iterator[Any]:
    """Expect an error of `kind` with the words recorded for this test; yield what `pytest.raises` does."""
    with pytest.raises(kind) as raised:
        yield raised
    check_wording(str(raised.value))


def check_wording(message: str) -> None:
    """Compare a text for people with the one recorded for this test, the first, second, ... of each test."""
    said, test = plain(message), os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0].removeprefix("tests/")
    number = _numbers[test] = _numbers.get(test, 0) + 1
    key = test if number == 1 else f"{test} ({number})"
    if os.environ.get("WORDING") == "write":
        with open(GOLDEN, "a+") as file:  # several workers write
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            known = json.loads(file.read() or "{}")
            if matches(said, known.get(key)):
                return
            file.truncate(0)
            json.dump(dict(sorted({**known, key: said}.items())), file, indent=0, ensure_ascii=False)
            file.write("\n")
        return
    known = json.loads(GOLDEN.read_text())
    assert key in known, f"no words recorded for {key}; record them: WORDING=write pytest ...\n{said}"
    assert matches(said, known[key]), f"{key}\nsays:     {said}\nrecorded: {known[key]}"


def matches(said: str, recorded: str | None) -> bool:
    """Whether a message is the recorded one, whose `…` stand for anything."""
    return (
        recorded is not None
        and re.fullmatch(".*".join(map(re.escape, recorded.split("…"))), said, re.DOTALL) is not None
    )


def plain(message: str) -> str:
    """A message without the folders of this run: TMP for the test's own, REPO for the checkout."""
    message = _TEMPORARY.sub("TMP", message).replace(str(TESTS.parent), "REPO")
    return message.replace(tempfile.gettempdir() + "/", "TMP/")


_numbers: dict[str, int] = {}
