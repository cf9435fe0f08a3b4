"""A run's parameters have one owner, its name: by hand, under papermill and launched they are the same."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.wording import refused

from dflash_lab import cli, run_params
from dflash_lab.errors import FileError, InputError
from dflash_lab.files import read_json, write_json
from dflash_lab.params import cell_source, in_force
from dflash_lab.results import check_ready
from dflash_lab.run_params import Given, check_owner, claim, find_run, from_notebook, new_run, read_given
from dflash_lab.stages import STAGES, params_class
from dflash_lab.stages.extract import ExtractParams
from dflash_lab.stages.prepare import PrepareParams
from dflash_lab.stages.train_drafter import TrainDrafterParams
from dflash_lab.strict_yaml import read_parameter_file


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """A folder with notebooks/ and two runs' parameters, as the working directory."""
    (tmp_path / "notebooks").mkdir()
    for name, budget in (("demo", 1024), ("mine", 2048)):
        folder = tmp_path / "params" / name
        folder.mkdir(parents=True)
        (folder / "common.yaml").write_text("target: smollm2\ndevice: cpu\n")
        (folder / "extract.yaml").write_text(f"# how\ntoken_budget: {budget}\nnum_shards: 2\n")
        (folder / "prepare.yaml").write_text("input: chats.jsonl  # <-- yours\nlimit: 7\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cell(stage: str, **written):
    """The globals of a notebook after its parameters cell, in which a person has written something."""
    space: dict = {}
    exec(cell_source(params_class(stage)), space)
    return {**space, **written}


@pytest.mark.parametrize("stage", STAGES)
def test_a_fresh_cell_sets_the_run_and_nothing_else(stage):
    space = cell(stage)
    names = {name for name in space if not name.startswith("__")}
    assert space["run"] == "demo" and {space[name] for name in names - {"run"}} == {None}
    assert all(
        row.startswith("#") or "  # " in row or not row
        for row in cell_source(params_class(stage)).split("\n")
    )


def test_long_cells_are_read_by_their_headings():
    headings = [text for text in cell_source(TrainDrafterParams).split("\n\n") if text.startswith("# ")]
    groups = [text.splitlines()[0].removeprefix("# ") for text in headings]
    ours = ("data", "drafter", "loss", "optimizer")
    assert tuple(one for one in groups if one in ours) == ours and groups[-1] == "target and machine"
    assert max(len(text.splitlines()) for text in headings) <= 16


def test_by_hand_and_headless_the_parameters_are_the_runs(workspace):
    by_hand = from_notebook(ExtractParams, cell("extract"))
    launched = read_given(ExtractParams, Given(run="demo"))
    files = [f"params/demo/{name}.yaml" for name in ("common", "extract")]
    listed = read_given(ExtractParams, Given(files=files))
    assert by_hand.token_budget == launched.token_budget == listed.token_budget == 1024
    assert by_hand.run_folder == launched.run_folder == listed.run_folder == Path("runs/demo")
    assert by_hand.interactive and not launched.interactive
    assert by_hand.origins["token_budget"] == "params/demo/extract.yaml"
    assert "window" not in by_hand.origins and by_hand.window == 32768


def test_what_is_typed_is_preferred_and_unset_is_the_runs(workspace):
    made = from_notebook(ExtractParams, cell("extract", run="mine", token_budget=512, shard=1))
    assert (made.run_name, made.token_budget, made.shard, made.num_shards) == ("mine", 512, 1, 2)
    assert made.origins["token_budget"] == run_params.TYPED
    injected = cell(
        "extract", run="mine", token_budget=512, In=["# Parameters\nrun = 'mine'\ntoken_budget = 512\n"]
    )
    assert from_notebook(ExtractParams, injected).origins["token_budget"] == "given to papermill"
    given = read_given(ExtractParams, Given(run="mine", typed=[("token_budget", "512"), ("window", "None")]))
    assert given.token_budget == 512 and given.origins["token_budget"] == "-p" and given.window == 32768
    nothing = [("token_budget", "None"), ("interactive", "None")]  # as the notebook will see them
    yaml = ["{token_budget: 7, interactive: true}"]
    unset = read_given(ExtractParams, Given(run="mine", yaml=yaml, typed=nothing))
    assert unset.token_budget == 2048 and not unset.interactive


def test_the_notebook_shows_what_is_in_force_and_where_it_came_from(workspace):
    shown = in_force(from_notebook(ExtractParams, cell("extract", window=9)))
    assert "token_budget" in repr(shown) and "params/demo/extract.yaml" in repr(shown)
    assert "window" in repr(shown) and "max_batch" not in repr(shown)
    page = shown._repr_html_()
    assert "<b>window</b>" in page and ">max_batch<" in page and "typed in the notebook" in page


def test_a_copied_parameter_folder_is_another_run_and_a_file_beside_them_none(workspace):
    shutil.copytree("params/mine", "params/other")
    for given in ("other", "params/other/"):
        assert read_given(ExtractParams, Given(run=given)).run_folder == Path("runs/other")
    Path("mine.yaml").write_text("token_budget: 77\n")
    made = read_given(ExtractParams, Given(files=["mine.yaml"]))
    assert (made.run_name, made.token_budget, made.num_shards) == ("demo", 77, 2)


@pytest.mark.parametrize("name", ["mien", "params/mien", "runs/mien", "nowhere"])
def test_a_run_that_is_not_there_is_refused_before_anything_is_made(workspace, name):
    with refused(InputError):
        read_given(ExtractParams, Given(run=name))
    with pytest.raises(InputError):
        from_notebook(ExtractParams, cell("extract", run=name))
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "name", ["..", "", "a b", "-x", "runs", ".hidden", pytest.param("a" * 300, id="long")]
)
def test_names_that_are_none_are_refused(workspace, name):
    with refused((InputError, FileError)):
        find_run(name)


