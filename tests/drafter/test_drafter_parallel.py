"""Two processes on the same global batch train like one; each kind of run goes on from the other's
checkpoint.
"""

from __future__ import annotations

import json
import os
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
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(SCRIPT), json.dumps(jobs)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Runs of two processes, by name, from one launch; `again` and `slices_on` lost their last checkpoint and
    were started anew, the latter with slices of the head, which its first steps had not.
    """
    root = tmp_path_factory.mktemp("ranks")
    jobs = {
        "ddp": dict(mode="ddp", kind="adamw"),
        "fsdp": dict(mode="fsdp", kind="muon"),
        "again": dict(mode="fsdp", kind="adamw"),
        "slices": dict(mode="ddp", kind="adamw", head_parallel=True),
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


@pytest.mark.parametrize(
    ("name", "kind"),
    [("ddp", "adamw"), ("fsdp", "muon"), ("slices", "adamw"), ("fsdp_slices", "muon"),
     ("slices_on", "adamw"), ("slices_off", "adamw")],
)  # fmt: skip
def test_two_processes_equal_one_on_the_same_global_batch(folders, tmp_path, name, kind):
    report = tiny_run(str(tmp_path), {**STEPS, "accumulate": 2, "kind": kind})
    one, two = read_journal(tmp_path), read_journal(folders[name])
    if name.startswith("slices_o"):  # steps 3 and 4 were made twice; the last ones count
        assert (folders[name] / "lost").exists()
    assert [r["step"] for r in two] == [r["step"] for r in one]
    for single, double in zip(one, two, strict=True):
        assert double["loss"] == pytest.approx(single["loss"], rel=2e-5)
        if single["kind"] == "step":
            assert double["grad_norm"] == pytest.approx(single["grad_norm"], rel=2e-4)
        else:
            assert double["slots"] == single["slots"] and double["streak"] == pytest.approx(single["streak"])
        if single["kind"] == "train":
            assert double["context_tokens"] == single["context_tokens"]
            assert double["blocks_seen"] == single["blocks_seen"]
    wanted = load_file(report.last_checkpoint / "model.safetensors")
    found = load_file(folders[name] / "checkpoints" / "step-00000004" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert max(relative_error(found[tensor], wanted[tensor]) for tensor in wanted) < 2e-3


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
    report = tiny_run(str(tmp_path / "one"), {**STEPS, "accumulate": 2, "kind": kind}, device="cuda:0")
    job = {**STEPS, "accumulate": 1, "folder": str(tmp_path / "two"), "mode": mode, "kind": kind}
    launch([{**job, "device": "cuda", "head_parallel": slices}])
    for single, double in zip(read_journal(tmp_path / "one"), read_journal(tmp_path / "two"), strict=True):
        assert double["loss"] == pytest.approx(single["loss"], rel=1e-3)
    wanted = load_file(report.last_checkpoint / "model.safetensors")
    found = load_file(tmp_path / "two" / "checkpoints" / "step-00000004" / "model.safetensors")
    assert max(relative_error(found[tensor], wanted[tensor]) for tensor in wanted) < 5e-3


@pytest.mark.parametrize(
    ("device", "other"),
    [("cpu", "cpu"), pytest.param("cuda:0", "cuda:1", marks=pytest.mark.gpu)],
)
def test_the_targets_logits_may_be_made_on_a_second_device(tmp_path, device, other):
    if device != "cpu" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    values = {**STEPS, "accumulate": 2, "kind": "adamw"}
    report = tiny_run(str(tmp_path / "one"), dict(values), device=device)
    apart = tiny_run(str(tmp_path / "two"), dict(values), device=device, target_device=other)
    for single, double in zip(read_journal(tmp_path / "one"), read_journal(tmp_path / "two"), strict=True):
        assert double["loss"] == pytest.approx(single["loss"], rel=2e-5)
    wanted = load_file(report.last_checkpoint / "model.safetensors")
    found = load_file(apart.last_checkpoint / "model.safetensors")
    assert max(relative_error(found[tensor], wanted[tensor]) for tensor in wanted) < 2e-3
