"""Make the README's picture from a finished run: `.venv/bin/python docs/pictures.py runs/demo`.

It is a figure that the run's notebook left as data; nothing is drawn here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import plotly.io as pio

from dflash_lab.errors import InputError
from dflash_lab.files import write_bytes
from dflash_lab.views.style import to_png

PICTURE = Path(__file__).parent / "pictures" / "acceptance.png"
FIGURE = "acceptance/figures/acceptance-length.json"


def main(run: Path) -> None:
    """Write the picture; an `InputError` names what the run lacks."""
    source = run / FIGURE
    if not source.exists():
        raise InputError(f"{source}: not there; run all stages of {run} first.")
    picture = to_png(pio.from_json(source.read_text()))
    if picture is None:
        raise InputError("no Chromium or no kaleido here: apt-get install chromium, pip install kaleido")
    write_bytes(PICTURE, picture)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo"))
