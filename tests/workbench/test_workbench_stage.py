"""execute: skip what is finished, redo what changed, leave a result or a failure, stop when told."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
from support.wording import check_wording, refused

from dflash_lab import results, stage_run
from dflash_lab.errors import FileError, InputError, StoreError
from dflash_lab.files import Move, read_json, too_wide, write_json
from dflash_lab.params import StageParams, param
from dflash_lab.progress import Stopped
from dflash_lab.results import WouldReplace, fingerprint


class ToyParams(StageParams):
    stage: ClassVar[str] = "toy"
    steps: int = param(3, "steps", low=1)

    def inputs(self) -> list[Path]:
        return [self.run_folder / "samples.parquet", self.run_folder / "store"]

    def outputs(self) -> list[Path]:
        return [self.run_folder / "product"]

    def products(self) -> list[Move]:
        return [Move(self.fresh / "product", self.run_folder / "product")]


@dataclass
class ToyResult:
    figures: dict = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        write_json(folder / "figures.json", {"tau": self.figures["tau"]})

    @classmethod
    def load(cls, folder: Path) -> ToyResult:
        return cls({**read_json(folder / "result.json")["figures"], "loaded": 1})


class Toy:
    """A stage whose behaviour a test sets."""

    def __init__(self) -> None:
        self.calls = 0
        self.body = lambda params, progress: None

    def run(self, params, progress):
        self.calls += 1
        self.body(params, progress)
        write_json(params.fresh / "product", {"steps": params.steps})
        return ToyResult({"tau": 1.5, "loss": float("nan")})


@pytest.fixture
def toy(monkeypatch):
    made = Toy()
    monkeypatch.setenv("DFLASH_LAB_COMMIT", "this one")  # git is asked in test_provenance.py
    monkeypatch.setattr(stage_run, "run_function", lambda name: made.run)
    monkeypatch.setattr(stage_run, "result_class", lambda name: ToyResult)
    return made


@pytest.fixture
def params(tmp_path):
    (tmp_path / "samples.parquet").write_bytes(b"rows")
    return ToyParams(run_dir=str(tmp_path), interactive=False)


def test_result_says_what_made_it(toy, params):
    result = stage_run.execute(params)
    text = (params.folder / "result.json").read_text()
    record = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert result.figures["tau"] == 1.5 and toy.calls == 1
    assert record["figures"] == {"tau": 1.5, "loss": None} and record["parameters"] == params.as_dict()
    assert record["schema_version"] == 1 and record["stage"] == "toy"
    assert {"torch", "polars", "python"} <= set(record["versions"]) and record["commit"]
    assert record["peak_memory"]["rss_gib"] > 0 and record["seconds"] >= 0
    assert set(record["inputs"]) == {"samples.parquet", "store"} and record["inputs"]["store"] == "absent"


def test_finished_work_is_loaded_not_redone(toy, params):
    stage_run.execute(params)
    again = stage_run.execute(params.changed(interactive=True))
    assert toy.calls == 1 and again.figures["loaded"] == 1


def test_what_an_earlier_version_finished_is_finished(toy, params, monkeypatch):
    """A parameter it had under another name is that one; one that it did not know had its default."""
    stage_run.execute(params)
    path = params.folder / results.RESULT
    result = read_json(path)
    result["parameters"]["rounds"] = result["parameters"].pop("steps")
    write_json(path, result)
    assert not results.is_finished(params)  # an unknown name is another run
    monkeypatch.setattr(ToyParams, "renamed", {"rounds": "steps"})
    assert results.is_finished(params)
    assert not results.is_finished(params.changed(steps=params.steps + 1))
    del result["parameters"]["rounds"]
    write_json(path, result)
    default = params.changed(steps=3)
    assert results.is_finished(default) and not results.is_finished(params.changed(steps=4))


def files_of(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_changed_parameter_or_input_runs_again_only_when_asked(toy, params):
    stage_run.execute(params)

    def refuses(**values: int) -> None:
        before, calls = files_of(params.run_folder), toy.calls
        with refused(WouldReplace):
            stage_run.execute(params.changed(**values))
        assert toy.calls == calls and files_of(params.run_folder) == before
        stage_run.execute(params.changed(force=True, **values))
        assert toy.calls == calls + 1
        stage_run.execute(params.changed(**values))
        assert toy.calls == calls + 1

    refuses(steps=4)
    assert read_json(params.run_folder / "product") == {"steps": 4}
    (params.run_folder / "samples.parquet").write_bytes(b"other rows")
    refuses(steps=4)
    (params.run_folder / "store").mkdir()
    (params.run_folder / "store" / "manifest.jsonl").write_text("{}")
    refuses(steps=4)


def test_a_lost_output_is_made_again_by_the_same_command(toy, params):
    stage_run.execute(params)
    (params.run_folder / "product").unlink()
    stage_run.execute(params)
    assert toy.calls == 2 and read_json(params.run_folder / "product") == {"steps": 3}
    stage_run.execute(params)
    assert toy.calls == 2


def test_a_moved_run_is_still_finished(toy, params, tmp_path):
    stage_run.execute(params)
    moved = tmp_path.with_name(tmp_path.name + "-moved")
    os.rename(tmp_path, moved)
    stage_run.execute(params.changed(run_dir=str(moved)))
    assert toy.calls == 1


def test_failure_is_written_and_raised_and_cleared_by_success(toy, params):
    class TooLarge(RuntimeError):
        details: ClassVar[dict] = {"batch": 8, "lengths": [10, 20]}
        advice = "lower token_budget to 4096"

    def fail(params, progress):
        raise TooLarge("no room")

    toy.body = fail
    with pytest.raises(TooLarge):
        stage_run.execute(params)
    record = read_json(params.folder / "failure.json")
    assert record["error"] == "TooLarge" and record["message"] == "no room" and record["state"] == "failed"
    assert record["details"] == {"batch": 8, "lengths": [10, 20]} and "4096" in record["advice"]
    assert any("fail" in frame for frame in record["where"])
    assert not (params.folder / "result.json").exists()
    toy.body = lambda params, progress: None
    stage_run.execute(params)
    assert not (params.folder / "failure.json").exists()


def test_a_failed_rerun_leaves_the_old_result_as_it_was(toy, params):
    stage_run.execute(params)
    before = files_of(params.run_folder)

    def fail(params, progress):
        write_json(params.fresh / "product", {"steps": "half"})
        raise ZeroDivisionError

    toy.body = fail
    with pytest.raises(ZeroDivisionError):
        stage_run.execute(params.changed(steps=9, force=True))
    after = files_of(params.run_folder)
    assert all(after[name] == data for name, data in before.items() if ".lock" not in name)
    assert read_json(params.folder / "failure.json")["state"] == "failed"
    toy.body = lambda params, progress: None
    assert results.is_finished(params) and stage_run.execute(params).figures["loaded"] == 1
    stage_run.execute(params.changed(steps=9, force=True))
    assert read_json(params.run_folder / "product") == {"steps": 9}
    assert not (params.folder / "failure.json").exists() and not params.fresh.exists()


def test_secrets_reach_neither_parameters_nor_failure_nor_log(toy, params, monkeypatch, capsys):
    secret = "hf_" + "Ab1" * 10
    with refused(InputError):
        ToyParams(target=secret)
    monkeypatch.setenv("HF_TOKEN", secret)
    monkeypatch.setenv("MY_API_KEY", "not-to-be-seen")

    def fail(params, progress):
        logging.getLogger("dflash_lab.toy").warning("key not-to-be-seen used")
        raise RuntimeError(f"401 for {secret} and not-to-be-seen")

    toy.body = fail
    with pytest.raises(RuntimeError):
        stage_run.execute(params)
    text = (params.folder / "failure.json").read_text()
    assert secret not in text and "not-to-be-seen" not in text and "[hidden]" in text
    toy.body = lambda params, progress: None
    stage_run.execute(params)
    lines = capsys.readouterr().err
    assert "key [hidden] used" in lines and "toy: done in" in lines


def test_errors_free_what_the_frames_hold(toy, params):
    import gc
    import weakref

    class Big:
        pass

    held = []

    def fail(params, progress):
        tensor = Big()
        held.append(weakref.ref(tensor))
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise RuntimeError("outer") from error

    toy.body = fail
    with pytest.raises(RuntimeError) as caught:
        stage_run.execute(params)
    gc.collect()
    assert held[0]() is None and caught.value.__traceback__ is not None


def test_sigterm_stops_at_the_next_report_and_says_so(toy, params):
    def body(params, progress):
        progress("work", 0, 10)
        for _ in range(2):  # whoever is impatient sends it again
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
        progress("work", 1, 10)
        pytest.fail("went on after SIGTERM")

    before = signal.getsignal(signal.SIGTERM)
    toy.body = body
    with refused(Stopped):
        stage_run.execute(params)
    assert read_json(params.folder / "failure.json")["state"] == "stopped"
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_ends_a_stage_that_never_reports(toy, params, monkeypatch, capfd):
    """No report within the limit, so the process, here a fork of this one, ends with SIGTERM's status."""
    monkeypatch.setattr(stage_run, "UNSTOPPED_S", 0.3)

    def body(params, progress):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    toy.body = body
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            stage_run.execute(params)
        os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 143
    assert "no safe point" in capfd.readouterr().err
    assert read_json(params.folder / "failure.json")["state"] == "stopped"


