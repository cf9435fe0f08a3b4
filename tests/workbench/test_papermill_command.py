"""What is filled in when papermill is asked for one of our notebooks, and that nothing else is touched."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from papermill.cli import papermill
from papermill.iorw import papermill_io
from support.wording import refused

from dflash_lab import launch
from dflash_lab.errors import InputError
from dflash_lab.launch import filled_in, main
from dflash_lab.papermill_engine import ENGINE, is_papermill
from dflash_lab.stages import STAGES

OURS = '{"cells": [{"source": "from dflash_lab.stages import STAGES"}]}'


def workspace_at(root: Path) -> Path:
    (root / "notebooks").mkdir(parents=True)
    for stage in STAGES:
        (root / "notebooks" / f"{stage}.ipynb").write_text(OURS)
    for run in ("demo", "mine"):
        (root / "params" / run).mkdir(parents=True)
        (root / "params" / run / "common.yaml").write_text("target: random:qwen3-0.6b\n")
        (root / "params" / run / "extract.yaml").write_text("num_shards: 2\n")
    return root


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A workspace with the six notebooks and two runs, in which every stage is ready."""
    monkeypatch.setattr(launch, "check_before", lambda params: None)
    monkeypatch.setattr(papermill_io, "_handlers", [*papermill_io._handlers])
    return workspace_at(tmp_path / "work")


def read(line: str) -> dict[str, Any]:
    """What papermill's command reads in a line."""
    return papermill.make_context("papermill", line.split()).params


def fill(line: str, cwd: Path) -> dict[str, Any]:
    return filled_in(read(line), cwd)


def changed(line: str, cwd: Path) -> dict[str, Any]:
    """What is filled in, but for the engine, which is always ours."""
    options, filled = read(line), fill(line, cwd)
    assert filled["engine"] == ENGINE
    return {name: value for name, value in filled.items() if value != options[name] and name != "engine"}


def paths(root: Path, run: str = "demo") -> dict[str, Any]:
    return {
        "notebook_path": str(root / "notebooks/extract.ipynb"),
        "output_path": str(root / "runs" / run / "extract-0.ipynb"),
    }


@pytest.mark.parametrize("folder", ["", "notebooks", "params/demo"])
def test_a_bare_name_is_the_notebook_of_the_workspace_and_goes_into_the_runs_folder(root, folder, capsys):
    assert changed("extract.ipynb -p shard 0", root / folder) == paths(root)
    assert f"the executed notebook goes to {root}/runs/demo/extract-0.ipynb\n" in capsys.readouterr().err
    assert not list((root / "runs").rglob("*.ipynb"))


def test_beside_a_finished_result_it_stands_under_another_name_first(root, capsys):
    (root / "runs/demo/extract-0").mkdir(parents=True)
    (root / "runs/demo/extract-0/result.json").write_text("{}")
    assert changed("extract.ipynb", root / "notebooks") == paths(root)
    assert "until it ends well, to extract-0.attempt.ipynb" in capsys.readouterr().err


@pytest.mark.parametrize(
    "typed", ["notebooks/extract.ipynb", "./notebooks/extract.ipynb", "{root}/notebooks/extract.ipynb"]
)
def test_a_path_is_the_same(root, typed):
    assert fill(f"{typed.format(root=root)} -p shard 1", root) == fill("extract.ipynb -p shard 1", root)
    assert fill("notebooks/extract.ipynb", root / "notebooks") == fill("extract.ipynb", root)


def test_whatever_else_is_typed_stays(root):
    line = "-k python3 -p store -x --log-output extract.ipynb -ptarget x --cwd=. -r dtype float32"
    assert changed(line, root) == paths(root)
    assert changed("-p seed 1 -- extract.ipynb", root) == paths(root)
    assert fill("extract.ipynb --engine nbclient", root)["engine"] == "nbclient"


def test_the_run_given_decides_where_the_notebook_goes(root, tmp_path):
    assert changed("extract.ipynb -p run mine", root) == paths(root, "mine")
    other = fill(f"prepare.ipynb -p run_dir {tmp_path}/disk", root)["output_path"]
    assert other == str(tmp_path / "disk/prepare.ipynb")


