"""A workspace with the notebooks set to tiny parameters, one JupyterLab over it, one Chromium."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

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
    """notebooks/ with the run's name written into the parameters cell as a person would, params/ with that
    run's, and a small file of chats.
    """
    from lab import write_parameters
    from test_notebooks_headless import TINY, conversations

    root = tmp_path_factory.mktemp("workspace")
    shutil.copytree(REPO / "params", root / "params")
    (root / "params" / "lab").mkdir()
    own: dict[str, dict[str, Any]] = {**TINY, "extract": {**TINY["extract"], "num_shards": 1}}
    own["prepare"] = {**TINY["prepare"], "input": str(conversations(root / "chats.jsonl"))}
    own["common"] = {"target": str(tiny_target("llama")), "device": "cpu", "dtype": "float32"}
    for name, values in own.items():
        (root / "params" / "lab" / f"{name}.yaml").write_text(yaml.safe_dump(values))
    (root / "notebooks").mkdir()
    for source in (REPO / "notebooks").glob("*.ipynb"):
        write_parameters(source, root / "notebooks" / source.name, run="lab")
    return root


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
