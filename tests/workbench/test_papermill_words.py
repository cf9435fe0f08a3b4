"""What is filled in when papermill is asked for one of our notebooks, and that nothing else is touched."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dflash_lab.errors import InputError
from dflash_lab.workbench import launch
from dflash_lab.workbench.papermill_engine import is_papermill
from dflash_lab.workbench.papermill_words import OPTIONS, Filled, filled_in
from dflash_lab.workbench.registry import STAGES

OURS = '{"cells": [{"source": "from dflash_lab.workbench import registry"}]}'


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
    return workspace_at(tmp_path / "work")


def fill(line: str, cwd: Path) -> Filled:
    return filled_in(line.split(), cwd)


def words(line: str, cwd: Path) -> list[str]:
    return fill(line, cwd).words


def test_the_table_of_options_is_papermills():
    import click
    from papermill.cli import papermill

    options = [option for option in papermill.params if isinstance(option, click.Option)]
    installed = {
        frozenset([*option.opts, *option.secondary_opts]): 0 if option.is_flag else option.nargs
        for option in options
    }
    installed[frozenset(papermill.context_settings["help_option_names"])] = 0
    ours = {frozenset(names): count for names, count in OPTIONS.items()}
    assert ours == installed


@pytest.mark.parametrize("folder", ["", "notebooks", "params/demo"])
def test_a_bare_name_is_the_notebook_of_the_workspace_and_goes_into_the_runs_folder(root, folder):
    filled = fill("extract.ipynb -p shard 0", root / folder)
    notebook, output = root / "notebooks/extract.ipynb", root / "runs/demo/extract-0.ipynb"
    assert filled.words == [str(notebook), str(output), "-p", "shard", "0"] and filled.output == output
    assert not (root / "runs").exists()


def test_beside_a_finished_result_it_stands_under_another_name_first(root):
    assert fill("extract.ipynb", root).attempt == root / "runs/demo/extract-0.ipynb"
    (root / "runs/demo/extract-0").mkdir(parents=True)
    (root / "runs/demo/extract-0/result.json").write_text("{}")
    filled = fill("extract.ipynb", root / "notebooks")
    assert filled.attempt == root / "runs/demo/extract-0.attempt.ipynb"
    assert filled.output == root / "runs/demo/extract-0.ipynb"


@pytest.mark.parametrize(
    "typed", ["notebooks/extract.ipynb", "./notebooks/extract.ipynb", "{root}/notebooks/extract.ipynb"]
)
def test_a_path_is_the_same(root, typed):
    assert words(f"{typed.format(root=root)} -p shard 1", root) == words("extract.ipynb -p shard 1", root)
    assert words("notebooks/extract.ipynb", root / "notebooks") == words("extract.ipynb", root)


def test_papermill_meets_the_words_in_the_order_typed(root):
    line = "-k python3 -p store -x --log-output extract.ipynb -ptarget x --cwd=. -r dtype float32"
    notebook, output = root / "notebooks/extract.ipynb", root / "runs/demo/extract-0.ipynb"
    expected = f"-k python3 -p store -x --log-output {notebook} {output} -p target x --cwd . -r dtype float32"
    assert words(line, root) == expected.split()


def test_an_empty_value_stays_a_value(root):
    assert filled_in(["extract.ipynb", "-p", "store", ""], root).words[2:] == ["-p", "store", ""]


def test_what_comes_after_two_dashes_is_a_path(root):
    notebook, output = root / "notebooks/extract.ipynb", root / "runs/demo/extract-0.ipynb"
    assert words("-p seed 1 -- extract.ipynb", root) == ["-p", "seed", "1", "--", str(notebook), str(output)]


def test_the_run_given_decides_where_the_notebook_goes(root, tmp_path):
    assert fill("extract.ipynb -p run mine", root).output == root / "runs/mine/extract-0.ipynb"
    other = fill(f"prepare.ipynb -p run_dir {tmp_path}/disk", root).output
    assert other == tmp_path / "disk/prepare.ipynb"


@pytest.mark.parametrize("folder", ["", "notebooks"])
def test_files_of_a_runs_parameters_name_the_run(root, folder):
    line = "extract.ipynb -f params/mine/common.yaml -f params/mine/extract.yaml"
    filled = fill(line, root / folder)
    assert filled.words[:2] == ["-r", "run"] and filled.words[2] == "mine"
    assert filled.output == root / "runs/mine/extract-0.ipynb"
    for path in filled.words[6::2]:
        assert (root / folder / path).is_file()


def test_a_file_typed_where_it_lies_names_the_run_too(root):
    assert words("prepare.ipynb -f common.yaml", root / "params/mine")[:3] == ["-r", "run", "mine"]


def test_a_run_that_is_given_by_name_wins_over_files(root):
    filled = fill("extract.ipynb -f params/mine/common.yaml -p run demo", root)
    assert "-r" not in filled.words and filled.output == root / "runs/demo/extract-0.ipynb"


def test_parameters_outside_the_workspace_are_named_by_their_path(root, tmp_path):
    elsewhere = tmp_path / "elsewhere" / "mine"
    elsewhere.mkdir(parents=True)
    (elsewhere / "common.yaml").write_text("seed: 3\n")
    assert words(f"extract.ipynb -f {elsewhere}/common.yaml", root)[:3] == ["-r", "run", str(elsewhere)]


def test_files_of_two_runs_need_a_name(root):
    with pytest.raises(InputError, match="-p run NAME"):
        words("extract.ipynb -f params/mine/common.yaml -f params/demo/extract.yaml", root)


def test_with_an_output_only_what_is_not_there_is_filled_in(root):
    assert " ".join(words("extract.ipynb out.ipynb -p shard 1", root)) == (
        f"{root}/notebooks/extract.ipynb out.ipynb -p shard 1"
    )
    assert words("extract.ipynb -", root) == [str(root / "notebooks/extract.ipynb"), "-"]
    for line in (
        "notebooks/extract.ipynb out.ipynb -p shard 1",
        "notebooks/extract.ipynb -",
        "notebooks/extract.ipynb s3://bucket/out.ipynb",
        "notebooks/extract.ipynb runs/{shard}.ipynb",
    ):
        assert words(line, root) == line.split()
        assert fill(line, root).output is None
    named = words("notebooks/extract.ipynb out.ipynb -f params/mine/extract.yaml", root)
    assert " ".join(named) == ("-r run mine notebooks/extract.ipynb out.ipynb -f params/mine/extract.yaml")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--version",
        "--help",
        "-h",
        "extract.ipynb --help",
        "--help-notebook extract.ipynb",
        "extract.ipynb --no-such-option",
        "extract.ipynb --log-output=yes",
        "extract.ipynb -p shard",
        "extract.ipynb out.ipynb third.ipynb",
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
        "extract.ipynb --prepare-only",
        "extract.ipynb -f s3://bucket/common.yaml",
        "extract.ipynb -f -",
    ],
)
def test_what_is_not_ours_to_fill_in_stays_as_it_was_typed(root, line):
    assert fill(line, root).words == line.split()
    assert fill(line, root).output is None


def test_another_projects_notebook_of_the_same_name_is_left_alone(root, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "extract.ipynb").write_text(OURS)
    assert words("extract.ipynb", tmp_path / "mine") == ["extract.ipynb"]
    other = workspace_at(tmp_path / "other")
    (other / "notebooks" / "prepare.ipynb").write_text('{"cells": []}')
    for cwd in (other, other / "notebooks"):
        assert words("prepare.ipynb", cwd) == ["prepare.ipynb"]
    assert words("notebooks/prepare.ipynb out.ipynb -p x 1", other)[-1] == "1"


def test_outside_a_workspace_a_name_is_nothing_of_ours(root, tmp_path):
    assert words("extract.ipynb -p shard", tmp_path) == ["extract.ipynb", "-p", "shard"]
    assert words("extract.ipynb -p shard 0", tmp_path) == ["extract.ipynb", "-p", "shard", "0"]


def test_braces_in_a_path_survive_papermills_formatting(tmp_path, monkeypatch):
    from papermill.parameterize import parameterize_path

    monkeypatch.setattr(launch, "check_before", lambda params: None)
    root = workspace_at(tmp_path / "a{b}c")
    source, output = words("extract.ipynb", root)
    assert parameterize_path(source, {}) == str(root / "notebooks/extract.ipynb")
    assert parameterize_path(output, {}) == str(root / "runs/demo/extract-0.ipynb")


@pytest.mark.parametrize("output", ["", " out.ipynb"])
def test_a_mistyped_parameter_stops_before_anything_is_made(root, output):
    with pytest.raises(InputError, match="did you mean 'shard'"):
        words(f"extract.ipynb{output} -p shrad 0", root)
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
        with pytest.raises(InputError, match="extract wants prepare"):
            words(line, root)
    line = "notebooks/extract.ipynb out.ipynb --prepare-only"
    assert words(line, root) == line.split()
    with pytest.raises(InputError, match="did you mean 'shard'"):
        words(f"{line} -p shrad 0", root)


def test_the_check_is_made_where_the_notebook_will_run(root, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(launch, "check_before", lambda params: seen.append(Path.cwd()))
    before = Path.cwd()
    words("extract.ipynb", root / "notebooks")
    other = workspace_at(tmp_path / "other")
    filled = fill(f"extract.ipynb --cwd {other}/notebooks", root)
    assert seen == [root, other] and Path.cwd() == before
    assert filled.words[0] == str(root / "notebooks/extract.ipynb")
    assert filled.output == other / "runs/demo/extract-0.ipynb"


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
