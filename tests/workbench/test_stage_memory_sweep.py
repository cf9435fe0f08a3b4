"""memory_sweep: predictions hold against counted runs, tables load again, sliders answer, the sweep stops."""

import json
import threading
import time

import polars as pl
import pytest

from dflash_lab.errors import InputError
from dflash_lab.workbench.figures import memory_sweep as figures
from dflash_lab.workbench.figures.memory_map import peak_map, scene_map
from dflash_lab.workbench.stage import execute
from dflash_lab.workbench.stages.memory_sweep import (
    MemorySweepParams,
    MemorySweepResult,
    predict_points,
    scene,
)
from dflash_lab.workbench.widgets.memory_sweep import Planner, SweepRun, planner, sweep_control

FIGURES = {
    "budget_gib",
    "predicted_peak_gib",
    "measured_peak_gib",
    "median_error_pct",
    "worst_error_pct",
    "largest_batch",
}


def params_for(tmp_path, target, **options):
    values = {
        "batches": [1, 3],
        "lengths": [20, 65, 130],
        "num_taps": 3,
        "budget_gib": 0.5,
        "num_layers": 2,
        "anchors": 16,
        "block_size": 4,
        "context_tokens": 64,
        "chunk": 24,
        "step_anchors": [8, 16],
        "step_blocks": [4],
        "device": "cpu",
        "dtype": "float32",
        "interactive": False,
    }
    return MemorySweepParams(run_dir=str(tmp_path / "run"), target=str(target), **{**values, **options})


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def swept(request, tiny_target, tmp_path_factory, monkeypatch_module):
    folder = tmp_path_factory.mktemp("memory")
    monkeypatch_module.setenv("DFLASH_LAB_CACHE", str(folder / "cache"))
    params = params_for(folder, tiny_target(request.param), allow_slow_kernels=True)
    return params, execute(params)


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def test_every_point_is_predicted_and_measured(swept):
    _params, result = swept
    points = result.points
    assert points.height == 6 and points["measured_moving"].null_count() == 0
    assert result.figures.keys() >= FIGURES
    assert result.figures["worst_error_pct"] < 1.0  # counted on fake tensors against counted for real
    assert result.figures["analytic_worst_error_pct"] < 8.0
    assert result.figures["points_measured"] == 6 and result.figures["out_of_memory"] == 0
    assert points["order"].unique().to_list() == ["falling"]
    steps = result.steps.sort("anchors")
    assert steps["anchors"].to_list() == [8, 16] and steps["measured_gib"].null_count() == 2
    assert result.figures["predicted_step_gib"] == pytest.approx(steps["fake_gib"].max(), abs=1e-4)


def test_the_result_is_kept_and_not_made_again(swept, monkeypatch):
    params, result = swept
    again = MemorySweepResult.load(params.folder)
    assert again.figures == result.figures and again.points.equals(result.points)
    monkeypatch.setattr("dflash_lab.target.loading.load_target", None)  # a second run must not load
    assert execute(params).terms.equals(result.terms)
    written = json.loads((params.folder / "result.json").read_text())
    assert written["figures"]["largest_batch"] == result.figures["largest_batch"]


def test_the_largest_batch_fits_and_the_next_does_not(swept):
    from dataclasses import replace

    from dflash_lab.memory.extraction_account import extraction_account
    from dflash_lab.memory.planner import usable

    params, result = swept
    found = scene(params)
    for row in result.buckets.iter_rows(named=True):
        setup = replace(found.extraction, batch=row["batch"], length=row["length"])
        assert extraction_account(found.shape, setup, cuda=False).peak <= usable(params.budget_gib)
        if row["batch"] < params.max_batch:
            more = replace(setup, batch=row["batch"] + 1)
            assert extraction_account(found.shape, more, cuda=False).peak > usable(params.budget_gib)


def test_figures_draw_what_the_tables_say(swept):
    params, result = swept
    found = scene(params)
    chart = scene_map(found, result.points, params.budget_gib)
    assert [trace.type for trace in chart.data] == ["heatmap", "contour", "scatter"]
    assert len(chart.data[2].x) == 6
    assert 10 ** chart.data[1].contours.start == pytest.approx(params.budget_gib)
    bars = figures.term_bars(result.terms, params.budget_gib)
    height = sum(trace.y[0] for trace in bars.data)
    first = result.terms.filter((pl.col("what") == "extraction") & (pl.col("kind") == "analytic"))
    assert height == pytest.approx(first["gib"].sum())
    assert [list(t.y) for t in figures.step_bars(result.steps, 0.5).data[:2]] == [
        result.steps.sort("anchors")[column].to_list() for column in ("analytic_gib", "fake_gib")
    ]
    scatter = figures.predicted_measured(result.points)
    assert [len(trace.x) for trace in scatter.data] == [2, 6, 6]
    assert len(figures.bucket_bars(result.buckets, 0.5).data) == 2
    for what in ("extraction", "training"):
        assert figures.advice_bars(result.advice, what).data[0].y
    assert all(len(fig.to_json()) < 400_000 for fig in (chart, bars, scatter))