def test_what_a_killed_process_left_half_written_is_swept_before_the_next_start(toy, params):
    kept = params.folder / "run" / "best" / "model.safetensors"
    write_json(kept, {})
    left = [
        kept.with_name(".model.safetensors.x1.tmp"),
        params.folder / ".samples.parquet.y2.tmp" / "000.parquet",
    ]
    for path in left:
        write_json(path, {})
    (params.run_folder / ".another.stage.tmp").write_text("is not ours")
    stage_run.execute(params)
    assert kept.exists() and not any(path.exists() for path in left) and not left[1].parent.exists()
    assert (params.run_folder / ".another.stage.tmp").exists()


def test_two_processes_do_not_share_a_stage(toy, params):
    with stage_run.stage_lock(params.folder):
        assert stage_run.is_held(params.folder)
        with refused(InputError):
            stage_run.execute(params)
    assert not stage_run.is_held(params.folder)
    stage_run.execute(params)


def test_a_file_in_the_way_of_the_run_folder_is_named(tmp_path, toy):
    (tmp_path / "file").write_text("")
    with refused(FileError):
        stage_run.execute(ToyParams(run_dir=str(tmp_path / "file"), interactive=False))


def test_a_full_disk_does_not_hide_the_error(toy, params, monkeypatch, capsys):
    def full(path, value):
        raise FileError(errno.ENOSPC, path)

    monkeypatch.setattr(stage_run, "write_json", full)
    toy.body = lambda params, progress: 1 / 0
    with pytest.raises(ZeroDivisionError):
        stage_run.execute(params)
    check_wording(capsys.readouterr().err.partition(" ")[2])  # behind the time


