"""Write each notebook's parameter cell as its stage declares it: `python tests/support/write_cells.py`."""

from __future__ import annotations

import json
from pathlib import Path

from dflash_lab.params import cell_source
from dflash_lab.stages import STAGES, params_class

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"

if __name__ == "__main__":
    for stage in STAGES:
        path = NOTEBOOKS / f"{stage}.ipynb"
        notebook = json.loads(path.read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            if "parameters" in cell["metadata"].get("tags", []):
                cell["source"] = cell_source(params_class(stage)).splitlines(keepends=True)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
