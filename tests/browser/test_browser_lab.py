"""A fresh checkout as a person uses it in JupyterLab, nothing edited: each notebook by its link, `Run all`, a
slider moved, `Restart` and again; then the same run headless, and by hand once more.

The tests run in order in one process, and each stage reads what the one before left.
"""

from __future__ import annotations

import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from lab import Notebook, Window, write_parameters
from support.checkout import REPO

from dflash_lab.files import checksum
from dflash_lab.stages import STAGES

pytestmark = pytest.mark.timeout(900)
WITHIN_S = 120.0  # a finished notebook; some seconds on idle cores
FIGURES = {"application/vnd.plotly.v1+json", "application/vnd.jupyter.widget-view+json"}


@pytest.fixture(scope="session")
def demo(checkout) -> Path:
    """The folder of the demo's run, which Lab and `dflash-lab` fill."""
    return checkout.root / "runs" / "demo"


@pytest.fixture(scope="session")
def headless(checkout, demo) -> dict[str, tuple[str, int]]:
    """Run the demo headless after it was run by hand; return what was finished before that."""
    before = finished_files(demo)
    code, said = checkout.run("dflash-lab run demo")
    assert code == 0 and said.count("finished before") >= 7, said[-3000:]
    return before


def finished_files(run: Path) -> dict[str, tuple[str, int]]:
    """Content and time of everything in a run's folder but its locks; of figures, which are drawn anew, only
    the content.
    """
    found = {}
    for path in sorted(path for path in run.rglob("*") if path.is_file() and not path.name.startswith(".")):
        drawn = "figures" in path.parts
        found[str(path.relative_to(run))] = (checksum(path), 0 if drawn else path.stat().st_mtime_ns)
    return found


def unchanged(run: Path, before: dict[str, tuple[str, int]], new: tuple[str, ...] = ("figures",)) -> None:
    """Assert that what was finished is there byte for byte, and that nothing is new but in folders `new`."""
    after = finished_files(run)
    assert {name: after.get(name) for name in before} == before
    assert {Path(name).parent.name for name in set(after) - set(before)} <= {*new}


def shown(cells: list[dict[str, Any]]) -> tuple[str, set[str]]:
    """What is printed in a notebook, and the kinds of what is displayed."""
    outputs = [output for cell in cells for output in cell["outputs"]]
    said = "".join(output.get("text", "") for output in outputs)
    return said, {kind for output in outputs for kind in output.get("data", {})}


def readable(notebook, name: str) -> None:
    """Assert that every text of the figures and tables can be read, page by page through the notebook."""
    kinds = set()
    for number, cell in enumerate(notebook.cells()):
        if not any("data" in output for output in cell["outputs"]):
            continue
        notebook.scroll_to(cell["source"])
        notebook.screenshot(f"{name}-{number:02d}")
        found = notebook.contrasts()
        kinds |= {one["kind"] for one in found}
        low = [one for one in found if one["ratio"] < (4.3 if one["kind"] == "figure" else 4.5)]
        assert not low, low[:5]
    assert "figure" in kinds


def move_the_explorers_slider(notebook) -> None:
    notebook.scroll_to("explorer(")
    texts = notebook.page.locator(".jp-OutputArea-output").filter(has=notebook.page.locator(".widget-slider"))
    texts.last.wait_for(timeout=20_000)
    notebook.press("PageDown", 5, texts.last)
    notebook.screenshot("explorer-moved")