@pytest.mark.parametrize("folder", ["", "notebooks"])
def test_files_of_a_runs_parameters_name_the_run(root, folder):
    line = "extract.ipynb -f params/mine/common.yaml -f params/mine/extract.yaml"
    filled = fill(line, root / folder)
    assert filled["parameters_raw"] == (("run", "mine"),) and filled.items() >= paths(root, "mine").items()
    for path in filled["parameters_file"]:
        assert (root / folder / path).is_file()


def test_a_file_typed_where_it_lies_names_the_run_too(root):
    filled = fill("prepare.ipynb -f common.yaml -r dtype float32", root / "params/mine")
    assert filled["parameters_raw"] == (("run", "mine"), ("dtype", "float32"))


def test_a_run_that_is_given_by_name_wins_over_files(root):
    assert changed("extract.ipynb -f params/mine/common.yaml -p run demo", root) == paths(root)


def test_parameters_outside_the_workspace_are_named_by_their_path(root, tmp_path):
    elsewhere = tmp_path / "elsewhere" / "mine"
    elsewhere.mkdir(parents=True)
    (elsewhere / "common.yaml").write_text("seed: 3\n")
    filled = fill(f"extract.ipynb -f {elsewhere}/common.yaml", root)
    assert filled["parameters_raw"] == (("run", str(elsewhere)),)


def test_files_of_two_runs_need_a_name(root):
    with refused(InputError):
        fill("extract.ipynb -f params/mine/common.yaml -f params/demo/extract.yaml", root)


def test_with_an_output_only_what_is_not_there_is_filled_in(root, capsys):
    notebook = {"notebook_path": str(root / "notebooks/extract.ipynb")}
    assert changed("extract.ipynb out.ipynb -p shard 1", root) == notebook
    assert changed("extract.ipynb -", root) == notebook
    for line in (
        "notebooks/extract.ipynb out.ipynb -p shard 1",
        "notebooks/extract.ipynb -",
        "notebooks/extract.ipynb s3://bucket/out.ipynb",
        "notebooks/extract.ipynb runs/{shard}.ipynb",
        "notebooks/extract.ipynb out.ipynb -f -",
    ):
        assert changed(line, root) == {}
    named = changed("notebooks/extract.ipynb out.ipynb -f params/mine/extract.yaml", root)
    assert named == {"parameters_raw": (("run", "mine"),)}
    assert not (root / "runs").exists() and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "line",
    [
        "extract.ipynb --help-notebook",
        "runs.ipynb",
        "somebodys.ipynb -p x 1",
        "-",
        "- out.ipynb",
        "s3://bucket/extract.ipynb out.ipynb",
        "https://host/notebooks/extract.ipynb",
        "runs/demo/extract.ipynb",
        "elsewhere/extract.ipynb out.ipynb",
        "Extract.ipynb",
        "extract",
    ],
)
def test_what_is_not_ours_to_fill_in_stays_as_it_was_typed(root, line):
    assert fill(line, root) == read(line)


@pytest.mark.parametrize(
    "line", ["--prepare-only", "-f s3://bucket/common.yaml", "-f -", "-f common.yaml --prepare-only"]
)
def test_where_it_is_to_go_is_asked_of_the_person(root, line):
    with refused(InputError):
        fill(f"extract.ipynb {line}", root)
    assert not (root / "runs").exists()


@pytest.mark.parametrize(
    ("words", "code"),
    [("--no-such-option", 2), ("out.ipynb third.ipynb", 2), ("--help", 0), ("--version", 0)],
)
def test_what_papermill_refuses_or_only_answers_is_its_own_business(root, words, code, monkeypatch):
    monkeypatch.chdir(root)
    monkeypatch.setattr(papermill, "callback", papermill.callback)
    with pytest.raises(SystemExit) as left:
        main(["extract.ipynb", *words.split()])
    assert left.value.code == code and not (root / "runs").exists()


