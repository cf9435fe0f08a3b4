"""Make the pictures of the README and the docs from a finished run: `.venv/bin/python docs/pictures.py
runs/demo`.

Each picture is a figure that the run's notebooks left as data; nothing is drawn here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import plotly.io as pio

from dflash_lab.errors import InputError
from dflash_lab.files import write_bytes
from dflash_lab.workbench.figures.png import to_png

PICTURES = Path(__file__).parent / "pictures"
CHOSEN = {
    "acceptance.png": "acceptance/figures/acceptance-length.json",
    "training.png": "train_drafter/figures/loss-by-term.json",
    "memory.png": "memory_sweep/figures/what-a-batch-brings-predicted-against-measured.json",
    "lengths.png": "dataset_stats/figures/length-of-samples-share-of-tokens.json",
}


def main(run: Path) -> None:
    """Write every chosen picture; an `InputError` names what the run lacks."""
    for name, source in CHOSEN.items():
        if not (run / source).exists():
            raise InputError(f"{run / source}: not there; run all stages of {run} first.")
        picture = to_png(pio.from_json((run / source).read_text()))
        if picture is None:
            raise InputError("no Chromium or no kaleido here: apt-get install chromium, pip install kaleido")
        write_bytes(PICTURES / name, picture)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo"))
