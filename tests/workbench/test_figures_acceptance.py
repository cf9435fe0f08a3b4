"""Figures of the stage `acceptance` draw what the tables say; text is escaped; the widget moves."""

from __future__ import annotations

import json

import polars as pl
import pytest

from dflash_lab.acceptance.results import Costs, Evaluation, OfflineReport
from dflash_lab.report import harmless
from dflash_lab.views import acceptance as figures


@pytest.fixture
def report():
    """Two answers of 6 and 4 tokens with known acceptances, block size 4."""
    accepted = [3, 0, 1, 1, 0, 0, 2, 1]
    counts = {
        "accepted": accepted, "tree_8": [3, 2, 2, 1, 1, 1, 2, 1], "top_1": accepted,
        "top_2": [3, 3, 3, 2, 1, 3, 2, 1],
    }  # fmt: skip
    places = {
        "answer": [0] * 5 + [1] * 3, "sample": ["aa"] * 5 + ["bb"] * 3,
        "anchor": [*range(5, 10), *range(7, 10)], "place": [0, 1, 2, 3, 4, 0, 1, 2],
        "left": [5, 4, 3, 2, 1, 3, 2, 1],
    }  # fmt: skip
    anchors = pl.DataFrame(places | {name: pl.Series(some, dtype=pl.UInt8) for name, some in counts.items()})
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
    fig = figures.tau_by_budget(budgets, report.oracle(), chosen=8)
    assert list(fig.data[1].y) == [2.5]
    assert list(fig.data[0].y) == [2.8, 2.2]
    bars = figures.taus(
        {"tau_trained": 2.0, "tau_trained_low": 1.7, "tau_trained_high": 2.4, "tau_offline": 2.1}
    )
    assert [bar.y[0] for bar in bars.data] == [2.0, 2.1]
    assert bars.data[0].error_y.array == pytest.approx((0.4,))


BREAKS = pl.DataFrame(
    {
        "kind": ["number", "number", "space", "word"],
        "p_top": [0.9, 0.1, 0.5, 1.0],
        "entropy": [0.2, 3.0, 1.0, 4.0],
        "place": [0, 5, 23, 23],
        "source": ["<b>"] * 4,
    }
)


@pytest.mark.parametrize(
    ("by", "shares"),
    [
        ("kind", {"number": 50, "space": 25, "word": 25}),
        ("source", {"&lt;b&gt;": 100}),
        ("entropy", {"0.1 to 0.5": 25, "1 to 2": 25, "2 to 4": 25, "4 and more": 25}),
        ("place", {"0-1": 25, "4-5": 25, "22-23": 50}),
    ],
)
def test_breaks_are_shares_of_all_breaks(by, shares):
    fig = figures.breaks(BREAKS, by)
    found: dict[str, float] = {}
    for bar in fig.data:
        for name, share in zip(bar.x, bar.y, strict=True):
            found[name] = found.get(name, 0) + share
    assert {name: share for name, share in found.items() if share} == pytest.approx(shares)
    unsure, leaning, sure = (sum(bar.y) for bar in fig.data)
    assert (unsure, leaning, sure) == (25, 25, 50)


def test_only_the_most_frequent_groups_are_shown():
    many = pl.concat([BREAKS.with_columns(kind=pl.lit(f"k{n:02}")) for n in range(20)] + [BREAKS])
    fig = figures.breaks(many)
    assert len(fig.data[0].x) == figures.MOST_GROUPS and fig.data[0].x[0] == "k00"
    assert sum(sum(bar.y) for bar in fig.data) == pytest.approx(100 * 48 / 84)
    assert not any(sum(bar.y) for bar in figures.breaks(BREAKS.clear(), "place").data)


def test_text_is_escaped_and_coloured():
    tokens = pl.DataFrame(
        {"answer": [0, 0, 0], "place": [0, 1, 2], "text": ["<script>", "a&b", "\n"],
         "kind": ["first", "accepted", "target"], "replaced": [None, None, "<img src=x>"],
         "method": ["trained"] * 3}
    )  # fmt: skip
    html = figures.coloured_text(tokens, 0)
    assert "<script>" not in html and "&lt;script&gt;" in html
    assert "<img" not in html and "a&amp;b" in html
    assert html.count("background-color") == 2
    assert harmless(html).count("background-color") == 2


COSTS = pl.DataFrame(
    {"what": ["step", "step", "draft", "build"], "size": [1, 9, 4, 8], "ms": [10.0, 12.0, 1.0, 0.1]}
)


