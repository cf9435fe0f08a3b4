"""A result's figure as files for the documentation, and the arguments of a script that draws one."""

from __future__ import annotations

import argparse
from pathlib import Path

import plotly.graph_objects as go

from dflash_lab.files import write_bytes


def figure_arguments(description: str | None) -> argparse.ArgumentParser:
    """Arguments of a script that draws `result` into `folder`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path)
    parser.add_argument("folder", type=Path)
    return parser


def save_figure(fig: go.Figure, folder: Path, name: str) -> None:
    """Write `name`.json, `name`.html (plotly.js from its CDN) and `name`.png into `folder`."""
    write_bytes(folder / f"{name}.json", fig.to_json(pretty=False).encode())
    write_bytes(folder / f"{name}.html", fig.to_html(include_plotlyjs="cdn").encode())
    write_bytes(folder / f"{name}.png", fig.to_image("png", scale=1.5))
