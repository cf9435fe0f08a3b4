"""How papermill saves an executed notebook of ours."""

from __future__ import annotations

from pathlib import Path

import nbformat
import papermill
import pytest
from papermill.iorw import papermill_io

from dflash_lab.launch import save_whole

KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}


@pytest.fixture(autouse=True)
def own_handlers(monkeypatch):
    monkeypatch.setattr(papermill_io, "_handlers", [*papermill_io._handlers])


def run(tmp_path: Path, source: str, last: str = "print('the end')") -> None:
    words = nbformat.v4.new_markdown_cell("# Words")
    cells = [words, *map(nbformat.v4.new_code_cell, (source, "", last))]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=KERNEL), tmp_path / "in.ipynb")
    papermill.execute_notebook(str(tmp_path / "in.ipynb"), str(tmp_path / "out.ipynb"), progress_bar=False)


def test_beside_a_finished_result_only_a_notebook_that_ended_well_takes_the_place(tmp_path):
    output, attempt = tmp_path / "out.ipynb", tmp_path / "out.attempt.ipynb"
    output.write_text("the one before")
    save_whole(output, attempt)
    with pytest.raises(papermill.PapermillExecutionError):
        run(tmp_path, "raise RuntimeError('no luck')")
    assert output.read_text() == "the one before" and "no luck" in attempt.read_text()
    with pytest.raises(Exception, match="Kernel died"):
        run(tmp_path, "import os; os._exit(9)")
    assert output.read_text() == "the one before" and "os._exit" in attempt.read_text()
    with pytest.raises(Exception, match="Kernel died"):
        run(tmp_path, "x = 1", "import os; os._exit(9)")
    assert output.read_text() == "the one before"
    run(tmp_path, "x = 1")
    assert "the end" in output.read_text() and not attempt.exists()


def test_with_no_result_to_keep_a_failure_is_seen_in_place_and_holds_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hidden-token-value")
    save_whole(tmp_path / "out.ipynb", tmp_path / "out.ipynb")
    with pytest.raises(papermill.PapermillExecutionError):
        run(tmp_path, "import os; print(os.environ['HF_TOKEN']); raise RuntimeError('no luck')")
    text = (tmp_path / "out.ipynb").read_text()
    assert "no luck" in text and "hidden-token-value" not in text
