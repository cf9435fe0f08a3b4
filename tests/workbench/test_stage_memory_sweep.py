"""memory_sweep: predictions hold against counted runs, tables load again, sliders answer, the sweep stops."""

import functools
import json
import re
import threading
import time
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import get_args

import polars as pl
import pytest
import torch
from support.wording import check_wording, refused

from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.errors import InputError
from dflash_lab.memory import measure, shapes
from dflash_lab.memory import planner as planning
from dflash_lab.memory.account import predict_extraction
from dflash_lab.memory.planner import usable
from dflash_lab.memory.training import drafter_parameters, predict_training
from dflash_lab.models import load
from dflash_lab.models.source import shape_config
from dflash_lab.results import is_finished
from dflash_lab.stage_run import execute
from dflash_lab.stages import memory_sweep
from dflash_lab.stages.memory_sweep import (
    STEP_SCHEMA,
    MemorySweepParams,
    MemorySweepResult,
    not_measured,
    predict_points,
    step_points,
    sweep_inputs,
    term_frame,
)
from dflash_lab.views import memory_sweep as figures
from dflash_lab.views.memory_sweep import SweepRun, budget_map, peak_map, planner, sweep_control

FIGURES = {
    "budget_gib", "predicted_peak_gib", "measured_peak_gib", "median_error_pct", "worst_error_pct",
    "largest_batch",
}  # fmt: skip


def params_for(tmp_path, target, **options):
    values = {
        "batches": [1, 3], "lengths": [20, 65, 130], "num_taps": 3, "budget_gib": 0.5, "num_layers": 2,
        "anchors": 16, "block_size": 4, "context_tokens": 64, "chunk": 24, "step_anchors": [8, 16],
        "step_blocks": [4], "device": "cpu", "dtype": "float32", "interactive": False,
    }  # fmt: skip
    return MemorySweepParams(run_dir=str(tmp_path / "run"), target=str(target), **{**values, **options})


@pytest.fixture(scope="module")
def runs(tiny_target, tmp_path_factory):
    """A function: kind of target -> parameters and result of a sweep of it, made once."""

    @functools.cache
    def run(kind):
        folder = tmp_path_factory.mktemp("memory")
        params = params_for(folder, tiny_target(kind), allow_slow_kernels=True)
        return params, execute(params)

    return run


@pytest.fixture
def swept(runs):
    return runs("llama")


def ignore(*_args, **_fields):
    """Progress that nobody looks at."""


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_every_point_is_predicted_and_measured_and_the_largest_batch_fits(kind, runs):
    params, result = runs(kind)
    points = result.points
    assert points.height == 6 and points["measured_moving"].null_count() == 0
    assert result.figures.keys() >= FIGURES
    assert result.figures["median_error_pct"] <= result.figures["worst_error_pct"] < 8.0
    assert result.figures["points_measured"] == 6 and result.figures["out_of_memory"] == 0
    assert points["order"].unique().to_list() == ["rising"]  # whatever `orders` says: this is a CPU
    assert "not_measured" not in result.figures
    steps = result.steps.sort("anchors")
    assert steps["anchors"].to_list() == [8, 16] and steps["measured_gib"].null_count() == 2
    assert result.figures["predicted_step_gib"] == pytest.approx(steps["analytic_gib"].max(), abs=1e-4)

    inputs = sweep_inputs(params)
    for row in result.buckets.iter_rows(named=True):
        setup = replace(inputs.extraction, batch=row["batch"], length=row["length"])
        assert predict_extraction(inputs.shape, setup, cuda=False).peak <= usable(params.budget_gib)
        if row["batch"] < params.max_batch:
            more = replace(setup, batch=row["batch"] + 1)
            assert predict_extraction(inputs.shape, more, cuda=False).peak > usable(params.budget_gib)


