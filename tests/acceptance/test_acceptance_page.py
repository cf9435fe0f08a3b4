"""The recorded result and the page about it say the same."""

from __future__ import annotations

from pathlib import Path

from dflash_lab.files import read_json

REPO = Path(__file__).resolve().parents[2]
RESULTS = ("h200/acceptance.json", "cpu/acceptance_humaneval.json")


def test_the_page_is_what_the_recorded_result_gives(monkeypatch):
    monkeypatch.syspath_prepend(REPO / "benchmarks")  # for this test: scripts are named like folders of tests
    import acceptance_figure

    result = acceptance_figure.joined([read_json(REPO / "benchmarks/results" / name) for name in RESULTS])
    assert acceptance_figure.report(result) == (REPO / "docs/results/acceptance.md").read_text(
        encoding="utf-8"
    )
    figure = acceptance_figure.figure(result)
    chains = [trace for trace in figure.data if trace.name == "held-out, chain"]
    assert chains[0].y[0] == next(
        row["tau"]
        for row in result["details"]["heldout"]["budgets"]
        if row["part"] == "all" and row["budget"] == 0
    )
    assert result["figures"]["tau_chain_humaneval"] > 1
    devices = {
        result["details"][key]["facts"]["protocol"]["device"] for key in ("heldout", "humaneval")
    }  # a speed-up stands beside others only if it was measured on the same device
    assert ("speedup_chain_humaneval" in result["figures"]) == (len(devices) == 1)
