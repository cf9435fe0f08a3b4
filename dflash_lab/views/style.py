"""How every figure looks, how a notebook shows it, and as what picture it is saved."""

from __future__ import annotations

import base64
import functools
import html
import importlib.util
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go
import plotly.io as pio

from dflash_lab.files import write_bytes

if TYPE_CHECKING:
    from dflash_lab.params import StageParams

# --- Pictures of figures, where kaleido and a Chromium exist
#
# A browser start costs two seconds, a further picture 0.2 s, so one browser serves all figures of a
# notebook. A missing browser is no error: the figure's data is saved anyway, and the log says once why
# there is no picture.


logger = logging.getLogger(__name__)

PIXELS = 900  # width of a picture before scaling
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@functools.cache
def browser_path() -> str:
    """Return the path of a Chromium, or an empty string. `BROWSER_PATH` wins."""
    named = os.environ.get("BROWSER_PATH", "")
    if named:
        return named if os.access(named, os.X_OK) else ""
    return next((found for found in map(shutil.which, _BROWSERS) if found), "")


@functools.cache
def _server() -> bool:
    """Start the one browser of this process; False, with one log line, when there is none."""
    if importlib.util.find_spec("kaleido") is None or not browser_path():
        logger.info("no pictures beside the figures: needs kaleido and a Chromium (apt-get install chromium)")
        return False
    import kaleido

    for name in ("kaleido", "choreographer"):  # they log each step of the browser's life
        logging.getLogger(name).setLevel(logging.WARNING)
    os.environ.setdefault("BROWSER_PATH", browser_path())
    kaleido.start_sync_server(silence_warnings=True)
    return True


def to_png(fig: go.Figure, scale: float = 1.5) -> bytes | None:
    """Return the figure as a PNG on white, or None when no browser can draw it."""
    if not _server():
        return None
    paper = go.Figure(fig).update_layout(paper_bgcolor="white", plot_bgcolor="white", font_color="#2b2f36")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*kopts.*")
        return paper.to_image("png", width=PIXELS, scale=scale)


# --- The look, and how a notebook shows a figure
#
# Figure functions are pure (data in, `go.Figure` out) and pick up the `dflash` template by importing this
# module. Colours are those of Okabe and Ito, which stay apart for colour-blind readers; backgrounds are
# transparent and lines mid-grey, so that one figure reads on the light and the dark theme of JupyterLab and
# of the report.
#
# `show(fig, params)` is the one way to display. Headless it never saves a `FigureWidget` (each would add
# the 5 MB plotly.js bundle to the notebook) and it adds a PNG where kaleido and a Chromium exist, since
# GitHub and nbconvert show nothing else. It also leaves the figure as JSON in the stage's folder, for the
# report.


BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
GREY = "#747a82"  # 4.3 to 1 against white and against JupyterLab's dark page; no colour has more on both
PALETTE = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY)
SEQUENTIAL = "Cividis"  # for heat maps: even in lightness, the same for colour-blind readers
DIVERGING = [[0.0, BLUE], [0.5, "#d9d9d9"], [1.0, RED]]
MAX_BYTES = 1_000_000  # of a figure's JSON
HEIGHT = 420  # px; the width is that of the page: a figure and its text fit a 1280 x 800 screen
WIDTH = 820  # px of a live figure
# A legend with many entries: below the axes, where it meets no title.
BELOW_LEFT = {"orientation": "h", "x": 0, "xanchor": "left", "y": -0.22, "yanchor": "top"}
# A logarithmic axis: 1, 2, 5 of each decade, written out. Plotly alone writes bare digits between decades.
_STEPS = [m * 10.0**e for e in range(-9, 10) for m in (1, 2, 5)]
LOG_AXIS = {"type": "log", "tickvals": _STEPS, "ticktext": [f"{step:,g}" for step in _STEPS]}
_GRID = "rgba(116, 122, 130, 0.25)"

TEMPLATE = go.layout.Template(
    layout={
        "colorway": list(PALETTE),
        "colorscale": {"sequential": SEQUENTIAL, "sequentialminus": SEQUENTIAL, "diverging": DIVERGING},
        "font": {"family": "system-ui, Helvetica, Arial, sans-serif", "size": 13, "color": GREY},
        "title": {"x": 0.01, "xanchor": "left", "font": {"size": 16}},
        "paper_bgcolor": "rgba(0, 0, 0, 0)",
        "plot_bgcolor": "rgba(0, 0, 0, 0)",
        "margin": {"l": 70, "r": 20, "t": 56, "b": 56},
        "autosize": True,
        "height": HEIGHT,
        "hovermode": "closest",
        "hoverlabel": {"align": "left"},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 1, "xanchor": "right"},
        "xaxis": {"gridcolor": _GRID, "zerolinecolor": _GRID, "linecolor": GREY, "automargin": True},
        "yaxis": {"gridcolor": _GRID, "zerolinecolor": _GRID, "linecolor": GREY, "automargin": True},
    },
    data={"scatter": [go.Scatter(line={"width": 2})], "bar": [go.Bar(marker={"line": {"width": 0}})]},
)
pio.templates["dflash"] = TEMPLATE
pio.templates.default = "dflash"


