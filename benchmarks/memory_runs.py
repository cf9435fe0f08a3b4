"""Do the planner's budgets hold? The second part of `memory.py`, which runs it and writes its figures.

Under each limit the device is made smaller by the allocator's own cap. Then 1,000 extraction batches and
1,000 training steps of real skewed lengths are run as the planner sizes them (`memory_runs_extraction.py`,
`memory_runs_training.py`), and compared with sizes set by hand: short windows of the same mix of lengths take
turns, the first round of which is not counted, so that every size has its kernels made and its memory taken.

The models are cut and the memory is not: what the missing layers would hold lies there as ballast. `about` in
the result says for each part what is real and what is ballast.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from dflash_lab.extraction.oom import classify
from dflash_lab.memory.account import OUTSIDE_TORCH
from dflash_lab.memory.measure import capped, clean
from dflash_lab.memory.shapes import GIB
from dflash_lab.models.load import load_target

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = ROOT / "tests" / "data" / "lengths_public_chat.parquet"
MAX_LENGTH = 4096
LIMITS_GIB = (94.97, 80.0, 60.0)
GIVEN_UP = 10  # batches or steps that did not fit: the rest is not tried
ROUNDS = 4  # of windows, the first one not counted
Keep = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Clock:
    """When to be done."""

    end: float

    def left(self) -> float:
        """Seconds left."""
        return self.end - time.monotonic()


@dataclass(frozen=True)
class Card:
    """The device, made as small as another card. On a CPU limits do nothing: the rest can be tried there."""

    device: torch.device

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def limit(self, gib: float) -> None:
        """Leave what a card of `gib` leaves to torch: what torch does not manage would lie there too."""
        clean(self.device)
        if self.cuda:
            capped(self.device, gib - OUTSIDE_TORCH / GIB)
            torch.cuda.reset_peak_memory_stats(self.device)

    def unlimit(self) -> None:
        """Give the device its whole memory back."""
        if self.cuda:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)
        clean(self.device)

    def wait(self) -> None:
        """Wait for what was launched."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def reserved(self) -> int:
        """Return the most bytes that the allocator has held under this limit (0 on a CPU)."""
        return torch.cuda.max_memory_reserved(self.device) if self.cuda else 0

    def allocated(self) -> int:
        """Return the bytes that tensors hold now (0 on a CPU)."""
        return torch.cuda.memory_allocated(self.device) if self.cuda else 0

    def ballast(self, size: int) -> torch.Tensor:
        """Take `size` bytes."""
        return torch.empty(max(0, size), dtype=torch.uint8, device=self.device)


def kernels() -> Any:
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


def alternating(
    windows: Mapping[str, Callable[[], int | None]], card: Card, seconds: float, rounds: int = ROUNDS
) -> dict[str, Any]:
    """Let windows take turns; return each one's rate in units a second, median of its counted rounds.

    A window returns how many units it did, or None if memory lacked: it is then out, and its rate None. The
    first round is not counted. No round is begun after `seconds`, but two are always made.
    """
    rates: dict[str, list[float]] = {name: [] for name in windows}
    failed: set[str] = set()
    start, made = time.monotonic(), 0
    for number in range(rounds):
        if number > 1 and time.monotonic() - start > seconds:
            break
        for name, window in windows.items():
            if name in failed:
                continue
            card.wait()
            clean(card.device)  # blocks cached for another size would be fragments to this one
            began = time.perf_counter()
            done = window()
            card.wait()
            if done is None:
                failed.add(name)
            elif number:
                rates[name].append(done / (time.perf_counter() - began))
        made += 1
    found = {
        name: None if name in failed else round(statistics.median(found), 1) for name, found in rates.items()
    }
    return {"rates": found, "rounds": made - 1}


def share_of_best(compared: Mapping[str, Any], planned: str) -> float:
    """Return the planned size's rate in percent of the best rate among all windows, its own included."""
    rates = {name: rate for name, rate in compared["rates"].items() if rate is not None}
    return round(100 * rates.get(planned, 0.0) / max(rates.values()), 1)


def run_figures(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the flat figures of what there is so far of `extraction` and `training`."""
    figures: dict[str, float] = {}
    for part, prefix, unit in (("extraction", "run", "batches"), ("training", "train", "steps")):
        limits = list(found.get(part, {}).get("limits", {}).values())
        if not limits:
            continue
        figures[f"{prefix}_limits"] = len(limits)
        figures[f"{prefix}_{unit}"] = sum(one["planned"][unit] for one in limits)
        figures[f"{prefix}_{unit}_under_each_limit"] = min(one["planned"][unit] for one in limits)
        figures[f"{prefix}_out_of_memory"] = sum(one["planned"]["out_of_memory"] for one in limits)
        if shares := [one["share_of_best_pct"] for one in limits if "share_of_best_pct" in one]:
            figures[f"{prefix}_compared_limits"] = len(shares)
            figures[f"{prefix}_share_of_best_pct"] = min(shares)
        if filled := [one["filled"] for one in limits if "filled" in one]:
            figures["filled_batches"] = sum(one["batches"] for one in filled)
            figures["filled_out_of_memory"] = sum(one["out_of_memory"] for one in filled)
    return figures
