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
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from support.checkout import REPO, Checkout
from support.wording import check_wording

TYPED = "papermill extract.ipynb -p shard 0"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory, tiny_target, preloaded) -> Checkout:
    """A checkout after `make install` alone."""
    return Checkout(tmp_path_factory.mktemp("papermill"), tiny_target("llama"), preloaded)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, tiny_target, preloaded) -> Checkout:
    """A checkout in which `prepare` ran, every process of it as anywhere."""
    checkout = Checkout(tmp_path_factory.mktemp("papermill"), tiny_target("llama"))
    code, said = checkout.run("papermill prepare.ipynb")
    assert code == 0, said
    checkout.preloaded = preloaded
    return checkout


def on_a_terminal(checkout: Checkout, command: str, folder: str) -> tuple[int, str]:
    """Run it with all three streams on a terminal."""
    ours, theirs = pty.openpty()
    try:
        log = checkout.root / "terminal.txt"
        reader = subprocess.Popen(["cat"], stdin=ours, stdout=log.open("w"), stderr=subprocess.DEVNULL)
        code, _ = checkout.run(command, folder, stdin=theirs, stdout=theirs, stderr=theirs)
    finally:
        os.close(theirs)
        reader.wait(30)  # a terminal that nobody has open any more is an error to its reader
        os.close(ours)
    return code, log.read_text()


def in_a_pipe(checkout: Checkout, command: str, folder: str) -> tuple[int, str]:
    return checkout.run(f"{command} 2>&1 | cat; exit ${{PIPESTATUS[0]}}", folder)


def fed_by_a_pipe(checkout: Checkout, command: str, folder: str) -> tuple[int, str]:
    return checkout.run(f"sleep 1 | {command}; exit ${{PIPESTATUS[1]}}", folder)


def pips_script(path: Path) -> None:
    """Write the command as an installer does that knows nothing of us."""
    from pip._vendor.distlib.scripts import ScriptMaker

    maker = ScriptMaker(None, str(path.parent))
    maker.executable, maker.variants = sys.executable, {""}
    maker.make("papermill = papermill.__main__:papermill")


def module_script(path: Path) -> None:
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -m papermill "$@"\n')


@pytest.mark.parametrize("command", [TYPED, "dflash-lab extract -p shard 0"])
def test_without_samples_one_sentence_names_prepare(fresh, command):
    code, said = fresh.run(command)
    assert code == 1 and not (fresh.root / "runs").exists()
    check_wording(said)


@pytest.mark.parametrize(
    ("way", "folder", "script"),
    [(on_a_terminal, "", pips_script), (in_a_pipe, "notebooks", None), (fed_by_a_pipe, "", module_script)],
)
def test_the_typed_command_ends_well_and_says_where_its_notebook_is(
    prepared, tmp_path, way: Callable, folder: str, script: Callable | None
):
    """However it is typed, and whichever script is named papermill."""
    if script:
        script(tmp_path / "papermill")
        (tmp_path / "papermill").chmod(0o755)
    output = prepared.root / "runs/demo/extract-0.ipynb"
    output.unlink(missing_ok=True)
    sources = {path: path.read_bytes() for path in (prepared.root / "notebooks").glob("*.ipynb")}
    code, said = way(prepared, f"PATH={tmp_path}:$PATH {TYPED}", folder)
    assert code == 0, said
    assert f"the executed notebook goes to {output}" in said.replace("\r\n", "\n")
    executed = nbformat.read(output, as_version=4)
    assert {cell.metadata.papermill.status for cell in executed.cells} == {"completed"}
    assert json.loads((prepared.root / "runs/demo/extract-0/result.json").read_text())["stage"] == "extract"
    assert '"nbformat"' not in said  # the notebook is in its file, not on the screen
    assert {path: path.read_bytes() for path in sources} == sources
    assert not list(prepared.root.glob("*.ipynb")) and not (prepared.root / "notebooks/runs").exists()


def test_a_failure_beside_a_finished_result_leaves_its_notebook(prepared):
    notebook = prepared.root / "notebooks/extract.ipynb"
    output = prepared.root / "runs/demo/extract-0.ipynb"
    if not output.exists():  # this test alone
        assert prepared.run(TYPED)[0] == 0
    before, source = output.read_bytes(), nbformat.read(notebook, as_version=4)
    source.cells.append(nbformat.v4.new_code_cell("raise RuntimeError('no luck')"))
    nbformat.write(source, notebook)
    code, said = prepared.run(TYPED)
    assert code == 1 and "no luck" in said and "extract-0.attempt.ipynb" in said
    assert output.read_bytes() == before
    assert "no luck" in output.with_name("extract-0.attempt.ipynb").read_text()


@pytest.mark.parametrize("command", ["papermill {path} -p x 7", "cat {path} | papermill -p x 7"])
def test_other_notebooks_and_pipes_are_papermills_own_business(prepared, tmp_path, command):
    cell = nbformat.v4.new_code_cell("x = 1", metadata={"tags": ["parameters"]})
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [cell, nbformat.v4.new_code_cell('print("x is", x)')]
    path = tmp_path / "extract.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), path)
    code, said = prepared.run(command.format(path=path), stderr=subprocess.DEVNULL)
    assert code == 0 and "x is 7" in "".join(json.loads(said)["cells"][-1]["outputs"][0]["text"])


def test_the_entry_point_is_declared_and_loads():
    import importlib

    declared = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["entry-points"]
    module, name = declared["papermill.engine"]["dflash-lab"].split(":")
    assert callable(getattr(importlib.import_module(module), name).execute_notebook)
