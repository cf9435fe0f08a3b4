"""The loop on tiny data: it learns, it resumes to the bit, accumulation is exact, bad steps are skipped and
kept.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from support.tiny_drafters import HIDDEN, SECOND, ItemList, tiny_config, tiny_drafter, tiny_head, tiny_items
from support.wording import refused

from dflash_lab.drafter import checkpoint as states
from dflash_lab.drafter.attention import row_layout
from dflash_lab.drafter.checkpoint import load_checkpoint
from dflash_lab.drafter.journal import Journal, Reader, read_journal
from dflash_lab.drafter.loss_terms import LossConfig
from dflash_lab.drafter.model import Drafter
from dflash_lab.drafter.objective import Objective, Tally, TrainSettings, selector_loss
from dflash_lab.drafter.optim import OptimizerConfig
from dflash_lab.drafter.train import Diverged, Trainer, train
from dflash_lab.errors import FileError, InputError, StoreError

LOSS = LossConfig(hard_weight=0.85, soft_weight=0.15, cap_weight=0.05)


def settings(**changes) -> TrainSettings:
    values = dict(
        max_steps=9,
        context_tokens=64,
        anchors=12,
        accumulate=2,
        loss=LOSS,
        gamma=4.0,
        noise_std=0.02,
        optimizer=OptimizerConfig(lr=2e-3),
        log_every=3,
        eval_every=4,
        eval_rows=1,
        checkpoint_every=4,
    )
    values.update(changes)
    return TrainSettings(**values)


def fresh(dtype=torch.float32) -> Drafter:
    config = tiny_config(initializer_range=0.05)
    return Drafter(config).initialize(torch.Generator().manual_seed(0)).to(dtype)


def records(folder, kind):
    """Records without what the clock and the machine say."""
    clock = ("seconds", "loader_share", "time", "memory_gib")
    return [{k: v for k, v in r.items() if k not in clock} for r in read_journal(folder) if r["kind"] == kind]


def test_it_learns_a_learnable_sequence(tmp_path):
    drafter = fresh()
    report = train(
        tiny_items(16, heldout=4),
        tiny_head(),
        drafter,
        settings(
            max_steps=60, loss=LossConfig(), eval_every=30, optimizer=OptimizerConfig(lr=1e-2), noise_std=0.0
        ),
        folder=tmp_path,
    )
    assert report.steps == 60 and report.skipped == 0
    assert report.last["streak"] > report.first["streak"] + 1.0
    assert report.last["accuracy"] > 0.6 > 0.2 > report.first["accuracy"]
    assert report.context_tokens > 0 and report.blocks > 0 and 0 <= report.loader_share <= 1
    best = load_checkpoint(report.best)
    last = load_checkpoint(report.last_checkpoint)
    assert all(torch.equal(a, b) for a, b in zip(last.parameters(), drafter.parameters(), strict=True))
    assert json.loads((report.best / "metrics.json").read_text())["step"] == report.best_step
    assert best.config == drafter.config


def test_of_equal_streaks_the_lower_loss_is_the_best(tmp_path):
    """A short run's streaks are often all alike: its export must not be the drafter before the first step."""
    report = train(
        tiny_items(16, heldout=4),
        tiny_head(),
        fresh(),
        settings(max_steps=4, eval_every=2, optimizer=OptimizerConfig(lr=1e-5), noise_std=0.0),
        folder=tmp_path,
    )
    told = [record for record in read_journal(tmp_path) if record["kind"] == "heldout"]
    assert len({record["streak"] for record in told}) == 1, "the streaks differ: this run shows nothing"
    losses = {record["step"]: record["loss"] for record in told}
    assert losses[4] < losses[2] < losses[0]
    assert report.best_step == 4


