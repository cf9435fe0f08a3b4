"""Where the time of a round goes.

Marks are read only at the end. On CUDA they are events in the stream: they time what the device did, gaps in
which it waited for the host included, and neither drain it nor hold anybody up, so the split is that of the
very run whose speed is reported.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch

PHASES = ("draft", "build", "verify", "commit")


class Clock:
    """Times named phases: what lies between a mark and the one before belongs to the phase it is given."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str | None, Any]] = []

    def lap(self, phase: str | None = None) -> None:
        """End a phase; None: what came before belongs to none."""
        if self._cuda:
            mark: Any = torch.cuda.Event(enable_timing=True)
            mark.record()
        else:
            mark = time.perf_counter()
        self._marks.append((phase, mark))

    def seconds(self) -> dict[str, float]:
        """Seconds by phase; waits for the device."""
        found = dict.fromkeys(PHASES, 0.0)
        if self._cuda and self._marks:
            self._marks[-1][1].synchronize()
        for (_, before), (phase, after) in pairwise(self._marks):
            if phase is not None:
                found[phase] += before.elapsed_time(after) / 1e3 if self._cuda else after - before
        return found
