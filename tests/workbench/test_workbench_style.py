"""Figures: one template, safe names, thinning, and what a saved notebook gets."""

from __future__ import annotations

import base64
import colorsys
import json
import re
from itertools import combinations
from typing import ClassVar

import IPython.display
import numpy as np
import plotly.graph_objects as go
import pytest

from dflash_lab.params import StageParams
from dflash_lab.views import style
from dflash_lab.views.style import headline, shown_number


class ShowParams(StageParams):
    stage: ClassVar[str] = "show"


@pytest.fixture
def shown(monkeypatch):
    bundles = []
    monkeypatch.setattr(
        IPython.display, "display", lambda *values, **options: bundles.append((values, options))
    )
    monkeypatch.delenv("PLOTLY_RENDERER", raising=False)
    return bundles


def rgb(colour: str) -> list[float]:
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def luminance(colour: str) -> float:
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_reads_on_both_themes_and_colours_stay_apart():
    for page in ("#ffffff", "#111111"):
        low, high = sorted((luminance(style.GREY), luminance(page)))
        assert (high + 0.05) / (low + 0.05) > 3.5
    hues = [colorsys.rgb_to_hls(*rgb(colour)) for colour in style.PALETTE[:6]]
    assert all(abs(a[0] - b[0]) + abs(a[1] - b[1]) > 0.05 for a, b in combinations(hues, 2))
    assert go.Figure().layout.template.layout.colorway == style.PALETTE


def test_headless_show_saves_data_and_never_a_widget(tmp_path, shown, monkeypatch):
    monkeypatch.setattr(style, "to_png", lambda fig: b"picture")
    fig = go.FigureWidget(go.Scatter(y=np.arange(5.0)), layout_title_text="Loss <b>by</b> step")
    style.show(fig, ShowParams(run_dir=str(tmp_path), interactive=False))
    ((values, options),) = shown
    bundle = values[0]
    assert options == {"raw": True}
    assert set(bundle) == {"application/vnd.plotly.v1+json", "text/plain", "image/png"}
    json.dumps(bundle)
    saved = json.loads((tmp_path / "show" / "figures" / "loss-by-step.json").read_text())
    values = saved["data"][0]["y"]
    assert np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"]).tolist() == [0, 1, 2, 3, 4]


def test_show_without_a_browser_still_shows_keeps_a_widget_and_tells_of_a_large_figure(
    tmp_path, shown, monkeypatch, caplog
):
    monkeypatch.setattr(style, "to_png", lambda fig: None)
    headless = ShowParams(run_dir=str(tmp_path), interactive=False)
    style.show(go.Figure(go.Bar(y=[1])), headless, name="bars")
    assert "image/png" not in shown[0][0][0] and (tmp_path / "show/figures/bars.json").exists()
    fig = go.FigureWidget(go.Bar(y=[1]))
    style.show(fig, ShowParams(run_dir=str(tmp_path)), name="live")
    assert shown[1][0][0] is fig and not caplog.text
    style.show(go.Figure(go.Scatter(y=np.random.default_rng(0).normal(size=200_000))), headless)
    assert "thin it out" in caplog.text


def test_a_wrong_browser_path_means_no_picture(monkeypatch):
    monkeypatch.setenv("BROWSER_PATH", "/nowhere/chromium")
    style.browser_path.cache_clear()
    style._server.cache_clear()
    try:
        assert style.browser_path() == "" and style.to_png(go.Figure()) is None
    finally:
        style.browser_path.cache_clear()
        style._server.cache_clear()


@pytest.mark.skipif(not style.browser_path(), reason="no Chromium on this machine")
def test_a_picture_is_a_png():
    assert style.to_png(go.Figure(go.Scatter(y=[1, 2]))).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("title", "name"), [("A B", "a-b"), ("<b>x</b>/../y", "x-y"), ("", "figure"), ("é", "figure")]
)
def test_slugs_are_safe_names(title, name):
    assert style.slug(title) == name


@pytest.mark.parametrize("count", [0, 1, 2000, 2001, 100_000])
def test_thinning_keeps_both_ends(count):
    kept = style.thin(count)
    assert len(kept) <= 2000 and kept == sorted(set(kept))
    assert not count or (kept[0] == 0 and kept[-1] == count - 1)


def test_a_logarithmic_axis_writes_numbers_between_decades():
    written = dict(zip(style.LOG_AXIS["tickvals"], style.LOG_AXIS["ticktext"], strict=True))
    assert written[0.2] == "0.2" and written[5000.0] == "5,000"


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


@pytest.mark.parametrize("count", [0, 1, 3, 7])
def test_every_figure_is_there_once_reading_down_the_columns(count):
    figures = {f"figure_{number}": number for number in range(count)}
    table = headline(figures)._repr_html_()
    names = re.findall(r">figure (\d+)</td>", table)
    assert sorted(map(int, names)) == list(range(count))
    rows = -(-count // 3)
    assert re.findall(r"<tr><td[^>]*>figure (\d+)", table) == [str(number) for number in range(rows)]
    assert repr(headline(figures)).count("\n") == max(count - 1, 0)


def test_text_is_escaped():
    table = headline({"<b>": "<script>'\""})._repr_html_()
    assert "&lt;b&gt;" in table and "&lt;script&gt;&#x27;&quot;" in table


def test_a_sentence_stands_below_the_columns_on_a_line_of_its_own():
    words = "Memory of model type odd is not understood"
    shown = headline({"memory_not_predicted": words, "steps": 3, "anchors": 8})._repr_html_()
    assert shown.index("anchors") < shown.index("memory not predicted") and shown.count("<tr>") == 2
    assert 'colspan="5"' in shown and shown.count(words) == 1