class Killed(Exception):
    """Stands for a kill at a step."""


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("kill_at", [[3], [4], [1, 6, 8]])
def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path, kill_at, optimizer):
    chosen = settings(optimizer=OptimizerConfig(kind=optimizer, lr=2e-3))
    whole = fresh()
    train(tiny_items(), tiny_head(), whole, chosen, folder=tmp_path / "whole")
    kills = list(kill_at)

    def progress(description, done, total, **facts):
        if kills and done == kills[0]:
            kills.pop(0)
            raise Killed

    for _ in kill_at:
        with pytest.raises(Killed):
            train(tiny_items(), tiny_head(), fresh(), chosen, folder=tmp_path / "cut", on_progress=progress)
    drafter = fresh()
    train(tiny_items(), tiny_head(), drafter, chosen, folder=tmp_path / "cut", on_progress=progress)
    for a, b in zip(whole.parameters(), drafter.parameters(), strict=True):
        assert torch.equal(a, b)
    for kind in ("step", "train", "heldout"):
        assert records(tmp_path / "cut", kind) == records(tmp_path / "whole", kind)
    assert [r["step"] for r in records(tmp_path / "cut", "step")] == list(range(1, 10))


def test_a_crash_between_checkpoints_loses_only_the_steps_since(tmp_path, monkeypatch):
    whole = fresh()
    train(tiny_items(), tiny_head(), whole, settings(), folder=tmp_path / "whole")
    original = Trainer.update

    def dies(self, *arguments):
        if self.step == 6:  # in the middle of step 7, nothing saved since step 4
            raise Killed
        return original(self, *arguments)

    monkeypatch.setattr(Trainer, "update", dies)
    with pytest.raises(Killed):
        train(tiny_items(), tiny_head(), fresh(), settings(), folder=tmp_path / "cut")
    monkeypatch.setattr(Trainer, "update", original)
    drafter = fresh()
    train(tiny_items(), tiny_head(), drafter, settings(), folder=tmp_path / "cut")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), drafter.parameters(), strict=True))
    assert records(tmp_path / "cut", "step") == records(tmp_path / "whole", "step")


def test_resume_refuses_another_setup(tmp_path):
    train(tiny_items(), tiny_head(), fresh(), settings(max_steps=2), folder=tmp_path)
    with refused(InputError):
        train(tiny_items(), tiny_head(), fresh(), settings(max_steps=2, gamma=7.0), folder=tmp_path)


def test_resume_refuses_states_of_another_source(tmp_path):
    train(tiny_items(), tiny_head(), fresh(), settings(max_steps=2), folder=tmp_path, source={"store": "a"})
    with refused(InputError):
        train(
            tiny_items(), tiny_head(), fresh(), settings(max_steps=2), folder=tmp_path, source={"store": "b"}
        )


@pytest.mark.parametrize("weighting", ["given", "dpace"])
@pytest.mark.parametrize("denominator", ["weights", "mask"])
def test_accumulated_rows_equal_one_large_row(tmp_path, denominator, weighting):
    """Two rows of one document each against both documents in one row: the same update."""
    items = ItemList(item for item in tiny_items(2, heldout=0, low=20, high=21))
    shared = dict(max_steps=1, denominator=denominator, noise_std=0.0, warmup=0.0, clip_norm=0.0, eval_rows=0)
    shared |= dict(loss=dataclasses.replace(LOSS, weighting=weighting), anchors=1000)
    for accumulate, context in ((2, 20), (1, 40)):
        drafter = fresh()
        chosen = settings(accumulate=accumulate, context_tokens=context, **shared)
        train(items, tiny_head(), drafter, chosen, folder=tmp_path / f"{accumulate}")
    losses = [records(tmp_path / name, "step")[0] for name in ("1", "2")]
    assert losses[0]["loss"] == pytest.approx(losses[1]["loss"], rel=1e-5)
    assert losses[0]["grad_norm"] == pytest.approx(losses[1]["grad_norm"], rel=1e-4)


