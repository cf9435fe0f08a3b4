"""A result's figure as files for the documentation."""

from __future__ import annotations

from pathlib import Path

import plotly.graph_objects as go

from dflash_lab.files import write_bytes


def save_figure(fig: go.Figure, folder: Path, name: str) -> None:
    """Write `name`.json, `name`.html (plotly.js from its CDN) and `name`.png into `folder`."""
    write_bytes(folder / f"{name}.json", fig.to_json(pretty=False).encode())
    write_bytes(folder / f"{name}.html", fig.to_html(include_plotlyjs="cdn").encode())
    write_bytes(folder / f"{name}.png", fig.to_image("png", scale=1.5))
