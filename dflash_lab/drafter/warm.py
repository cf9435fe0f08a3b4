"""What a CUDA run compiles, made before its clock starts: layers, attention, loss, update, on a row of zeros.

Kernels depend on shapes alone, and rows on a device all have one. Nothing of it stays: gradients are dropped,
the update is called off. What does not compile here is replaced by what needs no compiler, and a line says
so.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import TYPE_CHECKING

import torch

from dflash_lab.drafter.compiling import compiling, why_not_compiled

if TYPE_CHECKING:
    from dflash_lab.drafter.trainer import Trainer

logger = logging.getLogger(__name__)


def warm_up(run: Trainer) -> float:
    """Run one row forward and backward; the seconds it took, 0 where nothing is compiled.

    Raises `NotCompiled` for what the run was asked for by name, or shares with other processes.
    """
    if run.device.type != "cuda":
        return 0.0
    began = time.perf_counter()
    with_fallbacks(run)
    torch.cuda.synchronize(run.device)
    seconds = time.perf_counter() - began
    logger.info("compiled in %.0f s", seconds)
    return seconds


def with_fallbacks(run: Trainer) -> None:
    """Try a row; where it does not compile, once more with dense attention, then with plain layers too."""
    instead = "Train with attention='dense', and with compile=False if that is not enough."
    with compiling("the training step", instead):
        while True:
            try:
                return _one_row(run)
            except Exception as error:
                why = why_not_compiled(error)
                # Processes that share a step could only fall back together, which none of them can know.
                if not why or run.group.world > 1 or not _fall_back(run, why):
                    raise
            run.optimizer.zero_grad()


def _fall_back(run: Trainer, why: str) -> bool:
    """Let the next try compile less, and say what that costs; False where nothing is left."""
    if run.objective.attention == "auto":
        run.objective.attention = "dense"
        what = "attention runs dense, a document at a time, which is slower and holds a mask a document"
    elif run.objective.attention == "dense" and run.drafter.compiled:
        run.drafter.run_plain()
        what = "layers run uncompiled, which is slower and keeps more for the backward pass"
    else:
        return False
    logger.warning("a part does not compile here (%s): %s; the predicted memory does not know it", why, what)
    return True


def _one_row(run: Trainer) -> None:
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
