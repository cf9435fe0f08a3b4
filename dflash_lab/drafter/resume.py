"""Put a run down and take it up again: all of its state goes through these functions."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dflash_lab import files
from dflash_lab.drafter import state as states
from dflash_lab.drafter.checkpoint import save_checkpoint
from dflash_lab.drafter.loss.plan import ChunkPlan
from dflash_lab.drafter.outcomes import catch_up
from dflash_lab.errors import InputError

if TYPE_CHECKING:
    from dflash_lab.drafter.trainer import Trainer

logger = logging.getLogger(__name__)


def save(run: Trainer) -> None:
    """Write a checkpoint from which the run goes on exactly."""
    catch_up(run)
    weights = run.group.whole(run.drafter.state_dict())
    tensors = run.group.whole(run.optimizer.tensors())
    window = run.window.reduced(run.group.total).sums
    if run.group.rank == 0:
        if run.journal:
            run.journal.flush()  # the lines before the checkpoint must not be younger than it
        plan = run.objective.fused.plan
        record = {
            "setup": run.setup,
            "place": run.place,
            "optimizer_steps": run.optimizer.steps,
            "guard": run.guard.state(),
            "loss_rows": plan.rows if plan else 0,
        }
        tensors |= {f"window.{name}": value for name, value in window.items()}
        root = run.folder / "checkpoints"
        states.save_state(root, run.step, run.drafter, weights, tensors, record)
        states.rotate(root, run.settings.keep)
    run.group.barrier()


def resume(run: Trainer) -> None:
    """Go to the newest checkpoint of this run, if there is one; `InputError` if it is one of another
    setup.
    """
    found = states.newest(run.folder / "checkpoints")
    if found is None:
        return
    weights, tensors, record = states.load_state(found)
    if wrong := states.differences(record["setup"], run.setup):
        raise InputError(
            f"{run.folder} holds a run of another setup ({'; '.join(wrong[:4])}). Give that setup again to "
            "go on, or another run folder for a new run."
        )
    if run.group.rank == 0:
        states.rotate(run.folder / "checkpoints", run.settings.keep)  # a kill may have come before it
    run.group.load(run.drafter, weights)
    window = {n.removeprefix("window."): tensors.pop(n) for n in list(tensors) if n.startswith("window.")}
    run.group.load_optimizer(run.optimizer, tensors, record["optimizer_steps"])
    if run.group.rank == 0:  # the sums were those of all processes together
        run.window.load(window)
    run.guard.load(record["guard"])
    run.place = record["place"]
    rows = record["loss_rows"]
    run.objective.fused.plan = ChunkPlan(rows) if rows else None  # the same chunks give the same sums
    logger.info("training goes on from step %d", run.step)


def keep_best(run: Trainer, report: dict[str, Any]) -> None:
    """Write the present weights as the best so far."""
    weights = run.group.whole(run.drafter.state_dict())
    if run.group.rank == 0:
        save_checkpoint(run.folder / "best", run.drafter, weights)
        files.write_json(run.folder / "best" / "metrics.json", {"step": run.step, **report})
