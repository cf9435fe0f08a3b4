"""Killed at random points, with other shard counts, budgets and batch sizes each time: the same samples in
the end.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from support.extraction_crash_child import PART_GIB

from dflash_lab.extraction.checks import rel_l2, verify
from dflash_lab.extraction.store import open_store

KILLS = 12


def test_a_dozen_kills_lose_nothing_and_repeat_at_most_one_part_each(job, tiny_target, tmp_path) -> None:
    lengths = np.random.default_rng(1).integers(2, 90, 240).tolist()
    whole, store = job("llama", lengths, token_budget=200), tmp_path / "crashed" / "store"
    store.parent.mkdir()
    script = Path(__file__).parents[1] / "support" / "extraction_crash_child.py"
    given = map(str, (tiny_target("llama"), whole.samples, store, KILLS))
    # A process of its own: no library may have threads when it forks those that are killed.
    done = subprocess.run([sys.executable, str(script), *given], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] == KILLS and found["counts"] == [1, 2, 3]

    crashed, _ = open_store(store), whole.run()
    assert {row.tobytes() for row in crashed.hashes} == {row.tobytes() for row in whole.opened().hashes}
    assert [fault for fault in verify(store) if fault.part] == []
    for item in [whole.opened()[index] for index in range(0, len(lengths), 7)]:
        # other batches round otherwise in the last bit of bf16
        assert rel_l2(crashed[crashed.find(item.hash)].taps, item.taps) <= 3e-3
    part_tokens = PART_GIB * 2**30 / (2 * 48 * 2)
    assert 0 < found["tokens"] - sum(lengths) <= KILLS * part_tokens
