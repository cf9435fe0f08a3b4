"""Rows of the quality study side by side: each in a process of its own, the next row when one has ended.

Rows start in their order, so a study that runs out of time has measured the first ones. A row that fails
takes nothing else with it; what it said is in <row>.log. Of a row that was cut the diary tells.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from quality_recipes import STUDY

from dflash_lab.drafter.journal import read_journal

log = logging.getLogger("quality")
POLL_S = 0.5
CURVE = ("kind", "step", "streak", "accuracy", "loss", "ce", "kl", "context_tokens", "blocks_seen", "seconds")
TRAINING = ("streak", "accuracy", "loss", "ce", "kl", "epoch")


def study(args: argparse.Namespace) -> dict[str, Any]:
    """Train rows for the same number of steps, `parallel` at a time; after `limit_s` what is not finished is
    given up.
    """
    rows = list(args.rows or STUDY)
    args.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + (args.limit_s or 1e9)
    waiting, running = list(rows), {}
    try:
        while (waiting or running) and time.monotonic() < until:
            while waiting and len(running) < args.parallel:
                row = waiting.pop(0)
                running[row] = started(args, row)
            for row, process in list(running.items()):
                if process.poll() is not None:
                    del running[row]
                    log.info("%s", last_words(args.out, row, process.returncode))
            time.sleep(POLL_S)
        if waiting or running:
            log.warning("out of time: given up %s", [*running, *waiting])
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    paths = {row: args.out / row / "row.json" for row in rows}
    done = {row: json.loads(path.read_text()) for row, path in paths.items() if path.exists()}
    done = {row: record for row, record in done.items() if record["tau"]}
    return {"rows": done, "missing": sorted(set(rows) - set(done))}


def started(args: argparse.Namespace, row: str) -> subprocess.Popen[bytes]:
    """The process that trains and measures `row`."""
    (args.out / row / "row.json").unlink(missing_ok=True)  # of an earlier study
    command = [sys.executable, str(Path(__file__).with_name("quality.py")), "train", row, "--folders"]
    command += ["--data", str(args.data), "--out", str(args.out), "--steps", str(args.steps)]
    command += ["--seed", str(args.seed), "--device", args.device, "--target", args.target]
    command += ["--answers", str(args.answers)]
    command += [word for pair in args.p for word in ("-p", *pair)]
    with open(args.out / f"{row}.log", "w") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


def left_by(folder: Path) -> dict[str, Any]:
    """The record of a row or run; where it was cut, what its diary tells of it."""
    record = json.loads((folder / "row.json").read_text())
    if "figures" in record:
        return record
    diary = read_journal(folder / "train_drafter" / "run")
    measured = [line for line in diary if line["kind"] in ("train", "heldout")]
    train, kept = (
        next((line for line in reversed(measured) if line["kind"] == kind), {})
        for kind in ("train", "heldout")
    )
    seconds, blocks = train.get("seconds"), train.get("blocks_seen")
    return {
        **record,
        "record": "made of the diary: the run did not end, or nothing came back but that",
        "figures": {
            "steps": diary[-1]["step"] if diary else 0,
            "train_seconds": seconds,
            "anchors_per_s": blocks / seconds if seconds else None,
            "streak_last": kept.get("streak"),
        },
        "training": {name: train.get(name) for name in TRAINING},
        "curve": [{name: line.get(name) for name in CURVE} for line in measured],
        "peak_gib": None,
    }


def last_words(out: Path, row: str, code: int) -> str:
    """What a row's log says of its end."""
    said = (out / f"{row}.log").read_text()
    ended = [one for one in said.splitlines() if "ended: " in one]
    return ended[-1].split("ended: ")[1] if ended and not code else f"{row} failed ({code}):\n{said[-1500:]}"
