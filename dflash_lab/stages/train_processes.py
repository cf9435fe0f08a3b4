"""The training itself: here, in processes that torchrun starts, or with targets and drafters apart."""

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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from dflash_lab import files
from dflash_lab.drafter.workers import WorkerFailed, words_of
from dflash_lab.errors import InputError, naming
from dflash_lab.machine import usable_cpus
from dflash_lab.stages import params_class
from dflash_lab.stages.judgement import before_training
from dflash_lab.stages.training_inputs import SNAPSHOT

if TYPE_CHECKING:
    import torch

    from dflash_lab.drafter.config import DrafterConfig
    from dflash_lab.drafter.model import Drafter
    from dflash_lab.drafter.rows import Items
    from dflash_lab.drafter.train import TrainReport
    from dflash_lab.memory.gate import Clearance, NotPredicted
    from dflash_lab.models.load import TargetHead
    from dflash_lab.stages.train_drafter import TrainDrafterParams

# ----------------------------------------------------------------------------------------------------
# The measure that training runs on the side: acceptance on held-out samples, which the loss does not say.


BUDGETS = (16, 64)  # of draft trees, in nodes


def tau_probe(params: TrainDrafterParams, store: Items, head: Any) -> Any:
    """Acceptance length on the first held-out samples, as decoding would walk them: chained, and of draft
    trees.
    """
    import numpy as np

    from dflash_lab.acceptance.offline import answer_segments, offline

    items = [store[int(i)] for i in np.flatnonzero(store.heldout)[: params.tau_samples]]
    items = [item for item in items if answer_segments(item.loss_mask)]  # some are cut within their prompt

    def probe(drafter: Any) -> dict[str, Any]:
        if not items:
            return {}
        report = offline(items, head, drafter, budgets=BUDGETS, top_k=())
        trees = {f"tree{budget}_tau": report.tau(budget).mean for budget in BUDGETS}
        return {"chained_tau": report.tau().mean, **trees}

    return probe


# ----------------------------------------------------------------------------------------------------
# Training in this process: ask for the memory, load, train, and say how right the answer was.


logger = logging.getLogger(__name__)
MEMORY = "memory.json"  # of the first process: predicted and measured peak, how a live target runs its rows


def train_here(
    params: TrainDrafterParams, progress: Any = None, open_with: Callable[..., Any] | None = None
) -> TrainReport:
    """Load states (or the target that makes them), the ends of the target and the drafter, and train in this
    process, perhaps one of several. `open_with` replaces `open_states`.
    """
    import torch

    from dflash_lab.drafter.checkpoint import setup
    from dflash_lab.drafter.distributed import join
    from dflash_lab.drafter.live import LiveItems
    from dflash_lab.drafter.loss import VocabShard
    from dflash_lab.drafter.train import train
    from dflash_lab.machine import device_budget_gib
    from dflash_lab.memory.gate import explained
    from dflash_lab.models.load import choose_device
    from dflash_lab.models.source import load_config
    from dflash_lab.stages import training_inputs
    from dflash_lab.stages.training_inputs import ask_training, memory_figures

    group, device = join(params.parallel, choose_device(params.device))
    if params.attention == "flex" and device.type != "cuda":
        raise InputError(
            f"train_drafter: attention='flex' needs CUDA for its backward pass, and this trains on {device}. "
            "Give attention='auto'."
        )
    dtype = training_inputs.drafter_dtype(params, device)
    if params.compile and device.type == "cuda":
        torch.compiler.reset()  # shapes of earlier runs of this process count against the compiler's limit
    target, free_gib = load_config(params.target), device_budget_gib(device)
    store = training_inputs.open_bare(params) if params.source == "store" else None
    config = training_inputs.drafter_config(params, store)
    training_inputs.check_room(params, config, dtype)
    final = bool(getattr(store, "has_final", False))

    def ask(rows: str = "") -> Clearance | NotPredicted:
        return ask_training(
            params, target, config, device, dtype, final_states=final, rows=rows, budget_gib=free_gib
        )

    cleared = ask()  # before anything is loaded
    sizes = {
        "anchors": params.anchors, "block_size": config.block_size, "context": params.context_tokens,
        "hidden": config.hidden_size, "vocabulary": config.vocab_size, "taps": len(config.tap_ids),
        "intermediate": config.intermediate_size,
    }  # fmt: skip
    watch: dict[str, Any] = dict(device=device, snapshot=params.folder / snapshot_name(group))
    with explained(cleared, sizes, **watch):
        items, head = (open_with or training_inputs.open_states)(params, device, dtype)
        drafter = first_drafter(params, config, head, device, dtype)
    if isinstance(items, LiveItems):
        cleared = ask(items.forward.path)
    settings = training_inputs.train_settings(params, items, config)
    run, source = params.folder / "run", training_inputs.source_of(params, items)
    if group.rank == 0:
        lengths = items.lengths[~items.heldout].tolist()
        if warning := before_training(settings.max_steps, len(lengths), sum(lengths)):
            logger.warning("%s", warning)
        now = setup(settings, drafter, lengths, group.world, source)
        training_inputs.set_aside_other_run(run, now, anew=params.force)
    group.barrier()
    whole, shard = head, None
    measured = bool(params.tau_samples) and group.rank == 0  # tau is measured with the whole head
    if params.head_parallel:
        shard = VocabShard(config.vocab_size)
        mine = whole.weight[shard.slice()]  # a view, where the whole stays for others
        tied = whole.weight is whole.embedding_weight
        kept = tied or measured or isinstance(items, LiveItems)
        head = dataclasses.replace(whole, weight=mine if kept else mine.clone())
    probe = tau_probe(params, items, whole if measured else head) if params.tau_samples else None
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


