"""Killed before any operation on files, or with any byte of a checkpoint flipped: nothing half-written is
taken for whole, and a run goes on to the same end.
"""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.tiny_drafters import tiny_drafter
from support.wording import refused

from dflash_lab.drafter import checkpoint as states
from dflash_lab.errors import FileError, StoreError

CHILD = Path(__file__).parents[1] / "support" / "kill_child.py"
LEAST = {"merge": 12, "export": 8, "import": 8, "replace": 8, "train": 10}  # kills of each case


def test_killed_before_any_operation_on_files(tmp_path):
    """In a process of its own, that forks the cases: here libraries have started threads."""
    done = subprocess.run(
        [sys.executable, str(CHILD), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kills = json.loads(done.stdout.splitlines()[-1])
    assert kills.keys() == LEAST.keys() and all(kills[case] >= least for case, least in LEAST.items()), kills


def test_a_flipped_byte_anywhere_in_a_checkpoint_is_found(tmp_path):
    drafter, chooser = tiny_drafter(), random.Random(0)
    moments = {"moments.a": torch.randn(300, generator=torch.Generator().manual_seed(0))}
    record = {"setup": {"seed": 1}, "place": {"step": 7, "seconds": 1.5}, "optimizer_steps": 7}
    folder = states.save_state(tmp_path, 7, drafter, drafter.state_dict(), moments, record)
    weights, tensors, found = states.load_state(folder)
    assert all(torch.equal(weights[n], t) for n, t in drafter.state_dict().items())
    assert torch.equal(tensors["moments.a"], moments["moments.a"])
    assert {name: found[name] for name in record} == record
    for name in ("model.safetensors", "trainer/state.safetensors", "trainer/state.json"):
        path = folder / name
        whole = path.read_bytes()
        for at in [0, 7, 9, len(whole) - 2, *(chooser.randrange(len(whole)) for _ in range(20))]:
            flipped = bytearray(whole)
            flipped[at] ^= 1 << chooser.randrange(8)
            path.write_bytes(flipped)
            try:
                assert states.load_state(folder)[2] == found, f"{name}: byte {at}"  # a space of the JSON's
                assert name.endswith("json")
            except StoreError as error:
                assert "Move the folder away" in str(error)
        path.write_bytes(whole[: len(whole) // 2])
        with refused(StoreError):
            states.load_state(folder)
        path.write_bytes(whole)
    # A stop right after a save leaves what was saved as it is.
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert states.save_state(tmp_path, 7, drafter, drafter.state_dict(), {}, record) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, FileError), (errno.ENOENT, StoreError)])
def test_a_failing_disk_is_not_told_as_a_damaged_checkpoint(tmp_path, monkeypatch, number, kind):
    def refuse(*args, **kwargs):
        raise FileError(number, tmp_path / "trainer.safetensors")

    monkeypatch.setattr(states, "read_tensors", refuse)
    monkeypatch.setattr(states.files, "read_json", refuse)
    with refused(kind):
        states.load_state(tmp_path)
