"""What steps came to, on its way from the device to the host.

The host decides nothing in a step: whether the weights move is decided on the device, and the numbers follow
by an asynchronous copy, read one step later. So the device never waits for the host, nor the host for more
than the step before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dflash_lab.drafter.rows import Row

if TYPE_CHECKING:
    from dflash_lab.drafter.trainer import Trainer

FIELDS = ("loss", "norm", "fault", "usual", "below", "tokens", "blocks", "seconds", "waited")


@dataclass(frozen=True)
class Outcome:
    """A step's numbers (of all processes together) by the names in FIELDS, its rate, and this process's
    rows.
    """

    step: int
    lr: float
    rows: list[Row]
    values: dict[str, float]


@dataclass
class Outcomes:
    """Steps whose numbers have not been read yet, oldest first."""

    waiting: deque[tuple[int, float, list[Row], Tensor, Any]] = field(default_factory=deque)

    def add(self, step: int, lr: float, rows: list[Row], values: Tensor) -> None:
        """Start the copy of a step's `values` (float64, in the order of FIELDS)."""
        copied = None
        if values.is_cuda:
            stream = torch.cuda.current_stream(values.device)  # of the drafter's device, current or not
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = host.copy_(values, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(stream)
        self.waiting.append((step, lr, rows, values, copied))

    def take(self, keep: int) -> Iterator[Outcome]:
        """Read all but the newest `keep` steps, waiting for each."""
        while len(self.waiting) > keep:
            step, lr, rows, values, copied = self.waiting.popleft()
            if copied is not None:
                copied.synchronize()
            yield Outcome(step, lr, rows, dict(zip(FIELDS, values.tolist(), strict=True)))


def settle(run: Trainer, keep: int = 0) -> None:
    """Take in what is known of all but the newest `keep` steps."""
    place = run.place
    for outcome in run.outcomes.take(keep):
        values = outcome.values
        for name in ("tokens", "blocks"):
            place[name] += int(values[name])
        for name in ("seconds", "waited"):
            place[name] += values[name]
        fault = run.guard.note(outcome.step, values, outcome.rows, run.group.rank)
        if run.journal:
            loss, norm = (values[name] if values["below"] else None for name in ("loss", "norm"))
            run.journal.write(
                "step", outcome.step, loss=loss, grad_norm=norm, lr=outcome.lr, skipped=fault or None
            )
        run.guard.check(outcome.step, fault)


def catch_up(run: Trainer) -> None:
    """Wait for all steps begun, in every process; the wait is training time."""
    started = time.perf_counter()
    settle(run)
    run.place["seconds"] += run.group.longest(time.perf_counter() - started + run.tail)
    run.tail = 0.0