def test_a_parameter_folder_without_parameters_is_no_run_and_is_said_to_be_there(workspace):
    Path("params/empty").mkdir(parents=True)
    with refused(InputError):
        find_run("empty")


def test_a_file_as_a_runs_folder_is_said_to_be_one(workspace, tmp_path):
    (tmp_path / "file").write_text("")
    params = read_given(ExtractParams, Given(run="demo", typed=[("run_dir", str(tmp_path / "file"))]))
    with refused(InputError):
        check_ready(params)


def test_a_run_whose_folder_is_a_link_is_found_by_its_path(workspace):
    Path("elsewhere").mkdir()
    Path("runs").mkdir()
    Path("runs/mine").symlink_to(workspace / "elsewhere")
    for given in ("runs/mine", str(workspace / "runs" / "mine"), "notebooks/../runs/mine/"):
        assert find_run(given).name == "mine"


def test_which_run_is_meant_is_said_once(workspace):
    files = ["params/demo/common.yaml", "params/mine/extract.yaml"]
    with refused(InputError):
        read_given(ExtractParams, Given(files=files))
    assert read_given(ExtractParams, Given(files=files, typed=[("run", "mine")])).run_name == "mine"
    with refused(InputError):
        read_given(ExtractParams, Given(run="demo", typed=[("run", "mine")]))
    assert read_given(ExtractParams, Given(run="params/mine", typed=[("run", "mine")])).run_name == "mine"


def test_a_kernel_started_outside_the_repository_is_told_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(InputError):
        from_notebook(PrepareParams, cell("prepare"))


def test_a_common_file_that_names_a_run_or_leads_nowhere_is_told(workspace):
    common = Path("params/mine/common.yaml")
    common.write_text("run: demo\n")
    with refused(InputError):
        read_given(ExtractParams, Given(run="mine"))
    common.unlink()
    common.symlink_to("/nowhere/common.yaml")
    with refused(InputError):
        read_given(ExtractParams, Given(run="mine"))


def test_a_wrong_value_is_told_by_hand_too_with_its_place(workspace):
    Path("params/demo/extract.yaml").write_text("# x\ntoken_budget: -1\n")
    with refused(InputError):
        from_notebook(ExtractParams, cell("extract"))
    with refused(InputError):
        from_notebook(ExtractParams, cell("extract", shard=-1))
    with refused(InputError):
        from_notebook(ExtractParams, cell("extract", shard=-1, In=["# Parameters\nshard = -1\n"]))
    with refused(InputError):
        read_given(ExtractParams, Given(typed=[("shard", "-1")]))


def test_a_run_without_parameters_has_those_of_its_result(workspace, monkeypatch):
    made = read_given(ExtractParams, Given(run="mine", typed=[("shard", "1")]))
    record = {"schema_version": 1, "stage": "extract", "parameters": made.as_dict(), "seconds": 1.0}
    write_json(Path("runs/mine/extract-1/result.json"), {**record, "inputs": {}, "figures": {}})
    shutil.rmtree("params/mine")
    again = read_given(ExtractParams, Given(run="mine", typed=[("shard", "1")]))
    assert again.token_budget == 2048 and again.origins["token_budget"] == "runs/mine/extract-1/result.json"
    assert read_given(ExtractParams, Given(run="mine", typed=[("shard", "0")])).token_budget == 16384
    other = read_given(PrepareParams, Given(run="mine"))  # a stage without a result has what all stages have
    assert other.device == "cpu" and other.origins["device"] == "runs/mine/extract-1/result.json"
    assert other.limit == 0 and "limit" not in other.origins
    for run_dir, place in (("", "runs/mine"), ("~/disk", "home/disk")):  # as a shell would not have read it
        monkeypatch.setenv("HOME", str(workspace / "home"))
        if not Path(place).exists():
            shutil.copytree("runs/mine", place)
        typed = [("shard", "1"), ("run_dir", run_dir)]
        assert read_given(ExtractParams, Given(run="mine", typed=typed)).token_budget == 2048
    with refused(InputError):
        read_given(ExtractParams, Given(run="mine", yaml=["run_dir: 5"]))