NONSENSE = ['{"schema_version": 0}', '{"schema_version": 1,', "[]", "{}", '{"schema_version": 1}']


@pytest.mark.parametrize("text", [*NONSENSE, '{"schema_version": 1, "figures": {}}'])
def test_a_result_of_another_version_or_of_nonsense_is_refused_by_name(toy, params, text):
    params.folder.mkdir()
    (params.folder / "result.json").write_text(text)
    with refused(StoreError):
        stage_run.execute(params)


def test_a_finished_stage_whose_files_are_gone_says_how_to_run_it_again(toy, params, monkeypatch):
    stage_run.execute(params)

    def load(folder: Path) -> ToyResult:
        raise FileNotFoundError(2, "No such file", str(folder / "rows.parquet"))

    monkeypatch.setattr(ToyResult, "load", load)
    with refused(StoreError):
        stage_run.execute(params)
    (params.folder / "result.json").unlink()
    stage_run.execute(params)
    assert toy.calls == 2


def test_looking_whether_a_stage_runs_never_keeps_it_from_starting(tmp_path):
    ended = threading.Event()
    (tmp_path / stage_run.LOCK).write_text("")

    def look():
        while not ended.is_set():
            stage_run.is_held(tmp_path)

    watchers = [threading.Thread(target=look) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    try:
        for _ in range(300):
            with stage_run.stage_lock(tmp_path):
                assert stage_run.is_held(tmp_path)
    finally:
        ended.set()
        for watcher in watchers:
            watcher.join()
    assert not stage_run.is_held(tmp_path)


def test_an_input_that_is_the_whole_disk_is_refused_before_it_is_read(monkeypatch):
    monkeypatch.setattr(os, "walk", lambda *args, **options: pytest.fail("it was walked"))
    with refused(InputError):
        fingerprint(Path("/"))


def test_a_folder_on_a_disk_in_memory_is_a_persons_own():
    assert too_wide("/dev/pts") and not too_wide("/dev/shm/store")
