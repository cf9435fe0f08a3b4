"""Killed at twenty random points, with other shard counts, budgets and batch sizes each time: the
same samples in the end.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from support.extraction_crash_child import PART_GIB
from support.sample_files import make_samples

from dflash_lab.extraction.checks import rel_l2, verify
from dflash_lab.extraction.loop import extract
from dflash_lab.extraction.store import open_store

KILLS = 20


def test_twenty_kills_lose_nothing_and_repeat_at_most_one_part_each(
    tiny, tiny_folder, tmp_path: Path
) -> None:
    lengths = np.random.default_rng(1).integers(2, 90, 400).tolist()
    samples, store = make_samples(tmp_path / "s.parquet", lengths), tmp_path / "crashed" / "store"
    store.parent.mkdir()
    script = Path(__file__).parents[1] / "support" / "extraction_crash_child.py"
    command = [sys.executable, str(script), str(tiny_folder("llama")), str(samples), str(store), str(KILLS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] == KILLS
    assert len({run["num_shards"] for run in found["runs"]}) == 3

    crashed = open_store(store)
    extract(tiny("llama"), samples, tmp_path / "whole", tap_ids=[1, 3], token_budget=200, max_batch=8)
    whole = open_store(tmp_path / "whole")
    assert {row.tobytes() for row in crashed.hashes} == {row.tobytes() for row in whole.hashes}
    assert [fault for fault in verify(store) if fault.part] == []
    for index in range(0, len(whole), 7):
        item = crashed[crashed.find(whole[index].hash)]
        assert (
            rel_l2(item.taps, whole[index].taps) <= 3e-3
        )  # other batches round otherwise in the last bit of bf16

    part_tokens = PART_GIB * 2**30 / (2 * 48 * 2)
    repeated = found["tokens"] - sum(lengths)
    assert 0 < repeated <= KILLS * part_tokens
