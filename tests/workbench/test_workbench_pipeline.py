"""A named run: stages in order, one step a shard, the finished skipped, the first failure ends it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.wording import refused

from dflash_lab import launch
from dflash_lab.errors import InputError
from dflash_lab.files import read_json, write_json
from dflash_lab.launch import plan
from dflash_lab.params import check_names
from dflash_lab.results import WouldReplace, check_ready, fingerprints
from dflash_lab.run_params import Given, read_given
from dflash_lab.runs import overview
from dflash_lab.stages import STAGES, params_class

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """The demo's parameter files in a workspace of their own, and a launcher that only writes results."""
    shutil.copytree(REPO / "params" / "demo", tmp_path / "params" / "demo")
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path)
    started: list[str] = []
    fails: set[str] = set()

    def run_notebook(stage, given, extra):
        params = read_given(params_class(stage), given)
        check_ready(params)
        started.append(params.folder.name)
        if stage in fails:
            return 1
        params.folder.mkdir(parents=True, exist_ok=True)
        params.folder.with_suffix(".ipynb").write_text(
            '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}'
        )
        for path in params.outputs():
            write_json(path, {})
            if path.name == "manifest.jsonl":
                path.write_text('{"kind": "end"}\n')
        if stage == "prepare":
            write_json(params.run_folder / "samples.parquet", {})
        record = dict(
            schema_version=1, stage=stage, parameters=params.as_dict(), figures={}, seconds=2.0,
            inputs=fingerprints(params.inputs(), params.run_folder), time="2025-01-01T00:00:00+00:00",
        )  # fmt: skip
        write_json(params.folder / "result.json", record)
        return 0

    monkeypatch.setattr(launch, "run_notebook", run_notebook)
    return tmp_path, started, fails


def files_of(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_plan_is_the_stages_in_order_with_a_step_a_shard(demo):
    steps = launch.plan(Given(run="params/demo"))
    names = [read_given(params_class(stage), given).folder.name for stage, given in steps]
    wanted = "prepare dataset_stats extract-0 extract-1 memory_sweep train_drafter acceptance"
    assert names == wanted.split()


def test_everything_runs_once_then_nothing(demo):
    root, started, _ = demo
    assert launch.run_all(Given(run="params/demo"), []) == 0
    assert len(started) == 7
    record = read_json(root / "runs/demo/result.json")
    assert record["figures"]["extract_seconds"] == 4.0
    assert (root / "runs/demo/report.html").exists() and (root / "runs/index.html").exists()
    assert launch.run_all(Given(run="params/demo"), []) == 0
    assert len(started) == 7 and read_json(root / "runs/demo/result.json") == record


def test_a_changed_parameter_reruns_its_stage_only_and_only_when_asked(demo):
    root, started, _ = demo
    launch.run_all(Given(run="demo"), [])
    started.clear()
    changed, before = Given(run="demo", typed=[("num_prompts", "3")]), files_of(root)
    with refused(WouldReplace):
        launch.run_all(changed, [])
    assert started == [] and files_of(root) == before
    assert launch.run_all(changed, [], stale=True) == 0
    assert started == ["acceptance"]


def test_a_changed_input_reruns_what_reads_it(demo):
    root, started, _ = demo
    launch.run_all(Given(run="params/demo"), [])
    started.clear()
    write_json(root / "runs/demo/samples.parquet", {"other": 1})
    with refused(WouldReplace):
        launch.run_all(Given(run="params/demo"), [])
    assert started == []
    launch.run_all(Given(run="params/demo"), [], stale=True)
    assert {"dataset_stats", "extract-0", "extract-1"} <= set(started) and "prepare" not in started


def test_the_first_failure_ends_the_run_and_the_next_start_goes_on(demo):
    root, started, fails = demo
    fails.add("memory_sweep")
    assert launch.run_all(Given(run="params/demo"), []) == 1
    assert started[-1] == "memory_sweep"
    row = overview(root / "runs").row(0, named=True)
    assert (row["finished"], row["state"]) == ("4/7", "incomplete")
    fails.clear()
    started.clear()
    assert launch.run_all(Given(run="params/demo"), []) == 0
    assert started == ["memory_sweep", "train_drafter", "acceptance"]


def test_a_name_goes_to_the_stages_that_know_it_and_an_unknown_one_is_refused(demo):
    steps = dict(launch.plan(Given(run="params/demo", typed=[("max_batch", "7")])))
    assert ("max_batch", "7") in steps["extract"].typed and ("max_batch", "7") not in steps["prepare"].typed
    with refused(InputError):
        launch.plan(Given(run="params/demo", typed=[("max_bach", "7")]))


def test_a_folder_without_stages_is_refused(tmp_path):
    (tmp_path / "common.yaml").write_text("seed: 1\n")
    for folder in (tmp_path, tmp_path / "nowhere"):
        with refused(InputError):
            launch.plan(Given(run=str(folder)))


@pytest.mark.parametrize("old", ["second", "targets", "head"])
def test_a_parameter_of_an_earlier_version_is_told_by_its_new_name_wherever_it_is_typed(old):
    with refused(InputError):
        plan(Given(run="demo", raw=[(old, "1")]))
    with refused(InputError):  # all of them at once
        plan(Given(run="demo", raw=[(old, "1"), ("floor", "0.1")]))
    for stage in STAGES:
        with pytest.raises(InputError, match="is now called"):
            check_names(params_class(stage), {old: 1}, where="common.yaml")