def move_the_planners_slider_and_sweep(notebook) -> None:
    """The planner's verdict changes; a sweep starts, stops, and leaves the kernel free meanwhile."""
    page = notebook.page
    notebook.scroll_to("planner(")
    texts = page.locator(".jp-OutputArea-output").filter(has=page.locator(".widget-slider"))
    texts.first.wait_for(timeout=20_000)
    notebook.press("PageDown", 3, texts.first)
    notebook.screenshot("planner-moved")
    notebook.scroll_to("sweep_control(")
    start = page.get_by_role("button", name="Run sweep")
    start.wait_for(timeout=20_000)
    start.scroll_into_view_if_needed()
    stop = page.get_by_role("button", name="Stop", exact=True).last
    start.click()
    page.wait_for_function("() => document.body.innerText.match(/loading the target|of \\d+ points/)")
    began = time.monotonic()
    assert notebook.ask("6 * 7") == "42" and time.monotonic() - began < 10
    notebook.screenshot("sweep-running")
    stop.evaluate("button => { if (!button.disabled) button.click(); }")  # it may have ended by itself
    page.wait_for_function(
        "() => document.body.innerText.match(/stopped; what was measured stays|(\\d+) of \\1 points/)",
        timeout=60_000,
    )
    assert start.is_enabled()


WIDGETS = {"dataset_stats": move_the_explorers_slider, "memory_sweep": move_the_planners_slider_and_sweep}


def test_lab_asks_for_its_token(lab):
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{lab.url}/api/contents", timeout=10)
    assert refused.value.code == 403


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_by_hand(opened, checkout, demo, stage):
    notebook = opened(stage, link=stage)
    cells = notebook.run_all()
    assert shown(cells)[1] & FIGURES and "finished before" not in shown(cells)[0]
    assert len(list(demo.glob(f"{stage}*/result.json"))) == 1
    themes = ("JupyterLab Light", "JupyterLab Dark")
    for theme in themes[
        :: -1 if [*STAGES].index(stage) % 2 else 1
    ]:  # each stage begins as the one before ended
        notebook.theme(theme)
        readable(notebook, f"{stage}-{theme.split()[1].lower()}")
    WIDGETS.get(stage, lambda notebook: None)(notebook)
    again(notebook, notebook.restart_and_run_all, demo, stage)
    if stage == "extract":  # the demo has two shards
        code, said = checkout.run("dflash-lab extract -p shard 1")
        assert code == 0, said[-3000:]


def again(notebook, run_all: Callable, demo: Path, stage: str) -> None:
    """In a fresh kernel `Run all` shows what is finished, and leaves it byte for byte alone."""
    before, began = finished_files(demo), time.monotonic()
    cells = run_all(WITHIN_S)
    assert time.monotonic() - began < WITHIN_S
    said, kinds = shown(cells)
    assert "finished before" in said and kinds & FIGURES
    notebook.scroll_to("show(")
    notebook.page.wait_for_selector(".js-plotly-plot .main-svg", timeout=20_000)
    notebook.screenshot(f"again-{stage}")
    unchanged(demo, before)
    assert notebook.ask("__import__('os').environ['GOMP_SPINCOUNT']") == "'1000'"
    assert notebook.complaints == []
    as_it_came = nbformat.read(REPO / "notebooks" / f"{stage}.ipynb", as_version=4)
    assert [cell["source"] for cell in cells] == [c.source for c in as_it_came.cells if c.cell_type == "code"]


def test_training_is_drawn_while_its_cell_runs(opened, checkout):
    folder = checkout.root / "notebooks"
    values = {"run_dir": "runs/live", "max_steps": 1_000_000, "store": "runs/demo/store"}
    write_parameters(folder / "train_drafter.ipynb", folder / "train_long.ipynb", **values)
    notebook = opened("train_long")
    page = notebook.page
    notebook.start()
    notebook.scroll_to("execute(params)")
    page.wait_for_function(
        "() => document.body.innerText.match(/step [\\d,]+: loss .* tokens\\/s, peak memory .*ends about/)",
        timeout=90_000,
    )
    page.get_by_role("button", name="positions").click()
    page.locator(".heatmaplayer image").first.wait_for(timeout=60_000)
    seen = page.locator(".widget-label", has_text="step ").last
    before = seen.inner_text()
    page.wait_for_function("before => !document.body.innerText.includes(before)", arg=before, timeout=60_000)
    assert page.locator(".heatmaplayer image").first.is_visible()  # what was chosen stays
    running = next(cell for cell in notebook.cells() if "execute(params)" in cell["source"])
    assert running["count"] is None
    notebook.screenshot("training-live")
    assert notebook.complaints == []


