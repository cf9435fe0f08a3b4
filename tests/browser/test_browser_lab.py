"""The notebooks as a person uses them: opened in JupyterLab, `Run all`, a slider moved, a quiet console.

The tests of one file run in order in one process, and each stage reads what the one before left.
"""

from __future__ import annotations

import os
import time

import pytest
from lab import RUN_ALL, complaints, write_parameters

from dflash_lab.stages import STAGES

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("stage", STAGES)
def test_run_all_in_a_fresh_lab(opened, workspace, stage):
    notebook = opened(stage)
    cells = notebook.run_all()
    kinds = {kind for cell in cells for output in cell["outputs"] for kind in output.get("data", {})}
    assert "application/vnd.plotly.v1+json" in kinds or "application/vnd.jupyter.widget-view+json" in kinds
    results = list((workspace / "runs" / "lab").glob(f"{stage}*/result.json"))
    assert len(results) == 1
    notebook.scroll_to("show(")
    notebook.page.wait_for_selector(".js-plotly-plot .main-svg", timeout=20_000)
    try:
        for theme in ("JupyterLab Light", "JupyterLab Dark"):
            notebook.theme(theme)
            readable(notebook, f"{stage}-{theme.split()[1].lower()}")
    finally:
        notebook.theme("JupyterLab Light")
    assert complaints(notebook) == []


def readable(notebook, name: str) -> None:
    """Assert that every text of the figures and tables can be read, page by page through the notebook."""
    kinds = set()
    for number, cell in enumerate(notebook.cells()):
        if not any("data" in output for output in cell["outputs"]):
            continue
        notebook.scroll_to(cell["source"], wait_ms=800 if os.environ.get("SCREENSHOTS") else 200)
        notebook.screenshot(f"{name}-{number:02d}")
        found = notebook.contrasts()
        kinds |= {one["kind"] for one in found}
        low = [one for one in found if one["ratio"] < (4.3 if one["kind"] == "figure" else 4.5)]
        assert not low, low[:5]
    assert "figure" in kinds


def test_moving_a_slider_changes_the_figure(opened):
    notebook = opened("dataset_stats")
    notebook.run_all()
    notebook.scroll_to("explorer(")
    handle = notebook.page.locator(".widget-slider .noUi-handle").first
    handle.wait_for(timeout=20_000)
    texts = notebook.page.locator(".jp-OutputArea-output").filter(has=notebook.page.locator(".widget-slider"))
    before = texts.last.inner_text()
    handle.focus()
    for _ in range(5):
        handle.press("PageDown")
    notebook.page.wait_for_timeout(1500)
    notebook.screenshot("explorer-moved")
    assert texts.last.inner_text() != before
    assert complaints(notebook) == []


def test_training_is_drawn_while_its_cell_runs(opened, workspace):
    folder = workspace / "notebooks"
    values = {"run_dir": "runs/live", "max_steps": 1_000_000, "store": "runs/lab/store"}
    write_parameters(folder / "train_drafter.ipynb", folder / "train_long.ipynb", **values)
    notebook = opened("train_long")
    page = notebook.page
    page.evaluate(RUN_ALL)
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
    assert complaints(notebook) == []


def test_the_sweep_starts_stops_and_leaves_the_kernel_free(opened):
    notebook = opened("memory_sweep")
    notebook.run_all()
    notebook.scroll_to("sweep_control(")
    page = notebook.page
    start = page.get_by_role("button", name="Run sweep")
    start.wait_for(timeout=20_000)
    start.scroll_into_view_if_needed()
    stop = page.get_by_role("button", name="Stop", exact=True).last
    start.click()
    page.wait_for_function("() => document.body.innerText.match(/loading the target|of \\d+ points/)")
    began = time.monotonic()
    answer = notebook.ask("6 * 7")
    assert answer == "42" and time.monotonic() - began < 10
    notebook.screenshot("sweep-running")
    if stop.is_enabled():
        stop.click()
    page.wait_for_function(
        "() => document.body.innerText.match(/stopped; what was measured stays|(\\d+) of \\1 points/)",
        timeout=60_000,
    )
    assert start.is_enabled()
    assert complaints(notebook) == []


def test_moving_the_planners_slider_changes_its_verdict(opened):
    notebook = opened("memory_sweep")
    notebook.run_all()
    notebook.scroll_to("planner(")
    handle = notebook.page.locator(".widget-slider .noUi-handle").first
    handle.wait_for(timeout=20_000)
    box = notebook.page.locator(".jp-OutputArea-output").filter(has=notebook.page.locator(".widget-slider"))
    before = box.first.inner_text()
    handle.focus()
    for _ in range(3):
        handle.press("PageDown")
    notebook.page.wait_for_timeout(2000)
    notebook.screenshot("planner-moved")
    assert box.first.inner_text() != before
    assert complaints(notebook) == []


def test_the_run_browser_compares_two_runs(opened, workspace):
    import shutil

    copy = workspace / "runs" / "other"
    if not copy.exists():
        shutil.copytree(workspace / "runs" / "lab", copy)
        path = copy / "train_drafter" / "result.json"
        path.write_text(path.read_text().replace('"num_layers": 2', '"num_layers": 3'))
    notebook = opened("runs")
    notebook.run_all()
    notebook.scroll_to("browser(")
    options = notebook.page.locator("select[multiple] option")
    options.first.wait_for(timeout=20_000)
    names = [text.split(":")[0] for text in options.all_inner_texts()]
    runs = [path for path in (workspace / "runs").iterdir() if path.is_dir()]
    folders = {path.name for path in runs} - {"overview"}  # its own pictures
    assert sorted(names) == sorted(folders) and {"lab", "other"} <= folders
    pair = [names.index(run) for run in ("lab", "other")]
    notebook.page.locator("select[multiple]").select_option(index=pair)
    notebook.page.get_by_role("heading", name="parameters that differ").wait_for(timeout=20_000)
    table = notebook.page.locator(".jp-OutputArea-output table.dataframe").filter(has_text="num_layers")
    assert table.count() >= 1
    notebook.page.wait_for_function(
        "() => document.querySelectorAll('.js-plotly-plot .legend .traces').length >= 2"
    )
    notebook.screenshot("runs-compared")
    assert complaints(notebook) == []


def test_the_lab_asks_for_its_token(lab):
    import urllib.error
    import urllib.request

    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{lab.url}/api/contents", timeout=10)
    assert refused.value.code == 403
