"""Two processes on the same global batch train like one, and go on from each other's checkpoints."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_drafters import relative_error
from support.train_ranks import tiny_run

from dflash_lab.drafter.journal import read_journal

SCRIPT = Path(__file__).parent.parent / "support" / "train_ranks.py"
STEPS = dict(max_steps=4, eval_every=2, eval_rows=3, checkpoint_every=2, log_every=2, warmup=0.0)


def launch(jobs: list[dict]) -> None:
    """Both processes of a node, as torchrun would start them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), json.dumps(jobs)]
    started = [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in started:
        _, errors = process.communicate(timeout=500)
        assert process.returncode == 0, errors[-4000:]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Runs of two processes, by name, from one launch; `again` and `slices_on` lost their last checkpoint and
    were started anew, the latter with slices of the head, which its first steps had not.
    """
    root = tmp_path_factory.mktemp("ranks")
    jobs = {
        "again": dict(mode="fsdp", kind="adamw"),
        "fsdp_slices": dict(mode="fsdp", kind="muon", head_parallel=True),
        "slices_on": dict(mode="ddp", kind="adamw"),
        "slices_off": dict(mode="ddp", kind="adamw", head_parallel=True),
    }
    listed = [{**STEPS, "accumulate": 1, "folder": str(root / name), **job} for name, job in jobs.items()]
    by_name = dict(zip(jobs, listed, strict=True))
    listed.append({**by_name["again"], "drop": "step-00000004"})
    for name, head_parallel in (("slices_on", True), ("slices_off", False)):
        listed.append({**by_name[name], "drop": "step-00000004", "head_parallel": head_parallel})
    launch(listed)
    return {name: root / name for name in jobs}


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The same run in one process, by optimizer."""

    @functools.cache
    def run(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        tiny_run(str(folder), {**STEPS, "accumulate": 2, "kind": kind})
        return folder

    return run


@pytest.mark.parametrize(
    ("name", "kind"),
    [("again", "adamw"), ("fsdp_slices", "muon"), ("slices_on", "adamw"), ("slices_off", "adamw")],
)
def test_two_processes_equal_one_on_the_same_global_batch(folders, single, name, kind):
    one, two = read_journal(single(kind)), read_journal(folders[name])
    if name != "fsdp_slices":  # steps 3 and 4 were made twice; the last ones count
        assert (folders[name] / "lost").exists()
    assert [r["step"] for r in two] == [r["step"] for r in one]
    for alone, double in zip(one, two, strict=True):
        assert double["loss"] == pytest.approx(alone["loss"], rel=2e-5)
        if alone["kind"] == "step":
            assert double["grad_norm"] == pytest.approx(alone["grad_norm"], rel=2e-4)
        else:
            assert double["slots"] == alone["slots"] and double["streak"] == pytest.approx(alone["streak"])
        if alone["kind"] == "train":
            assert double["context_tokens"] == alone["context_tokens"]
            assert double["blocks_seen"] == alone["blocks_seen"]
    assert far_apart(single(kind), folders[name]) < 2e-3


def far_apart(one: Path, other: Path) -> float:
    """The largest relative error of a tensor after the last step."""
    last = Path("checkpoints", "step-00000004", "model.safetensors")
    wanted, found = load_file(one / last), load_file(other / last)
    assert found.keys() == wanted.keys()
    return max(relative_error(found[tensor], wanted[tensor]) for tensor in wanted)


def test_a_sharded_run_resumes_exactly_and_its_checkpoint_is_whole(folders):
    first, again = folders["again"] / "lost", folders["again"] / "checkpoints" / "step-00000004"
    for file in ("model.safetensors", "trainer/state.safetensors"):
        wanted, found = load_file(first / file), load_file(again / file)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.parametrize(("mode", "kind"), [("ddp", "adamw"), ("fsdp", "adamw"), ("fsdp", "muon")])
def test_two_gpus_equal_one_on_the_same_global_batch(tmp_path, mode, kind, slices):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tiny_run(str(tmp_path / "one"), {**STEPS, "accumulate": 2, "kind": kind}, device="cuda:0")
    job = {**STEPS, "accumulate": 1, "folder": str(tmp_path / "two"), "mode": mode, "kind": kind}
    launch([{**job, "device": "cuda", "head_parallel": slices}])
    for single, double in zip(read_journal(tmp_path / "one"), read_journal(tmp_path / "two"), strict=True):
        assert double["loss"] == pytest.approx(single["loss"], rel=1e-3)
    assert far_apart(tmp_path / "one", tmp_path / "two") < 5e-3


@pytest.mark.parametrize(
    ("device", "other"),
    [("cpu", "cpu"), pytest.param("cuda:0", "cuda:1", marks=pytest.mark.gpu)],
)
def test_the_targets_logits_may_be_made_on_a_second_device(tmp_path, device, other):
    if device != "cpu" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    values = {**STEPS, "accumulate": 2, "kind": "adamw"}
    tiny_run(str(tmp_path / "one"), dict(values), device=device)
    tiny_run(str(tmp_path / "two"), dict(values), device=device, target_device=other)
    for single, double in zip(read_journal(tmp_path / "one"), read_journal(tmp_path / "two"), strict=True):
        assert double["loss"] == pytest.approx(single["loss"], rel=2e-5)
    assert far_apart(tmp_path / "one", tmp_path / "two") < 2e-3
