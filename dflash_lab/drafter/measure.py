"""What a run measures of itself: means over the last training steps, and the fixed held-out rows."""

from __future__ import annotations

import logging
import resource
import time
from typing import TYPE_CHECKING, Any

import torch

from dflash_lab import files
from dflash_lab.drafter.metrics import Tally
from dflash_lab.drafter.outcomes import catch_up
from dflash_lab.drafter.resume import keep_best

if TYPE_CHECKING:
    from dflash_lab.drafter.trainer import Trainer

logger = logging.getLogger(__name__)


def log(run: Trainer) -> None:
    """Write the means over the steps since the last log."""
    catch_up(run)
    sums = run.window.reduced(run.group.total)
    run.window = Tally(run.drafter.config.block_size, run.head.weight.device)
    if run.journal:
        place = run.place
        run.journal.write(
            "train",
            run.step,
            **sums.report(),
            epoch=place["epoch"],
            seconds=round(place["seconds"], 3),
            context_tokens=place["tokens"],
            blocks_seen=place["blocks"],
            loader_share=place["waited"] / max(place["seconds"], 1e-9),
            memory_gib=_memory_gib(run.device),
            progress=run.progress,
            time=round(time.time(), 3),
        )
        run.journal.flush()


def note(run: Trainer, text: str) -> None:
    """Warn, and let the run's diary remember it."""
    if run.journal:
        run.journal.write("note", run.step, text=text)
        logger.warning("step %d: %s", run.step, text)


def evaluate(run: Trainer) -> None:
    """Measure the fixed held-out rows; keep the best drafter. One whose loss there is not a number is never
    the best; the rows are named.
    """
    if not run.heldout:
        return
    catch_up(run)
    run.drafter.eval()
    tally = Tally(run.drafter.config.block_size, run.head.weight.device)
    world = run.group.world
    bad = torch.zeros(len(run.heldout), dtype=torch.float64, device=run.head.weight.device)
    with torch.no_grad():
        for first in range(0, len(run.heldout), world):  # all processes take part in every forward
            number = first + run.group.rank
            row = run.heldout[min(number, len(run.heldout) - 1)].to(run.device)
            taps = row.taps.to(run.drafter.fc.weight.dtype)
            loss = run.objective(run.model, run.drafter, row, taps, teacher=True)
            if number < len(run.heldout):
                tally.add(loss)
                bad[number] = ~loss.total.isfinite()
    report = tally.reduced(run.group.total).report()
    if run.probe:
        whole = run.group.replica(run.drafter)
        # Documents have all lengths, and the compiler keeps eight shapes: were they the probe's, the steps'
        # own would run uncompiled.
        with torch.compiler.set_stance("force_eager"):
            report |= files.plain(run.probe(whole)) if run.group.rank == 0 else {}
    place = run.place
    place["last"] = {"step": run.step, **report}
    place["first"] = place["first"] or place["last"]
    if run.journal:
        run.journal.write("heldout", run.step, **report)
        run.journal.flush()
        logger.info("held-out rows at step %d: %s", run.step, _told(report))
    if lost := [number for number, found in enumerate(run.group.total(bad).tolist()) if found]:
        rows = "; ".join(f"row {n} (samples {', '.join(run.heldout[n].hashes)})" for n in lost)
        note(run, f"the held-out loss is not a number, so this drafter cannot be the best: {rows}")
    if report["streak"] is None or report["loss"] is None:
        return
    # By streak, and where all streaks are 1.000, as they are in a short run, by loss.
    rank = (report["streak"], -report["loss"])
    if place["best"] is None or rank > (place["best"], -place.get("best_loss", report["loss"])):
        place["best"], place["best_loss"], place["best_step"] = report["streak"], report["loss"], run.step
        keep_best(run, report)


def _told(report: dict[str, Any]) -> str:
    """The measure in a line, with what data tokens cap: how often the target itself would have said them."""
    names = [name for name in ("loss", "accuracy", "streak") if report[name] is not None]
    agrees = report["agreement"]
    known = "not known without final states" if agrees is None else f"{agrees:.1%}"
    told = [f"{name} {report[name]:.3f}" for name in names]
    return ", ".join([*told, f"the target's argmax is the data token: {known}"])


def _memory_gib(device: torch.device) -> float:
    """Peak so far: of the device's tensors, or on a CPU of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