def snapshot_name(group: Any) -> str:
    """The file of a process's last refused request; of one process, simply that."""
    path = Path(SNAPSHOT)
    return path.name if group.world == 1 else f"{path.stem}-{group.rank}{path.suffix}"


def first_drafter(
    params: TrainDrafterParams,
    config: DrafterConfig,
    head: TargetHead,
    device: torch.device,
    dtype: torch.dtype,
) -> Drafter:
    """The drafter before its first step, drawn or read, compiled on CUDA if asked for."""
    import torch

    from dflash_lab.drafter.checkpoint import load_checkpoint
    from dflash_lab.drafter.model import Drafter

    if params.start_from:
        drafter = load_checkpoint(params.start_from, device, dtype)
        if told := drafter.config.differences(config):
            raise InputError(
                f"train_drafter: {params.start_from} is a drafter of another shape than these parameters say "
                f"({'; '.join(told)}: the drafter's value first). Give the drafter's values, or start from "
                "another."
            )
    else:
        with torch.device("meta"):  # a billion weights are drawn once, not first as torch's layers would
            empty = Drafter(config)
        empty.to_empty(device="cpu").initialize(torch.Generator().manual_seed(params.seed))
        drafter = empty.to(device, dtype)
        drafter.fit_to_head(head.weight)
    drafter.gradient_checkpointing = params.gradient_checkpointing
    if params.compile and device.type == "cuda":
        drafter.compile_layers()
    return drafter


# ----------------------------------------------------------------------------------------------------
# Training in several processes, started from a notebook or a shell alike: torchrun runs this module in
# each.
#
#     torchrun --nproc-per-node 8 -m dflash_lab.stages.train_processes <parameters.json>
#
# The parent follows the run's journal for its progress bar, ends all processes when it is stopped, and
# shows the failing process's own traceback when one dies. Rank 0 leaves the report as JSON.


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

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    params: Any = params_class("train_drafter")(**json.loads(Path(path).read_bytes()))
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


# ----------------------------------------------------------------------------------------------------
# Online training with targets and drafters in processes of their own, placed on the GPUs that were named.
#
# The parent starts them, follows the run's journal for its progress bar, asks for a checkpoint and an
# orderly end when it is stopped, and raises the failing process's own traceback when one dies. Each leaves
# its log and its timings in `train_drafter/workers/` of the run's folder.


WORKERS = "workers"
TIMINGS, SUMMARY = "pipeline.parquet", "pipeline.json"
# for a checkpoint after a stop, and for the targets once the drafters have ended


def train_pipeline(params: TrainDrafterParams, progress: Any = None) -> TrainReport:
    """Train with `params.targets` feeding `params.drafters`, and wait for them."""
    from multiprocessing import Pipe

    from dflash_lab.drafter.pipeline import summary
    from dflash_lab.drafter.workers import Job, run_workers

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


def drafter_process(values: dict[str, Any], rank: int, pipes: list[Connection], port: int) -> dict[str, Any]:
    """Train on the states that come through `pipes`, one a target; what is returned is its report."""
    import torch

    from dflash_lab.drafter.pipeline import PipelineItems, Receiver, Timings
    from dflash_lab.models.source import identify, load_config, resolve
    from dflash_lab.stages.training_inputs import check_queue, live_taps, load_ends

    params = _placed(values, "drafters", rank)
    world = len(params.drafters)
    if world > 1:
        place = dict(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=params.drafters[rank], MASTER_PORT=port)
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    device = torch.device(params.device)
    timings = Timings(f"drafter-{rank}", device)
    width, taps = load_config(params.target).hidden_size, live_taps(params)
    check_queue(params, device, len(taps), width)

    def open_pipeline(params: TrainDrafterParams, device: torch.device, dtype: torch.dtype) -> Any:
        receivers = [
            Receiver(
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
            receivers,
            identity=identity,
            rank=rank,
            world=world,
            timings=timings,
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
    timings.save(params.folder / WORKERS)
    if world > 1:
        torch.distributed.destroy_process_group()
    return report_values(report)


def target_process(values: dict[str, Any], number: int, pipes: list[Connection]) -> dict[str, Any]:
    """Make rows for the drafters at the other ends of `pipes`."""
    import torch

    from dflash_lab.drafter.pipeline import RowServer, Sender, Timings
    from dflash_lab.memory.gate import explained
    from dflash_lab.models.source import load_config
    from dflash_lab.stages.training_inputs import SNAPSHOT, live_taps, open_live, packed_rows, target_figures

    params = _placed(values, "targets", number)
    device, config = torch.device(params.device), load_config(params.target)
    width = config.hidden_size
    sizes = {"context": params.context_tokens, "hidden": width, "taps": len(live_taps(params))}
    left = params.folder / f"{Path(SNAPSHOT).stem}-target-{number}.json"
    with explained(None, sizes, device=device, snapshot=left):
        items = open_live(params, device)
        rows, heldout = packed_rows(params, items)
        senders = [Sender(pipe, f"drafter-{k}") for k, pipe in enumerate(pipes)]
        timings = Timings(f"target-{number}", items.target.device)
        result = RowServer(items, rows, heldout, senders, number, len(params.targets), timings).serve()
    timings.save(params.folder / WORKERS)
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

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    params: Any = params_class("train_drafter")(**values)
    if choose_device(params.device).type != "cuda":
        return params.changed(device="cpu")
    device = f"cuda:{getattr(params, side)[number]}"
    torch.cuda.set_device(device)
    return params.changed(device=device)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