@pytest.mark.parametrize(
    ("budget", "words"), [(9.0, "all here fits"), (1.5, "the red line is"), (0.5, "nothing here fits")]
)
def test_the_map_speaks_of_a_line_only_where_it_draws_one(budget, words):
    chart = peak_map([1, 2], [64, 128], [[1.0, 2.0], [1.2, 2.4]], budget)
    assert words in chart.layout.title.text and chart.data[1].showlegend == (budget == 1.5)


def test_nothing_measured_still_draws(tmp_path, tiny_target):
    params = params_for(tmp_path, tiny_target("llama"), measure=False)
    result = execute(params)
    assert "measured_peak_gib" not in result.figures and result.figures["predicted_peak_gib"] > 0
    figures.predicted_measured(result.points).to_json()
    assert len(scene_map(scene(params), result.points).data[2].x) == 0


def test_a_point_that_did_not_fit_is_marked():
    points = pl.DataFrame(
        {
            "batch": [1, 2],
            "length": [64, 64],
            "measured_gib": [1.0, 2.0],
            "fake_gib": [1.0, 2.1],
            "out_of_memory": [False, True],
        }
    )
    chart = peak_map([1, 2], [64, 128], [[1.0, 2.0], [2.0, 4.0]], 1.5, points)
    assert list(chart.data[2].marker.symbol) == ["circle-open", "x"]
    assert "did not fit" in chart.data[2].customdata[1]


def test_a_target_without_weights_is_predicted(tmp_path):
    params = params_for(
        tmp_path,
        "random:qwen3.6-27b",
        measure=False,
        dtype="bfloat16",
        budget_gib=94.97,
        batches=[128],
        lengths=[3316],
        anchors=1024,
        context_tokens=4096,
        step_anchors=[64],
        block_size=24,
        num_taps=5,
    )
    rows = predict_points(params, scene(params), lambda *_, **__: None)
    assert rows[0]["fake_gib"] > 94.97 and rows[0]["analytic_gib"] > 94.97


def test_sliders_are_answered_within_200_ms(tmp_path):
    params = params_for(
        tmp_path,
        "random:qwen3.6-27b",
        measure=False,
        dtype="bfloat16",
        budget_gib=94.97,
        num_taps=5,
        context_tokens=4096,
    )
    found = scene(params)
    points = pl.DataFrame(
        {"batch": [16], "length": [1024], "measured_gib": [None]},
        schema_overrides={"measured_gib": pl.Float64},
    )
    brain = Planner(found, points)
    from dflash_lab.memory.explore import Question

    asked = Question(94.97, 16, 335, 512, 16, 0, 1024, "cached")
    brain.draw(asked)
    times = []
    for question in (
        Question(80.0, 128, 3316, 1024, 24, 0, 512, "same device"),
        Question(60.0, 1, 8, 8, 2, 0, 64, "other device"),
    ):
        start = time.perf_counter()
        chart, _bars, text = brain.draw(question)
        times.append(time.perf_counter() - start)
        assert f"{question.budget_gib:g} GiB" in chart.layout.title.text and "largest batch" in text
    assert min(times) < 0.2
    assert "does not fit" in brain.draw(Question(80.0, 128, 3316, 1024, 24, 0, 512, "cached"))[2]


def test_widgets_follow(swept):
    params, result = swept
    box = planner(result, params)
    controls = {control.description: control for control in box.children[0].children[0].children}
    assert set(controls) == {
        "budget, GiB",
        "batch",
        "length",
        "anchors",
        "block size",
        "vocabulary",
        "chunk",
        "placement",
    }
    text = box.children[0].children[1]
    before = text.value
    chart, bars = box.children[1].children
    height = sum(trace.y[0] for trace in bars.data)
    controls["batch"].value = controls["batch"].options[-1][1]
    assert text.value != before
    assert sum(trace.y[0] for trace in bars.data) > height
    controls["budget, GiB"].value = 1.0
    assert "1 GiB" in chart.layout.title.text


