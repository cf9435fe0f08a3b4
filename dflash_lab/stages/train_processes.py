"""The training itself: in this process, in processes that torchrun starts, or with targets and drafters in
processes of their own.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from dflash_lab import files, machine
from dflash_lab.acceptance.offline import answer_segments, offline
from dflash_lab.drafter.checkpoint import load_checkpoint, setup
from dflash_lab.drafter.distributed import join
from dflash_lab.drafter.journal import Reader
from dflash_lab.drafter.live import LiveItems
from dflash_lab.drafter.loss import VocabShard
from dflash_lab.drafter.model import Drafter
from dflash_lab.drafter.pipeline import PipelineItems, Receiver, RowServer, Sender, Timings, summary
from dflash_lab.drafter.train import TrainReport, train
from dflash_lab.drafter.workers import Job, WorkerFailed, run_workers, words_of
from dflash_lab.errors import InputError, naming
from dflash_lab.memory.gate import explained
from dflash_lab.models.load import TargetHead, choose_device
from dflash_lab.models.source import identify, resolve
from dflash_lab.stages import params_class
from dflash_lab.stages.clearance import SNAPSHOT, ask_training, check_queue, memory_figures, target_figures
from dflash_lab.stages.judgement import before_training
from dflash_lab.stages.training_inputs import (
    TrainingInputs,
    check_disks,
    load_ends,
    open_live,
    open_states,
    packed_rows,
    resolve_inputs,
    set_aside_other_run,
    source_of,
    train_settings,
)

if TYPE_CHECKING:
    from dflash_lab.stages.train_drafter import TrainDrafterParams

logger = logging.getLogger(__name__)
MEMORY = "memory.json"  # of the first process: predicted and measured peak, how a live target runs its rows
BUDGETS = (16, 64)  # of draft trees, in nodes

Opener = Callable[[TrainingInputs], tuple[Any, TargetHead]]  # what makes the states, and the target's head


# In this process -------------------------------------------------------------------------------------------


def train_here(inputs: TrainingInputs, progress: Any = None, open_with: Opener = open_states) -> TrainReport:
    """Ask for the memory, load the states, the ends of the target and the drafter, train in this process,
    perhaps one of several, and write how right the answer was.
    """
    import torch

    params = inputs.params
    group, device = join(params.parallel, inputs.device)
    inputs = dataclasses.replace(inputs, device=device)
    if params.attention == "flex" and device.type != "cuda":
        raise InputError(
            f"train_drafter: attention='flex' needs CUDA for its backward pass, and this trains on {device}. "
            "Give attention='auto'."
        )
    if params.compile and device.type == "cuda":
        torch.compiler.reset()  # shapes of earlier runs of this process count against the compiler's limit
    free_gib = machine.device_budget_gib(device)
    check_disks(inputs)
    cleared = ask_training(inputs, budget_gib=free_gib)  # before anything is loaded
    config = inputs.drafter
    sizes = {
        "anchors": params.anchors, "block_size": config.block_size, "context": params.context_tokens,
        "hidden": config.hidden_size, "vocabulary": config.vocab_size, "taps": len(config.tap_ids),
        "intermediate": config.intermediate_size,
    }  # fmt: skip
    snapshot = Path(SNAPSHOT)
    if group.world > 1:
        snapshot = snapshot.with_stem(f"{snapshot.stem}-{group.rank}")
    watch: dict[str, Any] = dict(device=device, snapshot=params.folder / snapshot)
    with explained(cleared, sizes, **watch):
        items, head = open_with(inputs)
        drafter = first_drafter(inputs, head)
    if isinstance(items, LiveItems):  # now it is known how the target runs its rows
        cleared = ask_training(inputs, rows=items.forward.path, budget_gib=free_gib)
    settings = train_settings(inputs, items)
    run, source = params.folder / "run", source_of(inputs, items)
    if group.rank == 0:
        lengths = items.lengths[~items.heldout].tolist()
        if warning := before_training(settings.max_steps, len(lengths), sum(lengths)):
            logger.warning("%s", warning)
        now = setup(settings, drafter, lengths, group.world, source)
        set_aside_other_run(run, now, anew=params.force)
    group.barrier()
    whole, shard = head, None
    measured = bool(params.tau_samples) and group.rank == 0  # tau is measured with the whole head
    if params.head_parallel:
        shard = VocabShard(config.vocab_size)
        mine = whole.weight[shard.slice()]  # a view, where the whole stays for others
        tied = whole.weight is whole.embedding_weight
        kept = tied or measured or isinstance(items, LiveItems)
        head = dataclasses.replace(whole, weight=mine if kept else mine.clone())
    probe = tau_probe(params.tau_samples, items, whole if measured else head) if params.tau_samples else None
    del whole
    apart = params.target_head_gpu
    with explained(cleared, sizes, **watch):
        report = train(
            items,
            head,
            drafter,
            settings,
            folder=run,
            probe=probe,
            on_progress=progress,
            group=group,
            source=source,
            shard=shard,
            target_device=torch.device("cuda", apart) if apart >= 0 else None,
        )
    if group.rank == 0:
        figures: dict[str, Any] = memory_figures(cleared, device)
        if isinstance(items, LiveItems):
            figures["live_rows"] = items.forward.way
        files.write_json(params.folder / MEMORY, figures)
    return report


def first_drafter(inputs: TrainingInputs, head: TargetHead) -> Drafter:
    """The drafter before its first step, drawn or read, compiled on CUDA if asked for."""
    import torch

    params, device = inputs.params, inputs.device
    if params.start_from:
        drafter = load_checkpoint(params.start_from, device, inputs.dtype)
        if told := drafter.config.differences(inputs.drafter):
            raise InputError(
                f"train_drafter: {params.start_from} is a drafter of another shape than these parameters say "
                f"({'; '.join(told)}: the drafter's value first). Give the drafter's values, or start from "
                "another."
            )
    else:
        with torch.device("meta"):  # a billion weights are drawn once, not first as torch's layers would
            empty = Drafter(inputs.drafter)
        empty.to_empty(device="cpu").initialize(torch.Generator().manual_seed(params.seed))
        drafter = empty.to(device, inputs.dtype)
        drafter.fit_to_head(head.weight)
    drafter.gradient_checkpointing = params.gradient_checkpointing
    if params.compile and device.type == "cuda":
        drafter.compile_layers()
    return drafter


def tau_probe(samples: int, store: Any, head: TargetHead) -> Callable[[Drafter], dict[str, Any]]:
    """Acceptance length on the first held-out samples, as decoding would walk them, which the loss does not
    say: chained, and of draft trees.
    """
    items = [store[int(i)] for i in np.flatnonzero(store.heldout)[:samples]]
    items = [item for item in items if answer_segments(item.loss_mask)]  # some are cut within their prompt

    def probe(drafter: Drafter) -> dict[str, Any]:
        if not items:
            return {}
        report = offline(items, head, drafter, budgets=BUDGETS, top_k=())
        trees = {f"tree{budget}_tau": report.tau(budget).mean for budget in BUDGETS}
        return {"chained_tau": report.tau().mean, **trees}

    return probe


# Several processes of this machine, whichever way they are started -----------------------------------------
# The parent follows the run's journal for its progress bar, and asks for a checkpoint and an orderly end when
# it is stopped.


POLL_S = 1.0
GRACE_S = 60.0  # for a checkpoint after a stop, and for targets once the drafters have ended
STOP = "stop"  # the file that asks training processes for an end
STEPS = "steps.json"  # how many steps there will be, as the processes counted them from epochs


class Stop(Exception):
    """The parent asked for an end."""


def stoppable(folder: Path) -> Callable[..., None]:
    """The progress callback of a training process: raises `Stop` when the parent asks for an end, in all
    processes at the same step.
    """
    import torch
    import torch.distributed as dist

    stop, steps = folder / STOP, folder / STEPS
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


def follower(params: TrainDrafterParams, progress: Any) -> Callable[[], None]:
    """What reports progress, at each call, from the journal that the first process writes."""
    journal = Reader(params.folder / "run")
    told = params.folder / STEPS  # there once the first step is done

    def follow() -> None:
        records = journal.read() if told.exists() else []
        streak = next((r.get("streak") for r in reversed(records) if r["kind"] == "heldout"), None)
        facts = {} if streak is None else {"streak": streak}
        total = files.read_json(told) if records else params.max_steps
        progress("training", records[-1]["step"] if records else 0, total, **facts)

    return follow if progress is not None else lambda: None


def report_values(report: TrainReport) -> dict[str, Any]:
    """A report as plain JSON values."""
    paths = {"best": str(report.best), "last_checkpoint": str(report.last_checkpoint)}
    return {**dataclasses.asdict(report), **paths}


def read_report(values: dict[str, Any]) -> TrainReport:
    """The report that `report_values` made plain."""
    paths = {name: Path(values[name]) for name in ("best", "last_checkpoint")}
    return TrainReport(**{**values, **paths})


# Processes that torchrun starts, from a notebook or a shell alike: it runs this module in each --------------
#
#     torchrun --nproc-per-node 8 -m dflash_lab.stages.train_processes <parameters.json>


_PARAMETERS, _REPORT, _OUTPUT = "launch.json", "report.json", "processes.log"
_WORDS = "failed-{}.json"  # advice and details of the error of one process


def train_apart(params: TrainDrafterParams, progress: Any = None) -> TrainReport:
    """Train with `params.gpus` processes of this machine and wait for them. `WorkerFailed` shows the failing
    process's own traceback.
    """
    folder = params.folder
    for path in (*(folder / name for name in (_REPORT, STOP, STEPS)), *folder.glob(_WORDS.format("*"))):
        path.unlink(missing_ok=True)
    files.write_json(folder / _PARAMETERS, params.as_dict())
    # By number, for a machine's own name need not be known to it.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(params.gpus), "-m", __name__, str(folder / _PARAMETERS)]
    environment = {"OMP_NUM_THREADS": str(max(1, machine.usable_cpus() // params.gpus)), **os.environ}
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
        files.write_bytes(folder / STOP, b"")
        try:
            workers.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(workers.pid, signal.SIGKILL)
            workers.wait()
        raise
    if workers.returncode != 0 or not (folder / _REPORT).exists():
        text = (folder / _OUTPUT).read_text(encoding="utf-8", errors="replace")
        start = text.find("Traceback (most recent call last)")  # later ones only tell that a peer is gone
        words = text[start : start + 4000] if start >= 0 else text[-4000:]
        left = [files.read_json(path) for path in folder.glob(_WORDS.format("*"))]
        left.sort(key=lambda told: (not told["advice"], told["time"]))  # the first that knew why
        told = left[0] if left else None
        raise WorkerFailed(f"training in {params.gpus} processes failed:\n{words}", told)
    return read_report(files.read_json(folder / _REPORT))


def main(path: str) -> None:
    """One process: train, and on rank 0 leave the report."""
    import torch.distributed as dist

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    params: Any = params_class("train_drafter")(**json.loads(Path(path).read_bytes()))
    try:
        report = train_here(resolve_inputs(params), stoppable(params.folder))
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


# Targets and drafters in processes of their own, placed on the GPUs that were named -------------------------


WORKERS = "workers"  # in the stage's folder: each process's log and timings
TIMINGS, SUMMARY = "pipeline.parquet", "pipeline.json"


def train_pipeline(params: TrainDrafterParams, progress: Any = None) -> TrainReport:
    """Train with targets on `target_gpus` that feed drafters on `drafter_gpus`, and wait for them."""
    folder, count = params.folder, len(params.target_gpus)
    for path in (folder / STOP, folder / STEPS, *(folder / WORKERS).glob("*")):
        path.unlink(missing_ok=True)
    pipes = {(m, k): Pipe() for m in range(count) for k in range(len(params.drafter_gpus))}
    with socket.socket() as probe:  # a free port
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    jobs = []
    for k, gpu in enumerate(params.drafter_gpus):
        ends = [pipes[m, k][0] for m in range(count)]
        jobs.append(Job(f"drafter-{k}", drafter_process, (params, gpu, k, ends, port), True))
    for m, gpu in enumerate(params.target_gpus):
        ends = [pipes[m, k][1] for k in range(len(params.drafter_gpus))]
        jobs.append(Job(f"target-{m}", target_process, (params, gpu, m, ends), False))
    results = run_workers(
        jobs,
        folder / WORKERS,
        ends=[end for pipe in pipes.values() for end in pipe],
        on_poll=follower(params, progress),
        on_stop=lambda: files.write_bytes(folder / STOP, b""),
        grace_s=GRACE_S,
    )
    timings = pl.concat(pl.read_parquet(folder / WORKERS / f"{job.name}.parquet") for job in jobs)
    with files.atomic_path(folder / TIMINGS) as temporary:
        timings.write_parquet(temporary)
    seconds = {job.name: results[job.name]["seconds"] for job in jobs if job.leads}
    files.write_json(folder / SUMMARY, {**summary(timings, seconds), **_of_targets(results)})
    return read_report(results["drafter-0"])


def drafter_process(
    params: TrainDrafterParams, gpu: int, rank: int, pipes: list[Connection], port: int
) -> dict[str, Any]:
    """Train on the states that come through `pipes`, one a target; what is returned is its report."""
    import torch

    inputs = _placed(params, gpu)
    world = len(params.drafter_gpus)
    if world > 1:
        place = dict(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=gpu, MASTER_PORT=port)
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    timings = Timings(f"drafter-{rank}", inputs.device)
    width, taps = inputs.drafter.hidden_size, list(inputs.drafter.tap_ids)
    check_queue(inputs)
    opened: list[PipelineItems] = []

    def open_pipeline(inputs: TrainingInputs) -> tuple[PipelineItems, TargetHead]:
        receivers = [
            Receiver(
                pipe,
                f"target-{m}",
                slots=params.queue_rows,
                row_tokens=params.context_tokens,
                tap_width=len(taps) * width,
                hidden=width,
                device=inputs.device,
            )
            for m, pipe in enumerate(pipes)
        ]
        items = PipelineItems(
            params.samples_path,
            width,
            taps,
            receivers,
            identity=identify(resolve(params.target), seed=params.seed),
            rank=rank,
            world=world,
            timings=timings,
        )
        opened.append(items)
        return items, load_ends(inputs)

    try:
        report = train_here(inputs, stoppable(params.folder), open_pipeline)
    except Stop:
        opened[0].close()
        return {}
    opened[0].close()
    timings.save(params.folder / WORKERS)
    if world > 1:
        torch.distributed.destroy_process_group()
    return report_values(report)


def target_process(
    params: TrainDrafterParams, gpu: int, number: int, pipes: list[Connection]
) -> dict[str, Any]:
    """Make rows for the drafters at the other ends of `pipes`."""
    inputs = _placed(params, gpu)
    taps = len(inputs.drafter.tap_ids)
    sizes = {"context": params.context_tokens, "hidden": inputs.drafter.hidden_size, "taps": taps}
    left = params.folder / f"{Path(SNAPSHOT).stem}-target-{number}.json"
    with explained(None, sizes, device=inputs.device, snapshot=left):
        items = open_live(inputs)
        rows, heldout = packed_rows(inputs, items)
        senders = [Sender(pipe, f"drafter-{k}") for k, pipe in enumerate(pipes)]
        timings = Timings(f"target-{number}", items.target.device)
        result = RowServer(items, rows, heldout, senders, number, len(params.target_gpus), timings).serve()
    timings.save(params.folder / WORKERS)
    return {**result, **target_figures(inputs, items.forward.path)}


def _placed(params: TrainDrafterParams, gpu: int) -> TrainingInputs:
    """The run's inputs with this process's own device: GPU `gpu`, or the CPU where the run is on one."""
    import torch

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    device = "cpu"
    if choose_device(params.device).type == "cuda":
        device = f"cuda:{gpu}"
        torch.cuda.set_device(device)
    return resolve_inputs(params.changed(device=device))


def _of_targets(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """What was predicted and measured of the target that held most."""
    names = ("predicted_peak_gib", "measured_peak_gib", "memory_error_pct")
    held = [found for found in results.values() if names[0] in found]
    if not held:
        return {}
    most = max(held, key=lambda found: [found.get(name, 0.0) for name in (names[1], names[0])])
    return {f"target_{name}": most[name] for name in names if name in most}


if __name__ == "__main__":
    main(sys.argv[1])
