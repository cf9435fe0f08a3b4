"""Where the time of a round goes."""

from __future__ import annotations

import time

import torch

PHASES = ("draft", "build", "verify", "commit")


class Clock:
    """Adds wall-clock to named phases; with `wait` the device is drained first, so that its work is counted
    where it arose."""

    def __init__(self, device: torch.device, wait: bool) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._wait = wait and device.type == "cuda"
        self._last = time.perf_counter()

    def lap(self, phase: str | None = None) -> None:
        if self._wait:
            torch.cuda.synchronize()
        now = time.perf_counter()
        if phase is not None:
            self.seconds[phase] += now - self._last
        self._last = now
