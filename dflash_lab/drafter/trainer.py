"""The training loop: rows in, steps, metrics, checkpoints; stopped anywhere, it goes on as if it had not
been.

A step sums the losses of `accumulate` packed rows, divides gradients once by the step's denominator (known
only when the weights are), clips, and moves the weights. All randomness is a function of the seed and the
place in the data, so model, optimizer and place are the whole state, and on a CPU a resumed run repeats the
uninterrupted one bit for bit.

On CUDA the host works one step ahead: a step's verdict is reached on the device, its numbers are read when
the next one has been started, and everything that writes or saves catches up first.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dflash_lab.drafter import state as states
from dflash_lab.drafter.anchors import stream_seed
from dflash_lab.drafter.feed import Fed, feed, prefetch
from dflash_lab.drafter.guard import FINE, Guard
from dflash_lab.drafter.journal import Journal
from dflash_lab.drafter.measure import evaluate, log, note
from dflash_lab.drafter.metrics import Tally
from dflash_lab.drafter.model import Drafter
from dflash_lab.drafter.objective import Objective, add_noise
from dflash_lab.drafter.optimizer import Optimizer
from dflash_lab.drafter.outcomes import Outcomes, catch_up, settle
from dflash_lab.drafter.parallel import Single
from dflash_lab.drafter.resume import resume, save
from dflash_lab.drafter.rows import Items, PackedRows, Row, Unfilled, without_bad_states
from dflash_lab.drafter.schedule import learning_rate_factor
from dflash_lab.drafter.settings import TrainSettings
from dflash_lab.drafter.warm import warm_up
from dflash_lab.errors import InputError

if TYPE_CHECKING:
    from dflash_lab.target.head import TargetHead

logger = logging.getLogger(__name__)

Progress = Callable[..., None]  # (description, done, total, **facts)
Probe = Callable[[Drafter], dict[str, Any]]  # more held-out metrics, such as a chained acceptance length


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


class Trainer:
    """One run: what it is made of, and its place."""

    def __init__(
        self,
        items: Items,
        head: TargetHead,
        drafter: Drafter,
        settings: TrainSettings,
        folder: Path,
        probe: Probe | None,
        on_progress: Progress | None,
        group: Single,
        source: dict[str, Any],
    ) -> None:
        self.head, self.drafter, self.settings, self.group = head, drafter, settings, group
        self.folder, self.probe, self.on_progress = folder, probe, on_progress
        self.device = drafter.fc.weight.device
        config = drafter.config
        if head.weight.shape[0] != config.vocab_size:
            raise InputError(
                f"the drafter's vocab_size is {config.vocab_size}, the target has {len(head.weight)} tokens."
            )
        self.objective = Objective(head, config, settings, group.plan_group)
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
        self.outcomes = Outcomes()
        self.tail = 0.0  # seconds of the last step that came after its numbers were on their way
        self.window = Tally(config.block_size, head.weight.device)  # since the last log
        self.journal: Journal | None = None
        self.compile_seconds = 0.0
        self.setup = states.setup(settings, drafter, self.rows.lengths, group.world, source)
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

    @property
    def step(self) -> int:
        """Steps done."""
        return self.place["step"]

    def run(self) -> TrainReport:
        """Go on to the end."""
        settings = self.settings
        resume(self)
        told = self.step or -1  # begun anew, the measure before the first step is told again
        self.journal = Journal(self.folder, told) if self.group.rank == 0 else None
        try:
            if self.left_out:
                note(self, f"left out of the measure, as not numbers: {', '.join(self.left_out)}")
            if self.live is not None:
                self.live.begin(self.place["epoch"], self.place["index"])
            self.compile_seconds = warm_up(self)
            if self.step == 0:
                evaluate(self)
            with contextlib.closing(prefetch(feed(self.stream(), self.device))) as stream:
                # A save can find the time up after a step that was not the last: a step more is due.
                done = self.done and self.place.get("ended", True)  # older checkpoints do not say
                while not done:
                    self.train_step(stream)
                    self.require_blocks()
                    done = self.place["ended"] = self.done  # asked once: what is below takes time as well
                    if self.step % settings.log_every == 0 or done:
                        log(self)
                    if self.step % settings.eval_every == 0 or done:
                        evaluate(self)
                    if self.step % settings.checkpoint_every == 0 or done:
                        save(self)
                    self.tell()
        finally:
            if self.journal:
                self.journal.close()
        return self.report()

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

    def stream(self) -> Iterator[tuple[int, int, Row]]:
        """This process's rows from our place on, with the place behind each."""
        world, rank = self.group.world, self.group.rank
        epoch, index, turn = self.place["epoch"], self.place["index"], 0
        while True:
            for i in range(index, self.rows.count(epoch)):
                if turn % world == rank:
                    row = self.rows.row(epoch, i)
                    yield epoch, i, row
                turn += 1
            epoch, index = epoch + 1, 0

    def train_step(self, stream: Iterator[Fed]) -> None:
        """One optimizer step, or a skipped one."""
        settings = self.settings
        started = time.perf_counter()
        settle(self, keep=1 if self.device.type == "cuda" else 0)
        asked = time.perf_counter()
        batch = [next(stream) for _ in range(settings.accumulate)]
        waited = time.perf_counter() - asked
        nominal = settings.anchors * (self.drafter.config.block_size - 1) * settings.accumulate
        self.drafter.train()
        tally = Tally(self.drafter.config.block_size, self.head.weight.device)
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
            sums += torch.stack([loss.total.detach(), loss.below]).to(sums)
            tally.add(loss)
        rows = [fed.host for fed in batch]
        spent = time.perf_counter() - started + self.tail
        world = self.group.world
        facts = [
            sum(row.tokens for row in rows),
            sum(row.blocks for row in rows),
            spent / world,
            waited / world,
        ]
        self.advance(len(batch))
        self.window.merge(tally, self.apply(sums, facts, nominal, rows))
        self.tail = time.perf_counter() - started + self.tail - spent

    def require_blocks(self) -> None:
        """Refuse to go on when an epoch, or the whole run, had no place to start a block in."""
        place, settings = self.place, self.settings
        if not place["blocks"] and (place["epoch"] or self.step >= settings.max_steps):
            catch_up(self)
        if not place["blocks"] and (place["epoch"] or self.step >= settings.max_steps):
            raise InputError(
                "no training sample has two answer tokens in a row within its first "
                f"{settings.context_tokens} tokens, so there is no place to start a block. Look at the loss "
                "masks that prepare shows, or raise context_tokens."
            )

    def apply(self, sums: torch.Tensor, facts: list[float], nominal: int, rows: list[Row]) -> torch.Tensor:
        """Judge the gradients, move the weights or not, and drop the gradients; whether they moved, on the
        device. `facts` are this process's tokens, blocks, and shares of seconds and of those waited.
        """
        settings, group = self.settings, self.group
        known = torch.tensor(facts, dtype=torch.float64).to(self.device, non_blocking=True)
        summed = group.total(torch.cat([sums, known]))
        total, below = summed[0], summed[1]
        some = below > 0
        loss = torch.where(some, total / below, 0.0)
        scale = torch.where(some, nominal * group.world / below, 0.0)
        norm = group.grad_norm(self.drafter.parameters()).double() * scale
        fault, usual = self.guard.judge(loss, norm, below)
        good = fault == FINE
        factor = learning_rate_factor(self.progress, settings.warmup, settings.floor)
        if settings.clip_norm:
            scale = scale * (settings.clip_norm / norm).clamp(max=1.0)
        self.optimizer.step(factor, scale, good)
        self.optimizer.zero_grad()
        self.place["step"] += 1
        values = torch.cat([torch.stack([loss, norm, fault, usual, below]), summed[2:]])
        self.outcomes.add(self.step, settings.optimizer.lr * factor, rows, values)
        return good

    def advance(self, rows: int) -> None:
        """Move our place behind the rows that all processes have used."""
        place = self.place
        place["index"] += rows * self.group.world
        while place["index"] >= (count := self.rows.count(place["epoch"])):
            place["index"] -= count
            place["epoch"] += 1

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
            save(self)
            raise

    def report(self) -> TrainReport:
        """Sum up."""
        place = self.place
        last = states.newest(self.folder / "checkpoints")
        assert last is not None, "a finished run has saved its last step"
        return TrainReport(
            steps=self.step,
            skipped=self.guard.skipped,
            seconds=place["seconds"],
            compile_seconds=self.compile_seconds,
            context_tokens=place["tokens"],
            blocks=place["blocks"],
            loader_share=place["waited"] / max(place["seconds"], 1e-9),
            first=place["first"],
            last=place["last"],
            best_step=self.step if place["best"] is None else place["best_step"],
            best=last if place["best"] is None else self.folder / "best",
            last_checkpoint=last,
        )
