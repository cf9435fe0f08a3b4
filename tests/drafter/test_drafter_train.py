"""The loop on tiny data: it learns, resumes to the bit, accumulates exactly, ends in time, keeps the best."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from types import SimpleNamespace

import pytest
import torch
from support.tiny_drafters import (
    HIDDEN,
    LOSS,
    SECOND,
    ItemList,
    Killed,
    killed_at,
    learner,
    records,
    tiny_config,
    tiny_drafter,
    tiny_head,
    tiny_items,
    tiny_settings,
)
from support.wording import refused

from dflash_lab.drafter import checkpoint as states
from dflash_lab.drafter import loss
from dflash_lab.drafter import train as loop
from dflash_lab.drafter.attention import row_layout
from dflash_lab.drafter.checkpoint import load_checkpoint
from dflash_lab.drafter.loss_terms import LossConfig
from dflash_lab.drafter.objective import Objective, Tally, selector_loss
from dflash_lab.drafter.optim import OptimizerConfig
from dflash_lab.drafter.rows import stream_seed
from dflash_lab.drafter.train import Trainer, train
from dflash_lab.errors import InputError
from dflash_lab.files import read_json


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_it_learns_a_learnable_sequence_and_its_selector_too(tmp_path):
    drafter = learner(**SECOND, is_causal=False)
    chosen = tiny_settings(
        max_steps=60, eval_every=30, optimizer=OptimizerConfig(lr=1e-2), noise_std=0.0, loss=LossConfig()
    )
    report = train(tiny_items(16, heldout=4), tiny_head(), drafter, chosen, folder=tmp_path)
    assert report.steps == 60 and report.skipped == 0
    assert report.last["streak"] > report.first["streak"] + 1.0
    assert report.last["accuracy"] > 0.6 > 0.2 > report.first["accuracy"]
    assert report.last["selector_accuracy"] > 0.6 > 0.3 > report.first["selector_accuracy"]
    assert report.last["selector_streak"] <= report.last["top4_streak"]
    assert report.context_tokens > 0 and report.blocks > 0 and 0 <= report.loader_share <= 1
    assert same(load_checkpoint(report.last_checkpoint), drafter)
    assert load_checkpoint(report.best).config == drafter.config
    assert read_json(report.best / "metrics.json")["step"] == report.best_step


def test_of_equal_streaks_the_lower_loss_is_the_best(tmp_path):
    """A short run's streaks are often all alike: its export must not be the drafter before the first step."""
    chosen = tiny_settings(max_steps=4, eval_every=2, optimizer=OptimizerConfig(lr=1e-5), noise_std=0.0)
    report = train(tiny_items(16, heldout=4), tiny_head(), learner(), chosen, folder=tmp_path)
    told = records(tmp_path, "heldout")
    assert len({record["streak"] for record in told}) == 1, "the streaks differ: this run shows nothing"
    losses = {record["step"]: record["loss"] for record in told}
    assert losses[4] < losses[2] < losses[0] and report.best_step == 4