def test_figures_draw_what_the_tables_say(swept):
    params, result = swept
    inputs = sweep_inputs(params)
    chart = budget_map(inputs, result.points, params.budget_gib)
    assert [trace.type for trace in chart.data] == ["heatmap", "contour", "scatter"]
    assert len(chart.data[2].x) == 6
    assert 10 ** chart.data[1].contours.start == pytest.approx(params.budget_gib)
    bars = figures.term_bars(result.terms, params.budget_gib)
    height = sum(trace.y[0] for trace in bars.data)
    first = result.terms.filter(what="extraction")
    assert height == pytest.approx(first["gib"].sum())
    predicted = figures.step_bars(result.steps, 0.5).data[0]
    assert list(predicted.y) == result.steps.sort("anchors")["analytic_gib"].to_list()
    scatter = figures.predicted_measured(result.points)
    assert [len(trace.x) for trace in scatter.data] == [2, 6]
    assert len(figures.bucket_bars(result.buckets, 0.5).data) == 2
    for what in ("extraction", "training"):
        advice = figures.advice_bars(result.advice, what).data[0]
        assert [text == "no help" for text in advice.text] == [saved <= 1e-3 for saved in advice.x]
    assert all(len(fig.to_json()) < 400_000 for fig in (chart, bars, scatter))


@pytest.mark.parametrize("budget", [9.0, 1.5, 0.5])
def test_the_map_marks_what_did_not_fit_and_speaks_of_a_line_only_where_it_draws_one(budget):
    points = pl.DataFrame(
        {"batch": [1, 2], "length": [64, 64], "measured_gib": [1.0, 2.0], "analytic_gib": [1.0, 2.1],
         "out_of_memory": [False, True]}
    )  # fmt: skip
    chart = peak_map([1, 2], [64, 128], [[1.0, 2.0], [1.2, 2.4]], budget, points)
    assert chart.data[1].showlegend == (budget == 1.5)
    assert list(chart.data[2].marker.symbol) == ["circle-open", "x"]
    check_wording("\n".join([chart.layout.title.text, *chart.data[2].customdata]))


@pytest.fixture
def slow_machine(monkeypatch):
    """A clock that only measuring moves: 10 ms a token, and half a second more the first time."""
    now, seen = [0.0], []

    def measured(_target, setup):
        seconds = 0.01 * setup.batch * setup.length + 0.5 * (not seen)
        seen.append(setup.batch * setup.length)
        now[0] += seconds
        found = {"measured_gib": 1.0, "measured_moving": 10**6, "reserved_gib": None, "out_of_memory": False}
        return {**found, "seconds": seconds}

    monkeypatch.setattr(measure, "measure_extraction", measured)
    monkeypatch.setattr(memory_sweep.time, "monotonic", lambda: now[0])
    return now, seen


def test_on_a_cpu_the_points_that_fit_the_time_are_measured(tmp_path, tiny_target, slow_machine, caplog):
    """The largest point first would take all of the time, and leave one point of twenty."""
    now, seen = slow_machine
    grid = {"batches": [1, 2, 4, 8, 16], "lengths": [16, 17, 64, 256]}
    params = params_for(tmp_path, tiny_target("llama"), measure_s=30.0, orders=["falling", "rising"], **grid)
    with caplog.at_level("INFO"):
        result = execute(params)
    assert seen == sorted(seen) and now[0] <= params.measure_s
    left = result.points.filter(pl.col("measured_moving").is_null()).sort(pl.col("batch") * pl.col("length"))
    assert 12 <= len(seen) == result.figures["points_measured"] == 20 - left.height
    sizes = (left["batch"] * left["length"]).to_list()
    assert min(sizes) >= max(seen)
    assert now[0] + 0.01 * min(sizes) > params.measure_s, "one more would have fitted"
    told = result.figures["not_measured"]
    check_wording(told)
    enough = int(re.search(r"-p measure_s (\d+) -p force True$", told)[1])
    assert enough >= now[0] + 0.01 * sum(sizes) and told in caplog.text
    more = execute(params.changed(measure_s=enough, force=True))
    assert more.figures["points_measured"] == 20 and "not_measured" not in more.figures


def test_one_point_left_out_is_named_alone():
    done = {"batch": 1, "length": 100, "order": "rising", "seconds": 3.0}
    rows = [done, {"batch": 4, "length": 1000, "order": "", "seconds": None}]
    check_wording(not_measured(20.0, rows))
    assert not_measured(20.0, [done]) == ""


def test_nothing_measured_still_draws(tmp_path, tiny_target):
    params = params_for(tmp_path, tiny_target("llama"), measure=False)
    result = execute(params)
    assert "measured_peak_gib" not in result.figures and result.figures["predicted_peak_gib"] > 0
    figures.predicted_measured(result.points).to_json()
    assert len(budget_map(sweep_inputs(params), result.points).data[2].x) == 0


