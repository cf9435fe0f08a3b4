"""Are the memory predictions right, and do the planner's budgets hold?

    python benchmarks/memory.py --json benchmarks/results/<device>/memory.json

On CUDA two parts in one call of about nine minutes; the file is written after each target and part.

points peaks of extraction batches and of training steps of the 27B hybrid, the 8B dense and the embedded
shape (random weights), short and wide to long and narrow, held against the count on fake tensors made
without the device, and against a calibration fitted on a third of the points and judged on the others.
Errors are of what a batch or step brings: weights, optimizer state and inputs that lie there are left out.
`peak_*` are errors of the whole reserved peak. runs the planner's budgets under 94.97, 80 and 60 GiB: see
memory_runs.py.

On a CPU the points are counted runs of small batches, and there are no runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from memory_runs import Clock, extraction_runs, kernels, load, run_figures, training_runs

from dflash_lab import files, provenance
from dflash_lab.drafter import attention
from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.memory.account import Account
from dflash_lab.memory.fake import count_extraction
from dflash_lab.memory.fake_training import TrainingStep, count_training, training_parts
from dflash_lab.memory.fit import Point, error_figures, fit
from dflash_lab.memory.measure import clean, count_forward, forward_once, measure_cuda
from dflash_lab.memory.setups import ExtractionSetup, TrainingSetup
from dflash_lab.memory.shapes import GIB, target_shape
from dflash_lab.target.sources import load_config
from dflash_lab.target.taps import default_tap_ids

DRAFTERS: dict[str, dict[str, Any]] = {
    "random:qwen3.6-27b": {"num_layers": 5, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    "random:qwen3-8b": {"num_layers": 5},
    "random:smollm2-135m": {"num_layers": 3},
}
# batch x length: short and wide, long and narrow, around whole chunks of 64, and the middle.
GRID = [
    (1, 335), (4, 335), (16, 335), (64, 335), (1, 64), (64, 64), (64, 65), (256, 16), (512, 8), (512, 48),
    (128, 128), (1, 4096), (3, 4096), (6, 2731), (1, 12288), (2, 8192), (33, 500), (12, 1024),
]  # fmt: skip
SMALL_GRID = [(batch, length) for batch in (1, 2, 5) for length in (16, 64, 65, 200)]
SHAPES = [(512, 16, 4096), (192, 24, 2048)]  # anchors, block, context; attention compiles once for each
CHUNKS = (256, 512, 1024, 4096)
log = logging.getLogger("memory")

Counts = Mapping[tuple[str, Any], "Future[tuple[Account, float]]"]
Rows = Iterator[dict[str, Any]]


def drafter_of(name: str, block: int) -> DrafterConfig:
    """The drafter that is measured for a target."""
    return DrafterConfig.from_target(load_config(name), mask_token_id=0, block_size=block, **DRAFTERS[name])


def extraction_setups(name: str, cuda: bool) -> list[ExtractionSetup]:
    """The batches measured for a target."""
    taps = tuple(default_tap_ids(load_config(name).num_hidden_layers))
    dtype, grid = ("bfloat16", GRID) if cuda else ("float32", SMALL_GRID)
    return [
        ExtractionSetup(batch=batch, length=length, tap_ids=taps, dtype=dtype, kernels=kernels())
        for batch, length in grid
    ]


def training_setups(name: str) -> list[list[TrainingSetup]]:
    """The steps measured for a target, one list a shape of attention, soft targets first."""
    return [
        [
            TrainingSetup(anchors=anchors, context=context, block_size=block, chunk=chunk, soft_targets=soft)
            for soft in (True, False)
            for chunk in CHUNKS
        ]
        for anchors, block, context in (SHAPES[:1] if "smollm2" in name else SHAPES)
    ]


def count(name: str, setup: ExtractionSetup | TrainingSetup) -> tuple[Account, float]:
    """Count a setup on fake tensors in a process that sees no device; return the account and the seconds."""
    started = time.perf_counter()
    if isinstance(setup, ExtractionSetup):
        account, _ = count_extraction(load_config(name), setup)
    else:
        account, _ = count_training(load_config(name), drafter_of(name, setup.block_size), setup)
    return account, time.perf_counter() - started


def without_device() -> None:
    """Hide the device from a counting process: it would take a context of its own there."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)


