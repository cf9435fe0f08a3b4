"""Run one extraction again and again, each time killed with SIGKILL at a random point, until one survives.

    extraction_crash_child.py TARGET SAMPLES STORE KILLS

A point is an fsync, a rename, an appended manifest line or a batch: the child counts them and kills itself
before or after a random one. Prints JSON: kills, tokens run in all, and the shard counts of the runs.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)  # no thread pool may exist before a fork

from dflash_lab import files  # noqa: E402
from dflash_lab.extraction import loop as loop_module  # noqa: E402
from dflash_lab.extraction.writer import Capture  # noqa: E402
from dflash_lab.models.load import load_target  # noqa: E402

PART_GIB = 0.0001  # 559 tokens: three buffers of a batch and two parts of up to 100 each


def main() -> None:
    folder, samples, store, kills = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    target = load_target(folder, with_head=False)
    log = store.parent / "tokens.log"
    chooser, done, counts = random.Random(7), 0, set()
    while True:
        last = done == kills
        setup = {
            "num_shards": 1 if last else chooser.choice([1, 2, 3]),
            "token_budget": chooser.choice([100, 150, 250]),
            "max_batch": chooser.choice([2, 8]),
        }
        setup["shard"] = chooser.randrange(setup["num_shards"])
        kill_at, before = chooser.randrange(1, 40), chooser.random() < 0.5
        child = os.fork()
        if child == 0:
            run(target, samples, store, setup, None if last else kill_at, before, log)
        _, status = os.waitpid(child, 0)
        counts.add(setup["num_shards"])
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if not killed and os.waitstatus_to_exitcode(status) != 0:
            raise SystemExit(f"a run after {done} kills failed with status {status}")
        if last:
            break
        done += killed
    tokens = sum(map(int, log.read_text().split()))
    print(json.dumps({"kills": done, "counts": sorted(counts), "tokens": tokens}))


def run(
    target, samples: Path, store: Path, setup: dict, kill_at: int | None, before: bool, log: Path
) -> None:
    points = itertools.count(1)  # shared by the loop and the writer thread

    def point(real):
        def counted(*args, **kwargs):
            number = next(points)
            if number == kill_at and before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            if number == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return counted

    def log_tokens(self, rows, ids, masks, still_working, examine):
        with open(log, "a") as file:
            file.write(f"{sum(map(len, ids))}\n")
        return real_run(self, rows, ids, masks, still_working, examine)

    real_run = Capture.run
    Capture.run = point(log_tokens)
    files.os.fsync, files.os.replace = point(os.fsync), point(os.replace)
    files.append_line = point(files.append_line)
    loop_module.extract(target, samples, store, tap_ids=[1, 3], part_gib=PART_GIB, seal_seconds=0.02, **setup)
    os._exit(0)


if __name__ == "__main__":
    main()
