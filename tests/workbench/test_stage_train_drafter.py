"""The stage on a tiny real target: store in, drafter out; finished, resumed, set aside; its figures and
widget.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file
from support.wording import refused

from dflash_lab.data.samples import Sample, write_samples
from dflash_lab.drafter.checkpoint import load_checkpoint, read_config
from dflash_lab.drafter.journal import Journal, Reader
from dflash_lab.errors import InputError, StoreError
from dflash_lab.extraction.store import open_store
from dflash_lab.files import read_json, write_json
from dflash_lab.results import WouldReplace
from dflash_lab.stage_run import execute
from dflash_lab.stages.clearance import ask_training, memory_figures
from dflash_lab.stages.train_drafter import TrainDrafterParams, TrainDrafterResult, seconds_left
from dflash_lab.stages.training_inputs import resolve_inputs, train_settings
from dflash_lab.views import train_drafter as figures
from dflash_lab.views.style import headline

TINY = dict(
    device="cpu", interactive=False, num_layers=2, block_size=4, sliding_layers=[0], sliding_window=6,
    context_tokens=96, anchors=24, gamma=4.0, soft_weight=0.15, hard_weight=0.85, lr=1e-2, max_steps=12,
    log_every=2, eval_every=6, checkpoint_every=6, tau_samples=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(tiny_target, tmp_path_factory) -> Path:
    """A run folder with a store of 14 samples, a third of them held out, extracted from a tiny llama."""
    from dflash_lab.extraction.loop import extract
    from dflash_lab.models.load import load_target

    run = tmp_path_factory.mktemp("run")
    generator = np.random.default_rng(0)
    samples = [
        Sample(f"s{i}", generator.integers(0, 256, n), (np.arange(n) >= n // 3).astype(np.uint8), "test")
        for i, n in enumerate([20, 31, 17, 44, 25, 38, 29, 33, 18, 40, 22, 27, 35, 30])
    ]
    write_samples(run / "samples.parquet", samples, heldout_fraction=0.3, provenance={"test": True})
    sizes = dict(tap_ids=[1, 3, 5], token_budget=256, max_batch=8, store_final=True)
    extract(load_target(str(tiny_target("llama"))), run / "samples.parquet", run / "store", **sizes)
    return run


@pytest.fixture(scope="module")
def params(run_dir, tiny_target):
    """Return a function: run folder, changes -> parameters of a short run on the store of `run_dir`."""

    def params(folder, **changes) -> TrainDrafterParams:
        own = {"store": "" if folder == run_dir else str(run_dir / "store")}
        own |= {"run_dir": str(folder), "target": str(tiny_target("llama"))}
        return TrainDrafterParams(**{**TINY, **own, **changes})

    return params


@pytest.fixture(scope="module")
def result(run_dir, params) -> TrainDrafterResult:
    return execute(params(run_dir))


def write_split(path: Path, samples: list[tuple[int, int, bool]]) -> None:
    """Write samples of (length, first answer token, held out)."""
    rows = [
        Sample(f"s{n}", np.arange(n) + i, (np.arange(n) >= first).astype(np.uint8), "test")
        for i, (n, first, _) in enumerate(samples)
    ]
    write_samples(path, rows, heldout_fraction=0.3, provenance={})
    split = pl.Series("split", ["heldout" if heldout else "train" for *_, heldout in samples])
    pl.read_parquet(path).with_columns(split).write_parquet(path)


def test_what_does_not_fit_on_the_disk_is_said_before_anything_is_loaded(
    result, run_dir, params, monkeypatch
):
    monkeypatch.setattr("shutil.disk_usage", lambda path: namedtuple("Usage", "free")(10_000))
    monkeypatch.setattr(
        "dflash_lab.stages.training_inputs.load_head", lambda *args, **more: pytest.fail("loaded")
    )
    before = (run_dir / "drafter" / "model.safetensors").read_bytes()
    with refused(InputError):
        execute(params(run_dir, num_layers=1, force=True))
    assert (run_dir / "drafter" / "model.safetensors").read_bytes() == before


def test_stage_leaves_a_drafter_and_its_figures(result, run_dir):
    drafter = load_checkpoint(run_dir / "drafter")
    assert drafter.config.tap_ids == (1, 3, 5) and drafter.config.block_size == 4
    assert drafter.config.layer_types == ("sliding_attention", "full_attention")
    notes = (run_dir / "drafter" / "serve.md").read_text()
    assert '"num_speculative_tokens": 3' in notes and "--dtype float32 " in notes
    assert f'"model": "{run_dir / "drafter"}"' in notes  # not the folder it was put together in
    found = json.loads((run_dir / "train_drafter" / "result.json").read_text())["figures"]
    for name in ("streak_last", "chained_tau_last", "context_tokens_per_s", "agreement"):
        assert np.isfinite(found[name]), name
    assert 0 < found["loss_last"] < found["loss_first"]
    assert found["steps"] == 12 and found["skipped_steps"] == 0
    assert found["judgement"] in repr(headline(found)) and "so few steps" in found["judgement"]
    assert result.steps["step"].to_list() == list(range(1, 13))
    assert result.positions["slot"].unique().sort().to_list() == [1, 2, 3]
    heldout = result.metrics.filter(kind="heldout")
    assert heldout["step"].to_list() == [0, 6, 12]
    measured = {"loss", "ce", "kl", "entropy", "accuracy", "streak", "top2_streak", "agreement", "ece"}
    assert heldout.select(measured).null_count().sum_horizontal()[0] == 0
    taus = heldout.select("chained_tau", "tree16_tau", "tree64_tau")
    assert all(1 <= tau <= 4 for row in taus.rows() for tau in row)


def test_other_parameters_ask_first_and_set_the_earlier_run_aside(result, run_dir, params, tmp_path):
    values = dict(gamma=2.0, max_steps=2)
    drafter = {path.name: path.read_bytes() for path in (run_dir / "drafter").iterdir()}
    with refused(WouldReplace):
        execute(params(run_dir, **values))
    assert not (run_dir / "train_drafter" / "run-1").exists()
    execute(params(run_dir, drafter=str(tmp_path / "other"), force=True, **values))
    assert {path.name: path.read_bytes() for path in (run_dir / "drafter").iterdir()} == drafter
    assert (run_dir / "train_drafter" / "run-1" / "checkpoints" / "step-00000012").is_dir()
    assert read_config(tmp_path / "other").block_size == 4


def test_force_trains_anew_and_keeps_the_finished_run(params, tmp_path, caplog):
    """Too few steps are said before the first, of the samples that are trained on."""
    with caplog.at_level("WARNING"):
        first = execute(params(tmp_path, max_steps=2, eval_rows=1, tau_samples=0))
    samples, tokens = first.figures["training_samples"], first.figures["training_tokens"]
    assert 0 < samples < 14 and samples * 17 <= tokens <= samples * 44  # those held out are not trained on
    assert f"2 steps on {samples} samples ({tokens:,} tokens) are planned: too few" in caplog.text
    again = execute(params(tmp_path, force=True, max_steps=2, eval_rows=1, tau_samples=0))
    assert again.steps.equals(first.steps) and (tmp_path / "train_drafter" / "run-1" / "best").is_dir()


def test_the_store_of_a_trial_is_trained_on_and_the_result_says_how_much_it_holds(
    run_dir, params, tmp_path, caplog
):
    from dflash_lab.stages.extract import ExtractParams

    chosen = params(tmp_path, store="", max_steps=1, tau_samples=0)
    sizes = {"token_budget": 256, "max_batch": 8, "tap_ids": [1, 3, 5], "store_final": True, "device": "cpu"}
    given = {"run_dir": str(tmp_path), "target": chosen.target, "samples": str(run_dir / "samples.parquet")}
    execute(ExtractParams(**given, **sizes, max_samples=10, interactive=False))
    with caplog.at_level("INFO"):
        found = execute(chosen).figures
    assert "the store holds 10 of 14 samples, a trial (max_samples of extract)" in caplog.text
    assert (found["stored_samples"], found["stored_samples_of"]) == (10, 14)
    assert 0 < found["training_samples"] < 10


def test_a_released_drafter_can_be_started_from(result, run_dir, params, tmp_path):
    """Its file has notes that ours has not, its weights no digest; what computes otherwise is named."""
    from safetensors.torch import save_file

    ours = read_json(run_dir / "drafter" / "config.json")
    notes = {
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "transformers_version": "4.57.0",
        "max_position_embeddings": 262144, "initializer_range": 0.5,
    }  # fmt: skip
    released = tmp_path / "released"
    released.mkdir()
    save_file(load_file(run_dir / "drafter" / "model.safetensors"), released / "model.safetensors")
    common = dict(max_steps=1, start_from=str(released))
    write_json(released / "config.json", {**ours, **notes})
    tuned = execute(params(tmp_path, **common))
    assert tuned.figures["streak_first"] == pytest.approx(result.figures["streak_best"])
    assert read_json(tmp_path / "drafter" / "config.json")["eos_token_id"] == 2
    theta = {"rope_theta": 12345.0, "rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}}
    for change in (theta, {"is_causal": True}, {"partial_rotary_factor": 0.5}):
        write_json(released / "config.json", {**ours, **notes, **change})
        with refused(InputError):
            execute(params(tmp_path, force=True, **common))
    with refused(InputError):
        execute(params(tmp_path, start_from=str(run_dir / "drafter"), max_steps=1, num_layers=3, force=True))


def test_epochs_become_steps(run_dir, params):
    def steps(**changes) -> int:
        inputs = resolve_inputs(
            params(run_dir, epochs=3.0, grad_accum_steps=2, **{"max_steps": 0, **changes})
        )
        return train_settings(inputs, inputs.items).max_steps

    store = open_store(run_dir / "store")
    rows = int(store.lengths[~store.heldout].sum()) / 96
    found = steps()
    assert 3 * rows / 2 <= found <= 3 * (rows + 3) / 2
    assert steps(min_steps=2) == found and steps(min_steps=50) == 50
    assert steps(max_steps=7, min_steps=50) == 7  # steps asked for are steps


@pytest.mark.parametrize(
    "change",
    [
        dict(sliding_layers=[2], num_layers=2),
        dict(hard_weight=0.0, soft_weight=0.0),
        dict(tap_ids=[1]),
        dict(target_gpus=[0], source="live"),
        dict(target_gpus=[0], drafter_gpus=[1], source="store"),
        dict(target_gpus=[0], drafter_gpus=[1], source="live", gpus=2),
        dict(target_gpus=[0], drafter_gpus=[1, 1], source="live"),
        dict(head_parallel=True),
        dict(head_parallel=True, gpus=2, head_gpu=1),
        dict(head_parallel=True, gpus=2, target_head_gpu=1),
        dict(head_parallel=True, gpus=2, dflash2=True),
        # Slips, too large for what computes with them.
        dict(lr=1e30),
        dict(hard_weight=1e300),
        dict(epochs=1e300),
        dict(anchors=10**49),
    ],
    ids=repr,
)
def test_wrong_parameters_are_named(change):
    with refused(InputError):
        TrainDrafterParams(**change)


def test_a_store_of_another_target_or_of_other_weights_is_refused(params, tmp_path):
    from support.tiny_targets import build_tiny

    with refused(InputError):
        execute(params(tmp_path, target="random:qwen3-0.6b"))
    other = build_tiny("llama", tmp_path / "fine_tune", seed=5)  # same config, tokenizer, names and shapes
    with refused(InputError):
        execute(params(tmp_path, target=str(other)))


def test_every_figure_draws(result):
    drawn = [
        figures.positions(result.positions),
        figures.positions(result.positions, "train", "conditional"),
        figures.anchors(result.row),
    ]
    assert all(figure.data and figure.layout.title.text for figure in drawn)
    heat = drawn[0].data[0]
    wanted = result.positions.filter(kind="heldout", step=6, slot=2)["accuracy"][0]
    assert heat.z[list(heat.y).index(2)][list(heat.x).index(6)] == wanted


def test_mask_figure_shows_the_rule(result):
    row = result.row
    assert row["anchors"] and len(row["texts"]) == len(row["tokens"])
    number = max(range(len(row["anchors"])), key=lambda i: row["anchors"][i])
    anchor = row["anchors"][number]
    assert anchor > 6
    for kind, window in (("sliding", 6), ("full", None)):
        heat = figures.mask(row, number, kind).data[0]
        first = max(0, anchor - 40)
        for k in range(4):
            seen = [bool(v) for v in heat.z[k]]
            context, own = seen[: anchor - first], seen[anchor - first :]
            wanted = [window is None or anchor + k - p < window for p in range(first, anchor)]
            assert context == wanted
            assert own == [kind == "full" or j <= k for j in range(4)]


def test_monitor_reads_a_run_and_says_where_it_is(result, run_dir):
    folder = next(
        p for p in sorted((run_dir / "train_drafter").glob("run*")) if (p / "metrics.jsonl").exists()
    )
    drawn, line = figures.snapshot(Reader(folder))
    assert all(figure.data for figure in drawn) and len(drawn) == len(figures.VIEWS)
    assert [figure.data[0].type for figure in drawn[:2]] == ["scatter", "heatmap"]
    assert re.search(r"^step .* [\d,]+ tokens/s, peak memory [\d.]+ GiB, done$", line)
    _, line = figures.snapshot(Reader(run_dir / "nowhere"))
    assert "nothing recorded" in line
    places = figures.monitor(folder).children[2].children
    assert places[figures.VIEWS.index("streaks")].children[0].layout.title.text == "Tokens a round"
    assert figures.mask_explorer(result).children


def test_the_monitor_follows_a_run_while_it_is_written_and_ends_when_closed(tmp_path, monkeypatch):
    def followers():
        return [thread for thread in threading.enumerate() if thread.name == "training-monitor"]

    def until(holds):
        deadline = time.monotonic() + 30
        while not holds() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert holds()

    monkeypatch.setattr(figures, "BUSY", 0)
    run, failure = tmp_path / "run", tmp_path / "failure.json"
    failure.write_text('{"state": "failed", "message": "of an earlier start"}')
    os.utime(failure, (1, 1))
    journal = Journal(run, -1)
    box = figures.monitor(run, follow=True, every_s=0.02)
    line, (_, follow, refresh) = box.children[1], box.children[0].children
    for step in range(1, 4):
        journal.write("step", step, loss=2.0, grad_norm=1.0, lr=1e-3, skipped=None)
        journal.flush()
        until(lambda step=step: line.value.startswith(f"step {step}:"))
        refresh.click()  # while the thread reads
    failure.write_text("{")  # what cannot be read is told, and looked at again
    until(lambda: line.value.startswith("cannot read"))
    for state, told in (("failed", "failed: out of memory"), ("stopped", "stopped; the same cell goes on")):
        failure.write_text(json.dumps({"state": state, "message": "out of memory"}))
        until(lambda told=told: line.value.startswith(f"step 3: loss 2.0000; {told}"))
        assert "ends about" not in line.value
    journal.write("step", 4, loss=1.0, grad_norm=1.0, lr=1e-3, skipped=None)
    os.utime(failure, (1, 1))
    journal.flush()  # it was started again
    until(lambda: line.value == "step 4: loss 1.0000")
    follow.value, follow.value = False, True
    until(lambda: len(followers()) == 1)
    box.close()
    until(lambda: not followers())
    journal.close()


def test_the_predicted_end_is_the_pace_of_the_last_records_times_what_is_left():
    rows = [{"kind": "train", "step": n, "time": 1000.0 + 30 * n, "progress": 0.1 * n} for n in range(1, 5)]
    rows += [{"kind": "heldout", "step": 4, "time": None, "progress": None}]
    assert seconds_left(pl.DataFrame(rows)) == pytest.approx(30 * 6)
    late = [{**row, "time": row["time"] and row["time"] + 9e4 * (row["step"] > 2)} for row in rows]
    assert seconds_left(pl.DataFrame(late)) == pytest.approx(30 * 6)  # stopped for a day after step 2
    assert seconds_left(pl.DataFrame(rows[:1])) is None
    assert seconds_left(pl.DataFrame(rows).drop("time")) is None


def test_processes_with_a_slice_of_a_sharded_drafter_and_of_the_head_train_as_one(params, tmp_path):
    seen = []
    common = dict(check_store=False, soft_weight=0.2, eval_every=1, eval_rows=2, export="last")
    chosen = params(
        tmp_path / "two", gpus=2, parallel="fsdp", head_parallel=True, max_steps=0, epochs=0.5, **common
    )
    two = execute(chosen, lambda description, done, total, **facts: seen.append((done, total)))
    steps = two.figures["steps"]
    assert steps > 0 and seen[0] == (0, 0), "a stop is seen before the first step too"
    assert {total for done, total in seen if done} <= {steps}, "the steps counted from epochs are the whole"
    asked = ask_training(resolve_inputs(chosen))
    assert "gathered weights" in asked.account.terms
    assert (
        two.figures["predicted_peak_gib"] == memory_figures(asked, torch.device("cpu"))["predicted_peak_gib"]
    )
    one = execute(params(tmp_path / "one", grad_accum_steps=2, max_steps=steps, **common))
    assert two.steps["loss"].to_list() == pytest.approx(one.steps["loss"].to_list(), rel=1e-4)
    for name in ("loss", "streak", "chained_tau"):
        known, given = (found.metrics.filter(kind="heldout")[name].to_list() for found in (one, two))
        assert known and given == pytest.approx(known, rel=1e-3)
    wanted, found = (load_file(tmp_path / n / "drafter" / "model.safetensors") for n in ("one", "two"))
    assert all(torch.allclose(found[name], wanted[name], rtol=1e-3, atol=1e-5) for name in wanted)


def test_a_silently_damaged_part_is_refused_by_name_before_the_first_step(run_dir, params, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(run_dir / "store", store)
    part = next(store.glob("shard-*/part-*.safetensors"))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    with refused(StoreError):
        execute(params(tmp_path / "run", store=str(store)))
    assert not (tmp_path / "run" / "train_drafter" / "run").exists()
    execute(params(tmp_path / "run", store=str(store), check_store=False, max_steps=1, tau_samples=0))


def test_a_drafter_that_lost_a_file_is_written_again_without_training(params, tmp_path):
    chosen = params(tmp_path, max_steps=2, checkpoint_every=1, tau_samples=0)
    execute(chosen)
    whole = {path.name: path.read_bytes() for path in chosen.drafter_path.iterdir()}
    checkpoints = sorted((chosen.folder / "run" / "checkpoints").iterdir())
    times = [path.stat().st_mtime_ns for path in checkpoints]
    for lost in ("model.safetensors", "config.json", "serve.md"):
        (chosen.drafter_path / lost).unlink()
        execute(chosen)
        assert {path.name: path.read_bytes() for path in chosen.drafter_path.iterdir()} == whole
        assert [path.stat().st_mtime_ns for path in checkpoints] == times, "no step was taken"


@pytest.mark.parametrize(
    "sample",
    [(1, 0, False), (2, 0, False), (30, 30, False), (200, 120, False)],
    ids=["one-token", "two-tokens", "no-answer", "cut-within-the-prompt"],
)
def test_samples_without_a_place_for_a_block_are_refused(params, tmp_path, sample):
    write_split(tmp_path / "samples.parquet", [sample] * 2)
    with refused(InputError):
        execute(params(tmp_path, source="live", tap_ids=[1, 3, 5]))


def test_some_rows_without_a_place_for_a_block_are_passed_over(params, tmp_path):
    """Samples cut within their prompt fill rows of their own; held-out ones leave nothing to measure."""
    samples = [(200, 120, False), (30, 10, False), (201, 120, False), (31, 10, False), (202, 130, True)]
    write_split(tmp_path / "samples.parquet", samples)
    found = execute(params(tmp_path, source="live", tap_ids=[1, 3, 5]))
    blank = found.steps.filter(found.steps["skipped"].is_not_null())
    assert found.figures["steps"] == 12 and 0 < len(blank) < 12
    assert blank["loss"].null_count() == len(blank), "a step that saw no slot has no loss, least of all 0"
    assert 0 < found.figures["loss_last"] < found.figures["loss_first"]
    assert found.figures["streak_best"] is None and found.figures["chained_tau_last"] is None
    assert load_checkpoint(tmp_path / "drafter", "cpu", "auto").config.block_size == 4


def test_a_held_out_answer_too_short_for_a_block_still_has_its_tau(params, tmp_path):
    write_split(tmp_path / "samples.parquet", [(30, 10, False), (31, 10, False), (2, 0, True)])
    chosen = params(tmp_path, source="live", tap_ids=[1, 3], max_steps=2, sliding_layers=[])
    figures = execute(chosen).figures
    assert figures["steps"] == 2 and figures["chained_tau_last"] is not None


def test_stage_trains_from_a_live_target(run_dir, params, tmp_path):
    """No store anywhere: the samples and the target are enough, and the result is shown again at once."""
    chosen = params(tmp_path, source="live", samples=str(run_dir / "samples.parquet"), tap_ids=[1, 3, 5])
    found = execute(chosen)
    assert not (tmp_path / "store").exists() and found.figures["live_rows"] == "packed"
    assert found.figures["predicted_peak_gib"] > 0 and found.figures["memory_forced"] == 0
    assert load_checkpoint(tmp_path / "drafter").config.tap_ids == (1, 3, 5)
    assert found.figures["loss_last"] < found.figures["loss_first"]
    assert np.isfinite(found.figures["chained_tau_last"]) and np.isfinite(found.figures["agreement"])
    assert found.row["anchors"]
    before = (tmp_path / "drafter" / "model.safetensors").stat().st_mtime_ns
    again = execute(chosen)
    assert again.figures == found.figures and again.steps.equals(found.steps) and again.row == found.row
    assert (tmp_path / "drafter" / "model.safetensors").stat().st_mtime_ns == before


def test_live_samples_are_checked_before_a_target_is_loaded(params, tmp_path, monkeypatch):
    """The message names the file, with processes of their own too, and nothing has been loaded or started."""
    from dflash_lab.models import load

    monkeypatch.setattr(load, "load_target", lambda *a, **k: pytest.fail("loaded a target"))

    def ids(*numbers):
        return [Sample(f"s{n}", np.full(9, n), np.r_[0, np.ones(8)].astype(np.uint8), "t") for n in numbers]

    path, chosen = tmp_path / "samples.parquet", params(tmp_path, source="live")
    with refused(InputError):
        execute(chosen)
    write_samples(path, ids(1, 2, 3), heldout_fraction=1 - 2**-40, provenance={})
    with refused(InputError):
        execute(chosen)
    write_samples(path, ids(1, 2, 3), heldout_fraction=0.0, provenance={})
    pl.read_parquet(path).with_columns(content_hash=pl.lit("no hash")).write_parquet(path)
    with refused(InputError):
        execute(chosen)
    write_samples(path, ids(1, 2, 5000), heldout_fraction=0.0, provenance={})
    for placed in ({}, {"target_gpus": [0], "drafter_gpus": [0]}, {"gpus": 2}):
        with refused(InputError):
            execute(params(tmp_path, source="live", **placed))


def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(params, tmp_path):
    chosen = params(tmp_path, max_steps=3, checkpoint_every=1, tau_samples=0)

    def stop(description, done, total, **facts):
        if done >= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(chosen, stop)
    kept = sorted((chosen.folder / "run" / "checkpoints").glob("step-*"))
    assert len(kept) == 2
    state = Path("trainer", "state.json")
    for name, damage in (
        ("model.safetensors", b"{cut"), ("trainer/state.safetensors", b"{cut"), (state, b"{cut"),
        (state, b"{}"), (state, None),
    ):  # fmt: skip
        path = kept[-1] / name
        whole = path.read_bytes()
        path.unlink() if damage is None else path.write_bytes(damage)
        with refused(StoreError):
            execute(chosen)
        path.write_bytes(whole)
    (kept[-1] / state).unlink()
    assert (kept[0] / "model.safetensors").exists() and kept[-1].exists(), "nothing is lost"
    kept[-1].rename(tmp_path / "aside")
    assert execute(chosen).figures["steps"] == 3
    assert not (chosen.folder / "run-1").exists(), "the same run went on"
