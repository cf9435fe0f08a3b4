"""Pictures of figures, where kaleido and a Chromium exist; found once, started once a process.

A browser start costs two seconds, a further picture 0.2 s, so one browser serves all figures of a notebook. A
missing browser is no error: the figure's data is saved anyway, and the log says once why there is no picture.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import shutil
import warnings

import plotly.graph_objects as go

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