def wait_for(sweep):
    assert sweep.thread is not None
    sweep.thread.join(timeout=60)
    assert not sweep.running


def test_a_sweep_runs_in_a_thread_and_measures_all(swept):
    params, result = swept
    changes = []
    sweep = SweepRun(params, result, lambda: changes.append(threading.current_thread().name))
    sweep.start()
    wait_for(sweep)
    assert sweep.error == "" and len(sweep.rows) == 6
    assert all(row["measured_moving"] for row in sweep.rows)
    assert set(changes) == {"memory-sweep"}


def test_a_sweep_stops_between_points_and_keeps_what_it_has(swept):
    params, result = swept
    sweep = SweepRun(params, result, lambda: sweep.stop() if sweep.done >= 2 else None)
    sweep.start()
    wait_for(sweep)
    assert "stopped" in sweep.error
    assert 2 <= sum(row["measured_moving"] is not None for row in sweep.rows) < 6


def test_an_error_in_the_thread_is_shown(swept, monkeypatch):
    params, result = swept
    monkeypatch.setattr("dflash_lab.target.loading.load_target", lambda *_, **__: 1 / 0)
    box = sweep_control(result, params)
    run, stop, _, line = box.children[0].children
    run.click()
    wait_for(box.sweep)
    assert "ZeroDivisionError" in line.value and not run.disabled and stop.disabled


@pytest.mark.parametrize(
    "options, message",
    [
        ({"anchors": 64}, "anchors"),
        ({"step_anchors": [64]}, "step_anchors"),
        ({"batches": []}, "batches"),
        ({"orders": ["sideways"]}, "orders"),
        ({"lengths": [0]}, "lengths"),
    ],
)
def test_parameters_that_cannot_be_are_refused(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        params_for(tmp_path, "smollm2", **options)


def test_training_steps_are_measured_falling_and_rising(tmp_path, tiny_target, monkeypatch):
    """Once in each order asked for, and the figure tells them apart."""
    from dataclasses import replace

    from dflash_lab.memory import measure
    from dflash_lab.workbench.stages.memory_steps import step_points
    from dflash_lab.workbench.stages.memory_sweep import STEP_SCHEMA

    seen = []

    def measured(_shape, _drafter, setup, _device):
        seen.append(setup.rows)
        found = {"measured_gib": setup.rows / 100, "measured_moving": setup.rows, "reserved_gib": 1.0}
        return {**found, "seconds": 0.1, "out_of_memory": False}

    monkeypatch.setattr(measure, "measure_training", measured)
    params = params_for(tmp_path, tiny_target("llama"), orders=["falling", "rising"], step_anchors=[8, 16])
    found = replace(scene(params), device="cuda")
    rows = step_points(params, found, lambda *_args, **_fields: None)
    assert seen == sorted(seen[: len(seen) // 2], reverse=True) + sorted(seen[len(seen) // 2 :])
    frame = pl.DataFrame(rows, schema=STEP_SCHEMA)
    assert sorted(frame["order"].to_list()) == ["falling", "falling", "rising", "rising"]
    bars = figures.step_bars(frame, 0.5).data[2]
    assert len(set(bars.x)) == 4 and sorted(bars.y) == sorted(frame["measured_gib"].to_list())
    monkeypatch.setattr(
        time, "monotonic", lambda start=[0.0]: start.__setitem__(0, start[0] + 200) or start[0]
    )
    cut = pl.DataFrame(step_points(params, found, lambda *_args, **_fields: None), schema=STEP_SCHEMA)
    assert cut.height >= 2 and cut.n_unique(["anchors", "block_size"]) == 2


def test_on_a_device_the_plan_is_of_compiled_layers_and_the_count_of_plain_ones(
    tmp_path, tiny_target, monkeypatch
):
    import torch

    from dflash_lab.target import loading
    from dflash_lab.workbench.stages.memory_tables import term_frame

    monkeypatch.setenv("DFLASH_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loading, "choose_device", lambda name: torch.device("cuda"))
    params = params_for(tmp_path, tiny_target("llama"))
    found = scene(params)
    assert found.training.compiled
    terms = term_frame(params, found).filter(pl.col("what") == "training")
    peaks = {
        title: part["gib"].sum()
        for (title, kind), part in terms.group_by("title", "kind")
        if kind == "analytic"
    }
    compiled, plain = sorted(peaks, key=len, reverse=True)
    assert compiled == f"{plain}, compiled layers" and peaks[compiled] < peaks[plain]
    assert terms.filter(kind="fake")["title"].unique().to_list() == [plain]
