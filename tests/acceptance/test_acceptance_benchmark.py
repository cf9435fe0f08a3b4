"""The acceptance benchmark on a tiny target, and the page made of what it recorded."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from acceptance_runs import build_run

from dflash_lab.files import read_json

REPO = Path(__file__).resolve().parents[2]
RESULTS = ("h200/acceptance.json", "cpu/acceptance_humaneval.json")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(REPO / "benchmarks")

    def load(name):  # from its file: a folder of tests bears the script's name
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", REPO / "benchmarks" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="module")
def run(tiny_target, tmp_path_factory):
    return build_run(tiny_target("llama"), tmp_path_factory.mktemp("run"), answer_tokens=12, steps=6)


@pytest.mark.parametrize("limit_s", [600, 0])
def test_every_part_is_recorded_and_drawn(script, tiny_target, run, tmp_path, monkeypatch, limit_s):
    samples, out = run / "samples.parquet", tmp_path / "result.json"
    options = {"--target": tiny_target("llama"), "--drafter": run / "drafter", "--heldout": samples}
    options |= {"--humaneval": samples, "--device": "cpu", "--dtype": "float32", "--prompts": 2}
    options |= {"--max-new-tokens": 8, "--second-dtype": "bfloat16", "--second-prompts": 2}
    options |= {"--offline-count": 5, "--json": out, "--limit-s": limit_s}
    words = [str(word) for pair in options.items() for word in pair]
    monkeypatch.setattr(sys, "argv", ["acceptance.py", *words, "--budgets", "4", "16"])
    assert script("acceptance").main() == 0
    result = read_json(out)
    figures, details = result["figures"], result["details"]
    for name in ("tau_chain_heldout", "tau_tree_heldout", "speedup_chain", "tree_build_ms_512"):
        assert figures[name] > 0 and figures["speedup_tree"] > 0
    split = details["heldout"]["phase_ms"]["trained"]
    phases = sum(split[phase] for phase in ("draft", "build", "verify", "commit"))
    assert phases == pytest.approx(split["round"], abs=0.01)
    parts = {"humaneval", "second_dtype", "offline"}
    assert parts & set(details) == (parts if limit_s else set())
    if limit_s:
        assert figures["tau_chain_humaneval"] >= 1 and figures["speedup_chain_heldout_bfloat16"] > 0
        assert details["second_dtype"]["facts"]["protocol"]["dtype"] == "bfloat16"
        assert details["offline"]["samples"] == 5 and figures["offline_minutes_for_10000"] > 0
    page = script("acceptance_figure").report(result)
    assert ("In bfloat16, 2 held-out prompts" in page) == bool(limit_s) and "held-out, tree of" in page


def test_the_page_is_what_the_recorded_result_gives(script):
    figure = script("acceptance_figure")
    result = figure.joined([read_json(REPO / "benchmarks/results" / name) for name in RESULTS])
    assert figure.report(result) == (REPO / "docs/results/acceptance.md").read_text(encoding="utf-8")
    (chain, *_) = (trace for trace in figure.figure(result).data if trace.name == "held-out, chain")
    rows = result["details"]["heldout"]["budgets"]
    assert chain.y[0] == next(r["tau"] for r in rows if r["part"] == "all" and r["budget"] == 0)
    assert result["figures"]["tau_chain_humaneval"] > 1
    # A speed-up stands beside others only if it was measured on the same device.
    device = {result["details"][key]["facts"]["protocol"]["device"] for key in ("heldout", "humaneval")}
    assert ("speedup_chain_humaneval" in result["figures"]) == (len(device) == 1)