def test_the_best_drafter_is_that_of_the_longest_streak_whose_loss_is_a_number(tmp_path, monkeypatch, caplog):
    plain, measured = Objective.__call__, []

    def broken(self, model, drafter, row, taps, *, teacher):
        found = plain(self, model, drafter, row, taps, teacher=teacher)
        if not teacher:
            return found
        measured.append(row.hashes)
        number = float("nan") if len(measured) == 2 else 1.0
        return dataclasses.replace(found, total=found.total * number)

    monkeypatch.setattr(Objective, "__call__", broken)
    told, report_of = iter([1.0, 9.0, 3.5, 3.0, 3.4]), Tally.report
    monkeypatch.setattr(Trainer, "log", lambda run: None)
    monkeypatch.setattr(Tally, "report", lambda tally: report_of(tally) | {"streak": next(told)})
    chosen = tiny_settings(max_steps=4, eval_every=1, checkpoint_every=1, keep=9)
    report = train(tiny_items(), tiny_head(), learner(), chosen, folder=tmp_path)
    assert [r["loss"] is None for r in records(tmp_path, "heldout")] == [False, True, False, False, False]
    assert "cannot be the best: row 0" in caplog.text
    assert all(digest in caplog.text for digest in measured[1])
    assert report.best_step == 2 and read_json(report.best / "metrics.json")["streak"] == 3.5
    for step in (2, 4):
        then = load_checkpoint(tmp_path / "checkpoints" / f"step-{step:08d}")
        assert same(load_checkpoint(report.best), then) == (step == 2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Uninterrupted runs by optimizer: settings, drafter and folder."""

    @functools.cache
    def run(kind):
        chosen = tiny_settings(optimizer=OptimizerConfig(kind=kind, lr=2e-3))
        folder, drafter = tmp_path_factory.mktemp(kind), learner()
        train(tiny_items(), tiny_head(), drafter, chosen, folder=folder)
        return chosen, drafter, folder

    return run


@pytest.mark.parametrize(
    ("kind", "kills"), [("adamw", [1, 6, 8]), ("muon", [3, 4]), ("adamw", "in step 7")], ids=str
)
def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path, monkeypatch, whole, kind, kills):
    """A stop after a step is saved; of a crash within one nothing since the checkpoint of step 4 is left."""
    chosen, wanted, folder = whole(kind)
    go = functools.partial(train, tiny_items(), tiny_head(), settings=chosen, folder=tmp_path)
    if kills == "in step 7":
        original = Trainer.update

        def dies(self, *arguments):
            if self.step == 6:
                raise Killed
            return original(self, *arguments)

        with monkeypatch.context() as patched, pytest.raises(Killed):
            patched.setattr(Trainer, "update", dies)
            go(learner())
        kills = ()
    progress = killed_at(*kills)
    for _ in kills:
        with pytest.raises(Killed):
            go(learner(), on_progress=progress)
    drafter = learner()
    go(drafter, on_progress=progress)
    assert same(drafter, wanted)
    for name in ("step", "train", "heldout"):
        assert records(tmp_path, name) == records(folder, name)
    assert [r["step"] for r in records(tmp_path, "step")] == list(range(1, 10))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000008", "step-00000009"]


@pytest.mark.parametrize(("gamma", "store"), [(7.0, "a"), (4.0, "b")])
def test_a_run_of_another_setup_or_source_is_not_gone_on_with(tmp_path, gamma, store):
    go = functools.partial(train, tiny_items(), tiny_head(), folder=tmp_path)
    go(learner(), settings=tiny_settings(max_steps=1), source={"store": "a"})
    with refused(InputError):
        go(learner(), settings=tiny_settings(max_steps=1, gamma=gamma), source={"store": store})


@pytest.mark.parametrize(("denominator", "weighting"), [("weights", "given"), ("mask", "dpace")])
def test_accumulated_rows_equal_one_large_row(tmp_path, denominator, weighting):
    """Two rows of one document each against both documents in one row: the same update."""
    items = tiny_items(2, heldout=0, low=20, high=21)
    shared = dict(max_steps=1, denominator=denominator, noise_std=0.0, warmup=0.0, clip_norm=0.0, eval_rows=0)
    shared |= dict(loss=dataclasses.replace(LOSS, weighting=weighting), anchors=1000)
    found = []
    for accumulate, context in ((2, 20), (1, 40)):
        chosen = tiny_settings(accumulate=accumulate, context_tokens=context, **shared)
        train(items, tiny_head(), learner(), chosen, folder=tmp_path / f"{accumulate}")
        found.append(records(tmp_path / f"{accumulate}", "step")[0])
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-5)
    assert found[0]["grad_norm"] == pytest.approx(found[1]["grad_norm"], rel=1e-4)


def test_training_rows_get_noise_of_their_own_and_held_out_rows_none(tmp_path, monkeypatch):
    drawn, plain, found = [], loop.add_noise, {}

    def noted(taps, std, generator):
        drawn.append((std, generator.initial_seed()))
        noisy = plain(taps, std, generator)
        assert 0 < float((noisy - taps).abs().max()) <= std * 1.01
        return noisy

    monkeypatch.setattr(loop, "add_noise", noted)
    for std in (0.0, 0.5):
        chosen = tiny_settings(max_steps=3, noise_std=std, seed=3)
        train(tiny_items(), tiny_head(), learner(), chosen, folder=tmp_path / f"{std}")
        found[std] = [records(tmp_path / f"{std}", kind)[0]["loss"] for kind in ("step", "heldout")]
    assert len(drawn) == len({seed for _, seed in drawn}) == 6 and {std for std, _ in drawn} == {0.5}
    assert drawn[0][1] == stream_seed("noise", 3, 0, 0)
    assert found[0.5][0] != found[0.0][0] and found[0.5][1] == found[0.0][1]


def test_a_resumed_run_keeps_the_chunks_of_its_loss(tmp_path, monkeypatch):
    """More memory may be free by then, and other chunks are other sums."""
    seen, plain = [], Trainer.resume

    def noted(run):
        plain(run)
        seen.append(run.objective.fused.chunk_rows)

    monkeypatch.setattr(Trainer, "resume", noted)
    go = functools.partial(train, tiny_items(), tiny_head(), settings=tiny_settings(max_steps=2))
    monkeypatch.setattr(loss, "plan_chunk_rows", lambda **options: 8)
    with pytest.raises(Killed):
        go(learner(), folder=tmp_path, on_progress=killed_at(1))
    monkeypatch.setattr(loss, "plan_chunk_rows", lambda **options: 32)
    go(learner(), folder=tmp_path)
    assert seen == [None, 8]


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves by 25 ms at each look: five looks a step, two more where it is logged."""
    ticks = iter(range(10**6))
    looks = SimpleNamespace(perf_counter=lambda: next(ticks) * 0.025, time=time.time)
    monkeypatch.setattr(loop, "time", looks)


RARELY = dict(max_steps=100_000, time_limit_s=1.0, eval_every=100_000)


@pytest.mark.parametrize(("log_every", "least"), [(3, 10), (1, 8)])  # 1: a record finds the time to be up
def test_time_limit_ends_the_run_with_a_low_rate(tmp_path, clock, log_every, least):
    chosen = tiny_settings(**RARELY, checkpoint_every=100_000, log_every=log_every)
    left = []

    def tell(*_, left_s, **facts):
        left.append(left_s)

    report = train(tiny_items(), tiny_head(), learner(), chosen, folder=tmp_path, on_progress=tell)
    assert left[0] == 1 and left[-1] == 0
    rates = [r["lr"] for r in records(tmp_path, "step")]
    assert least <= report.steps <= 13 and report.seconds >= 1.0  # a step's time is known one step later
    assert rates[-1] < 0.1 * max(rates)
    assert report.last["step"] == report.steps


@pytest.mark.parametrize("finished", [False, True])
def test_a_run_taken_up_where_a_save_found_the_time_up_is_measured_at_its_end(tmp_path, clock, finished):
    chosen = tiny_settings(**RARELY, checkpoint_every=1, log_every=100_000)

    def stop(*args, **facts):
        newest = states.newest(tmp_path / "checkpoints")
        place = json.loads((newest / "trainer" / "state.json").read_text())["place"]
        if place["seconds"] >= 1.0 and place["ended"] == finished:
            raise Killed

    with pytest.raises(Killed):
        train(tiny_items(), tiny_head(), learner(), chosen, folder=tmp_path, on_progress=stop)
    before = records(tmp_path, "step")[-1]["step"]
    assert (records(tmp_path, "heldout")[-1]["step"] == before) is finished
    report = train(tiny_items(), tiny_head(), learner(), chosen, folder=tmp_path)
    assert report.steps == before + (not finished) == report.last["step"]
    assert records(tmp_path, "heldout")[-1]["step"] == records(tmp_path, "train")[-1]["step"] == report.steps


def test_time_spent_waiting_for_rows_is_told(tmp_path, monkeypatch):
    now = [0.0]

    def look():
        now[0] += 0.01  # whatever is computed between two looks
        return now[0]

    class Slow(ItemList):
        def __getitem__(self, index):
            now[0] += 0.05
            return super().__getitem__(index)

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=look, time=time.time))
    monkeypatch.setattr(loop, "prefetch", lambda stream: stream)  # rows are read when they are asked for
    shares = {}
    for kind in (ItemList, Slow):
        chosen = tiny_settings(max_steps=4, eval_rows=0, accumulate=1, log_every=2)
        items, folder = kind(tiny_items(8, heldout=0)), tmp_path / kind.__name__
        shares[kind] = train(items, tiny_head(), learner(), chosen, folder=folder).loader_share
    assert shares[Slow] > 0.6 > shares[ItemList]