def test_weights_that_do_not_fit_are_a_result(tmp_path, tiny_target, monkeypatch, caplog):
    def lacking(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    params = params_for(tmp_path, tiny_target("llama"))
    monkeypatch.setattr(load, "load_target", lacking)
    result = execute(params)
    assert result.figures["out_of_memory"] == result.points.height == 6
    assert result.figures["points_measured"] == 0 and result.points["failed_gib"].to_list() == [2.0] * 6
    assert "the target's weights do not fit" in caplog.text
    assert list(budget_map(sweep_inputs(params), result.points).data[2].marker.symbol) == ["x"] * 6
    twice = MemorySweepResult(**{**vars(result), "points": pl.concat([result.points] * 2)})
    run = SweepRun(params, twice, lambda: None)
    run.start()
    run.thread.join()
    assert not run.error and [row["out_of_memory"] for row in run.rows] == [True] * 6


def test_the_drafter_and_its_optimizer_are_those_to_be_trained(tmp_path, tiny_target, monkeypatch):
    """A drafter of its own sizes, a DFlash 2, an optimizer on the host."""
    own = dict(num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=32)
    params = params_for(
        tmp_path, tiny_target("llama"), measure=False, offload=True, gradient_checkpointing=True, **own
    )
    dflash2 = params_for(tmp_path / "dflash2", tiny_target("llama"), measure=False, dflash2=True)
    assert sweep_inputs(dflash2).drafter.selector_rank == 256
    assert "draft layers: convolutions" in execute(dflash2).terms["term"].to_list()
    result, inputs = execute(params), sweep_inputs(params)
    assert {name: getattr(inputs.drafter, name) for name in own} == own
    assert (inputs.training.optimizer, inputs.training.checkpointing) == ("cpu-offload", "layers")
    terms = result.terms.filter(what="training")
    weights = terms.filter(term="drafter weights")["gib"].item()
    assert weights * 2**30 == 4 * drafter_parameters(inputs.drafter)[0]
    assert result.figures["predicted_step_gib"] > 0
    for figure in (figures.term_bars(result.terms, 0.5), figures.step_bars(result.steps, 0.5)):
        figure.to_json()


@pytest.fixture(scope="module")
def large():
    """Parameters and points of a sweep of the 27B shape that measured nothing: `planner` needs no more."""
    params = MemorySweepParams(
        run_dir="nowhere", target="random:qwen3.6-27b", device="cpu", dtype="bfloat16", budget_gib=94.97,
        batches=[16, 128], lengths=[335, 3316], context_tokens=65536,
    )  # fmt: skip
    points = pl.DataFrame(
        {"batch": [128], "length": [3316], "measured_gib": [None], "out_of_memory": [False]}
    )
    points = points.with_columns(pl.col("measured_gib").cast(pl.Float64))
    return params, SimpleNamespace(points=points)


def test_a_target_without_weights_is_predicted(large):
    params, _ = large
    rows = predict_points(params, sweep_inputs(params), ignore)
    assert max(row["analytic_gib"] for row in rows) > params.budget_gib


def controls_of(box):
    return {control.description: control for control in box.children[0].children[0].children}


def places(control):
    """Both ends of a slider and its middle, or all choices."""
    if not hasattr(control, "options"):
        return [0.5, 80.0, 900.0]
    values = [option[1] if isinstance(option, tuple) else option for option in control.options]
    return [values[0], values[len(values) // 2], values[-1]]


GROWS = {"batch": [0], "length": [0], "anchors": [1], "block size": [1], "chunk": [1], "vocabulary": [0, 1]}


def test_a_slider_moves_the_figure_it_should_asks_the_formulas_a_few_times_and_builds_no_model(
    large, monkeypatch
):
    """What keeps an answer within 200 ms: nothing grows with the target. Times: `benchmarks/planning.py`."""
    params, result = large
    box = planner(result, params)
    controls, text = controls_of(box), box.children[0].children[1]
    chart, bars = box.children[1].children
    asked = []
    for name in ("predict_extraction", "predict_training"):
        real = getattr(planning, name)
        monkeypatch.setattr(planning, name, lambda *a, real=real, **k: asked.append(a) or real(*a, **k))
    monkeypatch.setattr(torch.nn.Module, "__init__", lambda *_, **__: pytest.fail("a slider built a model"))
    map_size = len(chart.data[0].x) * len(chart.data[0].y)
    for name, control in controls.items():
        seen = {}
        for place in places(control):
            before = [str(figure.to_plotly_json()) for figure in (chart, bars)]
            changes, asked[:] = control.value != place, []
            control.value = place
            assert len(asked) <= 32 + map_size * (name == "vocabulary"), (name, place)
            after = [str(figure.to_plotly_json()) for figure in (chart, bars)]
            assert (before != after) == changes or name in ("chunk", "anchors", "block size"), (name, place)
            heights = [sum(trace.y[which] for trace in bars.data) for which in (0, 1)]
            seen[place] = (*heights, text.value, str(chart.data[0].z))
        low, *_, high = seen.values()
        for which in GROWS.get(name, []):  # extraction, training
            assert high[which] > low[which] and high[2] != low[2], name
        assert name != "vocabulary" or high[3] != low[3]
        if name == "placement":
            assert seen["same device"][1] > seen["other device"][1]
    controls["budget, GiB"].value = 1.0
    assert "1 GiB" in chart.layout.title.text and "does not fit" in text.value


def test_every_term_of_an_account_has_a_colour():
    """A term without one would be a trace that a live figure does not have."""
    config = shape_config("qwen3.6-27b")
    shape, terms = shapes.target_shape(config), set()
    dflash2 = dict(
        conv_kernel_size=2, conv_group_size=16, selector_rank=256, selector_top_k=16, is_causal=False
    )
    for more in ({}, dflash2):
        drafter = DrafterConfig.from_target(config, mask_token_id=0, num_layers=5, block_size=16, **more)
        kinds = map(get_args, (shapes.Placement, shapes.Optimizer, shapes.LossPath))
        ways = product(*kinds, ("none", "layers"), (1, 4), (8, 2048), (4096, 65536))
        for placement, optimizer, loss, checkpointing, shards, anchors, context in ways:
            setup = shapes.TrainingSetup(
                placement=placement, optimizer=optimizer, loss=loss, checkpointing=checkpointing,
                shards=shards, anchors=anchors, context=context, block_size=16, chunk=512, noise=True,
                rows_ahead=2, recorded=placement == "same device",
            )  # fmt: skip
            terms |= set(predict_training(shape, drafter, setup).terms)
    for capture, logits, cache, mask, fused, flying, kernels in product(
        ("hooks", "output_hidden_states"), *[(False, True)] * 4, (0, 3), ("fla", "torch")
    ):
        setup = shapes.ExtractionSetup(
            batch=8, length=500, tap_ids=(1, 16, 61), capture=capture, logits=logits, use_cache=cache,
            mask=mask, fused=fused, in_flight=flying, kernels=kernels,
        )  # fmt: skip
        terms |= set(predict_extraction(shape, setup).terms)
    assert terms - {term for _, several in figures.GROUPS.values() for term in several} == set()


def wait_for(sweep):
    assert sweep.thread is not None
    sweep.thread.join(timeout=60)
    assert not sweep.running


def test_a_sweep_in_a_thread_stops_between_points_keeps_what_it_has_and_starts_again(swept):
    params, result = swept
    threads = set()

    def changed():
        threads.add(threading.current_thread().name)
        if sweep.done >= 2 and not sweep.stopping.is_set() and stops:
            stops.pop()
            sweep.stop()

    stops, sweep = [1], SweepRun(params, result, changed)
    sweep.start()
    wait_for(sweep)
    check_wording(sweep.error)
    assert 2 <= sum(row["measured_moving"] is not None for row in sweep.rows) < 6
    sweep.start()
    wait_for(sweep)
    assert sweep.error == "" and len(sweep.rows) == 6
    assert all(row["measured_moving"] for row in sweep.rows)
    assert threads == {"memory-sweep"}


def test_an_error_in_the_thread_is_shown(swept, monkeypatch):
    params, result = swept
    monkeypatch.setattr(load, "load_target", lambda *_, **__: 1 / 0)
    box = sweep_control(result, params)
    run, stop, _, line = box.children[0].children
    run.click()
    wait_for(box.sweep)
    assert "ZeroDivisionError" in line.value and not run.disabled and stop.disabled


@pytest.mark.parametrize(
    "options",
    [
        {"anchors": 64},
        {"step_anchors": [64]},
        {"batches": []},
        {"orders": ["sideways"]},
        {"lengths": [0]},
    ],
    ids=str,
)
def test_parameters_that_cannot_be_are_refused(tmp_path, options):
    with refused(InputError):
        params_for(tmp_path, "smollm2", **options)


def test_training_steps_are_measured_falling_and_rising(tmp_path, tiny_target, monkeypatch):
    """Once in each order asked for, and the figure tells them apart."""
    seen = []

    def measured(_shape, _drafter, setup, _device):
        seen.append(setup.rows)
        found = {"measured_gib": setup.rows / 100, "measured_moving": setup.rows, "reserved_gib": 1.0}
        return {**found, "seconds": 0.1, "out_of_memory": False}

    monkeypatch.setattr(measure, "measure_training", measured)
    params = params_for(tmp_path, tiny_target("llama"), orders=["falling", "rising"], step_anchors=[8, 16])
    inputs = replace(sweep_inputs(params), device="cuda")
    rows = step_points(params, inputs, ignore)
    assert seen == sorted(seen[: len(seen) // 2], reverse=True) + sorted(seen[len(seen) // 2 :])
    frame = pl.DataFrame(rows, schema=STEP_SCHEMA)
    assert sorted(frame["order"].to_list()) == ["falling", "falling", "rising", "rising"]
    bars = figures.step_bars(frame, 0.5).data[1]
    assert len(set(bars.x)) == 4 and sorted(bars.y) == sorted(frame["measured_gib"].to_list())
    monkeypatch.setattr(
        time, "monotonic", lambda start=[0.0]: start.__setitem__(0, start[0] + 200) or start[0]
    )
    cut = pl.DataFrame(step_points(params, inputs, ignore), schema=STEP_SCHEMA)
    assert cut.height >= 2 and cut.n_unique(["anchors", "block_size"]) == 2


def test_on_a_device_the_plan_is_of_compiled_layers_beside_plain_ones(tmp_path, tiny_target, monkeypatch):
    monkeypatch.setattr(load, "choose_device", lambda name: torch.device("cuda"))
    params = params_for(tmp_path, tiny_target("llama"))
    inputs = sweep_inputs(params)
    assert inputs.training.compiled and not inputs.measured_step.compiled
    assert sweep_inputs(params.changed(compile_steps=True)).measured_step == inputs.training
    terms = term_frame(params, inputs).filter(what="training")
    peaks = {title: part["gib"].sum() for (title,), part in terms.group_by("title")}
    compiled, plain = sorted(peaks, key=len, reverse=True)
    assert compiled == f"{plain}, compiled layers" and peaks[compiled] < peaks[plain]


def test_a_result_that_also_kept_counts_and_a_fit_is_read_for_its_formulas(swept, tmp_path, monkeypatch):
    """As earlier versions left it: `memory_sweep` of such a run stays finished and draws."""
    params, result = swept
    old = {"fake_gib": 1.0, "fake_reserved_gib": 1.0, "fake_moving": 1}
    added = [pl.lit(value).alias(name) for name, value in old.items()]
    other = result.terms.with_columns(kind=pl.lit("fake"))
    terms = pl.concat([result.terms.with_columns(kind=pl.lit("analytic")), other])
    earlier = replace(
        result, points=result.points.with_columns(added), steps=result.steps.with_columns(added), terms=terms
    )
    earlier.save(tmp_path)
    (tmp_path / "calibration-extraction.json").write_text("{}")
    again = MemorySweepResult.load(tmp_path)
    for name in ("points", "steps", "terms"):
        assert getattr(again, name).equals(getattr(result, name))
    assert again.figures == result.figures
    written = json.loads((params.folder / "result.json").read_text())
    assert written["figures"]["largest_batch"] == result.figures["largest_batch"]
    written["parameters"]["second"] = written["parameters"].pop("dflash2")  # its name then
    (params.folder / "result.json").write_text(json.dumps(written))
    assert is_finished(params)
    monkeypatch.setattr(load, "load_target", None)  # a second run must not load
    assert execute(params).terms.equals(result.terms)
