"""Figures of the stage `acceptance` draw what the tables say; text is escaped; the widget moves."""

from __future__ import annotations

import json

import polars as pl
import pytest

from dflash_lab.acceptance.evaluation import Evaluation
from dflash_lab.acceptance.offline_report import OfflineReport
from dflash_lab.acceptance.whatif import Costs
from dflash_lab.workbench.figures import acceptance as figures
from dflash_lab.workbench.figures import acceptance_speed as speed
from dflash_lab.workbench.figures import acceptance_text as text
from dflash_lab.workbench.widgets import acceptance as widgets


@pytest.fixture
def report():
    """Two answers of 6 and 4 tokens with known acceptances, block size 4."""
    accepted = [3, 0, 1, 1, 0, 0, 2, 1]
    left = [5, 4, 3, 2, 1, 3, 2, 1]
    anchors = pl.DataFrame(
        {
            "answer": [0] * 5 + [1] * 3,
            "sample": ["aa"] * 5 + ["bb"] * 3,
            "anchor": [*range(5, 10), *range(7, 10)],
            "place": [0, 1, 2, 3, 4, 0, 1, 2],
            "left": left,
            "accepted": pl.Series(accepted, dtype=pl.UInt8),
            "tree_8": pl.Series([3, 2, 2, 1, 1, 1, 2, 1], dtype=pl.UInt8),
            "top_1": pl.Series(accepted, dtype=pl.UInt8),
            "top_2": pl.Series([3, 3, 3, 2, 1, 3, 2, 1], dtype=pl.UInt8),
        }
    )
    slots = pl.DataFrame(
        {"slot": [1, 2, 3], "valid": [8, 6, 4], "hits": [5, 3, 1], "reached": [8, 4, 2], "held": [5, 2, 1]}
    )
    anchors = anchors.with_columns(pl.Series("sampled_1", [0.5] * 8))
    return OfflineReport(anchors, slots, 4, (8,), (1, 2), (1.0,))


ROUNDS = pl.DataFrame(
    {
        "method": ["trained"] * 4 + ["untrained"],
        "answer": [0, 0, 1, 1, 0],
        "accepted": [3, 0, 0, 2, 0],
        "produced": [4, 1, 1, 2, 1],
    }
)


def test_the_walk_of_the_report(report):
    # Answer 0: the first block is accepted whole (4 tokens), one token is left. Answer 1: a miss, then both
    # tokens left.
    assert report.rounds() == [[4, 1], [1, 2]]
    assert report.rounds(8) == [[4, 1], [2, 1]]
    assert report.rounds(block_size=2) == [[2, 2, 1], [1, 2]]
    assert report.rounds(limit=3) == [[2], [1, 1]]
    assert report.tau(limit=3).mean == 1.5


def test_round_lengths_are_shares(report):
    fig = figures.round_lengths(ROUNDS)
    assert list(fig.data[0].y) == [50, 0, 25, 25]
    assert fig.data[1].name == "untrained" and list(fig.data[1].y) == [100]


def test_slots_and_heat_map(report):
    fig = figures.slots(report.by_slot(), ROUNDS, 4)
    accuracy, conditional, survival, decoded = (list(trace.y) for trace in fig.data)
    assert accuracy == [62.5, 50, 25]
    assert conditional == [62.5, 50, 50]
    assert survival == pytest.approx([62.5, 100 / 3, 25])
    assert decoded == [50, 50, 25]
    heat = figures.position_depth(report.anchors, 4, bins=5).data[0]
    assert list(heat.z[0]) == [50, 50, 50]
    assert list(heat.z[4]) == [0, None, None]


