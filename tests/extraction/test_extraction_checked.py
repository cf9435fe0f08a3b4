"""Parts are read whole before they are trained on, once: a silent change is named, what is sound is
remembered.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from support.wording import check_wording, refused

from dflash_lab import files
from dflash_lab.errors import FileError, StoreError
from dflash_lab.extraction.checks import CHECKED, check_parts
from dflash_lab.results import fingerprint


def size(*parts: Path) -> int:
    return sum(path.stat().st_size for path in parts)


def test_a_sound_store_is_read_once_and_a_new_file_again(made, tmp_path):
    store, total, told = made.store, size(*made.parts()), []
    before = fingerprint(store)
    assert check_parts(store, lambda *told_of: told.append(told_of)) == total
    assert told[-1] == ("checking the store", total, total)
    assert check_parts(store, lambda *told_of: pytest.fail("nothing is left to read")) == 0
    assert fingerprint(store) == before  # else what was made of the store would no longer count
    copy = shutil.copytree(store, tmp_path / "copy")  # with the times of writing, and what was remembered
    assert check_parts(copy) == total
    os.utime(made.parts()[1])
    assert check_parts(store) == size(made.parts()[1])
    (store / CHECKED).write_text('{"parts": {}')
    assert check_parts(store) == total
    (store / CHECKED).write_bytes((store / CHECKED).read_bytes().replace(b"part-000001", b"part-000009"))
    assert check_parts(store) == total


def test_silent_damage_is_named_with_the_remedy_and_the_sound_parts_are_remembered(made):
    check_parts(made.store)
    damaged = [made.parts()[1], made.parts()[3]]
    for path in damaged:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    made.opened()  # sees nothing
    for _ in range(2):  # a damaged part is never remembered
        with refused(StoreError):
            check_parts(made.store)
    remembered = {made.store / name for name in files.read_json(made.store / CHECKED)["parts"]}
    assert remembered == {*made.parts()} - {*damaged}


def test_what_was_read_before_a_stop_stays_remembered(made):
    def stop(what, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_parts(made.store, stop)
    assert check_parts(made.store) < size(*made.parts())


def test_a_store_on_a_read_only_disk_is_checked_each_time(made, monkeypatch, caplog):
    def refuse(path, value):
        raise FileError(errno.EROFS, path)

    monkeypatch.setattr(files, "write_json", refuse)
    assert check_parts(made.store) == check_parts(made.store) > 0
    check_wording(caplog.messages[-1])