def test_a_probe_of_many_shapes_is_recorded_and_leaves_the_steps_compiled(tmp_path):
    """More shapes than the compiler keeps (8), met before the first step."""
    torch.compiler.reset()
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def probe(drafter):
        before, size = len(graphs), drafter.config.block_size
        for tokens in range(3, 13):
            layout = row_layout([[2]], [tokens], size)
            drafter(torch.zeros(1, size, HIDDEN), torch.zeros(tokens, 2 * HIDDEN), layout)
        return {"compiled": len(graphs) - before}

    drafter = learner(num_layers=1)
    drafter.compile_layers(backend=counted)
    chosen = tiny_settings(max_steps=1, accumulate=1)
    report = train(tiny_items(), tiny_head(), drafter, chosen, folder=tmp_path, probe=probe)
    torch.compiler.reset()
    assert records(tmp_path, "heldout")[-1]["compiled"] == report.last["compiled"] == 0 and graphs


@pytest.mark.parametrize("final", [True, False])
def test_the_log_says_how_often_the_target_agrees_with_the_data(tmp_path, caplog, final):
    caplog.set_level("INFO", "dflash_lab")
    hard = tiny_settings(loss=LossConfig(), max_steps=1, eval_every=1)
    report = train(tiny_items(final=final), tiny_head(), learner(), hard, folder=tmp_path)
    line = next(text for text in reversed(caplog.messages) if text.startswith("held-out rows at step 1"))
    agreement = report.last["agreement"]
    known = f"{agreement:.1%}" if final else "not known without final states"
    assert line.endswith(f"the target's argmax is the data token: {known}") and "streak" in line


