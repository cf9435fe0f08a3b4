"""Do the planner's budgets hold? The second part of `memory.py`, which runs it and writes its figures.

Under each limit the device is made smaller by the allocator's own cap. Extraction: 1,000 planned batches of
real skewed lengths through the 27B shape cut to one layer of each kind, the weights and captured states of
the missing ones lying there as ballast, so that a batch meets the memory of the whole model in a fraction of
its time; then, for each length, the batch that fills the budget to its margin. Training: 1,000 steps with
as many anchors as fit a small budget, all memory above it filled; then steps with more anchors than that, to
see whether a bolder setting would have been faster.
"""

from __future__ import annotations

import importlib.util
import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from dflash_lab import files
from dflash_lab.data.batching import plan_batches
from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.extraction.fast.apply import skip_tuning, speed_up
from dflash_lab.extraction.oom import classify
from dflash_lab.memory.extraction_account import OUTSIDE_TORCH, extraction_account
from dflash_lab.memory.fake_training import TrainingStep, training_parts
from dflash_lab.memory.measure import capped, clean, forward_once
from dflash_lab.memory.planner import ExtractionBudget, extraction_budget, training_fits, usable
from dflash_lab.memory.setups import ExtractionSetup, Kernels, TrainingSetup
from dflash_lab.memory.shapes import CHUNK, GIB, TargetShape, target_shape
from dflash_lab.target.loading import load_target
from dflash_lab.target.sources import load_config
from dflash_lab.target.taps import default_tap_ids

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = ROOT / "tests" / "data" / "lengths_public_chat.parquet"
LARGE, SMALL = "random:qwen3.6-27b", "random:smollm2-135m"
MAX_LENGTH = 4096
LIMITS_GIB = (94.97, 80.0, 60.0)
HAND_SET = (2048, 4096, 8192, 16384, 32768, 65536)
BOLDER = (1.25, 1.6)  # times the planned anchors
TOKEN_CAP = 65536  # beyond some 120,000 tokens kernels overflow 32-bit indices
TRAIN_BUDGET_GIB = 2.0
TRAIN_CHUNK = 512  # rows of logits
Keep = Callable[[dict[str, Any]], None]
log = logging.getLogger("memory")


@dataclass(frozen=True)
class Clock:
    """When to be done."""

    end: float

    def left(self) -> float:
        """Seconds left."""
        return self.end - time.monotonic()


def kernels() -> Kernels:
    """The delta rule's kernels that this machine would use."""
    return "fla" if torch.cuda.is_available() and importlib.util.find_spec("fla") else "torch"


def load(name: str, device: torch.device, last_layer: int, dtype: str = "bfloat16") -> Any:
    """Load the layers up to `last_layer` of a target, on slow kernels where there are no fast ones."""
    slow = kernels() == "torch"
    return load_target(
        name, device=device, dtype=dtype, last_layer=last_layer, with_head=False, allow_slow_kernels=slow
    )


def real_lengths(count: int, seed: int = 0) -> np.ndarray:
    """Draw `count` chat exchange lengths with replacement, cut at 4,096 tokens."""
    pool = pl.read_parquet(LENGTHS).filter(pl.col("source") == "exchange")["length"].to_numpy()
    return np.minimum(np.random.default_rng(seed).choice(pool, count), MAX_LENGTH).astype(np.int64)


def fitted(run: Callable[[], None]) -> bool:
    """Run; False if memory lacked, any other error is raised."""
    try:
        run()
    except Exception as error:
        if classify(error).kind != "memory":
            raise
        return False
    return True


