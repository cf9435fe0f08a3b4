"""The run browser without a browser: the widget's values drive its figure and tables."""

from __future__ import annotations

import plotly.graph_objects as go
import polars as pl
import pytest

from dflash_lab.files import write_json
from dflash_lab.runs import overview
from dflash_lab.views import runs as figures
from dflash_lab.views.runs import browser, matching


def put(folder, stage, **record):
    write_json(folder / stage / "result.json", {"schema_version": 1, "stage": stage, "inputs": {}, **record})


@pytest.fixture
def root(tmp_path):
    for name, lr, tau in (("alpha", 1e-3, 2.5), ("beta", 1e-4, 3.0), ("<i>gamma", 1e-4, None)):
        given = {"parameters": {"lr": lr}, "seconds": 1.0}
        put(tmp_path / name, "train_drafter", figures={}, **given)
        steps = pl.DataFrame({"step": range(5000)}).with_columns(loss=lr * pl.col("step"))
        steps.write_parquet(tmp_path / name / "train_drafter" / "steps.parquet")
        put(tmp_path / name, "acceptance", figures={"tau_trained": tau, "tau_untrained": 1.0}, **given)
    return tmp_path


def parts(box):
    bar, chosen, message, figure, differing, numbers, table = box.children
    return bar.children, chosen, message, figure, differing, numbers, table


def test_selecting_runs_overlays_curves_and_shows_differences(root):
    _, chosen, _, figure, differing, numbers, _ = parts(browser(root))
    chosen.value = ("alpha", "beta")
    assert isinstance(figure, go.FigureWidget) and [trace.name for trace in figure.data] == ["alpha", "beta"]
    assert all(len(trace.x) <= 2000 and trace.x[-1] == 4999 for trace in figure.data)
    assert "lr" in differing.value and "0.0001" in differing.value and "tau_trained" in numbers.value
    chosen.value = ("alpha",)
    assert [trace.name for trace in figure.data] == ["alpha"]
    assert "parameters that differ" not in differing.value
    assert "<h4>stages</h4>" in differing.value and "never run" in differing.value  # of one run, its state


def test_filter_and_sort_rule_the_list(root):
    (words, sort, *_), chosen, message, *_ = parts(browser(root))
    sort.value = "tau_trained"
    assert [value for _, value in chosen.options] == ["beta", "alpha", "<i>gamma"]
    chosen.value = ("alpha", "beta")
    words.value = "alp"
    assert [value for _, value in chosen.options] == ["alpha"] and chosen.value == ("alpha",)
    assert "1 of 3 runs" in message.value


def test_names_are_escaped_everywhere(root):
    box = browser(root)
    _, chosen, _, figure, differing, numbers, table = parts(box)
    chosen.value = ("<i>gamma", "alpha")
    assert "<i>gamma" not in table.value + differing.value + numbers.value
    assert figure.data[0].name == "&lt;i&gt;gamma"


def test_a_damaged_curve_is_named_in_the_widget(root):
    (root / "beta" / "train_drafter" / "steps.parquet").write_bytes(b"PAR1 cut")
    _, chosen, message, figure, *_ = parts(browser(root))
    chosen.value = ("alpha", "beta")
    assert "beta/train_drafter/steps.parquet: cannot be read" in message.value
    chosen.value = ("alpha",)
    assert [trace.name for trace in figure.data] == ["alpha"]


def test_reading_again_sees_new_runs(root):
    (_, _, _, refresh), chosen, *_ = parts(browser(root))
    write_json(root / "delta" / "prepare" / "failure.json", {"state": "failed"})
    refresh.click()
    assert "delta" in [value for _, value in chosen.options]


def test_a_curve_nobody_has_is_said_and_held_out_records_are_one(root):
    fig = figures.curves({"alpha": figures.curve(root / "alpha", "accuracy")}, "accuracy")
    assert "no run here" in fig.layout.annotations[0].text
    frame = pl.DataFrame({"kind": ["train", "heldout"], "step": [1, 1], "accuracy": [0.9, 0.5]})
    frame.write_parquet(root / "alpha" / "train_drafter" / "metrics.parquet")
    assert figures.curve(root / "alpha", "accuracy")["value"].to_list() == [0.5]


def test_acceptance_bars_leave_out_runs_without_tau(root):
    fig = figures.acceptance(overview(root))
    assert len(fig.data) == 2 and all(len(bar.x) == 2 for bar in fig.data)
    assert "tokens a round" in fig.layout.yaxis.title.text


def test_matching_is_plain_text_not_a_pattern(root):
    assert matching(overview(root), "[", "run").height == 0