@pytest.mark.parametrize(
    ("items", "shape"),
    [(dict(final=False), {}), (dict(count=3), {}), ({}, dict(vocab_size=50, mask_token_id=1))],
    ids=["soft loss without final states", "nothing to train on", "another head"],
)
def test_what_cannot_be_trained_says_what_to_do(tmp_path, items, shape):
    with refused(InputError):
        train(tiny_items(**items), tiny_head(), learner(**shape), tiny_settings(), folder=tmp_path)


def test_selector_loss_by_hand():
    """One slot: cross-entropy over its top 4, the label in the last place if it is not among them."""
    drafter = tiny_drafter(tiny_config(**SECOND))
    selector, head = drafter.candidate_selector, tiny_head().weight
    hidden = torch.randn(1, 2, 48, generator=torch.Generator().manual_seed(3), requires_grad=True)
    top = (hidden[0, 1] @ head.T).topk(5).indices
    for label, place, kept in ((int(top[2]), 2, top[:4]), (int(top[4]), 3, torch.cat([top[:3], top[4:]]))):
        labels = torch.tensor([[11, label]])
        rows = SimpleNamespace(
            live=torch.tensor([[False, True]]), label=labels, weight=torch.tensor([[0.0, 0.5]])
        )
        total, chosen = selector_loss(drafter, hidden, head, labels, rows)
        query = selector.predecessor_codebook[11] * selector.hidden_projection(hidden[0, 1])
        scores = head[kept] @ hidden[0, 1] + selector.successor_codebook[kept] @ query
        wanted = 0.5 * torch.nn.functional.cross_entropy(scores[None], torch.tensor([place]))
        assert float(total.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
        allowed = scores[:4] if label in top[:4] else scores[:3]
        assert int(chosen[0, 1]) == int(kept[allowed.argmax()])
        found = torch.autograd.grad(total, [hidden, selector.successor_codebook])
        expected = torch.autograd.grad(wanted, [hidden, selector.successor_codebook])
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))