class CutTarget:
    """The 27B shape with one layer of each kind; what the others would hold (weights, captured states) is
    ballast.
    """

    def __init__(self, device: torch.device) -> None:
        config = load_config(LARGE)
        self.shape = target_shape(config)
        self.taps = tuple(default_tap_ids(config.num_hidden_layers))
        kinds = sorted(set(self.shape.layer_types))
        self.cut = replace(self.shape, layer_types=tuple(kinds), sparse=(False,) * len(kinds))
        fields = {**config.to_dict(), "num_hidden_layers": len(kinds), "layer_types": kinds}
        with tempfile.TemporaryDirectory() as folder:
            files.write_json(Path(folder) / "config.json", fields)
            self.target = load(f"random:{folder}/config.json", device, len(kinds) - 1)
        skip_tuning()
        fused = bool(speed_up(self.target, "auto").errors)
        kept = tuple(range(len(kinds)))
        self.setup = ExtractionSetup(batch=1, length=1, tap_ids=kept, kernels=kernels(), fused=fused)
        missing = self.shape.body_parameters(self.taps[-1] + 1) - self.cut.body_parameters()
        self.weights = torch.empty(2 * missing, dtype=torch.uint8, device=device)

    def account(self, rows: int, longest: int) -> Any:
        """The account of a batch through the whole model."""
        setup = replace(self.setup, batch=rows, length=longest, tap_ids=self.taps)
        return extraction_account(self.shape, setup)

    def batch(self, rows: int, longest: int) -> None:
        """Run one batch beside what the missing layers would have captured by then."""
        setup = replace(self.setup, batch=rows, length=longest)
        held = self.account(rows, longest).moving - extraction_account(self.cut, setup).moving
        states = torch.empty(max(0, held), dtype=torch.uint8, device=self.target.device)
        forward_once(self.target, setup)
        del states

    def run(self, batches: list[tuple[int, int]], seconds: float) -> dict[str, Any]:
        """Run (rows, longest) until done or out of time; a batch that does not fit is counted and left."""
        tokens = done = failed = 0
        torch.cuda.synchronize()
        start = time.perf_counter()
        for rows, longest in batches:
            if time.perf_counter() - start > seconds:
                break
            if fitted(lambda size=(rows, longest): self.batch(*size)):  # type: ignore[misc]
                tokens += rows * longest
            else:
                failed += 1
                clean(self.target.device)
            done += 1
        torch.cuda.synchronize()
        spent = time.perf_counter() - start
        counts = {"batches": done, "out_of_memory": failed, "seconds": round(spent, 1)}
        return {**counts, "padded_tokens_per_s": round(tokens / spent)}


def batches_of(lengths: np.ndarray, token_budget: int, max_batch: int, count: int) -> list[tuple[int, int]]:
    """Return (rows, longest) of `count` planned batches in the order of the plan, spread over all of it."""
    plan = plan_batches(lengths, token_budget=token_budget, max_batch=max_batch, chunk=CHUNK)
    found = list(zip(plan.sizes.tolist(), plan.longest.tolist()))
    keep = np.linspace(0, len(found) - 1, min(count, len(found))).round().astype(int)
    return [found[index] for index in sorted(set(keep.tolist()))]


def unlimited(device: torch.device) -> None:
    """Give the device its whole memory back."""
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    clean(device)


def limited(device: torch.device, limit_gib: float) -> None:
    """Make the device as small as a card of `limit_gib`: what torch does not manage would lie there too."""
    clean(device)
    capped(device, limit_gib - OUTSIDE_TORCH / GIB)


def extraction_runs(
    device: torch.device, clock: Clock, count: int, limits: Sequence[float], keep: Keep
) -> dict[str, Any]:
    """Run the planner's budgets under each limit, and budgets set by hand once for comparison; `keep` is
    called with what there is after each.
    """
    cut = CutTarget(device)
    lengths = real_lengths(200_000)
    cut.run([(8, 335), (2, MAX_LENGTH)], 120)  # compiles and tunes
    hand = {
        budget: cut.run(batches_of(lengths, budget, 512, 24), 1.5)["padded_tokens_per_s"]
        for budget in HAND_SET
    }
    runs: dict[str, Any] = {"hand_set_tokens_per_s": {str(budget): rate for budget, rate in hand.items()}}
    for number, limit in enumerate(limits):
        limited(device, limit)
        torch.cuda.reset_peak_memory_stats(device)
        budget = extraction_budget(
            cut.shape,
            limit,
            tap_ids=cut.taps,
            longest=MAX_LENGTH,
            kernels=cut.setup.kernels,
            fused=cut.setup.fused,
        )
        planned = batches_of(lengths, budget.token_budget, budget.max_batch, count)
        share = clock.left() / (len(limits) - number)
        found = cut.run(planned, max(5.0, 0.75 * share))
        steady = cut.run(batches_of(lengths, budget.token_budget, budget.max_batch, 24), 1.5)
        runs[f"{limit:g}"] = {
            "token_budget": budget.token_budget,
            "fits_tokens": budget.fits_tokens,
            "planned": found,
            "peak_reserved_gib": round(torch.cuda.max_memory_reserved(device) / GIB, 2),
            "filled": filled(cut, limit, budget, max(5.0, 0.2 * share)),
            "share_of_best_pct": round(100 * steady["padded_tokens_per_s"] / max(hand.values()), 1),
        }
        log.info("extraction under %g GiB: %s", limit, runs[f"{limit:g}"])
        keep(runs)
    unlimited(device)
    del cut
    clean(device)
    return runs


