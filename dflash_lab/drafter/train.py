"""The training loop: rows in, steps, metrics, checkpoints. Stopped anywhere, a run goes on as if it had not
been.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_lab import files
from dflash_lab.drafter.checkpoint import (
    differences,
    load_state,
    newest,
    rotate,
    save_checkpoint,
    save_state,
    setup,
)
from dflash_lab.drafter.distributed import Single
from dflash_lab.drafter.journal import Journal
from dflash_lab.drafter.loss import VocabShard
from dflash_lab.drafter.model import Drafter
from dflash_lab.drafter.objective import Objective, Tally, TrainSettings, add_noise
from dflash_lab.drafter.optim import Optimizer
from dflash_lab.drafter.rows import (
    Fed,
    Items,
    PackedRows,
    Row,
    Unfilled,
    feed,
    prefetch,
    stream_seed,
    without_bad_states,
)
from dflash_lab.errors import InputError, LabError
from dflash_lab.models.compiled import compiling, why_not_compiled

if TYPE_CHECKING:
    from dflash_lab.models.load import TargetHead

logger = logging.getLogger(__name__)

Progress = Callable[..., None]  # (description, done, total, **facts)
Probe = Callable[[Drafter], dict[str, Any]]  # more held-out metrics, such as a chained acceptance length
# What a step comes to, of all processes together, in the order of its way from the device to the host.
STEP_NUMBERS = ("loss", "norm", "fault", "usual", "denominator", "tokens", "blocks", "seconds", "waited")


@dataclass(frozen=True)
class TrainReport:
    """How a run went. `first` and `last` are held-out metrics before and after (train metrics without
    held-out data).
    """

    steps: int
    skipped: int
    seconds: float  # in steps, without evaluation, checkpoints and the compilation before the first
    compile_seconds: float
    context_tokens: int  # target states read, over all processes
    blocks: int
    loader_share: float  # of step time spent waiting for rows
    first: dict[str, Any]
    last: dict[str, Any]
    best_step: int
    best: Path  # drafter with the best held-out streak; the last one if none could be measured
    last_checkpoint: Path


def train(
    items: Items,
    head: TargetHead,
    drafter: Drafter,
    settings: TrainSettings,
    *,
    folder: Path | str,
    probe: Probe | None = None,
    on_progress: Progress | None = None,
    group: Single | None = None,
    source: dict[str, Any] | None = None,
    shard: VocabShard | None = None,
    target_device: torch.device | str | None = None,
) -> TrainReport:
    """Train `drafter` in place on the items that are not held out, writing everything below `folder`.

    A run found there goes on from its last checkpoint; `InputError` if it was another setup, of which
    `source` (plain values: where states and first weights come from) is a part. `head` is the target's, on
    the drafter's device and in its dtype; with `shard`, its weight is this rank's slice of it. On a
    `target_device` of its own the target's logits are made. Neither is a part of the setup. Raises `Diverged`
    after too many bad steps in a row.
    """
    trainer = Trainer(
        items, head, drafter, settings, Path(folder), probe, on_progress, group, source, shard, target_device
    )
    return trainer.run()


class Trainer:
    """One run: what it is made of, and its place.

    All randomness is a function of the seed and the place in the data, so model, optimizer and place are the
    whole state, and on a CPU a resumed run repeats the uninterrupted one bit for bit. On CUDA the host works
    one step ahead: a step's verdict is reached on the device, its numbers are read when the next one has been
    started, and everything that writes or saves catches up first.
    """

    def __init__(
        self,
        items: Items,
        head: TargetHead,
        drafter: Drafter,
        settings: TrainSettings,
        folder: Path,
        probe: Probe | None = None,
        on_progress: Progress | None = None,
        group: Single | None = None,
        source: dict[str, Any] | None = None,
        shard: VocabShard | None = None,
        target_device: torch.device | str | None = None,
    ) -> None:
        """As `train`, which calls `run`."""
        group = group or Single()
        self.head, self.drafter, self.settings, self.group = head, drafter, settings, group
        self.folder, self.probe, self.on_progress = folder, probe, on_progress
        self.device = drafter.fc.weight.device
        config = drafter.config
        tokens = len(head.weight) if shard is None else shard.total
        if tokens != config.vocab_size:
            raise InputError(
                f"the drafter's vocab_size is {config.vocab_size}, the target has {tokens} tokens."
            )
        self.head_slices = 1 if shard is None else group.world
        self.objective = Objective(
            head, config, settings, group.plan_group, shard=shard, target_device=target_device
        )
        sizes = dict(context_tokens=settings.context_tokens, anchors=settings.anchors, seed=settings.seed)
        heldout = np.asarray(items.heldout, dtype=bool)
        pad = self.device.type == "cuda"
        self.rows = PackedRows(items, np.flatnonzero(~heldout), config, pad=pad, **sizes)
        self.heldout: list[Row] = []  # kept in host memory: the same rows are measured each time
        if heldout.any() and settings.eval_rows:
            fixed = PackedRows(items, np.flatnonzero(heldout), config, pad=pad, **sizes)
            self.heldout = [fixed.row(0, i) for i in range(min(settings.eval_rows, fixed.count(0)))]
        self.live = items if isinstance(items, Unfilled) else None
        if self.live is not None:
            filled = (self.live.fill_heldout(r.to(self.device), i) for i, r in enumerate(self.heldout))
            self.heldout = [row.to("cpu") for row in filled]
        self.left_out: list[str] = []  # held-out samples whose states are not numbers, in words
        for number, row in enumerate(self.heldout):
            self.heldout[number], hashes = without_bad_states(row)
            self.left_out += [f"sample {digest} in held-out row {number}" for digest in hashes]
        self.model = group.wrap(drafter)
        self.optimizer = Optimizer(drafter.named_parameters(), settings.optimizer)
        self.guard = Guard(settings.explode_factor, settings.max_bad_steps, folder / "bad", self.device)
        # Steps whose numbers are not read yet, oldest first: step, rate, rows, STEP_NUMBERS, their copy.
        self.pending: deque[tuple[int, float, list[Row], Tensor, Any]] = deque()
        self.tail = 0.0  # seconds of the last step that came after its numbers were on their way
        self.window = self.tally()  # since the last log
        self.journal: Journal | None = None
        self.compile_seconds = 0.0
        self.setup = setup(settings, drafter, self.rows.lengths, group.world, source or {})
        self.place: dict[str, Any] = dict(
            step=0,
            epoch=0,
            index=0,
            seconds=0.0,
            waited=0.0,
            tokens=0,
            blocks=0,
            first={},
            last={},
            best=None,
            best_step=0,
            ended=False,  # whether the step behind us was the last one, measured and logged as such
        )

    def run(self) -> TrainReport:
        """Go on to the end."""
        settings = self.settings
        self.resume()
        told = self.step or -1  # begun anew, the measure before the first step is told again
        self.journal = Journal(self.folder, told) if self.group.rank == 0 else None
        try:
            if self.left_out:
                self.note(f"left out of the measure, as not numbers: {', '.join(self.left_out)}")
            if self.live is not None:
                self.live.begin(self.place["epoch"], self.place["index"])
            self.compile_seconds = self.warm_up()
            if self.step == 0:
                self.evaluate()
            with contextlib.closing(prefetch(feed(self.stream(), self.device))) as stream:
                # A save can find the time up after a step that was not the last: a step more is due.
                done = self.done and self.place.get("ended", True)  # older checkpoints do not say
                while not done:
                    self.train_step(stream)
                    self.require_blocks()
                    done = self.place["ended"] = self.done  # asked once: what is below takes time as well
                    if self.step % settings.log_every == 0 or done:
                        self.log()
                    if self.step % settings.eval_every == 0 or done:
                        self.evaluate()
                    if self.step % settings.checkpoint_every == 0 or done:
                        self.save()
                    self.tell()
        finally:
            if self.journal:
                self.journal.close()
        return self.report()

    @property
    def step(self) -> int:
        """Steps done."""
        return self.place["step"]

    @property
    def done(self) -> bool:
        """Whether steps or time are used up."""
        return self.step >= self.settings.max_steps or self.progress >= 1.0

    @property
    def progress(self) -> float:
        """Share of the run behind us: of its steps, or of its time if that is limited and further along."""
        share = self.step / self.settings.max_steps
        limit = self.settings.time_limit_s
        return max(share, self.place["seconds"] / limit) if limit else share

    # ---- a step

    def stream(self) -> Iterator[tuple[int, int, Row]]:
        """This process's rows from our place on, with the place behind each."""
        world, rank = self.group.world, self.group.rank
        epoch, index, turn = self.place["epoch"], self.place["index"], 0
        while True:
            for i in range(index, self.rows.count(epoch)):
                if turn % world == rank:
                    yield epoch, i, self.rows.row(epoch, i)
                turn += 1
            epoch, index = epoch + 1, 0

    def train_step(self, stream: Iterator[Fed]) -> None:
        """One optimizer step, or a skipped one."""
        settings, place, world = self.settings, self.place, self.group.world
        started = time.perf_counter()
        # On CUDA the step before may still be running: the one before that has ended.
        self.collect(keep=1 if self.device.type == "cuda" else 0)

        # The prefetch thread has read the rows and sent them to the device.
        asked = time.perf_counter()
        batch = [next(stream) for _ in range(settings.accumulate)]
        waited = time.perf_counter() - asked

        # Gradients of all rows add up. The denominator is known only when the weights of all processes' slots
        # are: until then a row is divided by this.
        nominal = settings.anchors * (self.drafter.config.block_size - 1) * settings.accumulate
        self.drafter.train()
        tally = self.tally()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)  # loss, denominator
        for number, fed in enumerate(batch):
            row = fed.arrived()
            if self.live is not None:
                row = self.live.fill(row, fed.epoch, fed.index)
            taps = row.taps.to(self.drafter.fc.weight.dtype)
            if settings.noise_std:
                generator = torch.Generator(self.device)
                generator.manual_seed(stream_seed("noise", settings.seed, fed.epoch, fed.index))
                taps = add_noise(taps, settings.noise_std, generator)
            self.group.exchange(self.model, number + 1 == len(batch))
            loss = self.objective(self.model, self.drafter, row, taps, teacher=False)
            (loss.total / nominal).backward()
            sums += torch.stack([loss.total.detach(), loss.denominator]).to(sums)
            tally.add(loss)
        rows = [fed.host for fed in batch]
        spent = time.perf_counter() - started + self.tail

        # Our place moves behind the rows that all processes have used.
        place["index"] += len(batch) * world
        while place["index"] >= (count := self.rows.count(place["epoch"])):
            place["index"] -= count
            place["epoch"] += 1

        # Judge, move the weights, and remember the metrics of a step that counts.
        facts = [
            sum(row.tokens for row in rows),
            sum(row.blocks for row in rows),
            spent / world,
            waited / world,
        ]
        self.window.merge(tally, self.update(sums, facts, nominal, rows))
        self.tail = time.perf_counter() - started + self.tail - spent

    def update(self, sums: Tensor, facts: list[float], nominal: int, rows: list[Row]) -> Tensor:
        """Judge the gradients, move the weights or not, and drop the gradients; whether they moved, on the
        device. `facts` are this process's tokens, blocks, and shares of seconds and of those waited.
        """
        settings, group = self.settings, self.group
        known = torch.tensor(facts, dtype=torch.float64).to(self.device, non_blocking=True)
        summed = group.total(torch.cat([sums, known]))  # one exchange for all that processes add up
        total, denominator = summed[0], summed[1]

        # `scale` turns gradients of rows over `nominal`, averaged over processes, into those of the loss.
        some = denominator > 0
        loss = torch.where(some, total / denominator, 0.0)
        scale = torch.where(some, nominal * group.world / denominator, 0.0)
        norm = group.grad_norm(self.drafter.parameters()).double() * scale
        fault, usual = self.guard.judge(loss, norm, denominator)
        good = fault == StepFault.NONE
        if settings.clip_norm:
            scale = scale * (settings.clip_norm / norm).clamp(max=1.0)

        factor = learning_rate_factor(self.progress, settings.warmup, settings.floor)
        self.optimizer.step(factor, scale, good)
        self.optimizer.zero_grad()
        self.place["step"] += 1

        numbers, copied = torch.cat([torch.stack([loss, norm, fault, usual, denominator]), summed[2:]]), None
        if numbers.is_cuda:  # read one step later, so that neither waits for the other
            current = torch.cuda.current_stream(numbers.device)  # of the drafter's device, current or not
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            numbers = host.copy_(numbers, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(current)
        self.pending.append((self.step, settings.optimizer.lr * factor, rows, numbers, copied))
        return good

    def collect(self, keep: int = 0) -> None:
        """Take in what all but the newest `keep` steps came to."""
        while len(self.pending) > keep:
            step, lr, rows, numbers, copied = self.pending.popleft()
            if copied is not None:
                copied.synchronize()
            values = dict(zip(STEP_NUMBERS, numbers.tolist(), strict=True))
            for name in ("tokens", "blocks"):
                self.place[name] += int(values[name])
            for name in ("seconds", "waited"):
                self.place[name] += values[name]
            fault = self.guard.note(step, values, rows, self.group.rank)
            if self.journal:
                loss, norm = (values[name] if values["denominator"] else None for name in ("loss", "norm"))
                self.journal.write("step", step, loss=loss, grad_norm=norm, lr=lr, skipped=fault or None)
            self.guard.check(step, fault)

    def catch_up(self) -> None:
        """Wait for all steps begun, in every process; the wait is training time."""
        started = time.perf_counter()
        self.collect()
        self.place["seconds"] += self.group.longest(time.perf_counter() - started + self.tail)
        self.tail = 0.0

    def require_blocks(self) -> None:
        """Refuse to go on when an epoch, or the whole run, had no place to start a block in."""
        place, settings = self.place, self.settings
        if place["blocks"] or not (place["epoch"] or self.step >= settings.max_steps):
            return
        self.catch_up()
        if not place["blocks"]:
            raise InputError(
                "no training sample has two answer tokens in a row within its first "
                f"{settings.context_tokens} tokens, so there is no place to start a block. Look at the loss "
                "masks that prepare shows, or raise context_tokens."
            )

    # ---- what a run measures and leaves

    def tally(self) -> Tally:
        """Open sums of metrics, beside the loss."""
        return Tally(self.drafter.config.block_size, self.head.weight.device)

    def log(self) -> None:
        """Write the means over the steps since the last log."""
        self.catch_up()
        sums = self.window.reduced(self.group.total)
        self.window = self.tally()
        if self.journal:
            place = self.place
            self.journal.write(
                "train",
                self.step,
                **sums.report(),
                epoch=place["epoch"],
                seconds=round(place["seconds"], 3),
                context_tokens=place["tokens"],
                blocks_seen=place["blocks"],
                loader_share=self.loader_share,
                memory_gib=_memory_gib(self.device),
                progress=self.progress,
                time=round(time.time(), 3),
            )
            self.journal.flush()

    def note(self, text: str) -> None:
        """Warn, and let the run's diary remember it."""
        if self.journal:
            self.journal.write("note", self.step, text=text)
            logger.warning("step %d: %s", self.step, text)

    def evaluate(self) -> None:
        """Measure the fixed held-out rows; keep the best drafter. One whose loss there is not a number is
        never the best; the rows are named.
        """
        if not self.heldout:
            return
        self.catch_up()
        self.drafter.eval()
        tally, group = self.tally(), self.group
        bad = torch.zeros(len(self.heldout), dtype=torch.float64, device=self.head.weight.device)
        with torch.no_grad():
            for first in range(0, len(self.heldout), group.world):  # all processes take part in every forward
                number = first + group.rank
                row = self.heldout[min(number, len(self.heldout) - 1)].to(self.device)
                taps = row.taps.to(self.drafter.fc.weight.dtype)
                loss = self.objective(self.model, self.drafter, row, taps, teacher=True)
                if number < len(self.heldout):
                    tally.add(loss)
                    bad[number] = ~loss.total.isfinite()
        report = tally.reduced(group.total).report()
        if self.probe:
            whole = group.replica(self.drafter)
            # Documents have all lengths, and the compiler keeps eight shapes: were they the probe's, the
            # steps' own would run uncompiled.
            with torch.compiler.set_stance("force_eager"):
                report |= files.plain(self.probe(whole)) if group.rank == 0 else {}
        place = self.place
        place["last"] = {"step": self.step, **report}
        place["first"] = place["first"] or place["last"]
        if self.journal:
            self.journal.write("heldout", self.step, **report)
            self.journal.flush()
            logger.info("held-out rows at step %d: %s", self.step, _told(report))
        if lost := [number for number, found in enumerate(group.total(bad).tolist()) if found]:
            rows = "; ".join(f"row {n} (samples {', '.join(self.heldout[n].hashes)})" for n in lost)
            self.note(f"the held-out loss is not a number, so this drafter cannot be the best: {rows}")
        if report["streak"] is None or report["loss"] is None:
            return
        # By streak, and where all streaks are 1.000, as they are in a short run, by loss.
        rank = (report["streak"], -report["loss"])
        if place["best"] is not None and rank <= (place["best"], -place.get("best_loss", report["loss"])):
            return
        place["best"], place["best_loss"], place["best_step"] = report["streak"], report["loss"], self.step
        weights = group.whole(self.drafter.state_dict())
        if group.rank == 0:
            save_checkpoint(self.folder / "best", self.drafter, weights)
            files.write_json(self.folder / "best" / "metrics.json", {"step": self.step, **report})

    def save(self) -> None:
        """Write a checkpoint from which the run goes on exactly."""
        self.catch_up()
        weights = self.group.whole(self.drafter.state_dict())
        tensors = self.group.whole(self.optimizer.tensors())
        window = self.window.reduced(self.group.total).sums
        if self.group.rank == 0:
            if self.journal:
                self.journal.flush()  # the lines before the checkpoint must not be younger than it
            record = {
                "setup": self.setup,
                "place": self.place,
                "optimizer_steps": self.optimizer.steps,
                "guard": self.guard.state(),
                "loss_rows": self.objective.fused.chunk_rows or 0,
                "head_slices": self.head_slices,
            }
            tensors |= {f"window.{name}": value for name, value in window.items()}
            root = self.folder / "checkpoints"
            save_state(root, self.step, self.drafter, weights, tensors, record)
            rotate(root, self.settings.keep)
        self.group.barrier()

    def tell(self) -> None:
        """Report progress; a stop asked for there is obeyed after saving."""
        if self.on_progress is None:
            return
        facts = {"streak": self.place["last"].get("streak")} if self.place["last"] else {}
        rate = self.place["tokens"] / max(self.place["seconds"], 1e-9)
        if limit := self.settings.time_limit_s:
            facts["left_s"] = round(max(0.0, limit - self.place["seconds"]))
        try:
            self.on_progress(
                "training", self.step, self.settings.max_steps, tokens_per_s=round(rate), **facts
            )
        except BaseException:
            self.save()
            raise

    def report(self) -> TrainReport:
        """Sum up."""
        place = self.place
        last = newest(self.folder / "checkpoints")
        assert last is not None, "a finished run has saved its last step"
        return TrainReport(
            steps=self.step,
            skipped=self.guard.skipped,
            seconds=place["seconds"],
            compile_seconds=self.compile_seconds,
            context_tokens=place["tokens"],
            blocks=place["blocks"],
            loader_share=self.loader_share,
            first=place["first"],
            last=place["last"],
            best_step=self.step if place["best"] is None else place["best_step"],
            best=last if place["best"] is None else self.folder / "best",
            last_checkpoint=last,
        )

    @property
    def loader_share(self) -> float:
        """Share of step time spent waiting for rows."""
        return self.place["waited"] / max(self.place["seconds"], 1e-9)

    # ---- before the first step

    def resume(self) -> None:
        """Go to the newest checkpoint of this run, if there is one; `InputError` if it is one of another
        setup.
        """
        found = newest(self.folder / "checkpoints")
        if found is None:
            return
        weights, tensors, record = load_state(found)
        if wrong := differences(record["setup"], self.setup):
            raise InputError(
                f"{self.folder} holds a run of another setup ({'; '.join(wrong[:4])}). Give that setup again "
                "to go on, or another run folder for a new run."
            )
        if self.group.rank == 0:
            rotate(self.folder / "checkpoints", self.settings.keep)  # a kill may have come before it
        self.group.load(self.drafter, weights)
        window = {n.removeprefix("window."): tensors.pop(n) for n in [*tensors] if n.startswith("window.")}
        self.group.load_optimizer(self.optimizer, tensors, record["optimizer_steps"])
        if self.group.rank == 0:  # the sums were those of all processes together
            self.window.load(window)
        self.guard.load(record["guard"])
        self.place = record["place"]
        # The same chunks give the same sums; another slice of the head has chunks of its own.
        rows, same = record["loss_rows"], record.get("head_slices", 1) == self.head_slices
        self.objective.fused.chunk_rows = rows if rows and same else None
        logger.info("training goes on from step %d", self.step)

    def warm_up(self) -> float:
        """Compile what a CUDA run compiles (layers, attention, loss, update) before its clock starts; the
        seconds it took, 0 where nothing is compiled.

        Raises `NotCompiled` for what the run was asked for by name, or shares with other processes.
        """
        if self.device.type != "cuda":
            return 0.0
        began = time.perf_counter()
        self.try_row()
        torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - began
        logger.info("compiled in %.0f s", seconds)
        return seconds

    def try_row(self) -> None:
        """Try a row; where it does not compile, once more with dense attention, then with plain layers, and
        say what that costs.
        """
        with compiling(
            "the training step", "Train with attention='dense', and with compile=False if that is not enough."
        ):
            while True:
                try:
                    return self._row_of_zeros()
                except Exception as error:
                    why = why_not_compiled(error)
                    # Processes that share a step could only fall back together, which none of them can know.
                    if not why or self.group.world > 1:
                        raise
                    if self.objective.attention == "auto":
                        self.objective.attention = "dense"
                        what = "attention runs dense, a document at a time: slower, with a mask a document"
                    elif self.objective.attention == "dense" and self.drafter.compiled:
                        self.drafter.run_plain()
                        what = "layers run uncompiled, which is slower and keeps more for the backward pass"
                    else:
                        raise
                    logger.warning(
                        "a part does not compile here (%s): %s; the predicted memory does not know it",
                        why,
                        what,
                    )
                self.optimizer.zero_grad()

    def _row_of_zeros(self) -> None:
        """A step of which nothing stays. Kernels depend on shapes alone; a device's rows all have one."""
        config = self.drafter.config
        row = self.rows.row(0, 0)
        width = len(config.tap_ids) * config.hidden_size
        taps = row.taps.new_zeros(len(row.input_ids), width, dtype=self.drafter.fc.weight.dtype)
        final = taps[:, : config.hidden_size] if self.settings.loss.needs_target else None
        row = dataclasses.replace(row, taps=taps, final=final).to(self.device)
        self.drafter.train()
        self.group.exchange(self.model, True)
        loss = self.objective(self.model, self.drafter, row, row.taps, teacher=False)
        (loss.total * 0.0).backward()
        self.optimizer.step(0.0, 1.0, torch.zeros((), dtype=torch.bool, device=self.device))
        self.optimizer.zero_grad()


def learning_rate_factor(progress: float, warmup: float, min_ratio: float) -> float:
    """Factor on the peak rate at `progress` in 0..1: a linear warm-up over the share `warmup` of the run,
    then half a cosine down to `min_ratio`.
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return progress / warmup
    share = (progress - warmup) / max(1.0 - warmup, 1e-12)
    return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * share))


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


class StepFault(IntEnum):
    """What is wrong with a step that must not happen."""

    NONE = 0
    LOSS = 1  # not a number
    NORM = 2  # of the gradient: not a number
    EXPLODED = 3  # a gradient far above its usual size
    EMPTY = 4  # no slot that counts


HISTORY = 64  # gradient norms the median is taken over
TRUSTED = 16  # as many must be there before a norm can be called exploding


class Diverged(LabError, RuntimeError):
    """Training stopped itself after too many bad steps in a row. `details` and `advice` go into the failure
    record.
    """

    def __init__(self, message: str, details: dict[str, Any]) -> None:
        super().__init__(message)
        self.details = details
        self.advice = (
            "Lower the learning rate, lengthen the warm-up, or look at the saved rows; the last good "
            "checkpoint is kept and the run resumes from it."
        )


class Guard:
    """Judges each step by its loss and gradient norm. The verdict is reached on the device and heard of
    later, so that a good step waits for nobody; a bad one is left out and counted, and its rows are written
    down, for a person to see what was in them. Many in a row mean that the run itself is broken.
    """

    def __init__(
        self, explode_factor: float, max_in_a_row: int, folder: Path, device: torch.device | str = "cpu"
    ) -> None:
        self.explode_factor, self.max_in_a_row, self.folder = explode_factor, max_in_a_row, folder
        self.norms = torch.full((HISTORY,), math.inf, dtype=torch.float64, device=device)  # newest last
        self.count = torch.zeros((), dtype=torch.int64, device=device)  # of remembered norms
        self.skipped = 0
        self.in_a_row = 0

    def judge(self, loss: Tensor, norm: Tensor, denominator: Tensor) -> tuple[Tensor, Tensor]:
        """(fault, usual norm) of a step, float64 scalars on the device; a good step's norm is remembered."""
        ordered = self.norms.sort().values
        middle = torch.stack([(self.count - 1).clamp_min(0) // 2, (self.count // 2).clamp_max(HISTORY - 1)])
        usual = ordered.gather(0, middle).mean()  # the median, as the norms not there are infinite
        exploded = (self.count >= TRUSTED) & (usual > 0) & (norm > self.explode_factor * usual)
        fault = torch.where(exploded, StepFault.EXPLODED, StepFault.NONE)
        fault = torch.where(torch.isfinite(norm), fault, StepFault.NORM)
        fault = torch.where(torch.isfinite(loss), fault, StepFault.LOSS)
        fault = torch.where(denominator > 0, fault, StepFault.EMPTY)
        good = fault == StepFault.NONE
        self.norms = torch.where(good, torch.cat([self.norms[1:], norm[None]]), self.norms)
        self.count = (self.count + good).clamp_max(HISTORY)
        return fault.double(), usual

    def note(self, step: int, values: dict[str, float], rows: Sequence[Row], rank: int = 0) -> str:
        """What was wrong with a step, once its numbers are known (STEP_NUMBERS), or an empty string.
        Rows of a bad one are saved.
        """
        kind, loss, norm, usual = (values[name] for name in ("fault", "loss", "norm", "usual"))
        if kind == StepFault.NONE:
            self.in_a_row = 0
            return ""
        if kind == StepFault.EMPTY:
            return "no slot counts in any row of this step"
        if kind == StepFault.LOSS:
            fault = f"loss is {loss}"
        elif kind == StepFault.NORM:
            fault = f"gradient norm is {norm}"
        else:
            fault = f"gradient norm {norm:.3g} is {norm / usual:.0f} times the usual {usual:.3g}"
        self.skipped += 1
        self.in_a_row += 1
        logger.warning("step %d skipped: %s", step, fault)
        save_rows(self.folder / f"step-{step:08d}-rank{rank}.safetensors", rows, fault)
        return fault

    def check(self, step: int, fault: str) -> None:
        """`Diverged` if the last steps were all bad."""
        if self.in_a_row >= self.max_in_a_row:
            details = {"step": step, "fault": fault, "skipped": self.skipped, "rows": str(self.folder)}
            raise Diverged(
                f"{self.in_a_row} bad steps in a row at step {step}: {fault}. Rows are in {self.folder}.",
                details,
            )

    def state(self) -> dict[str, Any]:
        """What a resumed run needs."""
        norms = self.norms[HISTORY - int(self.count) :].tolist()
        return {"norms": norms, "skipped": self.skipped, "in_a_row": self.in_a_row}

    def load(self, state: dict[str, Any]) -> None:
        """Put back `state()`."""
        norms = [math.inf] * (HISTORY - len(state["norms"])) + [float(norm) for norm in state["norms"]]
        self.norms.copy_(torch.tensor(norms, dtype=torch.float64))
        self.count.fill_(len(state["norms"]))
        self.skipped, self.in_a_row = int(state["skipped"]), int(state["in_a_row"])


def save_rows(path: Path, rows: Sequence[Row], fault: str) -> None:
    """Write rows as safetensors; the metadata names the fault and the samples' hashes."""
    tensors: dict[str, Tensor] = {}
    for number, row in enumerate(rows):
        fields = {
            "input_ids": row.input_ids,
            "taps": row.taps,
            "final": row.final,
            "anchors": row.layout.anchors,
            "starts": row.layout.starts,
            "labels": row.labels,
            "slot_mask": row.slot_mask,
        }
        tensors |= {f"{number}.{name}": t.cpu().contiguous() for name, t in fields.items() if t is not None}
    hashes = ",".join(digest for row in rows for digest in row.hashes)
    with files.atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={"fault": fault, "hashes": hashes})