def test_rows_that_are_not_numbers_are_skipped_counted_and_saved(tmp_path):
    items = tiny_items(12, heldout=0)
    bad = items[5]
    items[5] = dataclasses.replace(
        bad, taps=bad.taps.clone().index_fill_(0, torch.tensor([0, 1]), float("nan"))
    )
    drafter = fresh()
    report = train(items, tiny_head(), drafter, settings(eval_rows=0, checkpoint_every=9), folder=tmp_path)
    skipped = [r for r in records(tmp_path, "step") if r["skipped"]]
    assert report.skipped == len(skipped) >= 1
    assert all("nan" in r["skipped"] and r["loss"] is None for r in skipped)
    assert all(torch.isfinite(p).all() for p in drafter.parameters())
    saved = sorted((tmp_path / "bad").iterdir())
    assert len(saved) == report.skipped
    with safe_open(saved[0], framework="pt") as file:
        assert bad.hash in file.metadata()["hashes"].split(",")
        assert any(torch.isnan(file.get_tensor(n)).any() for n in file.keys() if n.endswith("taps"))  # noqa: SIM118


def with_states(item, name, value):
    states = getattr(item, name).clone()
    states[3] = value
    return dataclasses.replace(item, **{name: states})


@pytest.mark.parametrize("name", ["taps", "final"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_held_out_sample_that_is_not_a_number_is_named_and_the_others_are_measured(
    tmp_path, name, value, caplog
):
    items = tiny_items(12, heldout=3)
    items[1] = with_states(items[1], name, value)
    chosen = settings(max_steps=2, eval_every=1, context_tokens=96)
    report = train(items, tiny_head(), fresh(), chosen, folder=tmp_path)
    left = records(tmp_path, "note")
    assert len(left) == 1 and f"sample {items[1].hash} in held-out row 0" in left[0]["text"]
    assert left[0]["text"] in caplog.text and items[0].hash not in caplog.text
    blocks = [record["blocks"] for record in records(tmp_path, "heldout")]
    assert len(blocks) == 3 and 0 < blocks[0] < 12  # the third sample had a share of the anchors
    assert report.last["loss"] is not None and (report.best / "metrics.json").exists()


def test_a_drafter_whose_held_out_loss_is_not_a_number_is_never_the_best(tmp_path, monkeypatch, caplog):
    plain, step = Objective.__call__, []

    def broken(self, model, drafter, row, taps, *, teacher):
        loss = plain(self, model, drafter, row, taps, teacher=teacher)
        if not teacher:
            return loss
        step.append(row.hashes)
        return dataclasses.replace(loss, total=loss.total * float("nan")) if len(step) == 2 else loss

    monkeypatch.setattr(Objective, "__call__", broken)
    told, report_of = iter([1.0, 9.0, 2.0]), Tally.report
    monkeypatch.setattr(Trainer, "log", lambda run: None)
    monkeypatch.setattr(Tally, "report", lambda tally: report_of(tally) | {"streak": next(told)})
    chosen = settings(max_steps=2, eval_every=1)
    report = train(tiny_items(), tiny_head(), fresh(), chosen, folder=tmp_path)
    losses = [record["loss"] for record in records(tmp_path, "heldout")]
    assert [loss is None for loss in losses] == [False, True, False]
    assert report.best_step == 2 and "cannot be the best: row 0" in caplog.text
    assert all(digest in caplog.text for digest in step[1])


def test_too_many_bad_steps_in_a_row_end_the_run(tmp_path):
    items = ItemList(
        dataclasses.replace(i, taps=torch.full_like(i.taps, float("inf"))) for i in tiny_items(6, heldout=0)
    )
    with refused(Diverged) as caught:
        train(items, tiny_head(), fresh(), settings(max_bad_steps=3, eval_rows=0), folder=tmp_path)
    assert caught.value.details["skipped"] == 3 and "learning rate" in caught.value.advice
    assert len(list((tmp_path / "bad").iterdir())) == 3


def test_bf16_drafter_keeps_fp32_masters(tmp_path):
    """Steps far below a bf16 rounding step still add up."""
    drafter = fresh(torch.bfloat16)
    chosen = settings(max_steps=40, optimizer=OptimizerConfig(lr=2e-5), warmup=0.0, eval_every=40)
    before = drafter.fc.weight.detach().clone()
    train(tiny_items(), tiny_head(dtype=torch.bfloat16), drafter, chosen, folder=tmp_path)
    assert drafter.fc.weight.dtype == torch.bfloat16
    moved = (drafter.fc.weight != before).float().mean()
    assert moved > 0.2
    assert load_checkpoint(tmp_path / "checkpoints" / "step-00000040").fc.weight.dtype == torch.bfloat16


def test_checkpoints_are_rotated_and_whole(tmp_path):
    train(tiny_items(), tiny_head(), fresh(), settings(checkpoint_every=1, keep=2), folder=tmp_path)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000008", "step-00000009"]
    assert (tmp_path / "best" / "model.safetensors").exists()


@pytest.mark.parametrize("log_every", [3, 1])  # 1: it is a record that finds the time to be up
def test_time_limit_ends_the_run_with_a_low_rate(tmp_path, monkeypatch, log_every):
    ticks = iter(range(10**6))
    # Five looks a step, 0.1 s each, and two more where it is logged.
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) * 0.025, time=time.time)
    monkeypatch.setattr("dflash_lab.drafter.train.time", clock)
    rare = dict(eval_every=100_000, checkpoint_every=100_000)
    chosen = settings(max_steps=100_000, time_limit_s=1.0, log_every=log_every, **rare)
    left = []

    def tell(*_, left_s, **facts):
        left.append(left_s)

    report = train(tiny_items(), tiny_head(), fresh(), chosen, folder=tmp_path, on_progress=tell)
    assert left[0] == 1 and left[-1] == 0
    steps = records(tmp_path, "step")
    least = 8 if log_every == 1 else 10
    assert least <= report.steps <= 13 and report.seconds >= 1.0  # a step's time is known one step later
    assert steps[-1]["lr"] < 0.1 * max(r["lr"] for r in steps)
    assert report.last["step"] == report.steps


