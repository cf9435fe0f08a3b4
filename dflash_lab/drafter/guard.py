"""Steps that must not happen: a loss or gradient that is not a number, or a gradient far above its usual
size.

Such a step is left out and counted, and its rows are written down, so that a person can see what was in them.
Many in a row mean that the run itself is broken; it ends with a message that says what was seen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from dflash_lab import files
from dflash_lab.drafter.rows import Row
from dflash_lab.errors import LabError

HISTORY = 64  # gradient norms the median is taken over
TRUSTED = 16  # as many must be there before a norm can be called exploding


class Diverged(LabError, RuntimeError):
    """Training stopped itself after too many bad steps in a row. `details` and `advice` go into the failure
    record.
    """

    def __init__(self, message: str, details: dict[str, Any]) -> None:
        super().__init__(message)
        self.details = details
        self.advice = (
            "Lower the learning rate, lengthen the warm-up, or look at the saved rows; the last good "
            "checkpoint is kept and the run resumes from it."
        )


class Guard:
    """Judges each step by its loss and gradient norm, and remembers the recent norms."""

    def __init__(self, explode_factor: float, max_in_a_row: int, folder: Path) -> None:
        self.explode_factor, self.max_in_a_row, self.folder = explode_factor, max_in_a_row, folder
        self.norms: list[float] = []
        self.skipped = 0
        self.in_a_row = 0

    def fault(self, loss: float, norm: float) -> str:
        """What is wrong with a step, or an empty string; a good step's norm is remembered."""
        if not math.isfinite(loss):
            return f"loss is {loss}"
        if not math.isfinite(norm):
            return f"gradient norm is {norm}"
        if len(self.norms) >= TRUSTED:
            usual = statistics.median(self.norms)
            if norm > self.explode_factor * usual > 0:
                return f"gradient norm {norm:.3g} is {norm / usual:.0f} times the usual {usual:.3g}"
        self.norms = [*self.norms[-HISTORY + 1 :], norm]
        self.in_a_row = 0
        return ""

    def skip(self, step: int, fault: str, rows: Sequence[Row], rank: int = 0) -> None:
        """Count a skipped step and save its rows; `Diverged` after too many in a row."""
        self.skipped += 1
        self.in_a_row += 1
        path = self.folder / f"step-{step:08d}-rank{rank}.safetensors"
        save_rows(path, rows, fault)
        if self.in_a_row >= self.max_in_a_row:
            details = {"step": step, "fault": fault, "skipped": self.skipped, "rows": str(path)}
            raise Diverged(
                f"{self.in_a_row} bad steps in a row at step {step}: {fault}. Rows are in {self.folder}.",
                details,
            )

    def state(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"norms": self.norms, "skipped": self.skipped, "in_a_row": self.in_a_row}

    def load(self, state: dict[str, Any]) -> None:
        """Put back `state()`."""
        self.norms = [float(norm) for norm in state["norms"]]
        self.skipped, self.in_a_row = int(state["skipped"]), int(state["in_a_row"])


def save_rows(path: Path, rows: Sequence[Row], fault: str) -> None:
    """Write rows as safetensors; the metadata names the fault and the samples' hashes."""
    tensors: dict[str, Tensor] = {}
    for number, row in enumerate(rows):
        fields = {
            "input_ids": row.input_ids,
            "taps": row.taps,
            "final": row.final,
            "anchors": row.layout.anchors,
            "starts": row.layout.starts,
            "labels": row.labels,
            "slot_mask": row.slot_mask,
        }
        tensors |= {f"{number}.{name}": t.cpu().contiguous() for name, t in fields.items() if t is not None}
    hashes = ",".join(digest for row in rows for digest in row.hashes)
    with files.atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={"fault": fault, "hashes": hashes})
