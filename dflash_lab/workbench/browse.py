"""Parameters of the run browser's notebook, which is no stage: it reads runs and writes nothing but its
figures.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from dflash_lab.workbench.params import Params, param


class RunsParams(Params):
    """Parameters of `notebooks/runs.ipynb`."""

    stage: ClassVar[str] = "runs"

    root: str = param("runs", "folder that holds the runs")
    curve: str = param(
        "loss",
        "curve to lay over each other in the figure",
        choices=("loss", "accuracy", "streak", "chained_tau"),
    )
    interactive: bool = param(True, "widgets; false for headless runs")

    @property
    def folder(self) -> Path:
        """Where the notebook's figures go: beside the runs, in a folder that is none."""
        return Path(self.root) / "overview"