@pytest.mark.parametrize("finished", [False, True])
def test_a_run_taken_up_where_a_save_found_the_time_up_is_measured_at_its_end(
    tmp_path, monkeypatch, finished
):
    ticks = iter(range(10**6))
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) * 0.025, time=time.time)
    monkeypatch.setattr("dflash_lab.drafter.train.time", clock)
    rare = dict(eval_every=100_000, checkpoint_every=1, log_every=100_000)
    chosen = settings(max_steps=100_000, time_limit_s=1.0, **rare)

    def stop(*args, **facts):
        newest = states.newest(tmp_path / "checkpoints")
        place = json.loads((newest / "trainer" / "state.json").read_text())["place"]
        if place["seconds"] >= 1.0 and place["ended"] == finished:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tiny_items(), tiny_head(), fresh(), chosen, folder=tmp_path, on_progress=stop)
    before = records(tmp_path, "step")[-1]["step"]
    assert (records(tmp_path, "heldout")[-1]["step"] == before) is finished
    report = train(tiny_items(), tiny_head(), fresh(), chosen, folder=tmp_path)
    assert report.steps == before + (not finished) == report.last["step"]
    assert records(tmp_path, "heldout")[-1]["step"] == records(tmp_path, "train")[-1]["step"] == report.steps


def test_a_probe_of_many_shapes_leaves_the_steps_compiled(tmp_path):
    """More shapes than the compiler keeps (8), met before the first step."""
    torch.compiler.reset()
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def probe(drafter):
        before = len(graphs)
        for tokens in range(3, 13):
            layout = row_layout([[2]], [tokens], drafter.config.block_size)
            drafter(
                torch.zeros(1, drafter.config.block_size, HIDDEN), torch.zeros(tokens, 2 * HIDDEN), layout
            )
        return {"compiled": len(graphs) - before}

    drafter = fresh()
    drafter.compile_layers(backend=counted)
    report = train(tiny_items(), tiny_head(), drafter, settings(max_steps=1), folder=tmp_path, probe=probe)
    torch.compiler.reset()
    assert report.last["compiled"] == 0 and len(graphs) > 1


def test_probe_metrics_are_recorded(tmp_path):
    def probe(drafter):
        return {"chained_tau": 1.5}

    report = train(tiny_items(), tiny_head(), fresh(), settings(max_steps=1), folder=tmp_path, probe=probe)
    assert report.last["chained_tau"] == 1.5
    assert records(tmp_path, "heldout")[-1]["chained_tau"] == 1.5


