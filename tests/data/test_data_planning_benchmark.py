"""The benchmark of planning runs at a small size and gives every figure it promises."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "planning.py"
RESULT = SCRIPT.parent / "results" / "cpu" / "planning.json"
PROMISED = {
    "plan_seconds",
    "padding_waste_8k_pct",
    "padding_waste_32k_pct",
    "stats_913k_seconds",
    "stats_10m_seconds",
    "plan_peak_rss_gib",
    "stats_913k_peak_rss_gib",
    "stats_10m_peak_rss_gib",
    "slider_median_ms",
    "slider_worst_ms",
    "slider_moves",
}


def test_it_runs_small(tmp_path, monkeypatch):
    """Its pieces one after another in this process; the whole benchmark gives each one of its own."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    planning = importlib.import_module("planning")

    def in_process(piece, *words):
        if piece == "sliders":
            return {**planning.sliders(*words, places=2), "peak_rss_gib": 0}
        return {**planning._piece([piece, *words]), "process_seconds": 0}

    out = tmp_path / "planning.json"
    monkeypatch.setattr(planning, "in_process", in_process)
    words = ["planning.py", "--json", str(out), "--samples", "20000", "--many", "40000"]
    monkeypatch.setattr(sys, "argv", words)
    planning.main()
    found = json.loads(out.read_text())
    assert set(found["figures"]) >= PROMISED and found["versions"]["polars"]
    assert found["figures"]["stats_10m_samples"] == 40000
    assert 0 < found["figures"]["padding_waste_32k_pct"] <= found["figures"]["padding_waste_8k_pct"] < 10


def test_the_committed_result_meets_the_goals():
    figures = json.loads(RESULT.read_text())["figures"]
    assert figures["stats_913k_samples"] == 913_000 and figures["stats_10m_samples"] == 10_000_000
    assert figures["plan_seconds"] <= 5 and figures["stats_913k_seconds"] <= 10
    assert figures["padding_waste_8k_pct"] <= 3 and figures["padding_waste_32k_pct"] <= 1
    assert max(value for name, value in figures.items() if name.endswith("peak_rss_gib")) < 2
    assert figures["slider_moves"] >= 50 and figures["slider_worst_ms"] <= 200
