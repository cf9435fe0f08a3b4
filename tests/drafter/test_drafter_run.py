"""What a run keeps beside its weights: noise, the best drafter, bad steps, the loss's chunks, waiting."""

from __future__ import annotations

import dataclasses
import time
from types import SimpleNamespace

import pytest
import torch
from support.tiny_drafters import ItemList, tiny_config, tiny_head, tiny_items
from support.wording import refused

from dflash_lab.drafter import loss
from dflash_lab.drafter import train as loop
from dflash_lab.drafter.checkpoint import load_checkpoint
from dflash_lab.drafter.journal import Journal, read_journal
from dflash_lab.drafter.model import Drafter
from dflash_lab.drafter.objective import Tally, TrainSettings
from dflash_lab.drafter.rows import stream_seed
from dflash_lab.drafter.train import STEP_NUMBERS, Diverged, StepFault, Trainer, train
from dflash_lab.files import read_json


def settings(**changes) -> TrainSettings:
    values = dict(max_steps=6, context_tokens=64, anchors=12, log_every=2, eval_rows=0, checkpoint_every=1)
    return TrainSettings(**(values | changes))


def fresh() -> Drafter:
    return Drafter(tiny_config(initializer_range=0.05)).initialize(torch.Generator().manual_seed(0))


def losses(folder) -> list[float]:
    return [record["loss"] for record in read_journal(folder) if record["kind"] == "step"]


def test_training_rows_get_noise_of_their_own_and_held_out_rows_none(tmp_path, monkeypatch):
    drawn = []
    plain = loop.add_noise

    def noted(taps, std, generator):
        drawn.append((std, generator.initial_seed()))
        noisy = plain(taps, std, generator)
        assert 0 < float((noisy - taps).abs().max()) <= std * 1.01
        return noisy

    monkeypatch.setattr(loop, "add_noise", noted)
    found = {}
    for std in (0.0, 0.5):
        chosen = settings(noise_std=std, eval_rows=1, eval_every=1, accumulate=2, seed=3)
        train(tiny_items(), tiny_head(), fresh(), chosen, folder=tmp_path / f"{std}")
        heldout = [r["loss"] for r in read_journal(tmp_path / f"{std}") if r["kind"] == "heldout"]
        found[std] = losses(tmp_path / f"{std}"), heldout
    assert len(drawn) == 12 and {std for std, _ in drawn} == {0.5}
    assert len({seed for _, seed in drawn}) == 12 and drawn[0][1] == stream_seed("noise", 3, 0, 0)
    assert found[0.5][0][0] != found[0.0][0][0]  # the first step's loss
    assert found[0.5][1][0] == found[0.0][1][0]  # the measure before it


def test_the_best_drafter_is_that_of_the_longest_held_out_streak(tmp_path, monkeypatch):
    told = iter([1.0, 2.0, 3.5, 3.0, 3.4])
    plain = Tally.report
    monkeypatch.setattr(Trainer, "log", lambda run: None)
    monkeypatch.setattr(Tally, "report", lambda tally: plain(tally) | {"streak": next(told)})
    chosen = settings(max_steps=4, eval_rows=1, eval_every=1, keep=9)
    report = train(tiny_items(), tiny_head(), fresh(), chosen, folder=tmp_path)
    assert report.best_step == 2 and read_json(report.best / "metrics.json")["streak"] == 3.5
    kept = load_checkpoint(report.best).state_dict()
    for step in (2, 4):
        then = load_checkpoint(tmp_path / "checkpoints" / f"step-{step:08d}").state_dict()
        assert all(torch.equal(kept[name], then[name]) for name in kept) == (step == 2)


class Killed(Exception):
    """Stands for a kill at a step."""


def killed_at(step):
    def progress(description, done, total, **facts):
        if done == step:
            raise Killed

    return progress


