"""`papermill extract.ipynb -p shard 0` as a person types it: from two folders, on a terminal and in pipes,
with scripts that papermill's installation writes anew. In a checkout in miniature whose target is tiny.
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
from docs.conftest import Checkout

REPO = Path(__file__).resolve().parents[2]
TYPED = "papermill extract.ipynb -p shard 0"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory, tiny_target) -> Checkout:
    """A checkout after `make install` alone."""
    return Checkout(tmp_path_factory.mktemp("papermill"), tiny_target("llama"))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, tiny_target) -> Checkout:
    """A checkout in which `prepare` ran."""
    checkout = Checkout(tmp_path_factory.mktemp("papermill"), tiny_target("llama"))
    code, said = typed(checkout, "papermill prepare.ipynb")
    assert code == 0, said
    return checkout


def typed(checkout: Checkout, command: str, folder: str = "", path: Path | None = None, **streams):
    """Run shell text in a folder of the checkout; return exit code and what was said."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout.root)}
    environment["BROWSER_PATH"] = "/nowhere/chromium"
    environment["PATH"] = f"{path or Path(sys.executable).parent}:{environment['PATH']}"
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **streams}
    streams = {"stderr": subprocess.STDOUT, **streams}
    done = subprocess.run(
        command, shell=True, cwd=checkout.root / folder, env=environment, text=True, timeout=300, **streams
    )
    return done.returncode, done.stdout


def on_a_terminal(checkout: Checkout, command: str, folder: str) -> tuple[int, str]:
    """The same with all three streams on a terminal."""
    ours, theirs = pty.openpty()
    try:
        log = checkout.root / "terminal.txt"
        reader = subprocess.Popen(["cat"], stdin=ours, stdout=log.open("w"), stderr=subprocess.DEVNULL)
        code, _ = typed(checkout, command, folder, stdin=theirs, stdout=theirs, stderr=theirs)
    finally:
        os.close(theirs)
        reader.wait(30)  # a terminal that nobody has open any more is an error to its reader
        os.close(ours)
    return code, log.read_text()


def in_a_pipe(checkout: Checkout, command: str, folder: str) -> tuple[int, str]:
    return typed(checkout, f"{command} 2>&1 | cat; exit ${{PIPESTATUS[0]}}", folder, executable="/bin/bash")


def fed_by_a_pipe(checkout: Checkout, command: str, folder: str) -> tuple[int, str]:
    return typed(checkout, f"sleep 1 | {command}; exit ${{PIPESTATUS[1]}}", folder, executable="/bin/bash")


WAYS = {"terminal": on_a_terminal, "stdout a pipe": in_a_pipe, "stdin a pipe": fed_by_a_pipe}


@pytest.mark.parametrize("command", [TYPED, "dflash-lab extract -p shard 0", f"{TYPED} -r run demo"])
def test_without_samples_one_sentence_names_prepare(fresh, command):
    code, said = typed(fresh, command)
    assert code == 1 and "prepare" in said and len(said.strip().splitlines()) == 1, said
    assert not (fresh.root / "runs").exists()


@pytest.mark.parametrize("words", ["-p shrad 0", "-p run dmeo", "-p shard -1"])
def test_a_mistyped_word_is_one_sentence_and_leaves_nothing(fresh, words):
    code, said = typed(fresh, f"papermill extract.ipynb {words}")
    assert code == 1 and len(said.strip().splitlines()) == 1 and said.startswith("papermill: "), said
    assert words.split()[1] in said and not (fresh.root / "runs").exists()