@pytest.fixture
def result(report):
    empty = pl.DataFrame()
    facts = {"hybrid": False}
    return Evaluation({}, empty, empty, empty, empty, COSTS, empty, empty, empty, report, facts)


def test_what_if_marks_the_best_point_and_says_which_trees_win(report, result):
    known = figures.known_taus(result)
    assert known.filter(pl.col("budget") == 8)["tau"][0] == pytest.approx(report.tau(8).mean)
    # Sampling keeps an expected half token of the mean 1.0 that greedy accepts.
    warm = figures.known_taus(result, 1.0)
    assert warm.filter(pl.col("budget") == 8)["tau"][0] == pytest.approx(1 + (report.tau(8).mean - 1) / 2)
    title = figures.what_if_figure(Costs.from_frame(COSTS), known, block_size=4).layout.title
    assert "times plain decoding" in title.text
    points = pl.DataFrame({"budget": [0, 0, 32, 8, 64], "speedup": [1.5, 2.0, 2.5, 2.1, 1.9]})
    assert figures.trees_that_win(points) == "Trees of 8, 32 nodes beat the best chain."
    assert figures.trees_that_win(points.filter(pl.col("budget") != 8)[:2]) == "No tree was measured."
    assert figures.trees_that_win(points.filter(pl.col("budget").is_in([0, 64]))).startswith("No tree beats")


def test_every_slider_moves_the_figure_to_what_its_values_say(result):
    box = figures.what_if(result)
    controls, figure = box.children[0].children, box.children[1]
    named = {control.description: control for control in controls}
    typed = {"step_ms": 10.0, "step_ms_per_token": 0.25, "draft_ms": 1.0}
    chosen = {"block_size": 4, "budget": 0}

    def follows(temperature: float = 0.0) -> None:
        wanted = figures.what_if_figure(
            Costs.typed(**typed), figures.known_taus(result, temperature), **chosen
        )
        ours, theirs = (json.loads(fig.to_json()) for fig in (figure, wanted))
        assert ours["layout"]["title"] == theirs["layout"]["title"]
        assert [(t["name"], t["x"], t["y"]) for t in ours["data"]] == [
            (t["name"], t["x"], t["y"]) for t in theirs["data"]
        ]

    named["costs measured here"].value = False
    follows()
    for description, name, value in (
        ("target step (ms)", "step_ms", 25.0),
        ("each more token (ms)", "step_ms_per_token", 50.0),
        ("draft (ms)", "draft_ms", 7.0),
    ):
        named[description].value = typed[name] = value
        follows()
    for description, name, value in (("block size", "block_size", 2), ("block size", "block_size", 3)):
        named[description].value = chosen[name] = value
        follows()
    named["tree nodes (0: chain)"].value = 8
    chosen.update(block_size=4, budget=8)
    follows()
    named["temperature"].value = 1.0
    follows(1.0)
    named["costs measured here"].value = True
    wanted = figures.what_if_figure(Costs.from_frame(COSTS), figures.known_taus(result, 1.0), **chosen)
    assert list(figure.data[0].y) == list(wanted.data[0].y)


def test_other_figures(report):
    answers = pl.DataFrame(
        {
            "method": ["trained", "trained", "other", "other"],
            "answer": [0, 1, 0, 1],
            "prompt": ["p", "q", "p", "q"],
            "tau": [2.0, 1.5, 2.5, 1.0],
        }
    )
    told = {"other_minus_trained": 0.25, "other_minus_trained_low": -0.5, "other_minus_trained_high": 0.75}
    fig = figures.two_drafters(answers, told)
    assert "other - trained = +0.250 (95 % from -0.500 to +0.750)" in fig.layout.title.text
    assert sorted(zip(fig.data[1].x, fig.data[1].y)) == [(1.5, 1.0), (2.0, 2.5)]
    assert figures.worst_answers(answers) == [1, 0]
    full = answers.with_columns(
        source=pl.lit("humaneval"), asked=pl.lit("<i>def"), tokens=pl.lit(9), rounds=pl.lit(6)
    )
    html = figures.heading(full, 1)
    assert html.startswith("<p><b>q</b> (humaneval): tau 1.50, 9 tokens in 6 rounds")
    assert "&lt;i&gt;def" in html and "2.00" in figures.heading(full, 0)
    bars = figures.phases({"trained": {"draft": 0.25, "build": 0, "verify": 0.7, "commit": 0.05}})
    assert [bar.x[0] for bar in bars.data] == pytest.approx([25, 0, 70, 5])
