"""Runs on disk as a table, their differences, their report: states are true, untrusted text stays text."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import plotly.graph_objects as go
import polars as pl
import pytest
from support.wording import check_wording, refused

from dflash_lab import report, runs, stage_run
from dflash_lab.errors import InputError, StoreError
from dflash_lab.files import read_json, write_json
from dflash_lab.runs import closing_figures, closing_lines

EVIL = "</script><script>window.hacked=1</script><img src=x onerror=alert(1)>"


def result(folder: Path, figures: dict, parameters: dict | None = None, **more) -> None:
    record = {"schema_version": 1, "stage": folder.name.split("-")[0], "parameters": parameters or {}}
    record |= {"inputs": {}, "figures": figures, "seconds": 10.0, "peak_memory": {"rss_gib": 1.5}}
    write_json(folder / "result.json", {**record, "time": "2025-03-01T10:00:00+00:00", **more})


@pytest.fixture
def root(tmp_path):
    for name, lr, tau in (("one", 1e-3, 2.5), ("two", 1e-4, 3.0)):
        run = tmp_path / name
        result(run / "prepare", {"samples_in": 10})
        for shard in range(2):
            figures = {"samples_stored": 4 + shard, "tokens_stored": 400 + 100 * shard}
            speed = {"extract_tokens_per_s": 100.0 + 10 * shard, "padding_waste_pct": 5.0 + 2 * shard}
            result(run / f"extract-{shard}", {**figures, **speed})
        losses, values = {"loss_first": 9.0, "loss_last": 4.0}, {"lr": lr, "run_dir": str(run), "seed": 0}
        result(run / "train_drafter", losses, values)
        result(run / "acceptance", {"tau_trained": tau, "tau_untrained": 1.1, "samples": None})
    return tmp_path


def test_shards_are_put_together_in_the_closing_table(root):
    figures = closing_figures(root / "one")
    assert figures["samples_stored"] == 9 and figures["extract_tokens_per_s"] == 105.0
    assert (
        figures["padding_waste_pct"] == 7.0
        and figures["tau_trained"] == 2.5
        and figures["extract_seconds"] == 20.0
    )
    check_wording("\n".join(closing_lines(figures)))


def test_overview_has_a_row_a_run(root):
    table = runs.overview(root)
    assert table["run"].to_list() == ["one", "two"] and table["state"].to_list() == ["finished", "finished"]
    assert table["finished"].to_list() == ["5/5", "5/5"] and table["tau_trained"].to_list() == [2.5, 3.0]
    assert table["seconds"].to_list() == [50.0, 50.0]


def test_a_run_cut_short_does_not_look_whole(root):
    begun = ["prepare", "extract-0", "extract-1", "train_drafter", "acceptance"]
    runs.leave_plan(root / "one", [*begun[:3], "memory_sweep", *begun[3:], "dataset_stats"])
    assert runs.planned(root / "one")[3] == "memory_sweep" and runs.planned(root / "two") == []
    table = runs.overview(root)
    assert table["finished"].to_list() == ["5/7", "5/5"]
    assert table["state"].to_list() == ["incomplete", "finished"]
    (root / "one" / "plan.json").write_text('{"stages": 7}')
    assert runs.overview(root)["state"].to_list() == ["unreadable", "finished"]
    runs.leave_plan(root / "one", begun)
    assert runs.overview(root)["state"].to_list() == ["finished", "finished"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("time", "2025-01-01T00:00:00+99:00"),
        ("time", 5),
        ("seconds", "2"),
        ("peak_memory", []),
        ("peak_memory", {"rss_gib": "much"}),
        ("stage", None),
        ("figures", 3),
    ],
)
def test_a_damaged_field_of_a_result_makes_the_run_unreadable_not_the_browser(root, field, value):
    path = root / "one" / "prepare" / "result.json"
    write_json(path, {**read_json(path), field: value})
    assert runs.overview(root)["state"].to_list() == ["unreadable", "finished"]
    row = runs.stage_table(root).filter(pl.col("state") == "unreadable").row(0, named=True)
    assert str(path) in row["message"] and "Remove the file" in row["message"]


def test_states_are_told_apart(root):
    run = root / "three"
    write_json(run / "prepare" / "failure.json", {"state": "failed", "message": "no room", "seconds": 1.0})
    write_json(run / "extract-0" / "failure.json", {"state": "stopped", "message": "SIGTERM"})
    with stage_run.stage_lock(run / "memory_sweep"):
        pass
    (run / "acceptance").mkdir()
    (run / "acceptance" / "result.json").write_text("{")
    with stage_run.stage_lock(run / "train_drafter"):
        table = runs.stage_table(root)
    states = dict(table.filter(table["run"] == "three").select("stage", "state").iter_rows())
    assert states == {
        "prepare": "failed",
        "extract": "stopped",
        "memory_sweep": "killed",
        "train_drafter": "running",
        "acceptance": "unreadable",
    }
    assert runs.overview(root)["state"].to_list() == ["finished", "failed", "finished"]


def test_comparing_shows_parameters_that_differ_and_the_closing_tables_side_by_side(root):
    both = [root / "one", root / "two"]
    lr = {"stage": "train_drafter", "parameter": "lr", "one": "0.001", "two": "0.0001"}
    assert runs.compare_parameters(both).to_dicts() == [lr]
    figures = runs.compare_figures(both)
    row = figures.filter(figures["figure"] == "tau_trained").to_dicts()[0]
    assert (row["one"], row["two"]) == ("2.5", "3.0")
    tau = {"figure": "tau_trained", "unit": "tokens/round", "one": "2.500", "two": "3.000"}
    assert tau in runs.compare_closing(both).to_dicts()
    result(root / "two" / "memory_sweep", {"measured_peak_gib": 1.5}, {"batches": [1], "measure_s": 3.0})
    peak = {"figure": "measured_peak_gib", "unit": "GiB", "one": None, "two": "1.500"}
    assert peak in runs.compare_closing(both).to_dicts()
    stage = {"stage": "memory_sweep", "parameter": "(stage)", "one": None, "two": '"run"'}
    assert runs.compare_parameters(both).to_dicts() == [lr, stage]  # of one run alone: one row


def test_a_run_of_an_earlier_version_is_compared_under_todays_names(root):
    result(root / "one" / "train_drafter", {}, {"lr": 0.001, "accumulate": 2, "floor": 0.1})
    result(root / "two" / "train_drafter", {}, {"lr": 0.001, "grad_accum_steps": 2, "min_lr_ratio": 0.2})
    rows = runs.compare_parameters([root / "one", root / "two"]).to_dicts()
    assert rows == [{"stage": "train_drafter", "parameter": "min_lr_ratio", "one": "0.1", "two": "0.2"}]


@pytest.mark.parametrize("names", [["one"], ["one", "nowhere"]])
def test_comparing_too_few_or_absent_runs_is_refused(root, names):
    with refused(InputError):
        runs.compare_parameters([root / name for name in names])


def test_empty_and_absent_roots(tmp_path):
    assert runs.stage_table(tmp_path).height == 0
    with refused(InputError):
        runs.stage_table(tmp_path / "nowhere")


def evil_notebook(path: Path) -> None:
    figure = json.loads(go.Figure(go.Scatter(y=[1, 2], text=[EVIL, ""]), layout_title_text=EVIL).to_json())
    data = {"application/vnd.plotly.v1+json": figure, "text/plain": "figure"}
    outputs = [
        nbformat.v4.new_output("display_data", data),
        nbformat.v4.new_output("display_data", {"text/html": EVIL, "text/plain": EVIL}),
        nbformat.v4.new_output("stream", name="stdout", text=EVIL),
        nbformat.v4.new_output("error", ename="ValueError", evalue=EVIL, traceback=[]),
    ]
    cells = [
        nbformat.v4.new_markdown_cell(f"# Title\n\n{EVIL} and `code` | [link](javascript:alert(1))"),
        nbformat.v4.new_code_cell("x", outputs=outputs),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)


def test_report_is_one_page_with_everything_escaped(root, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a-secret-token")
    result(root / "one" / "prepare", {}, {"target": EVIL, "source": "a-secret-token"})
    evil_notebook(root / "one" / "prepare.ipynb")
    page = report.write_report(root / "one").read_text()
    assert EVIL not in page and "window.hacked" in page and "javascript:alert" not in page
    assert "<img" not in page.split("<script>")[0] and "a-secret-token" not in page
    assert "Plotly.newPlot(" in page and page.count('type="application/json"') == 2  # the data, the selector
    assert 4_000_000 < len(page) < 7_000_000  # one copy of plotly.js
    assert "default-src 'none'" in page and "tau_trained" in page


def test_index_links_the_reports(root):
    report.write_report(root / "two")
    page = report.write_index(root).read_text()
    assert '<a href="two/report.html">two</a>' in page and page.count("<a href") == 1
    assert "<script" not in page


def test_a_stage_run_by_hand_is_told_what_makes_its_figures(root):
    (root / "one" / "train_drafter" / "result.json").unlink()
    write_json(root / "one" / "train_drafter" / "failure.json", {"stage": "train_drafter", "state": "failed"})
    page = report.write_report(root / "one").read_text()
    assert "<code>dflash-lab prepare --run one</code> makes it" in page
    assert "<code>dflash-lab extract --run one -p shard 1</code> makes it" in page
    assert f"<code>dflash-lab report {root / 'one'}</code> again" in page
    assert "dflash-lab train_drafter --run" not in page  # which has no result to show


def test_a_torn_notebook_and_a_folder_without_stages_are_named(root, tmp_path):
    (root / "one" / "prepare.ipynb").write_text('{"cells": [')
    with refused(StoreError):
        report.write_report(root / "one")
    (tmp_path / "none").mkdir()
    with refused(InputError):
        report.write_report(tmp_path / "none")
