"""Writing that fails (a full disk, a limit, a read-only mount, a file in the way) and files that are damaged:
the message names the file, what happened and the remedy; nothing half-written stays; the next start goes on.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from support.wording import check_wording, refused

from dflash_lab import errors, files
from dflash_lab.errors import FileError, LabError, StoreError, naming, reading
from dflash_lab.stage_run import execute
from dflash_lab.stages import params_class

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS / "notebooks"))


@pytest.mark.parametrize("number", errors._WORDS, ids=lambda number: errno.errorcode[number])
def test_every_known_number_gets_the_path_what_happened_and_a_remedy(number, tmp_path):
    with refused(FileError) as caught, naming(tmp_path / "x"):
        raise OSError(number, "in the system's words")
    assert caught.value.errno == number and caught.value.advice in str(caught.value)
    assert isinstance(caught.value, LabError) and isinstance(caught.value, OSError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.errno == number


def test_other_errors_pass_untouched(tmp_path):
    for error in (KeyError("x"), ConnectionRefusedError(errno.ECONNREFUSED, "no"), OSError("no number")):
        with pytest.raises(type(error)) as caught, naming(tmp_path):
            raise error
        assert caught.value is error


def test_an_error_that_names_its_own_file_keeps_it(tmp_path):
    with refused(FileError), naming(tmp_path / "a"):
        open(tmp_path / "b.json").close()


def test_the_file_in_the_way_is_named_not_what_was_to_be_below_it(tmp_path):
    (tmp_path / "file").write_text("")
    with refused(FileError):
        files.write_json(tmp_path / "file" / "a" / "b.json", {})
    (tmp_path / "folder").mkdir()
    with refused(FileError):
        files.write_json(tmp_path / "folder", {})
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".tmp"]


def test_words_of_a_user_that_look_like_the_systems_stay_the_users(tmp_path):
    with pytest.raises(ValueError) as caught, naming(tmp_path):
        raise ValueError("my own (os error 28)")
    assert not isinstance(caught.value, FileError)


def test_damaged_content_is_a_store_error_with_the_remedy(tmp_path):
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1" + b"x" * 40 + b"PAR1")
    with refused(StoreError), reading(path, "Make it again."):
        pl.read_parquet(path)
    with refused(FileError), reading(tmp_path / "none", "Make it again."):
        pl.read_parquet(tmp_path / "none")


def test_a_line_that_does_not_fit_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "lines.jsonl"
    files.append_line(path, {"n": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, hard))
    try:
        with pytest.raises(FileError) as caught:
            files.append_line(path, {"n": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    check_wording(str(caught.value))
    assert path.read_text() == '{"n": 1}\n'


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_target) -> tuple[Path, Path]:
    """A finished run and its target."""
    from test_notebooks_headless import TINY, conversations

    run, target = tmp_path_factory.mktemp("disk") / "finished", tiny_target("llama")
    run.mkdir()
    chats = conversations(run / "chats.jsonl")
    for stage in ("prepare", "extract", "train_drafter"):
        given = {"run_dir": str(run), "target": str(target), "device": "cpu", "dtype": "float32"}
        given |= {**TINY[stage], "interactive": False}
        given |= {"input": str(chats)} if stage == "prepare" else {}
        given |= {"num_shards": 1} if stage == "extract" else {}
        execute(params_class(stage)(**given))
    return run, target


def cases(mode: str, finished: tuple[Path, Path], work: Path) -> list[dict]:
    words = [sys.executable, str(TESTS / "support" / "full_disk.py"), mode, *map(str, finished), str(work)]
    if mode != "limit":
        words = ["unshare", "-rm", *words]
        if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
            pytest.skip("this system does not let one mount a file system")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


ASKED = {("extract", 100_000), ("train_drafter", 300_000)}  # no room: said before the stage begins


@pytest.mark.parametrize("mode", ["limit", "mounted"])
def test_every_stage_says_what_to_do_and_goes_on_afterwards(mode, finished, tmp_path):
    found = cases(mode, finished, tmp_path / "work")
    every = {"prepare", "dataset_stats", "extract", "train_drafter", "acceptance"}
    assert mode == "mounted" or {case["stage"] for case in found} == every
    for case in found:
        asked = mode == "mounted" and (case["stage"], case["size"]) in ASKED
        if asked:
            assert case["error"] == "InputError" and "are free" in case["message"], case
        else:
            assert case["error"] == "FileError", case
            assert case["message"].startswith(str(tmp_path / "work" / "run")), case
            assert all(words in case["message"] for words in expected(mode, case["size"])), case
        assert case["left"] == [] and not case["result_too_early"] and case["finished"], case


def expected(mode: str, size: int) -> tuple[str, str]:
    if mode == "limit":
        return "the file would be larger", "Free space"
    if size < 0:
        return "the file system is read-only", "Give a folder that you can write to."
    return "the disk is full", "Free space"