def filled(cut: CutTarget, limit_gib: float, budget: ExtractionBudget, seconds: float) -> dict[str, Any]:
    """Fill the budget to its margin: a large batch of each length, topped up with ballast."""
    total = {"batches": 0, "out_of_memory": 0}
    start = time.perf_counter()
    for length in reversed(budget.batches):
        rows = min(budget.batches[length], TOKEN_CAP // length)
        spare = usable(limit_gib) - cut.account(rows, length).peak
        clean(cut.target.device)
        ballast = torch.empty(max(0, spare), dtype=torch.uint8, device=cut.target.device)
        found = cut.run([(rows, length)] * 3, seconds)
        del ballast
        total = {name: total[name] + found[name] for name in total}
        if time.perf_counter() - start > seconds:
            break
    return total


def training_runs(
    device: torch.device,
    clock: Clock,
    steps: int,
    drafter: DrafterConfig,
    limits: Sequence[float],
    keep: Keep,
) -> dict[str, Any]:
    """Train with as many anchors as fit a small budget, the rest of each limit filled; after the last limit
    try bolder settings.
    """
    shape = target_shape(load_config(SMALL))
    torch.compiler.reset()
    fits = training_fits(shape, drafter, TRAIN_BUDGET_GIB, anchors=2048, context=4096, chunk=TRAIN_CHUNK)
    planned = min(fits.largest_anchors, 2048)
    runs: dict[str, Any] = {}
    for number, limit in enumerate(limits):
        seconds = max(5.0, 0.9 * clock.left() / (len(limits) - number))
        runs[f"{limit:g}"] = trained(device, limit, shape, drafter, planned, steps, seconds)
        log.info("training under %g GiB: %s", limit, runs[f"{limit:g}"])
        keep(runs)
    few = max(10, steps // 50)
    bolder = {
        f"{anchors}": trained(device, limits[-1], shape, drafter, anchors, few, 15)
        for anchors in (int(planned * factor) // 8 * 8 for factor in BOLDER)
    }
    runs["bolder"] = bolder
    keep(runs)
    unlimited(device)
    return runs


def trained(
    device: torch.device,
    limit: float,
    shape: TargetShape,
    drafter: DrafterConfig,
    anchors: int,
    steps: int,
    seconds: float,
) -> dict[str, Any]:
    """Train `steps` steps under `limit` GiB, all but the small budget filled; stop after `seconds`."""
    limited(device, limit)
    torch.cuda.reset_peak_memory_stats(device)
    setup = TrainingSetup(anchors=anchors, context=4096, block_size=drafter.block_size, chunk=TRAIN_CHUNK)
    ballast = torch.empty(int((limit - TRAIN_BUDGET_GIB) * GIB), dtype=torch.uint8, device=device)
    step = TrainingStep(*training_parts(shape, drafter, setup, device), setup, None)
    failed = 0 if fitted(step.run) else 1  # the first one compiles
    torch.cuda.synchronize(device)
    start, done = time.perf_counter(), 1
    while done < steps and time.perf_counter() - start < seconds:
        failed += not fitted(step.run)
        done += 1
    torch.cuda.synchronize(device)
    spent = time.perf_counter() - start
    peak = torch.cuda.max_memory_reserved(device) - ballast.nbytes
    return {
        "anchors": anchors,
        "steps": done,
        "out_of_memory": failed,
        "seconds": round(spent, 1),
        "anchors_per_s": round(anchors * (done - 1) / spent) if spent and not failed else 0,
        "reserved_gib": round(peak / GIB, 3),
        "budget_gib": TRAIN_BUDGET_GIB - round(OUTSIDE_TORCH / GIB, 3),
    }


def run_figures(extraction: dict[str, Any], training: dict[str, Any]) -> dict[str, float]:
    """Return the flat figures of both."""
    limits = [found for found in extraction.values() if "planned" in found]
    steps = [found for name, found in training.items() if name != "bolder"]
    best = max(one["anchors_per_s"] for one in [*steps, *training["bolder"].values()])
    return {
        "run_batches": sum(one["planned"]["batches"] for one in limits),
        "run_out_of_memory": sum(one["planned"]["out_of_memory"] for one in limits),
        "run_share_of_best_pct": min(one["share_of_best_pct"] for one in limits),
        "filled_batches": sum(one["filled"]["batches"] for one in limits),
        "filled_out_of_memory": sum(one["filled"]["out_of_memory"] for one in limits),
        "train_steps": sum(one["steps"] for one in steps),
        "train_out_of_memory": sum(one["out_of_memory"] for one in steps),
        "train_share_of_best_pct": round(100 * min(one["anchors_per_s"] for one in steps) / max(best, 1), 1),
    }
