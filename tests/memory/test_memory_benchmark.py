"""The benchmark of memory: what it resumes from, and its runs under limits on small targets."""

from __future__ import annotations

import importlib
import json
import sys
import time
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from support.wording import check_wording

from dflash_lab.memory.measure import count_forward

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "memory.py"


@pytest.fixture
def runs(monkeypatch):
    """The benchmark's modules."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    names = ("memory_runs", "memory_runs_extraction", "memory_runs_training")
    return [importlib.import_module(name) for name in names]


@pytest.mark.parametrize("text", ['{"rows', "[1]"], ids=["no JSON", "no result"])
def test_what_it_cannot_resume_from_is_named_and_kept(runs, tmp_path, text, monkeypatch, capsys):
    memory, path = importlib.import_module("memory"), tmp_path / "memory.json"
    path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["memory.py", "--device", "cpu", "--resume", "--json", str(path)])
    assert memory.told(memory.main) == 1
    check_wording(capsys.readouterr().err)
    assert path.read_text() == text


def test_windows_take_turns_and_the_first_round_does_not_count(runs, monkeypatch):
    common = runs[0]
    clock = iter(range(10_000))  # a reading a second
    monkeypatch.setattr(common.time, "perf_counter", lambda: float(next(clock)))
    calls: list[str] = []

    def window(name: str, units: int | None) -> int | None:
        calls.append(name)
        return units if units is None or calls.count(name) > 1 else 1  # a cold first window

    windows = {name: partial(window, name, units) for name, units in (("a", 90), ("b", 100), ("c", None))}
    card = common.Card(torch.device("cpu"))
    found = common.alternating(windows, card, seconds=100, rounds=3)
    assert calls == ["a", "b", "c", "a", "b", "a", "b"]  # what does not fit is out
    assert found == {"rates": {"a": 90.0, "b": 100.0, "c": None}, "rounds": 2}
    assert common.share_of_best(found, "a") == 90.0
    assert common.share_of_best(found, "c") == 0.0
    calls.clear()
    assert common.alternating(windows, card, seconds=0, rounds=9)["rounds"] == 1


def test_windows_of_all_budgets_meet_the_same_mix_of_lengths(runs):
    common, extraction, _ = runs
    lengths = common.real_lengths(32_768)
    means = []
    for budget in (8192, *extraction.HAND_SET):
        batches = extraction.batches_of(lengths, budget)
        assert len(batches) >= extraction.WINDOW_BATCHES
        assert all(one.rows * one.longest <= max(budget, 4096) for one in batches)
        rows, tokens = sum(one.rows for one in batches), sum(one.tokens for one in batches)
        assert tokens >= 0.8 * max(extraction.WINDOW_TOKENS, 4 * budget)
        means.append(tokens / rows)
    assert max(means) < 1.35 * min(means)


def test_a_batch_of_the_cut_target_meets_the_memory_of_the_whole(runs, tiny_target):
    """Ballast and batch together peak where the account of the whole model does."""
    common, extraction, _ = runs
    card = common.Card(torch.device("cpu"))
    cut = extraction.CutTarget(card, f"random:{tiny_target('qwen3_5')}/config.json", "float32")
    assert cut.weights.nbytes > 0 and len(cut.cut.layer_types) < len(cut.shape.layer_types)
    parameters = sum(parameter.nbytes for parameter in cut.target.body.parameters())
    whole = 4 * cut.shape.body_parameters(cut.taps[-1] + 1)
    assert parameters + cut.weights.nbytes == whole
    setup = replace(cut.setup, batch=3, length=70)
    counted = count_forward(cut.target, setup)
    target = common.load(f"random:{tiny_target('qwen3_5')}/config.json", card.device, cut.taps[-1], "float32")
    whole_counted = count_forward(target, replace(setup, tap_ids=cut.taps))
    assert counted.moving < whole_counted.moving
    assert counted.moving + cut.missing(3, 70) == pytest.approx(whole_counted.moving, rel=0.01)


def test_runs_go_on_from_what_an_earlier_result_holds(runs, tiny_target, monkeypatch):
    common, _, training = runs
    monkeypatch.setattr(training, "WINDOW_STEPS", 2)
    card, clock = common.Card(torch.device("cpu")), common.Clock(time.monotonic() + 60)
    config = f"random:{tiny_target('qwen3_5')}/config.json"
    kept: list[dict] = []

    def keep(found: dict) -> None:
        kept.append(json.loads(json.dumps(found)))

    small = {"budget_gib": 0.6, "context": 64, "chunk": 32, "target": config, "layers": 1}
    training.training_runs(card, clock, 3, (60.0,), keep, {}, **small)
    first = kept[-1]["limits"]["60"]
    assert first["planned"]["steps"] == 3 and first["planned"]["out_of_memory"] == 0
    assert 0 < first["share_of_best_pct"] <= 100 and len(kept) == 2
    before = kept[-1]
    training.training_runs(card, clock, 3, (80.0, 60.0), keep, before, **small)
    assert len(kept) == 4 and set(kept[-1]["limits"]) == {"60", "80"}
    assert kept[-1]["limits"]["60"] == first
    figures = common.run_figures({"training": kept[-1]})
    assert figures["train_steps"] == 6 and figures["train_steps_under_each_limit"] == 3


def test_what_does_not_fit_is_counted_and_given_up(runs, tiny_target, monkeypatch):
    common, extraction, _ = runs
    card = common.Card(torch.device("cpu"))
    cut = extraction.CutTarget(card, f"random:{tiny_target('qwen3_5')}/config.json", "float32")

    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    batches = [extraction.Batch(2, 8, 16)] * 50
    assert cut.run(batches[:3], 60)["out_of_memory"] == 0
    assert cut.window(batches[:3]) == 48
    monkeypatch.setattr(extraction, "forward_once", refuse)
    found = cut.run(batches, 60)
    assert found["batches"] == found["out_of_memory"] == common.GIVEN_UP
    assert cut.window(batches) is None


def test_what_breaks_in_one_part_does_not_cost_the_other(runs, monkeypatch, tmp_path):
    memory, common = importlib.import_module("memory"), runs[0]
    done: list[str] = []

    def breaks(*_: object) -> None:
        raise ValueError("no such kernel")

    def runs_through(card, clock, count, limits, keep, before):
        assert before == {"limits": {}} and count == 5 and clock.left() > 0
        keep({"limits": {"60": {"planned": {"batches": 5, "out_of_memory": 0}}}})
        done.append("extraction")

    monkeypatch.setattr(memory, "training_runs", breaks)
    monkeypatch.setattr(memory, "extraction_runs", runs_through)
    args = Namespace(resume=True, batches=5, limits=(60.0,))
    kept: dict = {}
    card, clock = common.Card(torch.device("cpu")), common.Clock(time.monotonic() + 5)
    with pytest.raises(ValueError, match="no such kernel"):
        memory.run_both(card, clock, args, {"runs": {"extraction": {"limits": {}}}}, kept.update)
    assert done == ["extraction"]
    assert kept["figures"]["run_batches"] == 5 and "provenance" in kept["runs"]


def test_the_page_is_written_from_the_result_alone(runs, tmp_path):
    figure = importlib.import_module("memory_figure")
    result = json.loads((SCRIPT.parent / "results" / "h200" / "memory.json").read_text())
    part = {"about": {"real": "a", "ballast": "b", "left out": "c"}}
    one = {"planned": {"batches": 1000, "out_of_memory": 0}, "peak_reserved_gib": 48.3, "token_budget": 8192}
    rates = {"rates": {"4096": 95.0, "8192": 99.0, "65536": 110.0, "131072": None}}
    compared = {**one, "compare": rates, "share_of_best_pct": 90.0}
    result["runs"] = {"extraction": {**part, "limits": {"60": compared, "80": one}}}
    page = tmp_path / "page.md"
    page.write_text(f"before\n{figure.BEGIN}\nold\n{figure.END}\nafter\n")
    for _ in range(2):
        figure.write_page(page, figure.tables(result))
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| 60 GiB | 8,192 | 1,000 | 0 | 48.3 GiB | 90.0 % |" in text and "not compared" in text
    points = figure.points_figure(result)
    assert sum(len(trace.x) for trace in points.data) == result["figures"]["points"]
    (trace,) = figure.runs_figure(result).data
    assert list(trace.x) == [4096, 8192, 65536] and list(trace.marker.line.width) == [0, 3, 0]
    assert max(trace.y) == 100 and trace.y[1] == pytest.approx(90.0)
