"""Planning and statistics at 913,000 and 10 million samples: padding, seconds and peak memory on this
machine; and how long the sliders of `memory_sweep` take to answer.

    python benchmarks/planning.py --json benchmarks/results/cpu/planning.json

Lengths are drawn from the measured ones in tests/data, stretched to a mean of 335 tokens and cut at 4,096; a
log-normal of the same mean is planned beside them, so that the padding does not hang on one shape. Every
timed piece runs in a process of its own, whose peak resident memory is reported; seconds are of the work
itself, without start and imports, which `*_process_seconds` include.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dflash_lab import files, provenance
from dflash_lab.data.batching import balance_shards, plan_batches, predicted_cost
from dflash_lab.data.lengths import length_counts, synthetic_lengths
from dflash_lab.stages.dataset_stats import DatasetStatsParams, run_dataset_stats

REAL = Path(__file__).resolve().parent.parent / "tests" / "data" / "lengths_public_chat.parquet"
SAMPLES, MEAN, LONGEST = 913_000, 335, 4096
BUDGET_TOKENS, MAX_BATCH, CHUNK = 32768, 512, 64
log = logging.getLogger("planning")


def heavy_tailed(count: int = SAMPLES, *, seed: int = 0) -> np.ndarray:
    """Lengths [count] like the measured ones, mean 335, cut at 4,096."""
    real = pl.read_parquet(REAL)["length"].to_numpy()
    return synthetic_lengths(real, count, mean=MEAN, longest=LONGEST, seed=seed)


def log_normal(count: int = SAMPLES, *, sigma: float = 1.1, seed: int = 0) -> np.ndarray:
    """Log-normal lengths [count] of the same mean before the cut."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEAN) - sigma**2 / 2, sigma, count)
    return np.clip(drawn.round(), 1, LONGEST).astype(np.int64)


def planning(count: int = SAMPLES) -> dict[str, float]:
    """Plan in both window sizes and balance over 8 shards; the padding is the worse of the two shapes of
    lengths.
    """
    figures: dict[str, float] = {}
    real = heavy_tailed(count)
    for name, lengths in (("", real), ("_lognormal", log_normal(count))):
        for window, label in ((8192, "8k"), (32768, "32k")):
            start = time.perf_counter()
            plan = plan_batches(
                lengths, token_budget=BUDGET_TOKENS, max_batch=MAX_BATCH, window=window, chunk=CHUNK
            )
            figures[f"plan_{label}{name}_seconds"] = time.perf_counter() - start
            figures[f"waste_{label}{name}_pct"] = plan.waste_pct
    start = time.perf_counter()
    cost = predicted_cost(real, chunk=CHUNK, attention_per_token=1 / (6 * 5120))
    loads = np.bincount(balance_shards(cost, 8), weights=cost)
    figures["balance_8_shards_seconds"] = time.perf_counter() - start
    figures["balance_8_shards_skew_pct"] = 100 * (loads.max() / loads.min() - 1)
    figures["mean_tokens"] = float(real.mean())
    figures["plan_seconds"] = max(figures["plan_8k_seconds"], figures["plan_32k_seconds"])
    figures["padding_waste_8k_pct"] = max(figures["waste_8k_pct"], figures["waste_8k_lognormal_pct"])
    figures["padding_waste_32k_pct"] = max(figures["waste_32k_pct"], figures["waste_32k_lognormal_pct"])
    return figures


def write_table(path: Path, count: int) -> None:
    """Write the columns of a samples file that are not tokens, in row groups like its own."""
    lengths = heavy_tailed(count)
    frame = pl.DataFrame({"length": lengths}).with_columns(
        pl.concat_str(pl.lit("source-"), (pl.int_range(pl.len()) % 23).cast(pl.String)).alias("source"),
        pl.int_range(pl.len()).hash().cast(pl.String).alias("content_hash"),
    )
    frame.write_parquet(path, row_group_size=8192)


def stats(path: Path, folder: Path) -> dict[str, float]:
    """Time one counting pass over a table, then the whole dataset_stats stage on it."""
    start = time.perf_counter()
    length_counts(path)
    counting = time.perf_counter() - start
    start = time.perf_counter()
    params = DatasetStatsParams(run_dir=str(folder), samples=str(path), interactive=False)
    result = run_dataset_stats(params)
    result.save(params.folder)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "counting_seconds": counting, "samples": result.figures["samples"]}