@pytest.mark.parametrize("folder", ["", "notebooks"])
@pytest.mark.parametrize("way", WAYS)
def test_the_typed_command_ends_well_and_says_where_its_notebook_is(prepared, way, folder):
    output = prepared.root / "runs/demo/extract-0.ipynb"
    output.unlink(missing_ok=True)
    sources = {path: path.read_bytes() for path in (prepared.root / "notebooks").glob("*.ipynb")}
    code, said = WAYS[way](prepared, TYPED, folder)
    assert code == 0, said
    assert f"the executed notebook goes to {output}" in said.replace("\r\n", "\n")
    executed = nbformat.read(output, as_version=4)
    assert {cell.metadata.papermill.status for cell in executed.cells} == {"completed"}
    assert json.loads((prepared.root / "runs/demo/extract-0/result.json").read_text())["stage"] == "extract"
    assert '"nbformat"' not in said  # the notebook is in its file, not on the screen
    assert {path: path.read_bytes() for path in sources} == sources
    assert not list(prepared.root.glob("*.ipynb")) and not (prepared.root / "notebooks/runs").exists()


def test_a_failure_beside_a_finished_result_leaves_its_notebook(prepared):
    notebook = prepared.root / "notebooks/dataset_stats.ipynb"
    output = prepared.root / "runs/demo/dataset_stats.ipynb"
    code, said = typed(prepared, "papermill dataset_stats.ipynb")
    assert code == 0, said
    before, source = output.read_bytes(), nbformat.read(notebook, as_version=4)
    source.cells.append(nbformat.v4.new_code_cell("raise RuntimeError('no luck')"))
    nbformat.write(source, notebook)
    code, said = typed(prepared, "papermill dataset_stats.ipynb")
    assert code == 1 and "no luck" in said and "dataset_stats.attempt.ipynb" in said
    assert output.read_bytes() == before
    assert "no luck" in output.with_name("dataset_stats.attempt.ipynb").read_text()


def test_the_launcher_without_a_run_does_the_same(prepared):
    output = prepared.root / "runs/demo/extract-0.ipynb"
    output.unlink(missing_ok=True)
    code, said = typed(prepared, "dflash-lab extract -p shard 0")
    assert code == 0 and output.exists(), said


def scripts(kind: str, folder: Path) -> Path:
    """Write the command as an installer does that knows nothing of us; return its folder."""
    folder.mkdir()
    if kind == "pip":
        from pip._vendor.distlib.scripts import ScriptMaker

        maker = ScriptMaker(None, str(folder))
        maker.executable, maker.variants = sys.executable, {""}
        maker.make("papermill = papermill.__main__:papermill")
    else:
        (folder / "papermill").write_text(f'#!/bin/sh\nexec {sys.executable} -m papermill "$@"\n')
    (folder / "papermill").chmod(0o755)
    return folder


@pytest.mark.parametrize("kind", ["pip", "module"])
def test_it_does_not_rest_on_which_script_is_named_papermill(prepared, tmp_path, kind):
    output = prepared.root / "runs/demo/extract-0.ipynb"
    output.unlink(missing_ok=True)
    code, said = typed(prepared, TYPED, path=scripts(kind, tmp_path / "bin"))
    assert code == 0 and output.exists() and str(output) in said, said


def test_other_notebooks_and_pipes_are_papermills_own_business(prepared, tmp_path):
    cell = nbformat.v4.new_code_cell("x = 1", metadata={"tags": ["parameters"]})
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [cell, nbformat.v4.new_code_cell('print("x is", x)')]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), tmp_path / "extract.ipynb")
    for command in (
        f"papermill {tmp_path}/extract.ipynb -p x 7",
        f"papermill {tmp_path}/extract.ipynb - -p x 7",
        f"cat {tmp_path}/extract.ipynb | papermill -p x 7",
        f"cat {tmp_path}/extract.ipynb | papermill {tmp_path}/out.ipynb -p x 7 && cat {tmp_path}/out.ipynb",
    ):
        code, said = typed(prepared, command, stderr=subprocess.DEVNULL)
        assert code == 0 and "x is 7" in "".join(json.loads(said)["cells"][-1]["outputs"][0]["text"]), command
    code, said = typed(prepared, "papermill --version")
    assert code == 0 and "papermill" in said and "goes to" not in said


def test_the_entry_point_is_declared_and_loads():
    import importlib

    declared = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["entry-points"]
    module, name = declared["papermill.engine"]["dflash-lab"].split(":")
    assert callable(getattr(importlib.import_module(module), name).execute_notebook)
