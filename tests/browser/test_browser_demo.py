"""After the demo, nothing edited: `make lab`, the first page, each notebook by its link, `Run all`, and again
after `Restart`. Every notebook shows what the demo found, and leaves what is finished byte for byte alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from lab import TOKEN, Lab, Notebook, complaints
from support.checkout import REPO, Checkout

from dflash_lab.files import checksum
from dflash_lab.stages import STAGES

pytestmark = pytest.mark.timeout(900)
WITHIN_S = 60.0  # a notebook; some seconds on idle cores


@pytest.fixture(scope="session")
def demo(tmp_path_factory, tiny_target) -> Path:
    """A checkout with the demo done headless, its parameters cut down to seconds, its notebooks as they
    are.
    """
    made = Checkout(tmp_path_factory.mktemp("demo-checkout"), tiny_target("llama"))
    (made.root / "README.md").symlink_to(REPO / "README.md")
    code, said = made.run("dflash-lab run demo")
    assert code == 0, said[-3000:]
    return made.root


@pytest.fixture(scope="session")
def demo_lab(demo, tmp_path_factory) -> Iterator[Lab]:
    server = Lab(demo, tmp_path_factory.mktemp("demo-lab-home"))
    yield server
    server.close()


def finished_files(run: Path) -> dict[str, tuple[str, int]]:
    """Content and time of everything in a run's folder but its locks; of figures, which are drawn anew, only
    the content.
    """
    found = {}
    for path in sorted(path for path in run.rglob("*") if path.is_file() and not path.name.startswith(".")):
        drawn = "figures" in path.parts
        found[str(path.relative_to(run))] = (checksum(path), 0 if drawn else path.stat().st_mtime_ns)
    return found


@pytest.fixture
def page(browser, demo_lab) -> Iterator[Any]:
    """Lab as its address opens it."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(f"{demo_lab.url}/?token={TOKEN}", wait_until="domcontentloaded")
    page.wait_for_selector(".jp-MarkdownViewer h2", timeout=60_000)
    yield page
    context.close()


def test_lab_opens_on_the_page_that_says_what_is_here(page, demo):
    viewer = page.locator(".jp-MarkdownViewer")
    viewer.get_by_role("heading", name="DFlash Lab").wait_for(timeout=20_000)
    row = viewer.locator("tr", has_text="demo").first.inner_text().split("\t")
    assert row[:3] == ["demo", "finished", "7/7"]
    assert viewer.locator("li", has_text="demo").count() == 0  # no stage is left to do or out of date
    assert page.evaluate("() => window.jupyterapp.serviceManager.sessions.refreshRunning()") is None
    assert page.evaluate("() => Array.from(window.jupyterapp.serviceManager.kernels.running()).length") == 0
    text = viewer.inner_text()
    assert "dflash-lab new mine --from own" in text and "dflash-lab run mine" in text
    assert page.locator(".jp-Dialog, .jp-toast-message").count() == 0  # nothing lies over it


@pytest.mark.parametrize("name", [*STAGES, "The run browser"])
def test_links_of_the_page_open_notebooks(page, name):
    page.locator(".jp-MarkdownViewer").get_by_role("link", name=name, exact=True).click()
    wanted = f"notebooks/{name if name in STAGES else 'runs'}.ipynb"
    page.wait_for_function(
        "path => window.jupyterapp.shell.currentWidget?.context?.path === path", arg=wanted, timeout=30_000
    )
    page.locator(".jp-NotebookPanel:visible .jp-Cell").first.wait_for(timeout=30_000)
    page.evaluate("() => window.jupyterapp.serviceManager.sessions.shutdownAll()")


@pytest.mark.parametrize("stage", STAGES)
def test_run_all_shows_the_demo_and_changes_nothing(browser, demo, demo_lab, stage):
    before = finished_files(demo / "runs" / "demo")
    notebook = Notebook(browser, demo_lab, f"notebooks/{stage}.ipynb")
    try:
        for run_all in (notebook.run_all, notebook.restart_and_run_all):
            began = time.monotonic()
            cells = run_all(WITHIN_S)
            assert time.monotonic() - began < WITHIN_S
            outputs = [output for cell in cells for output in cell["outputs"]]
            said = "".join(output.get("text", "") for output in outputs)
            assert "finished before" in said
            kinds = [kind for output in outputs for kind in output.get("data", {})]
            assert (
                "application/vnd.plotly.v1+json" in kinds
                or "application/vnd.jupyter.widget-view+json" in kinds
            )
            notebook.scroll_to("show(")
            notebook.page.wait_for_selector(".js-plotly-plot .main-svg", timeout=20_000)
            notebook.screenshot(f"demo-{stage}-{run_all.__name__}")
            after = finished_files(demo / "runs" / "demo")
            assert {name: after.get(name) for name in before} == before
            assert {Path(name).parent.name for name in set(after) - set(before)} <= {"figures"}
        assert notebook.ask("__import__('os').environ['GOMP_SPINCOUNT']") == "'1000'"
        assert complaints(notebook) == []
    finally:
        notebook.close()
    as_it_came = nbformat.read(REPO / "notebooks" / f"{stage}.ipynb", as_version=4)
    assert [cell["source"] for cell in cells] == [c.source for c in as_it_came.cells if c.cell_type == "code"]


def test_the_run_browser_shows_the_demo(browser, demo, demo_lab):
    before = finished_files(demo / "runs" / "demo")
    notebook = Notebook(browser, demo_lab, "notebooks/runs.ipynb")
    try:
        notebook.run_all(WITHIN_S)
        notebook.restart_and_run_all(WITHIN_S)
        notebook.scroll_to("browser(")
        option = notebook.page.locator("select[multiple] option").first
        option.wait_for(timeout=20_000)
        line = option.inner_text().replace("\N{NO-BREAK SPACE}", " ")
        assert line.startswith("demo: finished, 7/7 stages")
        assert complaints(notebook) == []
    finally:
        notebook.close()
    assert finished_files(demo / "runs" / "demo") == before


def test_the_demo_is_finished_afterwards(demo, monkeypatch):
    from dflash_lab.runs import run_status

    monkeypatch.chdir(demo)
    stages = run_status("demo")
    assert len(stages) == 7 and {(stage.state, stage.why) for stage in stages} == {("finished", "")}
