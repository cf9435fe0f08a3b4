"""Online training with targets and drafters in processes of their own, placed on the GPUs that were named.

The parent starts them, follows the run's journal for its progress bar, asks for a checkpoint and an orderly
end when it is stopped, and raises the failing process's own traceback when one dies. Each leaves its log and
its diary in `train_drafter/workers/` of the run's folder.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from dflash_lab import files
from dflash_lab.workbench.train_launch import (
    STEPS,
    STOP,
    Stop,
    follower,
    read_report,
    report_values,
    stoppable,
)

if TYPE_CHECKING:
    from dflash_lab.drafter.train import TrainReport
    from dflash_lab.workbench.stages.train_drafter import TrainDrafterParams

WORKERS = "workers"
DIARY, SUMMARY = "pipeline.parquet", "pipeline.json"
GRACE_S = 60.0  # for a checkpoint after a stop, and for the targets once the drafters have ended
logger = logging.getLogger(__name__)


def train_pipeline(params: TrainDrafterParams, progress: Any = None) -> TrainReport:
    """Train with `params.targets` feeding `params.drafters`, and wait for them."""
    from multiprocessing import Pipe

    from dflash_lab.drafter.pipeline import summary
    from dflash_lab.drafter.workers import Job, run_crew

    folder, values = params.folder, params.as_dict()
    for path in (folder / STOP, folder / STEPS, *(folder / WORKERS).glob("*")):
        path.unlink(missing_ok=True)
    targets, drafters = len(params.targets), len(params.drafters)
    pipes = {(m, k): Pipe() for m in range(targets) for k in range(drafters)}
    port = _free_port()
    jobs = [
        Job(
            f"drafter-{k}", drafter_process, (values, k, [pipes[m, k][0] for m in range(targets)], port), True
        )
        for k in range(drafters)
    ] + [
        Job(f"target-{m}", target_process, (values, m, [pipes[m, k][1] for k in range(drafters)]), False)
        for m in range(targets)
    ]
    results = run_crew(
        jobs,
        folder / WORKERS,
        ends=[end for pipe in pipes.values() for end in pipe],
        on_poll=follower(params, progress),
        on_stop=lambda: files.write_bytes(folder / STOP, b""),
        grace_s=GRACE_S,
    )
    diary = pl.concat(pl.read_parquet(folder / WORKERS / f"{job.name}.parquet") for job in jobs)
    with files.atomic_path(folder / DIARY) as temporary:
        diary.write_parquet(temporary)
    seconds = {job.name: results[job.name]["seconds"] for job in jobs if job.leads}
    files.write_json(folder / SUMMARY, {**summary(diary, seconds), **_of_targets(results)})
    return read_report(results["drafter-0"])


def drafter_process(values: dict[str, Any], rank: int, pipes: list[Connection], port: int) -> dict[str, Any]:
    """Train on the states that come through `pipes`, one a target; what is returned is its report."""
    import torch

    from dflash_lab.drafter.pipeline import Diary, PipelineItems, Taker
    from dflash_lab.models.source import identify, load_config, resolve
    from dflash_lab.workbench.stages.train_here import train_here
    from dflash_lab.workbench.stages.train_placement import check_queue
    from dflash_lab.workbench.stages.train_setup import live_taps, load_ends

    params = _placed(values, "drafters", rank)
    world = len(params.drafters)
    if world > 1:
        place = dict(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=params.drafters[rank], MASTER_PORT=port)
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    device = torch.device(params.device)
    diary = Diary(f"drafter-{rank}", device)
    width, taps = load_config(params.target).hidden_size, live_taps(params)
    check_queue(params, device, len(taps), width)

    def open_pipeline(params: TrainDrafterParams, device: torch.device, dtype: torch.dtype) -> Any:
        takers = [
            Taker(
                pipe,
                f"target-{m}",
                slots=params.queue_rows,
                row_tokens=params.context_tokens,
                tap_width=len(taps) * width,
                hidden=width,
                device=device,
            )
            for m, pipe in enumerate(pipes)
        ]
        identity = identify(resolve(params.target), seed=params.seed)
        items = PipelineItems(
            params.samples_path,
            width,
            taps,
            takers,
            identity=identity,
            rank=rank,
            world=world,
            diary=diary,
        )
        opened.append(items)
        return items, load_ends(params, device, dtype)

    opened: list[PipelineItems] = []
    try:
        report = train_here(params, stoppable(params), open_pipeline)
    except Stop:
        opened[0].close()
        return {}
    opened[0].close()
    diary.save(params.folder / WORKERS)
    if world > 1:
        torch.distributed.destroy_process_group()
    return report_values(report)


def target_process(values: dict[str, Any], number: int, pipes: list[Connection]) -> dict[str, Any]:
    """Make rows for the drafters at the other ends of `pipes`."""
    import torch

    from dflash_lab.drafter.pipeline import Diary, Giver, Making, serve
    from dflash_lab.memory.gate import explained
    from dflash_lab.models.source import load_config
    from dflash_lab.workbench.stages.clearance import SNAPSHOT
    from dflash_lab.workbench.stages.train_gpu_processes import target_figures
    from dflash_lab.workbench.stages.train_setup import live_taps, open_live, packed_rows

    params = _placed(values, "targets", number)
    device, config = torch.device(params.device), load_config(params.target)
    width = config.hidden_size
    sizes = {"context": params.context_tokens, "hidden": width, "taps": len(live_taps(params))}
    left = params.folder / f"{Path(SNAPSHOT).stem}-target-{number}.json"
    with explained(None, sizes, device=device, snapshot=left):
        items = open_live(params, device)
        rows, heldout = packed_rows(params, items)
        givers = [Giver(pipe, f"drafter-{k}") for k, pipe in enumerate(pipes)]
        diary = Diary(f"target-{number}", items.target.device)
        making = Making(items, rows, heldout, givers, number, len(params.targets))
        result = serve(making, diary)
    diary.save(params.folder / WORKERS)
    return {**result, **target_figures(params, config, device, items.forward.path)}


def _of_targets(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """What was predicted and measured of the target that held most."""
    names = ("predicted_peak_gib", "measured_peak_gib", "memory_error_pct")
    held = [found for found in results.values() if names[0] in found]
    if not held:
        return {}
    most = max(held, key=lambda found: [found.get(name, 0.0) for name in (names[1], names[0])])
    return {f"target_{name}": most[name] for name in names if name in most}


def _placed(values: dict[str, Any], side: str, number: int) -> TrainDrafterParams:
    """The run's parameters with this process's own device."""
    import torch

    from dflash_lab.models.load import choose_device
    from dflash_lab.workbench.stages.train_drafter import TrainDrafterParams

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    params = TrainDrafterParams(**values)
    if choose_device(params.device).type != "cuda":
        return params.changed(device="cpu")
    device = f"cuda:{getattr(params, side)[number]}"
    torch.cuda.set_device(device)
    return params.changed(device=device)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
