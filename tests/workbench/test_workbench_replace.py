"""New results take the place of old ones whole: killed before any step, there is the old or the new."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.wording import refused

from dflash_lab import files as replacing
from dflash_lab.errors import StoreError
from dflash_lab.files import JOURNAL, Move, beside, replace, settle

CHILD = Path(__file__).parents[1] / "support" / "kill_stage.py"


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def run(tmp_path):
    """A run with a file, a folder and a failure, and the new ones beside them."""
    written(tmp_path / "samples", "old")
    written(tmp_path / "store" / "a", "old")
    written(tmp_path / "store" / "b", "old")
    written(tmp_path / "stage" / "failure.json", "{}")
    written(tmp_path / "stage" / ".fresh" / "samples", "new")
    written(tmp_path / ".store.new" / "a", "new")
    return tmp_path


def moves(run: Path, whole: bool = True) -> list[Move]:
    fresh = run / "stage" / ".fresh"
    return [Move(run / ".store.new", run / "store", whole), Move(fresh / "samples", run / "samples")]


def test_everything_takes_its_place(run):
    replace(run, moves(run), [run / "stage" / "failure.json"])
    assert (run / "samples").read_text() == (run / "store" / "a").read_text() == "new"
    assert not (run / "store" / "b").exists() and not (run / ".store.new").exists()
    assert not (run / JOURNAL).exists() and not (run / "stage" / "failure.json").exists()


def test_what_others_put_into_a_folder_stays(run):
    replace(run, moves(run, whole=False))
    assert (run / "store" / "a").read_text() == "new" and (run / "store" / "b").read_text() == "old"


def test_a_folder_is_never_gone_while_it_is_replaced(run, monkeypatch):
    monkeypatch.setattr(os, "rename", lambda *args: pytest.fail("a step in which there is none"))
    replace(run, moves(run))
    assert (run / "store" / "a").read_text() == "new"


def test_file_systems_that_cannot_exchange_take_two_steps(run, monkeypatch):
    monkeypatch.setattr(replacing.ctypes, "CDLL", lambda *args, **more: object())
    replace(run, moves(run))
    assert (run / "store" / "a").read_text() == "new" and not list(run.glob(".*.old"))


def test_a_change_that_was_cut_short_is_ended_by_whoever_comes_next(run, monkeypatch):
    monkeypatch.setattr(replacing, "_exchange", lambda new, place: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        replace(run, moves(run))
    assert (run / "store" / "a").read_text() == "old" and (run / JOURNAL).exists()
    monkeypatch.undo()
    moved = run.with_name("moved")  # a run folder may be moved meanwhile
    os.rename(run, moved)
    settle(moved)
    assert (moved / "store" / "a").read_text() == (moved / "samples").read_text() == "new"
    settle(moved)


def test_a_damaged_journal_is_named(run):
    (run / JOURNAL).write_text("[]")
    with refused(StoreError):
        settle(run)


OTHER_DISK = Path("/dev/shm")


@pytest.fixture
def other_disk(tmp_path):
    """A folder on another disk than `tmp_path`."""
    if not OTHER_DISK.is_dir() or OTHER_DISK.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second disk")
    with tempfile.TemporaryDirectory(dir=OTHER_DISK) as folder:
        yield Path(folder)


def test_a_file_whose_link_leads_to_another_disk_is_replaced_there(run, other_disk):
    shutil.move(run / "samples", other_disk / "samples")
    (run / "samples").symlink_to(other_disk / "samples")
    replace(run, moves(run))
    assert (run / "samples").is_symlink() and (other_disk / "samples").read_text() == "new"
    assert not (run / JOURNAL).exists() and [path.name for path in other_disk.iterdir()] == ["samples"]


def test_a_folder_where_a_disk_is_mounted_takes_what_is_made_within_it(run, monkeypatch):
    place = run / "store"
    assert beside(place).parent == run
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == place)
    new = beside(place)
    assert new.parent == place
    shutil.move(run / ".store.new", new)
    replace(run, [Move(new, place)])
    assert (place / "a").read_text() == "new" and (place / "b").read_text() == "old" and not new.exists()


def test_what_another_process_moved_meanwhile_is_no_error(run, monkeypatch):
    wait = replacing.waiting_lock

    def other_first(path):
        monkeypatch.setattr(replacing, "waiting_lock", wait)
        replace(run, moves(run))  # the other process has it
        return wait(path)

    monkeypatch.setattr(replacing, "waiting_lock", other_first)
    replace(run, moves(run))
    assert (run / "store" / "a").read_text() == (run / "samples").read_text() == "new"


@pytest.mark.slow
def test_killed_at_any_moment_a_stage_leaves_the_old_result_or_the_new(tmp_path, tiny_target):
    """`kill -9` before file operations all over the replacement of a real stage's result."""
    command = [sys.executable, str(CHILD), str(tmp_path), str(tiny_target("llama"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    kills = ast.literal_eval(done.stdout.splitlines()[-1])
    assert len(kills) == 4 and sum(kills.values()) >= 33
