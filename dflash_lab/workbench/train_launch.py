"""Training in several processes, started from a notebook or a shell alike: torchrun runs this module in each.

    torchrun --nproc-per-node 8 -m dflash_lab.workbench.train_launch <parameters.json>

The parent follows the run's journal for its progress bar, ends all processes when it is stopped, and shows
the failing process's own traceback when one dies. Rank 0 leaves the report as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_lab import files
from dflash_lab.drafter.workers import WorkerFailed, words_of
from dflash_lab.file_errors import naming
from dflash_lab.machine import usable_cpus

if TYPE_CHECKING:
    from dflash_lab.drafter.train import TrainReport
    from dflash_lab.workbench.stages.train_drafter import TrainDrafterParams

POLL_S = 1.0
GRACE_S = 60.0  # for a checkpoint after a stop
STOP = "stop"  # the file that asks training processes for an end
STEPS = "steps.json"  # how many steps there will be, as the processes counted them from epochs
_PARAMETERS, _REPORT, _OUTPUT = "launch.json", "report.json", "processes.log"
_WORDS = "failed-{}.json"  # advice and details of the error of one process


class Stop(Exception):
    """The parent asked for an end."""


def train_apart(params: TrainDrafterParams, progress: Any = None) -> TrainReport:
    """Train with `params.gpus` processes of this machine and wait for them."""
    folder = params.folder
    for path in (*(folder / name for name in (_REPORT, STOP, STEPS)), *folder.glob(_WORDS.format("*"))):
        path.unlink(missing_ok=True)
    files.write_json(folder / _PARAMETERS, params.as_dict())
    # By number, for a machine's own name need not be known to it.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(params.gpus), "-m", __name__, str(folder / _PARAMETERS)]
    environment = {"OMP_NUM_THREADS": str(max(1, usable_cpus() // params.gpus)), **os.environ}
    with naming(folder / _OUTPUT), open(folder / _OUTPUT, "w", encoding="utf-8") as output:
        workers = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    follow = follower(params, progress)
    try:
        while workers.poll() is None:
            time.sleep(POLL_S)
            follow()
    except BaseException:
        _end(workers, folder)
        raise
    if workers.returncode != 0 or not (folder / _REPORT).exists():
        raise WorkerFailed(
            f"training in {params.gpus} processes failed:\n{_last_words(folder / _OUTPUT)}",
            _first_words(folder),
        )
    return read_report(files.read_json(folder / _REPORT))


def follower(params: TrainDrafterParams, progress: Any) -> Callable[[], None]:
    """What reports progress, at each call, from the journal that the first process writes."""
    from dflash_lab.drafter.journal import Reader

    journal = Reader(params.folder / "run")
    told = params.folder / STEPS  # there once the first step is done

    def follow() -> None:
        records = journal.read() if told.exists() else []
        streak = next((r.get("streak") for r in reversed(records) if r["kind"] == "heldout"), None)
        facts = {} if streak is None else {"streak": streak}
        total = files.read_json(told) if records else params.max_steps
        progress("training", records[-1]["step"] if records else 0, total, **facts)

    return follow if progress is not None else lambda: None


def _end(workers: subprocess.Popen, folder: Path) -> None:
    """Ask for a checkpoint and an orderly end, then end the processes that this call started."""
    files.write_bytes(folder / STOP, b"")
    try:
        workers.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(workers.pid, signal.SIGKILL)
        workers.wait()


def _last_words(path: Path) -> str:
    """The first traceback in the processes' output (the others only tell that a peer is gone), or its end."""
    text = path.read_text(encoding="utf-8", errors="replace")
    start = text.find("Traceback (most recent call last)")
    return text[start : start + 4000] if start >= 0 else text[-4000:]


def _first_words(folder: Path) -> dict[str, Any]:
    """What the process that failed first, and knew why, left of its error."""
    left = [files.read_json(path) for path in folder.glob(_WORDS.format("*"))]
    return min(left, key=lambda told: (not told["advice"], told["time"]), default={})


def report_values(report: TrainReport) -> dict[str, Any]:
    """A report as plain JSON values."""
    paths = {"best": str(report.best), "last_checkpoint": str(report.last_checkpoint)}
    return {**dataclasses.asdict(report), **paths}


def read_report(values: dict[str, Any]) -> TrainReport:
    """The report that `report_values` made plain."""
    from dflash_lab.drafter.train import TrainReport

    paths = {name: Path(values[name]) for name in ("best", "last_checkpoint")}
    return TrainReport(**{**values, **paths})


def stoppable(params: TrainDrafterParams) -> Callable[..., None]:
    """The progress callback of a training process: raises `Stop` when the parent asks for an end, in all
    processes at the same step.
    """
    import torch
    import torch.distributed as dist

    stop, steps = params.folder / STOP, params.folder / STEPS
    groups: list[Any] = []  # one over the host: through NCCL every step would wait for its device

    def progress(description: str, done: int, total: int, **facts: Any) -> None:
        if not steps.exists():
            files.write_json(steps, total)
        wanted = [stop.exists()]
        if dist.is_initialized():
            groups[:] = groups or [dist.new_group(backend="gloo")]
            dist.broadcast_object_list(wanted, src=0, group=groups[0], device=torch.device("cpu"))
        if wanted[0]:
            raise Stop

    return progress


def main(path: str) -> None:
    """One process: train, and on rank 0 leave the report."""
    import torch.distributed as dist

    from dflash_lab.workbench.stages.train_drafter import TrainDrafterParams
    from dflash_lab.workbench.stages.train_here import train_here

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    params = TrainDrafterParams(**json.loads(Path(path).read_bytes()))
    try:
        report = train_here(params, stoppable(params))
    except Stop:
        return
    except BaseException as error:
        told = {"time": time.time(), **words_of(error)}
        files.write_json(params.folder / _WORDS.format(os.environ["RANK"]), told)
        raise
    finally:
        if dist.is_initialized() and sys.exc_info()[0] in (None, Stop):
            dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        files.write_json(params.folder / _REPORT, report_values(report))


if __name__ == "__main__":
    main(sys.argv[1])
