"""Are the memory predictions right, and do the planner's budgets hold?

    python benchmarks/memory.py --json benchmarks/results/<device>/memory.json
    python benchmarks/memory.py --again benchmarks/results/<device>/memory.json

The second judges the raw points of a result by the account as it is now, without a device. It needs the
version of transformers that they were measured with, on which what some layers hold depends.

On CUDA two parts in one call of about eight minutes (`--smoke`: one minute); the file is written after each
point and each run, and `--resume` goes on from it.

points peaks of extraction batches and of training steps of the 27B hybrid, the 8B dense and the embedded
shape (random weights), short and wide to long and narrow, held against the formulas. Errors are of what a
batch or step brings: weights, optimizer state and inputs that lie there are left out. runs the planner's
budgets under 94.97, 80 and 60 GiB: see memory_runs.py.

On a CPU the points are counted runs of small batches, and there are no runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from memory_points import DRAFTERS, measure, row_of, summary, task_of, tasks
from memory_points import brought as brought_bytes
from memory_runs import LIMITS_GIB, Card, Clock, run_figures
from memory_runs_extraction import extraction_runs
from memory_runs_training import training_runs
from result_file import made_of, read_result, told

from dflash_lab import files, provenance
from dflash_lab.memory.shapes import GIB
from dflash_lab.models.load import choose_device

TRAINING_SHARE = 0.5  # of the time of the runs
RUN_FIGURES = ("run_", "train_", "filled_")  # so begin the figures of the second part
SMOKE = {"targets": ["random:smollm2-135m", "random:qwen3-8b"], "batches": 30, "limits": LIMITS_GIB[-1:]}
log = logging.getLogger("memory")
Keep = Callable[[dict[str, Any]], None]


def measure_points(
    args: argparse.Namespace, device: torch.device, clock: Clock, rows: list[Any], keep: Keep
) -> None:
    """Measure what `rows` does not hold yet; `keep` is called with what there is after each point."""
    cuda, done = device.type == "cuda", {task_of(row).key for row in rows}
    wanted = [task for name in args.targets for task in tasks(name, cuda=cuda, smoke=args.smoke)]
    wanted = [task for task in wanted if task.key not in done]
    for name in args.targets:
        began = time.monotonic()
        for task, measured in measure([task for task in wanted if task.target == name], device, clock):
            rows.append(row_of(task, measured, cuda))
            predicted, found = (brought_bytes(rows[-1], kind) / GIB for kind in ("analytic", "measured"))
            error, spent = 100 * (predicted / found - 1), time.monotonic() - began
            log.info(
                "%s: %.3f predicted, %.3f GiB measured, %+.2f %%, %.1f s",
                task,
                predicted,
                found,
                error,
                spent,
            )
            keep({**summary(rows), "rows": rows})
            began = time.monotonic()


def again(path: Path) -> dict[str, Any]:
    """Return a stored result with its points judged by the account as it is now."""
    result = read_result(path, "memory.py", figures=dict, rows=list)
    rows = [row_of(task_of(row), row["measured"], "reserved" in row["measured"]) for row in result["rows"]]
    found = summary(rows)
    kept = {name: one for name, one in result["figures"].items() if name.startswith(RUN_FIGURES)}
    return {**result, "rows": rows, "groups": found["groups"], "figures": {**found["figures"], **kept}}


def run_both(card: Card, clock: Clock, args: argparse.Namespace, result: dict[str, Any], keep: Keep) -> None:
    """Run training and then extraction under the limits, on from what `result` holds of it.

    What breaks in one is raised after the other has run.
    """
    found: dict[str, Any] = dict(result.get("runs", {})) if args.resume else {}
    found["provenance"] = provenance.provenance()

    def keep_part(name: str) -> Keep:
        def put(part: dict[str, Any]) -> None:
            found[name] = part
            keep({"runs": found, "figures": run_figures(found)})

        return put

    errors = []
    part = Clock(time.monotonic() + TRAINING_SHARE * clock.left())
    for name, run, until in (("training", training_runs, part), ("extraction", extraction_runs, clock)):
        try:
            run(card, until, args.batches, args.limits, keep_part(name), found.get(name, {}))
        except Exception as error:
            log.exception("%s under limits broke", name)
            errors.append(error)
    if errors:
        raise errors[0]


def arguments() -> argparse.Namespace:
    """Read the command line; `--smoke` is a small selection of everything."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--json", type=Path, help="where figures and raw points go")
    parser.add_argument("--again", type=Path, help="judge the raw points of this result again and rewrite it")
    parser.add_argument("--resume", action="store_true", help="keep the points that --json already holds")
    parser.add_argument(
        "--smoke", action="store_true", help="few points and one short run, to see that it works"
    )
    parser.add_argument("--parts", nargs="+", default=["points", "runs"], choices=["points", "runs"])
    parser.add_argument("--targets", nargs="+", default=list(DRAFTERS), choices=list(DRAFTERS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=500.0, help="of the whole call")
    parser.add_argument("--batches", type=int, default=1000, help="batches and steps under each limit")
    args = parser.parse_args()
    args.limits = LIMITS_GIB
    if args.smoke:
        vars(args).update(SMOKE)
    if not (args.json or args.again):
        parser.error("one of --json and --again")
    return args


def main() -> None:
    """Do what was asked for."""
    args = arguments()
    layout = "%(asctime)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=layout, datefmt="%H:%M:%S", stream=sys.stderr)
    if args.again:
        with made_of(args.again, "memory.py"):
            found = again(args.again)
        files.write_json(args.again, found)
        print(json.dumps({"figures": found["figures"], "groups": found["groups"]}, indent=2))
        return
    device, start = choose_device(args.device), time.monotonic()
    result: dict[str, Any] = {"figures": {}, "provenance": provenance.provenance(), "rows": []}
    if args.resume and args.json.exists():
        result = read_result(args.json, "memory.py", figures=dict, rows=list)

    def keep(found: dict[str, Any]) -> None:
        result.update({**found, "figures": {**result["figures"], **found.get("figures", {})}})
        files.write_json(args.json, result)

    for name in ("extraction_runs", "training_runs"):  # of results before sizes took turns
        result.pop(name, None)
    runs = "runs" in args.parts and device.type == "cuda"
    if "points" in args.parts:
        end = start + (0.6 if runs else 1.0) * args.seconds
        measure_points(args, device, Clock(end), result["rows"], keep)
    if runs:
        run_both(Card(device), Clock(start + args.seconds), args, result, keep)
    print(json.dumps(result["figures"], indent=2))


if __name__ == "__main__":
    sys.exit(told(main))