def extraction_points(name: str, device: torch.device, clock: Clock, counts: Counts) -> Rows:
    """Measure extraction batches of one target."""
    setups = extraction_setups(name, device.type == "cuda")
    target = load(name, device, setups[0].tap_ids[-1], setups[0].dtype)
    for setup in setups:
        if clock.left() < 0:
            return
        fake, spent = counts[name, setup].result()
        yield {
            "what": "extraction",
            "target": name,
            "batch": setup.batch,
            "length": setup.length,
            "setup": setup,
            "predicted": fake.live - fake.static,
            "predicted_reserved": fake.reserved,
            "predict_s": spent,
            **measured_batch(target, setup),
        }


def measured_batch(target: Any, setup: ExtractionSetup) -> dict[str, Any]:
    """Measure one batch: what it brought, what was reserved, what lies outside torch, in bytes."""
    if target.device.type != "cuda":
        account, _ = count_forward(target, setup)
        return {"measured": account.moving, "reserved": account.peak, "out_of_memory": False}
    return _plain_measurement(lambda: forward_once(target, setup), target.device)


def _plain_measurement(run: Callable[[], None], device: torch.device) -> dict[str, Any]:
    found = measure_cuda(run, device)
    clean(device)
    return {
        "measured": found.allocated - found.static,
        "reserved": found.reserved,
        "outside": found.outside,
        "out_of_memory": found.out_of_memory,
        "seconds": found.seconds,
    }


def training_points(name: str, device: torch.device, clock: Clock, counts: Counts) -> Rows:
    """Measure training steps of one drafter; weights, optimizer and the row stand there before a step."""
    shape = target_shape(load_config(name))
    for setups in training_setups(name):
        torch.compiler.reset()
        attention._compiled_flex.cache_clear()
        model, head, row = training_parts(shape, drafter_of(name, setups[0].block_size), setups[0], device)
        for setup in setups:
            if clock.left() < 0:
                return
            fake, spent = counts[name, setup].result()
            given = fake.terms["captured states"] + fake.terms.get("target final states", 0)
            used = row if setup.soft_targets else replace(row, final=None)
            step = TrainingStep(model, head, used, setup, None)
            yield {
                "what": "training",
                "target": name,
                "anchors": setup.anchors,
                "block": setup.block_size,
                "context": setup.context,
                "chunk": setup.chunk,
                "soft": setup.soft_targets,
                "setup": setup,
                "predicted": fake.live - fake.static - given,
                "predicted_reserved": fake.reserved,
                "predict_s": spent,
                **_plain_measurement(step.run, device),
            }
            del step
        del model, head, row, used
        clean(device)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Fit each target's extraction and training on a third of the points and judge on the rest."""
    measured = [row for row in rows if not row["out_of_memory"]]
    heldout: list[float] = []
    groups: dict[str, Any] = {}
    for key in sorted({(row["what"], row["target"]) for row in measured}):
        mine = [row for row in measured if (row["what"], row["target"]) == key]
        median, worst = error_figures(_errors(mine, "predicted", "measured"))
        group: dict[str, Any] = {
            "points": len(mine),
            "fake_median_error_pct": median,
            "fake_worst_error_pct": worst,
        }
        if len(mine) >= 6:
            found = fit(
                [Point(row["setup"], row["predicted"], row["measured"]) for row in mine], target=key[1]
            )
            heldout += found.heldout
            group |= {"heldout": found.heldout_points, "median_error_pct": found.median_error_pct}
            group |= {"worst_error_pct": found.worst_error_pct, "coefficients": dict(found.coefficients)}
        groups[" ".join(key)] = group
    figures: dict[str, float] = {"points": len(heldout), "fake_points": len(measured)}
    for prefix, errors in (
        ("", heldout),
        ("fake_", _errors(measured, "predicted", "measured")),
        ("peak_fake_", _errors(measured, "predicted_reserved", "reserved")),
    ):
        median, worst = error_figures(errors)
        figures |= {
            f"{prefix}median_error_pct": round(median, 3),
            f"{prefix}worst_error_pct": round(worst, 3),
        }
    figures["slowest_prediction_s"] = round(max((row["predict_s"] for row in rows), default=0.0), 2)
    return {"figures": figures, "groups": groups}


