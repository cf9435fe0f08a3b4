"""Nothing finished is replaced unasked, and `status` says beforehand what would be done again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import types
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from support.wording import check_wording, refused

from dflash_lab import cli, launch
from dflash_lab import stage_run as running
from dflash_lab.errors import InputError
from dflash_lab.extraction.store import open_store
from dflash_lab.files import read_json
from dflash_lab.results import WouldReplace, is_finished
from dflash_lab.run_params import Given, read_given
from dflash_lab.runs import overview, run_status, stage_table
from dflash_lab.stage_run import execute, stage_lock
from dflash_lab.stages import params_class


def chat(user: str, assistant: str) -> str:
    turns = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return json.dumps({"messages": turns}) + "\n"


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_target: Callable[[str], Path]) -> Path:
    """A workspace whose run `mine` has finished prepare, dataset_stats and both shards of extract."""
    root = tmp_path_factory.mktemp("base")
    (root / "notebooks").mkdir()
    folder = root / "params" / "mine"
    folder.mkdir(parents=True)
    chats = (chat(f"Say {one}", f"The number is {one}. " * (1 + one % 3)) for one in range(16))
    (root / "chats.jsonl").write_text("".join(chats))
    texts = {
        "common": f"target: {tiny_target('llama')}\ndevice: cpu\ndtype: float32\n",
        "prepare": "input: chats.jsonl\nheldout_fraction: 0.25\n",
        "dataset_stats": "max_length: 128\n",
        "extract": "num_shards: 2\nnum_taps: 3\ntoken_budget: 512\nmax_batch: 4\npart_gib: 0.01\n",
        "train_drafter": "num_layers: 1\n",
    }
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("DFLASH_LAB_COMMIT", "this one")
        for stage in ("prepare", "dataset_stats"):
            execute(given(stage))
        for shard in range(2):
            execute(given("extract", shard=shard))
    return root


@pytest.fixture
def workspace(base, tmp_path, monkeypatch):
    """A copy of it, as the working directory."""
    root = tmp_path / "copy"
    shutil.copytree(base, root)
    monkeypatch.chdir(root)
    monkeypatch.setenv("DFLASH_LAB_COMMIT", "this one")
    return root


def given(stage: str, run: str = "mine", **typed):
    return read_given(params_class(stage), Given(run=run, yaml=[json.dumps(typed)]))


def states(run: str = "mine") -> dict[str, str]:
    return {row.folder: row.state for row in run_status(run)}


def reasons() -> dict[str, str]:
    return {row.folder: row.why for row in run_status("mine")}


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


FINISHED = dict.fromkeys(("prepare", "dataset_stats", "extract-0", "extract-1"), "finished")


def test_states_of_a_run(workspace):
    assert states() == {**FINISHED, "train_drafter": "never run"}
    with stage_lock(Path("runs/mine/train_drafter")):
        assert states()["train_drafter"] == "running"
    assert states()["train_drafter"] == "killed"
    shutil.rmtree("runs/mine/train_drafter")
    with pytest.raises(InputError):
        execute(given("train_drafter", target="random:nowhere"))
    assert states()["train_drafter"] == "failed"


def test_other_parameters_are_refused_with_all_that_a_person_needs(workspace):
    before = snapshot(workspace / "runs")
    with refused(WouldReplace):  # what would go stale among it
        execute(given("prepare", limit=5, max_length=64))
    assert snapshot(workspace / "runs") == before


def test_changed_inputs_are_refused_too_and_shown_beforehand(workspace):
    with open("chats.jsonl", "a") as file:
        file.write(chat("x", "y"))
    assert states()["prepare"] == "stale" and "chats.jsonl has changed" in reasons()["prepare"]
    assert states()["extract-1"] == "finished"
    assert reasons()["extract-1"] == "goes out of date when prepare is done again"
    with refused(WouldReplace):
        execute(given("prepare"))
    execute(given("prepare", force=True))
    assert states() == {
        "prepare": "finished",
        **dict.fromkeys(("dataset_stats", "extract-0", "extract-1"), "stale"),
        "train_drafter": "never run",
    }
    Path("chats.jsonl").unlink()
    assert "chats.jsonl is not read any more" in reasons()["prepare"]


def test_a_failed_attempt_leaves_the_result_valid_and_visible(workspace):
    before = snapshot(workspace / "runs" / "mine")
    Path("bad.jsonl").write_text("{broken\n")
    with refused(InputError):
        execute(given("prepare", input="bad.jsonl", force=True))
    after = snapshot(workspace / "runs" / "mine")
    failure = json.loads(after.pop("prepare/failure.json"))
    assert any("bad.jsonl:1" in one for one in failure["details"]["problems"])
    assert {name: data for name, data in after.items() if ".fresh" not in name} == before
    assert is_finished(given("prepare")) and execute(given("prepare")).figures["samples_stored"] == 16
    assert states()["prepare"] == "finished" and "a later attempt failed" in reasons()["prepare"]
    table = stage_table(Path("runs")).filter(pl.col("stage") == "prepare").row(0, named=True)
    assert table["state"] == "finished" and "later attempt" in table["message"]
    assert overview(Path("runs")).row(0, named=True)["state"] == "finished"


def test_two_runs_from_one_folder_leave_each_other_alone(workspace):
    shutil.copytree("params/mine", "params/other")
    before = snapshot(workspace / "runs" / "mine")
    execute(given("prepare", "other"))
    assert snapshot(workspace / "runs" / "mine") == before
    other = snapshot(workspace / "runs" / "other")
    execute(given("prepare", limit=5, force=True))
    assert snapshot(workspace / "runs" / "other") == other


def test_a_new_store_takes_its_place_with_its_last_shard(workspace):
    old = open_store("runs/mine/store").tap_ids
    first = given("extract", num_taps=2).changed(force=True)
    with refused(WouldReplace):
        execute(first.changed(force=False))
    execute(first)
    assert open_store("runs/mine/store").tap_ids == old
    assert read_json("runs/mine/extract-0/result.json")["parameters"]["num_taps"] == 3
    told = reasons()
    assert told["extract-0"] == "a new result waits for those of the other shards" and not told["extract-1"]
    execute(first.changed(shard=1))
    assert len(open_store("runs/mine/store").tap_ids) == 2 and open_store("runs/mine/store").num_samples == 16
    for shard in range(2):
        assert is_finished(given("extract", num_taps=2, shard=shard))
    assert not list(Path("runs/mine").glob(".store.new*")) and not list(Path("runs/mine").glob("*/.fresh"))


@pytest.mark.parametrize("num_taps", [3, 2])
def test_another_count_of_shards_leaves_nothing_of_the_earlier_one(workspace, num_taps):
    """Also in the store that stays: each sample is in one result."""
    execute(given("extract", num_taps=num_taps, num_shards=1, force=True))
    assert open_store("runs/mine/store").num_samples == 16
    assert stage_table(Path("runs"))["folder"].to_list() == ["prepare", "dataset_stats", "extract-0"]
    for shard in range(2):
        execute(given("extract", num_taps=num_taps, shard=shard, force=True))
        assert is_finished(given("extract", num_taps=num_taps, shard=shard))
    assert stage_table(Path("runs"))["folder"].to_list()[2:] == ["extract-0", "extract-1"]


def test_a_store_that_cannot_be_replaced_as_a_whole_is_told_first(workspace, monkeypatch):
    with monkeypatch.context() as patch:  # a disk is mounted there
        patch.setattr("os.path.ismount", lambda path: Path(path).name == "store")
        with refused(InputError):
            execute(given("extract", num_taps=2, force=True))
    little = types.SimpleNamespace(free=1000)
    monkeypatch.setattr("dflash_lab.extraction.checks.shutil.disk_usage", lambda path: little)
    with refused(InputError):
        execute(given("extract", num_taps=2, force=True))
    assert len(open_store("runs/mine/store").tap_ids) == 3 and states()["extract-0"] == "finished"


def test_what_another_process_finished_meanwhile_is_not_replaced(workspace, monkeypatch):
    shutil.rmtree("runs/mine/dataset_stats")
    lock = stage_lock

    @contextlib.contextmanager
    def after_the_other(folder):
        monkeypatch.setattr(running, "stage_lock", lock)
        execute(given("dataset_stats"))
        with lock(folder):
            yield

    monkeypatch.setattr(running, "stage_lock", after_the_other)
    with refused(WouldReplace):
        execute(given("dataset_stats", max_length=64))
    assert is_finished(given("dataset_stats"))


def test_samples_that_were_merged_are_not_replaced_unasked(workspace):
    shutil.copytree("params/mine", "params/both")
    inputs = ["runs/mine/samples.parquet"]
    assert cli.main(["merge", "runs/both/samples.parquet", *inputs]) == 0
    before = Path("runs/both/samples.parquet").read_bytes()
    with refused(WouldReplace):
        execute(given("prepare", "both", limit=5))
    assert Path("runs/both/samples.parquet").read_bytes() == before
    execute(given("prepare", "both", limit=5, force=True))
    execute(given("prepare", "both", limit=5))


def test_a_drafter_at_a_path_of_several_runs_is_not_replaced_unasked(workspace):
    few = {"max_steps": 1, "anchors": 4, "context_tokens": 128, "block_size": 4, "tau_samples": 0}
    few |= {"drafter": "kept", "num_layers": 1}
    shutil.copytree("params/mine", "params/other")
    shutil.copytree("runs/mine", "runs/other")
    Path("runs/other/run.json").unlink()
    execute(given("train_drafter", **few))
    before = snapshot(workspace / "kept")
    with refused(WouldReplace):
        execute(given("train_drafter", "other", **few, seed=1))
    assert snapshot(workspace / "kept") == before
    execute(given("train_drafter", "other", **few, seed=1, force=True))
    assert snapshot(workspace / "kept") != before


def test_a_new_store_that_was_begun_with_yet_another_setup_is_given_up(workspace):
    execute(given("extract", num_taps=2, force=True))
    assert Path("runs/mine/.store.new").exists()
    execute(given("extract", num_taps=1, force=True))
    execute(given("extract", num_taps=1, shard=1, force=True))
    assert len(open_store("runs/mine/store").tap_ids) == 1
    execute(given("extract", num_taps=2, force=True))
    execute(given("extract", num_taps=1, force=True))  # back to what is there
    assert not Path("runs/mine/.store.new").exists() and not Path("runs/mine/extract-1/.fresh").exists()


def test_the_same_store_is_gone_on_with_and_nothing_is_done_again(workspace):
    result = execute(given("extract", token_budget=256, force=True))
    assert result.figures["samples_stored_before"] > 0 and result.figures["samples_stored"] == 0
    assert not Path("runs/mine/.store.new").exists()


def test_a_trial_holds_as_typed_until_more_is_asked_which_replaces_nothing(workspace, caplog):
    for path in (workspace / "runs" / "mine").glob("[es]*t*"):
        if path.is_dir():
            shutil.rmtree(path)
    for shard in range(2):
        execute(given("extract", shard=shard, max_samples=6))
    assert states()["extract-0"] == states()["extract-1"] == "finished"
    left = "a trial of 6 of 16 samples; -p max_samples 0 goes on to the others"
    assert [row.why for row in run_status("mine") if row.stage == "extract"] == [left] * 2
    with caplog.at_level("INFO"):
        execute(given("extract"))
    assert f"finished before with the same parameters and inputs; {left}" in caplog.text
    with open(workspace / "params" / "mine" / "extract.yaml", "a") as file:
        file.write("max_samples: 10\n")
    rows = [row for row in run_status("mine") if row.stage == "extract"]
    why = "max_samples was 6, now 10: the others of them are still to be extracted"
    assert [(row.state, row.why) for row in rows] == [("stale", why)] * 2
    for shard in range(2):
        execute(given("extract", shard=shard))
    assert states()["extract-0"] == states()["extract-1"] == "finished"
    assert len(open_store(workspace / "runs" / "mine" / "store")) == 10


def test_a_lost_store_is_made_again_unasked(workspace):
    shutil.rmtree("runs/mine/store")
    assert states()["extract-0"] == "stale"
    assert reasons()["extract-0"] == "what it left is not whole any more"
    execute(given("extract"))
    execute(given("extract", shard=1))
    assert states() == {**FINISHED, "train_drafter": "never run"}


def test_one_result_that_cannot_be_read_hides_no_other_stage(workspace):
    Path("runs/mine/extract-0/result.json").write_text("{")
    Path("params/mine/prepare.yaml").write_text("input: chats.jsonl\nlimit: 5\n")
    found = states()
    assert (found["prepare"], found["extract-0"], found["extract-1"]) == ("stale", "unreadable", "finished")
    with refused(WouldReplace):
        execute(given("prepare"))


def test_the_command_shows_each_stage(workspace, capsys):
    assert cli.main(["status", "mine"]) == 0
    check_wording(capsys.readouterr().out)
    assert cli.main(["status", "mien"]) == 1
    check_wording(capsys.readouterr().err)
    for path in Path("params/mine").glob("[!c]*.yaml"):
        path.unlink()
    os.rename("params/mine", "params/few")  # of common parameters alone: all stages
    assert cli.main(["status", "few"]) == 0
    assert capsys.readouterr().out.count("never run") == 6


def test_a_run_of_all_stages_stops_where_something_would_be_replaced(workspace, capsys, monkeypatch):
    monkeypatch.setattr(launch, "_papermill", lambda words: pytest.fail("a kernel was started"))
    for name in FINISHED:
        Path(f"runs/mine/{name}.ipynb").write_text("{}")
    assert cli.main(["run", "mine", "-p", "max_length", "64"]) == 1
    check_wording(capsys.readouterr().err)


def test_stale_stages_are_done_again_when_asked(workspace, monkeypatch):
    started, page = [], '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}'

    def run_notebook(stage, step, extra):
        params = read_given(params_class(stage), step)
        started.append((params.folder.name, params.force))
        execute(params)
        params.folder.with_suffix(".ipynb").write_text(page)
        return 0

    monkeypatch.setattr(launch, "run_notebook", run_notebook)
    Path("params/mine/train_drafter.yaml").unlink()
    for name in FINISHED:
        Path(f"runs/mine/{name}.ipynb").write_text(page)
    with open("chats.jsonl", "a") as file:
        file.write(chat("x", "y"))
    assert cli.main(["run", "mine", "--stale"]) == 0
    assert started == [("prepare", True), ("dataset_stats", True), ("extract-0", True), ("extract-1", True)]
    assert open_store("runs/mine/store").num_samples == 17 and set(states().values()) == {"finished"}
    started.clear()
    assert cli.main(["run", "mine"]) == 0
    assert not started
    made = read_json("runs/mine/samples.json")  # of older mask rules, which no fingerprint tells
    Path("runs/mine/samples.json").write_text(json.dumps({**made, "mask_rules": 1}))
    assert states()["prepare"] == "stale"
    assert cli.main(["run", "mine"]) == 0
    assert not started
    assert cli.main(["run", "mine", "--stale"]) == 0
    assert started == [("prepare", True)]  # the same samples, so what was made of them stands
    assert set(states().values()) == {"finished"}


def test_a_run_made_with_typed_values_is_opened_as_it_was_made(workspace, monkeypatch):
    """`dflash-lab run mine -p limit 5`, then the notebook by hand: the run's own values did not change."""
    execute(given("prepare", limit=5, force=True))
    path = Path("runs/mine/prepare/result.json")
    made = read_json(path)
    assert made["overridden"] == {"limit": 0}
    opened = read_given(params_class("prepare"), Given(run="mine"))
    assert opened.limit == 5 and opened.origins["limit"] == "typed when it was made"
    # The same, made by a version that called it otherwise.
    older = {**made["parameters"], "most": 5}
    del older["limit"]
    path.write_text(json.dumps({**made, "parameters": older, "overridden": {"most": 0}}))
    with monkeypatch.context() as patch:
        patch.setattr(params_class("prepare"), "renamed", {"most": "limit"})
        assert given("prepare").limit == 5
    path.write_text(json.dumps(made))
    assert execute(opened).figures["samples_stored"] == 5
    assert states()["prepare"] == "finished"
    with refused(WouldReplace):
        execute(given("prepare", limit=7))
    assert given("prepare", force=True).limit == 0  # done again, it is the run's
    with open("params/mine/prepare.yaml", "a") as file:
        file.write("limit: 6\n")
    with refused(WouldReplace):  # what is written since is preferred
        execute(given("prepare"))
    assert "limit was 5, now 6" in reasons()["prepare"]
