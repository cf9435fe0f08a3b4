"""Runs that an earlier version left on disk are gone on with, or seen to be finished, as that version did it:
tests/fixtures/before/README.md says which runs, and how they were made.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import platform
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dflash_lab import cli
from dflash_lab.run_params import Given, read_given
from dflash_lab.stage_run import execute
from dflash_lab.stages import params_class

REPO = Path(__file__).resolve().parents[1]
BEFORE = REPO / "tests" / "fixtures" / "before"
EXPECTED = BEFORE / "expected.json"
TRAIN = Path("runs/training/train_drafter")
SHARD = Path("runs/store/store/shard-00000-of-00001")


def lab(workspace: Path, *words: str) -> str:
    """Type `dflash-lab` and `words` in a workspace; return what it said."""
    said = io.StringIO()
    with contextlib.chdir(workspace), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        assert cli.main(words) == 0, said.getvalue()[-4000:]
    return said.getvalue()


@pytest.fixture
def workspace(tmp_path) -> Path:
    return copied(tmp_path)


def copied(folder: Path) -> Path:
    """What a person has who fetches the repository and an old run: every file is new, only bytes are kept."""
    made = folder / "workspace"
    shutil.copytree(BEFORE, made, copy_function=shutil.copyfile)
    shutil.copytree(REPO / "notebooks", made / "notebooks")
    return made


def machine() -> dict[str, str]:
    """Where the same program gives the same bits."""
    told = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.*)", told.read_text()) if told.exists() else None
    return {
        "cpu": name[1] if name else platform.processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def same_machine() -> bool:
    return json.loads(EXPECTED.read_text())["machine"] == machine()


def digests(*paths: Path) -> dict[str, str]:
    """Hash safetensors files by name: header and data, but for the order of the header's notes, which the
    library draws at random.
    """
    found = {}
    for path in sorted(paths):
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.dumps(json.loads(data[8:end]), sort_keys=True)
        found[path.name] = hashlib.sha256(header.encode() + data[end:]).hexdigest()
    return found


def steps(workspace: Path) -> list[list[float]]:
    """Step, loss and gradient norm of every step, as the journal has them."""
    lines = map(json.loads, (workspace / TRAIN / "run" / "metrics.jsonl").read_text().splitlines())
    return [[one["step"], one["loss"], one["grad_norm"]] for one in lines if one["kind"] == "step"]


def states(workspace: Path) -> list[str]:
    """What `status` says of each stage of the three runs."""
    return [
        f"{run}: {line}"
        for run in ("finished", "training", "store")
        for line in lab(workspace, "status", run).splitlines()
    ]


def gone_on(workspace: Path) -> dict[str, Any]:
    """Go on with the training and the store; return the numbers and hashes at their ends."""
    with contextlib.chdir(workspace):
        for stage, run in (("train_drafter", "training"), ("extract", "store")):
            execute(read_given(params_class(stage), Given(run=run)))
    weights = workspace / "runs/training/drafter/model.safetensors"
    parts = sorted((workspace / SHARD).glob("*.safetensors"))
    stored = [load_file(part) for part in parts]
    return {
        "machine": machine(),
        "steps": steps(workspace),
        "drafter": digests(weights),
        "parts": digests(*parts),
        "tokens": [one["input_ids"].tolist() for one in stored],
        "size_of_states": [[float(one[name].float().norm()) for name in ("taps", "final")] for one in stored],
    }


def test_what_was_begun_goes_on_at_the_same_place_and_ends_the_same(workspace):
    expected = json.loads(EXPECTED.read_text())
    told = dict(re.findall(r"^(\w+: \S+) +(\w+)", "\n".join(states(workspace)), re.MULTILINE))
    assert told["training: train_drafter"] == "killed" and told["store: extract-0"] == "stopped"
    assert told["training: prepare"] == told["training: extract-0"] == told["store: prepare"] == "finished"
    journal = (workspace / TRAIN / "run" / "metrics.jsonl").read_text().splitlines()
    manifest = (workspace / SHARD / "manifest.jsonl").read_text().splitlines()
    kept = digests(*(workspace / SHARD).glob("*.safetensors"))

    found = gone_on(workspace)

    # Training: from the checkpoint of step 5, whose past stays as it was written; nothing was set aside.
    now = (workspace / TRAIN / "run" / "metrics.jsonl").read_text().splitlines()
    old = {line for line in journal if json.loads(line)["kind"] == "train"}  # with the time of their writing
    assert sorted(json.loads(line)["step"] for line in old.intersection(now)) == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in (workspace / TRAIN).glob("run*")) == ["run"]
    assert [step for step, *_ in found["steps"]] == list(range(1, 15))
    assert np.allclose(found["steps"], expected["steps"], rtol=1e-3)

    # Store: what was sealed stays, and the four samples that were missing are added.
    lines = (workspace / SHARD / "manifest.jsonl").read_text().splitlines()
    assert lines[: len(manifest)] == manifest
    added = [line for line in map(json.loads, lines[len(manifest) :]) if line["kind"] == "part"]
    assert sum(line["samples"] for line in added) == 4
    assert kept.items() <= found["parts"].items() and found["parts"].keys() == expected["parts"].keys()
    assert found["tokens"] == expected["tokens"]
    assert np.allclose(found["size_of_states"], expected["size_of_states"], rtol=1e-3)
    assert "14 samples" in lab(workspace, "verify", "runs/store/store")

    if same_machine():
        assert found == expected
    assert not [line for line in states(workspace) if not re.search(r"  finished(:|$)", line)]


def test_a_finished_run_is_finished_and_nothing_is_done_again(workspace):
    run = workspace / "runs" / "finished"
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in contents(run)}
    said = [line.split() for line in lab(workspace, "status", "finished").splitlines()]
    stages = "prepare dataset_stats extract-0 extract-1 memory_sweep train_drafter acceptance"
    assert [words[:2] for words in said] == [[name, "finished"] for name in stages.split()]
    assert lab(workspace, "run", "finished").count("finished before") == 7
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in contents(run)} == before
    assert (run / "report.html").stat().st_size > 10_000  # which is not among the fixtures: made of the rest


def contents(run: Path) -> list[Path]:
    """All that stages left in a run's folder: what the closing table and the report are made of."""
    closing = {run / "result.json", run / "report.html"}
    return sorted(path for path in run.rglob("*") if path.is_file() and path not in closing)


if __name__ == "__main__":  # as README.md says: write what the runs end with
    EXPECTED.write_text(json.dumps(gone_on(copied(Path(sys.argv[1])))) + "\n")
