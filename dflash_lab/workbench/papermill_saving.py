"""papermill saves an executed notebook as every file is saved here: whole or not at all, and without secrets.

Its own writer opens the file and writes into it, which leaves half a notebook on a full disk, and nothing of
the one before when the new attempt fails.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dflash_lab.files import write_bytes
from dflash_lab.workbench.secrets import redact


def save_whole(output: Path, attempt: Path) -> None:
    """Let papermill in this process save the notebook `output` so. It stands at `attempt`, which may be the
    same path, until every cell of it has ended well; what is at `output` stays until then.
    """
    from papermill.iorw import LocalHandler, papermill_io

    class Whole(LocalHandler):
        def write(self, buf: str, path: str) -> None:
            write_bytes(attempt, redact(buf).encode())
            if attempt != output and ended_well(buf):
                os.replace(attempt, output)

    # A scheme is what a path begins with; the last one is asked first.
    papermill_io.register(str(output), Whole())


def ended_well(text: str) -> bool:
    """Say whether a notebook that papermill saves is at its end: it has one, and every cell had its answer.

    papermill's own state of a cell is `completed` also where the kernel died in it, and for those after it.
    """
    notebook = json.loads(text)
    record = notebook["metadata"]["papermill"]
    run = [cell for cell in notebook["cells"] if cell["cell_type"] == "code" and _source(cell)]
    answered = all("shell.execute_reply" in cell["metadata"].get("execution", {}) for cell in run)
    return bool(record.get("end_time")) and not record.get("exception") and answered


def _source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"]).strip()