def test_two_parameter_folders_of_one_name_never_share_a_run(workspace):
    shutil.copytree("params/mine", "elsewhere/mine")
    first = read_given(ExtractParams, Given(run="mine"))
    claim(first)
    assert read_json("runs/mine/run.json") == {"run": "mine", "parameters": "../../params/mine"}
    other = read_given(ExtractParams, Given(run="elsewhere/mine"))
    with refused(InputError):
        check_owner(other)
    shutil.rmtree("params/mine")  # whose owner is gone may be taken over
    check_owner(other)
    with refused(InputError):
        check_ready(other)


def test_two_runs_with_one_run_dir_never_share_it(workspace):
    for name in ("demo", "mine"):
        with open(f"params/{name}/common.yaml", "a") as file:
            file.write("run_dir: big/disk\n")
    claim(read_given(PrepareParams, Given(run="demo")))
    with refused(InputError):
        check_owner(read_given(PrepareParams, Given(run="mine")))
    claim(read_given(PrepareParams, Given(run="demo")))
    check_owner(read_given(PrepareParams, Given(run="demo")))


def test_a_moved_workspace_keeps_its_runs(workspace, monkeypatch):
    claim(read_given(PrepareParams, Given(run="demo")))
    moved = workspace.with_name(f"{workspace.name}-moved")
    os.rename(workspace, moved)
    monkeypatch.chdir(moved)
    check_owner(read_given(PrepareParams, Given(run="demo")))


@pytest.mark.parametrize("stage", ["dataset_stats", "extract", "train_drafter", "acceptance"])
def test_what_a_stage_needs_is_asked_for_before_anything_is_made(workspace, stage):
    with refused(InputError):
        check_ready(read_given(params_class(stage), Given()))
    assert not Path("runs").exists()


def test_a_mistyped_run_folder_is_told_before_a_target_is_loaded(workspace):
    (workspace / "runs" / "demo").mkdir(parents=True)
    with refused(InputError):
        check_ready(read_given(params_class("acceptance"), Given(typed=[("run_dir", "runs/dmeo")])))
    assert not Path("runs/dmeo").exists()


def test_a_new_run_has_its_target_and_input_and_the_comments(workspace):
    with open("params/mine/common.yaml", "a") as file:
        file.write("run_dir: runs/elsewhere\n")
    folder = new_run("third", source="mine", target="path/to model", input="my chats.jsonl")
    made = read_given(PrepareParams, Given(run="third"))
    assert (made.target, made.input, made.limit) == ("path/to model", "my chats.jsonl", 7)
    assert made.run_folder == Path("runs/third")
    assert (
        folder / "prepare.yaml"
    ).read_text() == 'input: "my chats.jsonl"  # yours\nlimit: 7\n'  # it is set
    assert "# how" in (folder / "extract.yaml").read_text()


@pytest.mark.parametrize(
    "value", ["true", "7", "a: b", 'quo"te', "~/x", "über/modell", "no", "1:30", "owner/name"]
)
def test_any_text_is_read_back_as_it_was_typed(workspace, value):
    new_run("third", source="mine", input=value)
    assert read_given(PrepareParams, Given(run="third")).input == os.path.expanduser(value)


def test_a_new_run_of_files_in_other_encodings(workspace):
    """Windows editors begin a file with a mark that is no part of its first line."""
    Path("params/demo/common.yaml").write_text("target: smollm2\n", encoding="utf-8-sig")
    folder = new_run("mine2", source="demo", target="other")
    assert read_parameter_file(folder / "common.yaml") == {"target": "other"}
    Path("params/demo/common.yaml").write_text("target: smollm2\n", encoding="utf-16")
    with refused(InputError):
        new_run("mine3", source="demo")
    assert not Path("params/mine3").exists()


def test_paths_of_a_new_run_are_meant_from_where_they_were_typed(workspace, monkeypatch):
    Path("notebooks/chats.jsonl").write_text("")
    monkeypatch.chdir("notebooks")
    assert cli.main(["new", "here", "--from", "mine", "--input", "chats.jsonl", "--target", "org/model"]) == 0
    made = read_given(PrepareParams, Given(run="here"))
    assert (made.input, made.target) == ("notebooks/chats.jsonl", "org/model")


def test_a_taken_name_and_an_unknown_source_are_refused(workspace):
    (workspace / "runs" / "old").mkdir(parents=True)
    for name, source in (("mine", "own"), ("old", "own"), ("third", "mien"), ("../third", "mine")):
        with refused(InputError):
            new_run(name, source=source)
    assert not Path("params/third").exists()


def test_a_run_remembers_parameters_that_lie_elsewhere(workspace):
    shutil.copytree("params/mine", "elsewhere/third")
    claim(read_given(ExtractParams, Given(run="elsewhere/third")))
    made = read_given(ExtractParams, Given(run="third"))
    assert (made.token_budget, made.origins["token_budget"]) == (2048, "elsewhere/third/extract.yaml")
