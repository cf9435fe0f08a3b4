"""The short live cell of a notebook, to be run on its own."""

from __future__ import annotations

import json
from pathlib import Path

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def live_cell(notebook: str) -> str:
    """Return the source of the code cell whose id is `toy`."""
    cells = json.loads((NOTEBOOKS / f"{notebook}.ipynb").read_text(encoding="utf-8"))["cells"]
    (source,) = ["".join(cell["source"]) for cell in cells if cell["id"] == "toy"]
    return source
