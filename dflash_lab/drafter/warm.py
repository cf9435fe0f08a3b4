"""What a CUDA run compiles, made before its clock starts: layers, attention, loss, update, on a row of zeros.

Kernels depend on shapes alone, and rows on a device all have one. Nothing of it stays: gradients are dropped,
the update is called off.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from dflash_lab.drafter.trainer import Trainer

logger = logging.getLogger(__name__)


def warm_up(run: Trainer) -> float:
    """Run one row forward and backward; the seconds it took, 0 where nothing is compiled."""
    if run.device.type != "cuda":
        return 0.0
    began = time.perf_counter()
    config = run.drafter.config
    row = run.rows.row(0, 0)
    width = len(config.tap_ids) * config.hidden_size
    taps = row.taps.new_zeros(len(row.input_ids), width, dtype=run.drafter.fc.weight.dtype)
    final = taps[:, : config.hidden_size] if run.settings.loss.needs_target else None
    row = dataclasses.replace(row, taps=taps, final=final).to(run.device)
    run.drafter.train()
    run.group.exchange(run.model, True)
    loss = run.objective(run.model, run.drafter, row, row.taps, teacher=False)
    (loss.total * 0.0).backward()
    run.optimizer.step(0.0, 1.0, torch.zeros((), dtype=torch.bool, device=run.device))
    run.optimizer.zero_grad()
    torch.cuda.synchronize(run.device)
    seconds = time.perf_counter() - began
    logger.info("compiled in %.0f s", seconds)
    return seconds