def sliders(folder: Path | str, places: int = 8) -> dict[str, float]:
    """Move every control of the memory planner's widget to so many places or more and time each move."""
    from dflash_lab.stages.memory_sweep import MemorySweepParams, run_memory_sweep
    from dflash_lab.views.memory_sweep import planner

    params = MemorySweepParams(
        run_dir=str(folder), target="random:qwen3.6-27b", device="cpu", dtype="bfloat16", budget_gib=94.97,
        batches=[16, 128], lengths=[335, 3316], step_anchors=[64], step_blocks=[16], measure=False,
    )  # fmt: skip
    box = planner(run_memory_sweep(params), params)
    controls, text = box.children[0].children[0].children, box.children[0].children[1]
    taken_ms: dict[str, list[float]] = {}
    for control in controls:
        if hasattr(control, "options"):
            values = [option[1] if isinstance(option, tuple) else option for option in control.options]
            moves = values[:: max(1, len(values) // places)]
        else:
            moves = [float(gib) for gib in np.geomspace(1, 800, places)]
        for place in (place for place in moves if place != control.value):
            before = text.value, [child.to_json() for child in box.children[1].children]
            start = time.perf_counter()
            control.value = place
            taken_ms.setdefault(control.description, []).append(1e3 * (time.perf_counter() - start))
            if before == (text.value, [child.to_json() for child in box.children[1].children]):
                taken_ms[control.description].pop()  # the same answer: nothing had to be drawn
    whole = [value for several in taken_ms.values() for value in several]
    slowest = max(taken_ms, key=lambda name: max(taken_ms[name]))
    log.info("slowest slider: %s", slowest)
    return {"moves": len(whole), "median_ms": float(np.median(whole)), "worst_ms": max(whole)}


def in_process(piece: str, *words: str) -> dict[str, float]:
    """Run one piece in a process of its own; its figures, peak memory in GiB, and seconds from start to
    end.
    """
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, __file__, "--piece", piece, *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{piece} failed:\n{done.stderr[-2000:]}")
    return {**json.loads(done.stdout), "process_seconds": time.perf_counter() - start}


def measure(*, samples: int = SAMPLES, many: int = 10_000_000) -> dict[str, Any]:
    """Return the figures of planning and statistics, each piece in its own process."""
    figures: dict[str, Any] = {}
    plans = in_process("planning", str(samples))
    figures.update((name, value) for name, value in plans.items() if not name.startswith(("peak", "process")))
    figures["plan_peak_rss_gib"] = plans["peak_rss_gib"]
    figures["plan_process_seconds"] = plans["process_seconds"]
    with tempfile.TemporaryDirectory() as name:
        moved = in_process("sliders", name)
        figures.update((f"slider_{key}", moved[key]) for key in ("moves", "median_ms", "worst_ms"))
        for label, count in (("913k", samples), ("10m", many)):
            path = Path(name) / f"{label}.parquet"
            in_process("table", str(path), str(count))
            found = in_process("stats", str(path), str(Path(name) / label))
            figures.update((f"stats_{label}_{key}", value) for key, value in found.items())
    return figures


def _piece(words: list[str]) -> dict[str, float]:
    if words[0] == "planning":
        figures = planning(int(words[1]))
    elif words[0] == "table":
        write_table(Path(words[1]), int(words[2]))
        figures = {}
    elif words[0] == "sliders":
        figures = sliders(Path(words[1]))
    else:
        figures = stats(Path(words[1]), Path(words[2]))
    figures["peak_rss_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write figures and versions here")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--many", type=int, default=10_000_000, help="samples of the large table")
    parser.add_argument("--piece", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.piece:
        sys.stdout.write(json.dumps(_piece(args.piece)))
        return
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    figures = measure(samples=args.samples, many=args.many)
    for name, value in figures.items():
        log.info("%-36s %.4g", name, value)
    if args.json:
        files.write_json(args.json, {"figures": figures, **provenance.provenance()})


if __name__ == "__main__":
    main()
