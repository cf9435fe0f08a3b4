"""Targets that feed drafters in processes of their own: the same drafter comes out, refused or stopped
first too.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from support.wording import refused

from dflash_lab import machine
from dflash_lab.data.samples import Sample, write_samples
from dflash_lab.drafter.checkpoint import load_checkpoint
from dflash_lab.errors import InputError, UnsupportedTarget
from dflash_lab.files import read_json
from dflash_lab.memory.gate import DoesNotFit, clear_devices
from dflash_lab.memory.planner import MARGIN
from dflash_lab.memory.shapes import GIB
from dflash_lab.progress import Stopped
from dflash_lab.stage_run import execute
from dflash_lab.stages import clearance, training_inputs
from dflash_lab.stages.clearance import (
    check_queue,
    clear_processes,
    gpu_processes,
    queue_row_bytes,
    with_anchors,
)
from dflash_lab.stages.train_drafter import TrainDrafterParams
from dflash_lab.stages.training_inputs import check_placement, resolve_inputs
from dflash_lab.views import train_drafter as figures

TINY = dict(
    device="cpu", interactive=False, source="live", num_layers=2, block_size=4, context_tokens=96, anchors=24,
    soft_weight=0.15, lr=1e-2, max_steps=8, log_every=2, eval_every=4, eval_rows=2, checkpoint_every=4,
    tau_samples=2, tap_ids=[1, 3, 5],
)  # fmt: skip
LARGE = dict(device="cuda", target="random:qwen3-8b", context_tokens=4096, anchors=512, tap_ids=[])


@pytest.fixture(scope="module")
def params(tiny_target, tmp_path_factory):
    """Return a function: run folder, changes -> parameters of a short live run on the same samples."""
    path = tmp_path_factory.mktemp("samples") / "samples.parquet"
    generator = np.random.default_rng(0)
    rows = [
        Sample(f"s{i}", generator.integers(0, 256, n), (np.arange(n) >= n // 3).astype(np.uint8), "test")
        for i, n in enumerate([20, 31, 17, 44, 25, 38, 29, 33, 18, 40, 22, 27, 35, 30])
    ]
    write_samples(path, rows, heldout_fraction=0.3, provenance={"test": True})

    def params(folder, **changes) -> TrainDrafterParams:
        values = {**TINY, "run_dir": str(folder), "samples": str(path), "target": str(tiny_target("llama"))}
        return TrainDrafterParams(**{**values, **changes})

    return params


@pytest.fixture(scope="module")
def alone(params, tmp_path_factory) -> Path:
    """The run that one process makes."""
    chosen = params(tmp_path_factory.mktemp("alone"))
    execute(chosen)
    return chosen.folder


def last(folder: Path, step: int = 8) -> dict[str, torch.Tensor]:
    newest = sorted((folder / "run" / "checkpoints").glob("step-*"))[-1]
    assert newest.name == f"step-{step:08d}"
    return load_checkpoint(newest).state_dict()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_two_targets_and_one_drafter_train_the_drafter_of_one_process(alone, params, tmp_path, monkeypatch):
    """What is predicted not to fit is refused before a process starts; forced, it finds enough here."""
    chosen = params(tmp_path, target_gpus=[0, 1], drafter_gpus=[0])
    with monkeypatch.context() as patch:
        patch.setattr(machine, "device_budget_gib", lambda device: 1e-5)
        with refused(DoesNotFit):
            execute(chosen)
        record = read_json(chosen.folder / "failure.json")
        assert {"drafter-0", "target-0", "target-1", "device"} <= set(record["details"]) and record["advice"]
        assert not (chosen.folder / "workers").exists()
        result = execute(chosen.changed(ignore_memory=True))
    found = result.figures
    assert found["target_predicted_peak_gib"] > 0 and found["predicted_peak_gib"] > 0
    assert same(last(chosen.folder), last(alone))
    frame = result.pipeline
    made = frame.filter(pl.col("worker") != "drafter-0")
    used = frame.filter(worker="drafter-0")
    assert used["turn"].to_list() == list(range(8))
    for number in (0, 1):
        turns = made.filter(worker=f"target-{number}")["turn"].to_list()
        assert turns[:4] == list(range(number, 8, 2)) and len(turns) <= 4 + 3  # what lay ready at the end
    assert made["forward_ms"].min() > 0 and used["depth"].max() <= 2 * 2
    for name in ("drafter_busy_pct", "target_busy_pct"):
        assert 0 <= found[name] <= 100
    assert found["limit"] in ("targets", "drafters")
    assert len(figures.queues(frame).data) >= 4
    assert execute(chosen).pipeline.equals(frame)


def test_one_target_and_two_drafters_train_one_drafter(params, tmp_path):
    """The global batch is that of one process with two rows a step."""
    short = dict(max_steps=4, checkpoint_every=4)
    pair = params(tmp_path / "pair", target_gpus=[0], drafter_gpus=[0, 1], **short)
    single = params(tmp_path / "single", grad_accum_steps=2, **short)
    execute(pair)
    execute(single)
    mine, theirs = last(pair.folder, 4), last(single.folder, 4)
    for name, value in theirs.items():
        assert (mine[name] - value).norm() <= 1e-4 * value.norm(), name


def test_stopped_pipeline_goes_on_exactly(alone, params, tmp_path):
    chosen = params(tmp_path, target_gpus=[0], drafter_gpus=[1], max_steps=8)

    def stop(description, done, total, **facts):
        if done >= 1:
            raise Stopped("enough")

    with pytest.raises(Stopped):
        execute(chosen, stop)
    saved = sorted((chosen.folder / "run" / "checkpoints").glob("step-*"))
    assert saved, "a stop leaves a checkpoint"
    execute(chosen)
    assert same(last(chosen.folder), last(alone))


@pytest.fixture
def gpus(monkeypatch, tiny_target):
    """Parameters that take this machine for one with GPUs."""
    tiny_target("llama")
    monkeypatch.setattr(training_inputs, "choose_device", lambda name: torch.device("cuda", 0))


def test_what_shares_a_gpu_is_added_up(params, tmp_path, gpus):
    chosen = params(tmp_path, target_gpus=[0, 1], drafter_gpus=[1, 3], head_gpu=2, **LARGE)
    found = {(process.name, process.device): process for process in gpu_processes(resolve_inputs(chosen))}
    assert set(found) == {
        ("drafter-0", "cuda:1"), ("drafter-1", "cuda:3"), ("target-0", "cuda:0"), ("target-1", "cuda:1"),
        ("head of drafter-0", "cuda:2"), ("head of drafter-1", "cuda:2"),
    }  # fmt: skip
    target, drafter = found["target-1", "cuda:1"], found["drafter-0", "cuda:1"]
    head = found["head of drafter-0", "cuda:2"]
    assert target.account.terms["target weights"] == 2 * 8_190_735_360  # all of Qwen3-8B in bf16
    assert "recorded forward's pool" in target.account.terms
    assert "head and embedding" in head.account.terms and "head and embedding" not in drafter.account.terms
    slots = 2 * 2 * 4096 * 6 * 4096 * 2  # two rows of each of two targets, five taps and the final states
    assert drafter.account.terms["rows ahead"] == slots
    enough = {f"cuda:{number}": 139.0 for number in range(4)}
    assert clear_devices(list(found.values()), enough) == []
    between = {**enough, "cuda:1": 1.1 * max(target.peak, drafter.peak) / GIB}
    with refused(DoesNotFit) as caught:
        clear_devices(list(found.values()), between)
    assert caught.value.details["device"] == "cuda:1"
    assert "drafter" not in str(clear_devices(list(found.values()), between, force=True))
    alone = {**enough, "cuda:0": 10.0}
    with refused(DoesNotFit):
        clear_devices(list(found.values()), alone)


@pytest.mark.parametrize(
    ("placed", "wanted"),
    [
        (dict(gpus=3, head_gpu=0), ["drafter-0 0", "drafter-1 1", "head of drafter-1 0", "drafter-2 2",
                                    "head of drafter-2 0"]),
        (dict(head_gpu=1), ["drafter-0 0", "head of drafter-0 1"]),
        (dict(target_head_gpu=1), ["drafter-0 0", "target's head of drafter-0 1"]),
    ],
    ids=["heads-of-several", "head-apart", "targets-head-apart"],
)  # fmt: skip
def test_heads_are_accounted_where_they_are(params, tmp_path, gpus, placed, wanted):
    found = gpu_processes(resolve_inputs(params(tmp_path, **placed, **LARGE)))
    assert [f"{process.name} {process.device.removeprefix('cuda:')}" for process in found] == wanted
    if "target_head_gpu" in placed:
        assert found[1].account.terms["head"] == 151936 * 4096 * 2
    if "gpus" in placed:  # added up, with that of the process that trains there
        assert "head and embedding" in found[0].account.terms
        budgets = {f"cuda:{number}": 1.1 * found[number].peak / GIB for number in range(3)}
        with refused(DoesNotFit):
            clear_devices(found, budgets)


def test_slices_of_a_head_are_accounted_as_such(params, tmp_path, gpus):
    apart = dict(target_gpus=[2], drafter_gpus=[0, 1], tau_samples=0, **LARGE)
    (whole, *_), (slices, *_) = (
        gpu_processes(resolve_inputs(params(tmp_path, **apart, head_parallel=sliced)))
        for sliced in (False, True)
    )
    saved = whole.account.terms["head and embedding"] - slices.account.terms["head and embedding"]
    assert saved == 151936 * 4096 * 2 // 2


def test_planned_anchors_leave_targets_their_memory(params, tmp_path, monkeypatch):
    """They are those with which the processes that share the memory are cleared together."""
    chosen = params(tmp_path, target_gpus=[0, 0], drafter_gpus=[0], anchors=40)
    budget_gib = 1.06 * sum(process.peak for process in gpu_processes(resolve_inputs(chosen))) / GIB
    monkeypatch.setattr(machine, "device_budget_gib", lambda device: budget_gib)
    counts = {}
    for targets in ([0], [0, 0]):
        asked = chosen.changed(run_dir=str(tmp_path / str(len(targets))), anchors=0, target_gpus=targets)
        planned = with_anchors(resolve_inputs(asked))
        clear_processes(planned)
        counts[len(targets)] = planned.params.anchors
    assert counts[1] > counts[2] >= 32


def test_a_target_whose_memory_is_not_understood_feeds_without_a_prediction(
    params, tmp_path, monkeypatch, caplog
):
    def strange(config):
        raise UnsupportedTarget("model type 'mystery' is not known")

    monkeypatch.setattr(clearance, "target_shape", strange)
    clear_processes(resolve_inputs(params(tmp_path, target_gpus=[0], drafter_gpus=[0])))
    assert "'mystery'" in caplog.text


def test_gpus_that_are_not_there_are_named(params, tiny_target, tmp_path, monkeypatch):
    for changes in (dict(head_gpu=2), dict(target_head_gpu=1)):
        with refused(InputError):
            execute(params(tmp_path, **changes))  # on a CPU
    tiny_target("llama")  # made while there is no GPU
    for name, value in (("is_available", True), ("device_count", 2), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for changes in (
        dict(target_gpus=[0, 2], drafter_gpus=[1]),
        dict(target_gpus=[0], drafter_gpus=[3]),
        dict(head_gpu=2),
        dict(gpus=3),
        dict(gpus=2, device="cuda:1"),
    ):
        with refused(InputError):
            check_placement(params(tmp_path, **{"device": "cuda", **changes}))
    check_placement(params(tmp_path, device="cuda", target_gpus=[0], drafter_gpus=[1], head_gpu=0))


def test_a_queue_too_large_is_refused_with_the_number_that_fits(params, tmp_path, monkeypatch):
    chosen = params(tmp_path, target_gpus=[0, 1], drafter_gpus=[0, 1], queue_rows=5)
    inputs = resolve_inputs(chosen)
    each = queue_row_bytes(inputs) * 2 * 2
    assert each == 96 * 4 * 48 * 2 * 4  # tokens, states, hidden, bytes, pairs
    usage = shutil.disk_usage("/")
    room = int(3.5 * each / (1 - MARGIN))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=room))
    with refused(InputError):
        check_queue(inputs)
    check_queue(resolve_inputs(chosen.changed(queue_rows=3)))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=each // 2))
    with refused(InputError):
        check_queue(inputs)


@pytest.mark.gpu
def test_processes_on_one_gpu_train_the_drafter_of_one_process(params, tmp_path):
    """Slots lie on a GPU: what the target writes there from its own process is what the drafter reads."""
    common = dict(device="cuda", dtype="bfloat16", drafter_dtype="float32", context_tokens=128, compile=False)
    chosen = params(tmp_path / "apart", target_gpus=[0, 0], drafter_gpus=[0], **common)
    result = execute(chosen)
    single = params(tmp_path / "alone", **common)
    execute(single)
    mine, theirs = last(chosen.folder), last(single.folder)
    for name, value in theirs.items():
        assert (mine[name] - value).norm() <= 1e-2 * value.norm(), name
    assert 0 <= result.figures["drafter_busy_pct"] <= 100


@pytest.mark.gpu
def test_the_frozen_head_may_live_on_another_gpu(params, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    common = dict(
        device="cuda:0", dtype="bfloat16", drafter_dtype="float32", context_tokens=128, compile=False
    )
    losses = [
        execute(params(tmp_path / str(number), **where, **common)).steps["loss"].to_list()
        for number, where in enumerate(({}, {"head_gpu": 1}, {"target_head_gpu": 1}))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) == pytest.approx(losses[2], rel=1e-3)
