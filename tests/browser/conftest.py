"""A checkout in miniature, one JupyterLab over it, one page of it in one Chromium."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checkout import REPO, Checkout

sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in Path(item.fspath).parents:
            item.add_marker("browser")
            item.add_marker("slow")


@pytest.fixture(scope="session")
def checkout(
    tmp_path_factory: pytest.TempPathFactory, tiny_target: Any, preloaded: dict[str, str]
) -> Checkout:
    """A checkout with its notebooks as they are, in which nothing ran."""
    made = Checkout(tmp_path_factory.mktemp("checkout"), tiny_target("llama"), preloaded)
    (made.root / "README.md").symlink_to(REPO / "README.md")
    return made


@pytest.fixture(scope="session")
def lab(checkout: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A running JupyterLab over the checkout."""
    from lab import Lab

    server = Lab(checkout, tmp_path_factory.mktemp("lab-home"))
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


@pytest.fixture(scope="session")
def window(browser: Any, lab: Any) -> Iterator[Any]:
    """Lab as its address opens it, for all tests: loading it takes longer than what most of them do there."""
    from lab import Window

    opened = Window(browser, lab)
    yield opened
    opened.context.close()


@pytest.fixture
def opened(window: Any) -> Iterator[Callable[..., Any]]:
    """Return a function that opens a notebook in a fresh kernel, by its link where that is given."""
    from lab import Notebook

    notebooks: list[Any] = []

    def open_notebook(name: str, link: str = "") -> Any:
        notebooks.append(Notebook(window, f"notebooks/{name}.ipynb", link))
        return notebooks[-1]

    yield open_notebook
    for notebook in notebooks:
        notebook.close()