def spoilt(*numbers) -> ItemList:
    """Six samples, those of `numbers` with infinite states."""
    items = tiny_items(6, heldout=0)
    for number in numbers:
        items[number] = dataclasses.replace(
            items[number], taps=torch.full_like(items[number].taps, float("inf"))
        )
    return items


def test_bad_steps_in_a_row_are_counted_over_a_kill(tmp_path):
    items, chosen = spoilt(*range(6)), settings(max_bad_steps=3)
    with pytest.raises(Killed):
        train(items, tiny_head(), fresh(), chosen, folder=tmp_path, on_progress=killed_at(2))
    with refused(Diverged):
        train(items, tiny_head(), fresh(), chosen, folder=tmp_path)


def test_bad_steps_that_good_ones_part_do_not_end_a_run(tmp_path):
    """One sample a row and one of the two bad: every other step on average, seldom three in a row."""
    items = ItemList([spoilt(0)[0], *tiny_items(6, heldout=0)[1:2]])
    chosen = settings(context_tokens=30, max_steps=12, max_bad_steps=3)
    report = train(items, tiny_head(), fresh(), chosen, folder=tmp_path)
    skipped = [bool(r["skipped"]) for r in read_journal(tmp_path) if r["kind"] == "step"]
    assert report.skipped == sum(skipped) == 6  # more than may follow each other
    assert not all(skipped[:3])


def test_a_resumed_run_keeps_the_chunks_of_its_loss(tmp_path, monkeypatch):
    """More memory may be free by then, and other chunks are other sums."""
    seen = []
    plain = Trainer.resume

    def noted(run):
        plain(run)
        seen.append(run.objective.fused.chunk_rows)

    monkeypatch.setattr(Trainer, "resume", noted)
    monkeypatch.setattr(loss, "plan_chunk_rows", lambda **options: 8)
    with pytest.raises(Killed):
        train(tiny_items(), tiny_head(), fresh(), settings(), folder=tmp_path, on_progress=killed_at(3))
    monkeypatch.setattr(loss, "plan_chunk_rows", lambda **options: 32)
    train(tiny_items(), tiny_head(), fresh(), settings(), folder=tmp_path)
    assert seen == [None, 8]


def test_steps_are_taken_in_in_order_and_the_newest_may_wait(tmp_path):
    run = Trainer(tiny_items(), tiny_head(), fresh(), settings(), tmp_path)
    run.journal = Journal(tmp_path, -1)
    for step in (1, 2, 3):
        values = torch.full((len(STEP_NUMBERS),), float(step), dtype=torch.float64)
        values[STEP_NUMBERS.index("fault")] = StepFault.NONE
        run.pending.append((step, 0.1, [], values, None))
    run.collect(keep=1)
    assert [step for step, *_ in run.pending] == [3] and run.place["tokens"] == 1 + 2
    run.collect()
    run.journal.close()
    assert not run.pending and run.place["blocks"] == 1 + 2 + 3
    assert [(r["step"], r["grad_norm"]) for r in read_journal(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 3.0)]


class Slow(ItemList):
    """Samples that take a while to read, on a clock that stands still else."""

    now = 0.0  # seconds

    def __getitem__(self, index):
        Slow.now += 0.05
        return super().__getitem__(index)


def test_time_spent_waiting_for_rows_is_told(tmp_path, monkeypatch):
    def look():
        Slow.now += 0.01  # whatever is computed between two looks
        return Slow.now

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=look, time=time.time))
    monkeypatch.setattr(loop, "prefetch", lambda stream: stream)  # rows are read when they are asked for
    shares = {}
    for kind in (ItemList, Slow):
        folder = tmp_path / kind.__name__
        report = train(kind(tiny_items(8, heldout=0)), tiny_head(), fresh(), settings(), folder=folder)
        last = [r for r in read_journal(folder) if r["kind"] == "train"][-1]
        assert last["loader_share"] == pytest.approx(report.loader_share, abs=0.1)
        shares[kind] = report.loader_share
    assert shares[Slow] > 0.6 > shares[ItemList]
