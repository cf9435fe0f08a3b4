"""Threads that wait for each other sleep, whoever started the process: Python, plain papermill, the launcher.

OpenMP, asked to show what it read when torch loaded it, is the witness.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell

from dflash_lab.stages import STAGES

REPO = Path(__file__).resolve().parents[2]


def spins(words: list[str], folder: Path) -> list[str]:
    """Run a command in `folder`; return the GOMP_SPINCOUNT of every OpenMP library that was loaded in it."""
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE", "PYTHONPATH": str(REPO)}
    words = [sys.executable, *words]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return re.findall(r"GOMP_SPINCOUNT = '(\w+)'", done.stdout + done.stderr)


def test_in_python(tmp_path):
    assert spins(["-c", "import dflash_lab, torch"], tmp_path) == ["1000"]
    code = "import os, dflash_lab; assert os.environ['GOMP_SPINCOUNT'] == '7'"  # as it was given
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "GOMP_SPINCOUNT": "7"}, check=True)


def test_notebooks_import_ours_before_anything_that_loads_torch():
    for stage in (*STAGES, "runs"):
        lines = imports(REPO / "notebooks" / f"{stage}.ipynb")
        first = next(place for place, line in enumerate(lines) if line.startswith("from dflash_lab"))
        others = {line.split()[1].split(".")[0] for line in lines[:first]}
        assert others <= {"IPython", "pathlib", "polars"}, stage  # none of them brings an OpenMP library


def test_in_a_kernel_of_papermill(tmp_path):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "params").mkdir()
    (tmp_path / "params" / "demo").symlink_to(REPO / "params" / "demo")
    notebook = nbformat.read(REPO / "notebooks" / "prepare.ipynb", as_version=4)
    kept = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    lines = [*imports(REPO / "notebooks" / "prepare.ipynb"), "import torch"]
    notebook.cells = [*kept, new_code_cell("\n".join(lines))]
    nbformat.write(notebook, tmp_path / "notebooks" / "prepare.ipynb")
    found = spins(["-m", "papermill", "notebooks/prepare.ipynb", "out.ipynb"], tmp_path)
    saved = (tmp_path / "out.ipynb").read_text()
    found += re.findall(r"GOMP_SPINCOUNT = '(\w+)'", saved)  # a kernel's words may lie in the notebook
    assert set(found) == {"1000"}


def imports(path: Path) -> list[str]:
    """The import lines of a notebook's first code, its parameters aside."""
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    source = next(cell.source for cell in code if "parameters" not in cell.metadata.get("tags", []))
    return [line for line in source.splitlines() if line.startswith(("from ", "import "))]
