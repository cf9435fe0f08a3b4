"""The acceptance benchmark on a tiny target: every part of its result, and the page made of it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from acceptance_runs import build_run

from dflash_lab.files import read_json

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)

    def load(name):
        # From its file: a folder of tests bears the script's name.
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize("limit_s", [600, 0])
def test_every_part_is_recorded_and_drawn(script, tiny_target, tmp_path, monkeypatch, limit_s):
    target = tiny_target("llama")
    run = build_run(target, tmp_path / "run")
    samples, out = str(run / "samples.parquet"), tmp_path / "result.json"
    options = {"--target": target, "--drafter": run / "drafter", "--heldout": samples, "--humaneval": samples}
    options |= {"--device": "cpu", "--dtype": "float32", "--prompts": 2, "--max-new-tokens": 12}
    options |= {"--second-dtype": "bfloat16", "--second-prompts": 2, "--offline-count": 5, "--json": out}
    words = [str(word) for pair in options.items() for word in pair]
    monkeypatch.setattr(
        sys, "argv", ["acceptance.py", *words, "--budgets", "4", "16", "--limit-s", str(limit_s)]
    )
    assert script("acceptance").main() == 0
    result = read_json(out)
    figures, details = result["figures"], result["details"]
    for name in (
        "tau_chain_heldout",
        "tau_tree_heldout",
        "speedup_chain",
        "speedup_tree",
        "tree_build_ms_512",
    ):
        assert figures[name] > 0
    split = details["heldout"]["phase_ms"]["trained"]
    assert sum(split[phase] for phase in ("draft", "build", "verify", "commit")) == pytest.approx(
        split["round"], abs=0.01
    )
    parts = {"humaneval", "second_dtype", "offline"}
    assert parts & set(details) == (parts if limit_s else set())
    if limit_s:
        assert figures["tau_chain_humaneval"] >= 1 and figures["speedup_chain_heldout_bfloat16"] > 0
        assert details["second_dtype"]["facts"]["protocol"]["dtype"] == "bfloat16"
        assert details["offline"]["samples"] == 5 and figures["offline_minutes_for_10000"] > 0
    page = script("acceptance_figure").report(result)
    assert ("In bfloat16, 2 held-out prompts" in page) == bool(limit_s)
    assert "held-out, tree of" in page
