"""Threads that wait for each other sleep, whoever started the process (papermill: test_workbench_launch.py).

OpenMP, asked to show what it read when torch loaded it, is the witness.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat

from dflash_lab.stages import STAGES

REPO = Path(__file__).resolve().parents[2]


def test_in_python():
    code = "import dflash_lab, torch"
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert re.findall(r"GOMP_SPINCOUNT = '(\w+)'", done.stdout + done.stderr) == ["1000"]
    code = "import os, dflash_lab; assert os.environ['GOMP_SPINCOUNT'] == '7'"  # as it was given
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "GOMP_SPINCOUNT": "7"}, check=True)


def test_notebooks_import_ours_before_anything_that_loads_torch():
    for stage in (*STAGES, "runs"):
        lines = imports(REPO / "notebooks" / f"{stage}.ipynb")
        first = next(place for place, line in enumerate(lines) if line.startswith("from dflash_lab"))
        others = {line.split()[1].split(".")[0] for line in lines[:first]}
        assert others <= {"IPython", "pathlib", "polars"}, stage  # none of them brings an OpenMP library


def imports(path: Path) -> list[str]:
    """The import lines of a notebook's first code, its parameters aside."""
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    source = next(cell.source for cell in code if "parameters" not in cell.metadata.get("tags", []))
    return [line for line in source.splitlines() if line.startswith(("from ", "import "))]