def test_a_refusal_is_one_sentence(root, monkeypatch):
    monkeypatch.chdir(root)
    monkeypatch.setattr(papermill, "callback", papermill.callback)
    with pytest.raises(SystemExit) as left:
        main(["extract.ipynb", "-p", "shard", "-1"])
    assert left.value.code.startswith("papermill: extract: shard=-1: must be at least 0")


def test_another_projects_notebook_of_the_same_name_is_left_alone(root, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "extract.ipynb").write_text(OURS)
    assert fill("extract.ipynb", tmp_path / "mine") == read("extract.ipynb")
    other = workspace_at(tmp_path / "other")
    (other / "notebooks" / "prepare.ipynb").write_text('{"cells": []}')
    for cwd in (other, other / "notebooks"):
        assert fill("prepare.ipynb", cwd) == read("prepare.ipynb")
    line = "notebooks/prepare.ipynb out.ipynb -p x 1"
    assert fill(line, other) == read(line)


def test_outside_a_workspace_a_name_is_nothing_of_ours(root, tmp_path):
    assert fill("extract.ipynb -p shard 0", tmp_path) == read("extract.ipynb -p shard 0")


def test_braces_in_a_path_survive_papermills_formatting(tmp_path, monkeypatch):
    from papermill.parameterize import parameterize_path

    monkeypatch.setattr(launch, "check_before", lambda params: None)
    root = workspace_at(tmp_path / "a{b}c")
    filled = fill("extract.ipynb", root)
    assert {name: parameterize_path(filled[name], {}) for name in paths(root)} == paths(root)


@pytest.mark.parametrize("output", ["", " out.ipynb"])
def test_a_mistyped_parameter_stops_before_anything_is_made(root, output):
    with refused(InputError):
        fill(f"extract.ipynb{output} -p shrad 0", root)
    assert not (root / "runs").exists()


def test_a_stage_that_is_not_ready_stops_unless_it_is_only_prepared(root, monkeypatch):
    def refuse(params) -> None:
        raise InputError(f"{params.stage} wants prepare")

    monkeypatch.setattr(launch, "check_before", refuse)
    for line in (
        "extract.ipynb",
        "extract.ipynb out.ipynb",
        "extract.ipynb --prepare-only --prepare-execute",
    ):
        with refused(InputError):
            fill(line, root)
    line = "notebooks/extract.ipynb out.ipynb --prepare-only"
    assert changed(line, root) == {}
    with refused(InputError):
        fill(f"{line} -p shrad 0", root)


def test_the_check_is_made_where_the_notebook_will_run(root, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(launch, "check_before", lambda params: seen.append(Path.cwd()))
    before = Path.cwd()
    fill("extract.ipynb", root / "notebooks")
    other = workspace_at(tmp_path / "other")
    filled = fill(f"extract.ipynb --cwd {other}/notebooks", root)
    assert seen == [root, other] and Path.cwd() == before
    assert filled["notebook_path"] == str(root / "notebooks/extract.ipynb")
    assert filled["output_path"] == str(other / "runs/demo/extract-0.ipynb")


def test_which_process_is_papermill():
    python = "/env/bin/python"
    for argv, original in (
        (["/env/bin/papermill", "x"], [python, "/env/bin/papermill", "x"]),
        (["papermill"], [python, "papermill"]),
        (["/env/papermill/__main__.py", "x"], [python, "/env/papermill/__main__.py", "x"]),
        (["-m", "x", "y"], [python, "-X", "dev", "-m", "papermill", "x", "y"]),
        (["-m"], [python, "-mpapermill"]),
    ):
        assert is_papermill(argv, original), argv
    for argv, original in (
        (["/env/bin/dflash-lab", "papermill"], [python, "/env/bin/dflash-lab", "papermill"]),
        (["-m", "papermill"], [python, "-m", "pytest", "papermill"]),
        (["-c"], [python, "-c", "import papermill"]),
        ([""], [python]),
        ([], []),
        (["/lab/papermill/tool.py"], [python, "/lab/papermill/tool.py"]),
    ):
        assert not is_papermill(argv, original), argv
    assert not is_papermill(sys.argv, sys.orig_argv)