def _errors(rows: list[dict[str, Any]], predicted: str, measured: str) -> list[float]:
    return [100 * (row[predicted] / row[measured] - 1) for row in rows]


def measure_points(
    device: torch.device, clock: Clock, targets: list[str], keep: Callable[[dict[str, Any]], None]
) -> None:
    """Measure everything; `keep` is called after each target with what there is so far."""
    rows: list[dict[str, Any]] = []
    cuda = device.type == "cuda"
    workers = max(1, min(8, (os.cpu_count() or 2) - 2))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=without_device) as pool:
        counts: dict[tuple[str, Any], Future[tuple[Account, float]]] = {}
        for name in targets:
            setups: list[Any] = list(extraction_setups(name, cuda))
            setups += [setup for group in training_setups(name) for setup in group] if cuda else []
            counts |= {(name, setup): pool.submit(count, name, setup) for setup in setups}
        for name in targets:
            sources = [extraction_points(name, device, clock, counts)]
            sources += [training_points(name, device, clock, counts)] if cuda else []
            for source in sources:
                for row in source:
                    rows.append(row)
                    predicted, measured = row["predicted"] / GIB, row["measured"] / GIB
                    log.info("%s: predicted %.3f, measured %.3f GiB", _label(row), predicted, measured)
                clean(device)
            plain = [{key: value for key, value in row.items() if key != "setup"} for row in rows]
            keep({**summary(rows), "rows": plain})
        pool.shutdown(cancel_futures=True)


def _label(row: dict[str, Any]) -> str:
    if row["what"] == "extraction":
        return f"{row['target']} {row['batch']} x {row['length']}"
    return f"{row['target']} {row['anchors']} x {row['block']}, chunk {row['chunk']}, soft {row['soft']}"


def main() -> None:
    """Run the parts asked for."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", default=["points", "runs"], choices=["points", "runs"])
    parser.add_argument("--targets", nargs="+", default=list(DRAFTERS), choices=list(DRAFTERS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=560.0, help="of the whole call")
    parser.add_argument("--layers", type=int, default=4, help="layers of the cut 27B shape in the runs")
    parser.add_argument("--batches", type=int, default=1000, help="batches and steps under each limit")
    args = parser.parse_args()
    layout = "%(asctime)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=layout, datefmt="%H:%M:%S", stream=sys.stderr)
    device, start = torch.device(args.device), time.monotonic()
    result: dict[str, Any] = {"figures": {}, "provenance": provenance.provenance()}
    runs = "runs" in args.parts and device.type == "cuda"

    def keep(found: dict[str, Any]) -> None:
        result.update({**found, "figures": {**result["figures"], **found.get("figures", {})}})
        files.write_json(args.json, result)

    if "points" in args.parts:
        end = start + (0.55 if runs else 1.0) * args.seconds
        measure_points(device, Clock(end), args.targets, keep)
    if runs:
        clock = Clock(start + args.seconds)
        middle = Clock(time.monotonic() + 0.75 * clock.left())
        extraction = extraction_runs(device, middle, args.layers, args.batches)
        keep({"extraction_runs": extraction})
        training = training_runs(device, clock, args.batches, drafter_of("random:smollm2-135m", 16))
        keep({"training_runs": training, "figures": run_figures(extraction, training)})
    print(json.dumps(result["figures"], indent=2))


if __name__ == "__main__":
    main()