def show(fig: go.Figure, params: StageParams, name: str = "") -> None:
    """Display `fig` in a notebook, and keep it as `<stage folder>/figures/<name>.json` (name: the title's
    words).
    """
    from IPython.display import display

    plain = go.Figure(fig)
    content = plain.to_json()
    name = name or slug(plain.layout.title.text or "figure")
    if len(content) > MAX_BYTES:
        logger.warning("figure %r holds %.1f MB: thin it out (style.thin)", name, len(content) / 1e6)
    write_bytes(params.folder / "figures" / f"{name}.json", content.encode())
    interactive = params.interactive or os.environ.get("PLOTLY_RENDERER")
    if interactive and isinstance(fig, go.FigureWidget):
        display(fig)
    elif interactive:
        fig.show()
    else:  # what a saved notebook should hold: the figure as data, its picture if there is one, a name
        bundle: dict[str, Any] = {
            "application/vnd.plotly.v1+json": {**json.loads(content), "config": {"responsive": True}},
            "text/plain": f"figure: {name}",
        }
        if picture := to_png(plain):
            bundle["image/png"] = base64.b64encode(picture).decode()
        display(bundle, raw=True)


def live(fig: go.Figure, height: int | None = None) -> go.FigureWidget:
    """Return a figure that a widget can change. Inside a box it cannot measure its place, so it is as wide as
    the notebook beside the file browser at 1280 pixels.
    """
    return go.FigureWidget(fig).update_layout(width=WIDTH, **({} if height is None else {"height": height}))


def slug(title: str) -> str:
    """Return a file name for a title: lower-case words joined by ``-``, at most 60 characters."""
    words = re.sub(r"<[^>]*>", " ", title).lower()
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-")[:60].strip("-") or "figure"


def thin(count: int, keep: int = 2000) -> list[int]:
    """Return at most `keep` evenly spread indices of `count` points, the first and the last among them."""
    if count <= keep:
        return list(range(count))
    return sorted({round(index * (count - 1) / (keep - 1)) for index in range(keep)})


def escape(text: object) -> str:
    """Escape untrusted text for titles, labels and hover text, which plotly reads as a small HTML."""
    return html.escape(str(text), quote=True)


# --- A stage's headline figures: three to a row in a notebook, one a line in a log


_COLUMNS = 3
_LONG = 32  # characters of a value that takes a line of its own, below the others
_NAME = "text-align: left; padding: 2px 8px 2px 24px"


class Headline:
    """Flat figures by name, shown by whoever displays it; the values themselves stay in `figures`."""

    def __init__(self, figures: Mapping[str, Any]) -> None:
        self.figures = dict(figures)

    def __repr__(self) -> str:
        shown = [(name, shown_number(value)) for name, value in self.figures.items()]
        width = max((len(name) for name, _ in shown), default=0)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in shown)

    def _repr_html_(self) -> str:
        """Columns are read from top to bottom, as the figures' order groups them; sentences stand below."""
        whole = [(name, shown_number(value)) for name, value in self.figures.items()]
        shown = [(name, value) for name, value in whole if len(value) <= _LONG]
        rows = -(-len(shown) // _COLUMNS)
        lines = []
        for row in range(rows):
            cells = "".join(
                f'<td style="{_NAME}">{escape(name).replace("_", " ")}</td>'
                f'<td style="text-align: right"><b>{escape(value)}</b></td>'
                for name, value in shown[row::rows]
            )
            lines.append(f"<tr>{cells}</tr>")
        for name, value in whole:
            if len(value) > _LONG:
                cell = f'<td colspan="{2 * _COLUMNS - 1}" style="text-align: left">{escape(value)}</td>'
                lines.append(f'<tr><td style="{_NAME}">{escape(name).replace("_", " ")}</td>{cell}</tr>')
        return f"<table>{''.join(lines)}</table>"


def headline(figures: Mapping[str, Any]) -> Headline:
    """Return the table of a result's `figures`."""
    return Headline(figures)


def shown_number(value: Any) -> str:
    """Return a number as a person reads it, four significant digits; others as text, None as a dash."""
    if isinstance(value, bool | str) or value is None:
        return "-" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:.3g}"
