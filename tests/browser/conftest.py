"""A workspace with the notebooks set to tiny parameters, one JupyterLab over it, one Chromium."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "notebooks"))
REPO = Path(__file__).resolve().parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in Path(item.fspath).parents:
            item.add_marker("browser")
            item.add_marker("slow")


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory, tiny_target: Callable[[str], Path]) -> Path:
    """notebooks/ with the parameters cell edited as a person would, params/, and a small file of chats."""
    from test_notebooks_headless import TINY, conversations

    root = tmp_path_factory.mktemp("workspace")
    shutil.copytree(REPO / "params", root / "params")
    (root / "notebooks").mkdir()
    chats = conversations(root / "chats.jsonl")
    for source in (REPO / "notebooks").glob("*.ipynb"):
        notebook = nbformat.read(source, as_version=4)
        values: dict[str, Any] = {
            "run_dir": "runs/lab",
            "target": str(tiny_target("llama")),
            "device": "cpu",
            "dtype": "float32",
            "input": str(chats),
            **TINY.get(source.stem, {}),
        }
        if source.stem == "extract":
            values["num_shards"] = 1
        for cell in notebook.cells:
            if "parameters" in cell.metadata.get("tags", []):
                cell.source = "\n".join(_edited(line, values) for line in cell.source.splitlines())
        nbformat.write(notebook, root / "notebooks" / source.name)
    return root


def _edited(line: str, values: dict[str, Any]) -> str:
    name = line.split(":")[0].strip()
    if name not in values:
        return line
    head, comment = line.split(" = ")[0], line.partition("  #")[2]
    return f"{head} = {values[name]!r}  #{comment}"


@pytest.fixture(scope="session")
def lab(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A running JupyterLab over the workspace."""
    from lab import Lab

    server = Lab(workspace, tmp_path_factory.mktemp("lab-home"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    from lab import ARGUMENTS, chromium

    if not chromium():
        pytest.skip("no Chromium on this machine (apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium(), args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any, lab: Any) -> Iterator[Callable[[str], Any]]:
    """Return a function that opens a notebook of the workspace in a fresh page and kernel."""
    from lab import Notebook

    notebooks: list[Any] = []

    def open_notebook(stage: str) -> Any:
        notebooks.append(Notebook(browser, lab, f"notebooks/{stage}.ipynb"))
        return notebooks[-1]

    yield open_notebook
    for notebook in notebooks:
        notebook.close()
