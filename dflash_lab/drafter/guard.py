"""Steps that must not happen: a loss or gradient that is not a number, or a gradient far above its usual
size.

Such a step is left out and counted, and its rows are written down, so that a person can see what was in them.
The verdict is reached on the device and heard of later, so that a good step waits for nobody.
Many in a row mean that the run itself is broken; it ends with a message that says what was seen.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_lab import files
from dflash_lab.drafter.rows import Row
from dflash_lab.errors import LabError

HISTORY = 64  # gradient norms the median is taken over
TRUSTED = 16  # as many must be there before a norm can be called exploding
FINE, LOSS, NORM, EXPLODED, EMPTY = range(5)  # faults of a step; an empty one has no slot that counts

logger = logging.getLogger(__name__)


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
    """Judges each step by its loss and gradient norm, and remembers the recent norms, on the device; tells
    the host's side what came of it.
    """

    def __init__(
        self, explode_factor: float, max_in_a_row: int, folder: Path, device: torch.device | str = "cpu"
    ) -> None:
        self.explode_factor, self.max_in_a_row, self.folder = explode_factor, max_in_a_row, folder
        self.norms = torch.full((HISTORY,), math.inf, dtype=torch.float64, device=device)  # newest last
        self.count = torch.zeros((), dtype=torch.int64, device=device)  # of remembered norms
        self.skipped = 0
        self.in_a_row = 0

    def judge(self, loss: Tensor, norm: Tensor, below: Tensor) -> tuple[Tensor, Tensor]:
        """(fault, usual norm) of a step, float64 scalars on the device; a good step's norm is remembered.
        `below` is the loss's denominator. Fault FINE is none.
        """
        ordered = self.norms.sort().values
        middle = torch.stack([(self.count - 1).clamp_min(0) // 2, (self.count // 2).clamp_max(HISTORY - 1)])
        usual = ordered.gather(0, middle).mean()  # the median, as the norms not there are infinite
        exploded = (self.count >= TRUSTED) & (usual > 0) & (norm > self.explode_factor * usual)
        fault = torch.where(exploded, EXPLODED, FINE)
        fault = torch.where(torch.isfinite(norm), fault, NORM)
        fault = torch.where(torch.isfinite(loss), fault, LOSS)
        fault = torch.where(below > 0, fault, EMPTY)
        good = fault == FINE
        self.norms = torch.where(good, torch.cat([self.norms[1:], norm[None]]), self.norms)
        self.count = (self.count + good).clamp_max(HISTORY)
        return fault.double(), usual

    def note(self, step: int, values: dict[str, float], rows: Sequence[Row], rank: int = 0) -> str:
        """What was wrong with a step, once its numbers are known (`train.FIELDS`), or an empty string.
        Rows of a bad one are saved.
        """
        kind, loss, norm, usual = (values[name] for name in ("fault", "loss", "norm", "usual"))
        if kind == FINE:
            self.in_a_row = 0
            return ""
        if kind == EMPTY:
            return "no slot counts in any row of this step"
        if kind == LOSS:
            fault = f"loss is {loss}"
        elif kind == NORM:
            fault = f"gradient norm is {norm}"
        else:
            fault = f"gradient norm {norm:.3g} is {norm / usual:.0f} times the usual {usual:.3g}"
        self.skipped += 1
        self.in_a_row += 1
        logger.warning("step %d skipped: %s", step, fault)
        save_rows(self.folder / f"step-{step:08d}-rank{rank}.safetensors", rows, fault)
        return fault

    def check(self, step: int, fault: str) -> None:
        """`Diverged` if the last steps were all bad."""
        if self.in_a_row >= self.max_in_a_row:
            details = {"step": step, "fault": fault, "skipped": self.skipped, "rows": str(self.folder)}
            raise Diverged(
                f"{self.in_a_row} bad steps in a row at step {step}: {fault}. Rows are in {self.folder}.",
                details,
            )

    def state(self) -> dict[str, Any]:
        """What a resumed run needs."""
        norms = self.norms[HISTORY - int(self.count) :].tolist()
        return {"norms": norms, "skipped": self.skipped, "in_a_row": self.in_a_row}

    def load(self, state: dict[str, Any]) -> None:
        """Put back `state()`."""
        norms = [math.inf] * (HISTORY - len(state["norms"])) + [float(norm) for norm in state["norms"]]
        self.norms.copy_(torch.tensor(norms, dtype=torch.float64))
        self.count.fill_(len(state["norms"]))
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
