"""Headline figures: readable numbers, whole in HTML and in a log, untrusted text escaped."""

from __future__ import annotations

import re

import pytest

from dflash_lab.views.style import headline, shown_number


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1234567, "1,234,567"),
        (0.38461538461538325, "0.3846"),
        (8.02e-05, "8.02e-05"),
        (44310.64, "44,311"),
        (-1.5, "-1.5"),
        (0.0, "0"),
        (3.2e9, "3.2e+09"),
        (float("nan"), "nan"),
        (None, "-"),
        (True, "True"),
        ("[1, 16]", "[1, 16]"),
    ],
)
def test_numbers_are_short(value, shown):
    assert shown_number(value) == shown


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 40])
def test_every_figure_is_there_once_reading_down_the_columns(count):
    figures = {f"figure_{number}": number for number in range(count)}
    table = headline(figures)._repr_html_()
    names = re.findall(r">figure (\d+)</td>", table)
    assert sorted(map(int, names)) == list(range(count))
    rows = -(-count // 3)
    assert re.findall(r"<tr><td[^>]*>figure (\d+)", table) == [str(number) for number in range(rows)]
    assert repr(headline(figures)).count("\n") == max(count - 1, 0)


def test_text_is_escaped():
    table = headline({"<b>": "<script>alert(1)</script>"})._repr_html_()
    assert "<script>" not in table and "&lt;script&gt;" in table and "&lt;b&gt;" in table


def test_a_sentence_stands_below_the_columns_on_a_line_of_its_own():
    words = "Memory of model type odd is not understood"
    shown = headline({"memory_not_predicted": words, "steps": 3, "anchors": 8})._repr_html_()
    assert shown.index("anchors") < shown.index("memory not predicted") and shown.count("<tr>") == 2
    assert 'colspan="5"' in shown and shown.count(words) == 1