def test_headless_finds_what_was_done_by_hand(headless, demo, checkout, monkeypatch):
    from dflash_lab.runs import run_status

    after = finished_files(demo)
    mine = {name for name in headless if "figures" not in Path(name).parts}
    assert {name: after.get(name) for name in mine} == {name: headless[name] for name in mine}
    monkeypatch.chdir(checkout.root)
    stages = run_status("demo")
    assert len(stages) == 7 and {(stage.state, stage.why) for stage in stages} == {("finished", "")}


@pytest.mark.parametrize("stage", ["extract", "acceptance"])
def test_by_hand_a_notebook_shows_what_headless_left(headless, opened, demo, stage):
    notebook = opened(stage, link=stage)
    again(notebook, notebook.run_all, demo, stage)


@pytest.fixture(scope="module")
def later(headless, browser, lab) -> Iterator[Window]:
    """Lab opened anew when there is a run."""
    window = Window(browser, lab)
    yield window
    window.context.close()


def test_lab_opens_on_the_page_that_says_what_is_here(later):
    page = later.page
    viewer = page.locator(".jp-MarkdownViewer")
    viewer.get_by_role("heading", name="DFlash Lab").wait_for(timeout=20_000)
    row = viewer.locator("tr", has_text="demo").first.inner_text().split("\t")
    assert row[:3] == ["demo", "finished", "7/7"]
    demos = viewer.locator("li", has_text="demo")
    assert demos.count() == 0  # no stage is left to do or out of date
    text = viewer.inner_text()
    assert "dflash-lab new mine --from own" in text and "dflash-lab run mine" in text
    assert page.locator(".jp-Dialog, .jp-toast-message").count() == 0  # nothing lies over it
    assert page.evaluate("() => window.jupyterapp.serviceManager.sessions.refreshRunning()") is None
    assert page.evaluate("() => Array.from(window.jupyterapp.serviceManager.kernels.running()).length") == 0


def test_the_run_browser_shows_the_demo_and_compares_it_with_another(later, demo):
    other = demo.with_name("other")
    shutil.copytree(demo, other)
    path = other / "train_drafter" / "result.json"
    path.write_text(path.read_text().replace('"num_layers": 2', '"num_layers": 3'))
    before = finished_files(demo)
    notebook = Notebook(later, "notebooks/runs.ipynb", link="The run browser")
    notebook.run_all(WITHIN_S)
    notebook.restart_and_run_all(WITHIN_S)
    notebook.scroll_to("browser(")
    page, options = notebook.page, notebook.page.locator("select[multiple] option")
    options.first.wait_for(timeout=20_000)
    lines = [text.replace("\N{NO-BREAK SPACE}", " ") for text in options.all_inner_texts()]
    names = [line.split(":")[0] for line in lines]
    found = {path.name for path in demo.parent.iterdir() if path.is_dir()}
    folders = {name for name in found if name[0] != "."} - {"overview"}  # Lab's own; pictures of the runs
    assert sorted(names) == sorted(folders) and {"demo", "other"} <= folders
    assert lines[names.index("demo")].startswith("demo: finished, 7/7 stages")
    page.locator("select[multiple]").select_option(index=[names.index(run) for run in ("demo", "other")])
    page.get_by_role("heading", name="parameters that differ").wait_for(timeout=20_000)
    table = page.locator(".jp-OutputArea-output table.dataframe").filter(has_text="num_layers")
    assert table.count() >= 1
    page.wait_for_function("() => document.querySelectorAll('.js-plotly-plot .legend .traces').length >= 2")
    notebook.screenshot("runs-compared")
    assert notebook.complaints == []
    assert finished_files(demo) == before