@pytest.mark.parametrize("final", [True, False])
def test_the_log_says_how_often_the_target_agrees_with_the_data(tmp_path, caplog, final):
    caplog.set_level("INFO", "dflash_lab")
    hard = settings(loss=LossConfig(), max_steps=1, eval_every=1)
    report = train(tiny_items(final=final), tiny_head(), fresh(), hard, folder=tmp_path)
    line = next(text for text in reversed(caplog.messages) if text.startswith("held-out rows at step 1"))
    agreement = report.last["agreement"]
    known = f"{agreement:.1%}" if final else "not known without final states"
    assert line.endswith(f"the target's argmax is the data token: {known}") and "streak" in line


def test_soft_loss_without_final_states_says_what_to_do(tmp_path):
    with refused(InputError):
        train(tiny_items(final=False), tiny_head(), fresh(), settings(), folder=tmp_path)


def test_nothing_to_train_on_and_wrong_head_are_named(tmp_path):
    with refused(InputError):
        train(tiny_items(3, heldout=3), tiny_head(), fresh(), settings(), folder=tmp_path)
    with refused(InputError):
        train(
            tiny_items(),
            tiny_head(),
            tiny_drafter(tiny_config(vocab_size=50, mask_token_id=1)),
            settings(),
            folder=tmp_path,
        )


def test_second_generation_trains_its_selector(tmp_path):
    config = tiny_config(**SECOND, is_causal=False, initializer_range=0.05)
    drafter = Drafter(config).initialize(torch.Generator().manual_seed(0))
    chosen = settings(
        max_steps=60, eval_every=30, optimizer=OptimizerConfig(lr=1e-2), noise_std=0.0, loss=LossConfig()
    )
    report = train(tiny_items(16, heldout=4), tiny_head(), drafter, chosen, folder=tmp_path)
    assert report.last["selector_accuracy"] > 0.6 > 0.3 > report.first["selector_accuracy"]
    assert report.last["selector_streak"] <= report.last["top4_streak"]


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


def test_a_journal_is_read_on_from_where_it_was(tmp_path):
    journal, reader = Journal(tmp_path, 0), Reader(tmp_path)
    assert reader.read() == []
    for step in (1, 2):
        journal.write("step", step, loss=1.0 / step)
    journal.flush()
    first = reader.read()[0]
    assert [record["step"] for record in reader.read()] == [1, 2]
    with open(journal.path, "ab") as file:
        file.write(b'{"kind": "step", "st')  # still being written
    assert len(reader.read()) == 2
    with open(journal.path, "ab") as file:
        file.write(b'ep": 3, "loss": 0.5}\n')
    assert [record["step"] for record in reader.read()] == [1, 2, 3]
    assert reader.read()[0] is first, "lines read before are not parsed again"
    journal.close()
    Journal(tmp_path, 1).close()  # a resumed run drops what is behind its checkpoint
    assert [record["step"] for record in reader.read()] == [1]
    assert read_journal(tmp_path) == reader.read()


@pytest.mark.parametrize(
    "line", [b"\0" * 40, b"[]", b'{"kind": "step"}', b'{"kind": 3, "step": 1}', b"[" * 9999]
)
def test_a_damaged_line_of_the_journal_is_named_with_what_to_do(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"kind": "step", "step": 1}\n' + line + b"\n")
    with refused(StoreError):
        read_journal(tmp_path)


@pytest.mark.parametrize("number, blamed", [(errno.EIO, "disk"), (errno.ENOENT, "checkpoint")])
def test_a_failing_disk_is_not_told_as_a_damaged_checkpoint(tmp_path, monkeypatch, number, blamed):
    def refuse(*args, **kwargs):
        raise FileError(number, tmp_path / "trainer.safetensors")

    monkeypatch.setattr(states, "read_tensors", refuse)
    monkeypatch.setattr(states.files, "read_json", refuse)
    with pytest.raises(FileError if blamed == "disk" else StoreError) as told:
        states.load_state(tmp_path)
    assert ("Move the folder away" in str(told.value)) == (blamed == "checkpoint")