def test_budgets_and_taus(report):
    budgets = pl.DataFrame(
        {"part": ["test", "test"], "budget": [0, 8], "tau": [2.0, 2.5], "low": [1.8, 2.2], "high": [2.2, 2.8]}
    )
    fig = speed.tau_by_budget(budgets, report.oracle(), chosen=8)
    assert list(fig.data[1].y) == [2.5]
    assert list(fig.data[0].y) == [2.8, 2.2]
    bars = figures.taus(
        {"tau_trained": 2.0, "tau_trained_low": 1.7, "tau_trained_high": 2.4, "tau_offline": 2.1}
    )
    assert [bar.y[0] for bar in bars.data] == [2.0, 2.1]
    assert bars.data[0].error_y.array == pytest.approx((0.4,))


def test_breaks_are_shares_of_all_breaks():
    frame = pl.DataFrame(
        {
            "kind": ["number", "number", "space"],
            "p_top": [0.9, 0.1, 0.5],
            "entropy": [0.2, 3.0, 1.0],
            "source": ["<b>"] * 3,
        }
    )
    fig = figures.breaks(frame)
    assert list(fig.data[0].x) == ["number", "space"]
    assert sum(sum(bar.y) for bar in fig.data) == pytest.approx(100)
    assert list(fig.data[2].y) == pytest.approx([100 / 3, 0])
    assert figures.breaks_by(frame).data[0].name == "&lt;b&gt;"


def test_text_is_escaped_and_coloured():
    tokens = pl.DataFrame(
        {
            "answer": [0, 0, 0],
            "place": [0, 1, 2],
            "text": ["<script>", "a&b", "\n"],
            "kind": ["first", "accepted", "target"],
            "replaced": [None, None, "<img src=x>"],
            "method": ["trained"] * 3,
        }
    )
    html = text.coloured_text(tokens, 0)
    assert "<script>" not in html and "&lt;script&gt;" in html
    assert "<img" not in html and "a&amp;b" in html
    assert html.count("background-color") == 2
    from dflash_lab.workbench.report_page import harmless

    assert harmless(html).count("background-color") == 2


def test_what_if_marks_the_best_point_and_the_widget_follows(report):
    costs = pl.DataFrame(
        {"what": ["step", "step", "draft", "build"], "size": [1, 9, 4, 8], "ms": [10.0, 12.0, 1.0, 0.1]}
    )
    empty = pl.DataFrame()
    facts = {"hybrid": False}
    result = Evaluation({}, empty, empty, empty, empty, costs, empty, empty, empty, report, facts)
    known = widgets.known_taus(result)
    assert known.filter(pl.col("budget") == 8)["tau"][0] == pytest.approx(report.tau(8).mean)
    warm = widgets.known_taus(
        result, 1.0
    )  # sampling keeps an expected half token of the mean 1.0 that greedy accepts
    assert warm.filter(pl.col("budget") == 8)["tau"][0] == pytest.approx(1 + (report.tau(8).mean - 1) / 2)
    fig = speed.what_if(Costs.from_frame(costs), known, block_size=4)
    assert "times plain decoding" in fig.layout.title.text
    box = widgets.what_if(result)
    controls, figure = box.children[0].children, box.children[1]
    before = list(figure.data[0].y)
    named = {control.description: control for control in controls}
    named["costs measured here"].value = False
    named["each more token (ms)"].value = 50.0
    assert list(figure.data[0].y) != before
    named["tree nodes (0: chain)"].value = 8
    assert json.loads(figure.to_json())["data"][-1]["name"] == "chosen"


def test_other_figures(report):
    answers = pl.DataFrame(
        {
            "method": ["trained", "trained", "other", "other"],
            "answer": [0, 1, 0, 1],
            "prompt": ["p", "q", "p", "q"],
            "tau": [2.0, 1.5, 2.5, 1.0],
        }
    )
    fig = figures.two_drafters(answers)
    assert sorted(zip(fig.data[1].x, fig.data[1].y)) == [(1.5, 1.0), (2.0, 2.5)]
    assert text.worst_answers(answers) == [1, 0]
    bars = speed.phases({"trained": {"draft": 0.25, "build": 0, "verify": 0.7, "commit": 0.05}})
    assert [bar.x[0] for bar in bars.data] == pytest.approx([25, 0, 70, 5])
