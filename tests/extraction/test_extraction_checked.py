"""Parts are read whole before they are trained on, once: a silent change is named, what is sound is
remembered.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from support.sample_files import TAP_IDS, make_samples
from support.wording import refused

from dflash_lab import files
from dflash_lab.errors import FileError, StoreError
from dflash_lab.extraction.checks import CHECKED, check_parts
from dflash_lab.extraction.loop import extract
from dflash_lab.extraction.store import open_store
from dflash_lab.results import fingerprint


@pytest.fixture
def store(tiny, tmp_path: Path) -> Path:
    """Four parts or more."""
    samples = make_samples(tmp_path / "s.parquet", [60, 50, 40, 30, 20, 10, 55, 45, 35, 25])
    limits = dict(token_budget=120, max_batch=8, part_gib=0.00004)
    extract(tiny("llama"), samples, tmp_path / "store", tap_ids=TAP_IDS, **limits)
    assert len(parts(tmp_path / "store")) >= 4
    return tmp_path / "store"


def parts(store: Path) -> list[Path]:
    return sorted(store.glob("shard-*/part-*.safetensors"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_sound_store_is_read_once_and_a_new_file_again(store):
    total = sum(path.stat().st_size for path in parts(store))
    before, told = fingerprint(store), []
    assert check_parts(store, lambda *told_of: told.append(told_of)) == total
    assert told[-1] == ("checking the store", total, total)
    assert check_parts(store, lambda *told_of: pytest.fail("nothing is left to read")) == 0
    assert fingerprint(store) == before  # else what was made of the store would no longer count
    os.utime(parts(store)[1])
    assert check_parts(store) == parts(store)[1].stat().st_size
    (store / CHECKED).write_text('{"parts": {}')
    assert check_parts(store) == total
    (store / CHECKED).write_bytes((store / CHECKED).read_bytes().replace(b"part-000001", b"part-000009"))
    assert check_parts(store) == total


def test_a_copy_that_keeps_sizes_and_times_is_read_again(store, tmp_path):
    total = check_parts(store)
    shutil.copytree(store, tmp_path / "copy")  # the times of writing too, and what was remembered
    shutil.copy2(store / CHECKED, tmp_path / "copy" / CHECKED)
    assert check_parts(tmp_path / "copy") == total
    assert check_parts(store) == 0


def test_silent_damage_is_named_with_the_remedy_and_the_sound_parts_are_remembered(store):
    check_parts(store)
    damaged = [parts(store)[1], parts(store)[3]]
    for path in damaged:
        flip(path)
    open_store(store)  # sees nothing
    for _ in range(2):  # a damaged part is never remembered
        with refused(StoreError) as error:
            check_parts(store)
        assert all(f"{path.parent.name}/{path.name}" in str(error.value) for path in damaged)
        assert parts(store)[0].name not in str(error.value)
    remembered = {store / name for name in files.read_json(store / CHECKED)["parts"]}
    assert remembered == {*parts(store)} - {*damaged}


def test_what_was_read_before_a_stop_stays_remembered(store):
    def stop(what, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_parts(store, stop)
    total = sum(path.stat().st_size for path in parts(store))
    assert check_parts(store) < total


def test_a_store_on_a_read_only_disk_is_checked_each_time(store, monkeypatch, caplog):
    def refuse(path, value):
        raise FileError(errno.EROFS, path)

    monkeypatch.setattr(files, "write_json", refuse)
    assert check_parts(store) == check_parts(store) > 0
    assert "the next run reads the whole store again" in caplog.text and "read-only" in caplog.text
