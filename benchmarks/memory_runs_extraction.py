"""Planned extraction batches under a limit, beside sizes set by hand; see `memory_runs.py`.

The 27B shape is cut to one layer of each kind. The weights and captured states of the missing layers lie
there as ballast, so that a batch meets the memory of the whole model in a thirtieth of its time. Batches that
fill the budget to its margin come last: for each length a large one, topped up with ballast.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from memory_runs import (
    GIVEN_UP,
    MAX_LENGTH,
    Card,
    Clock,
    Keep,
    alternating,
    fitted,
    kernels,
    load,
    real_lengths,
)
from memory_runs import share_of_best as share

from dflash_lab import files
from dflash_lab.data.batching import plan_batches
from dflash_lab.extraction.fused_layers import skip_tuning, speed_up
from dflash_lab.memory.account import Account, predict_extraction
from dflash_lab.memory.measure import clean, forward_once
from dflash_lab.memory.planner import ExtractionBudget, extraction_budget, usable
from dflash_lab.memory.shapes import CHUNK, GIB, ExtractionSetup, dtype_bytes, target_shape
from dflash_lab.models.hooks import default_tap_ids
from dflash_lab.models.source import load_config

LARGE = "random:qwen3.6-27b"
HAND_SET = (2048, 4096, 16384, 32768, 65536)  # tokens a batch
MAX_BATCH = 512
TOKEN_CAP = 65536  # beyond some 120,000 tokens kernels overflow 32-bit indices
WINDOW_TOKENS, WINDOW_BATCHES = 131_072, 4  # a window has at least so many of both
ROUND_S = 8.0  # what a comparison takes at least
ABOUT = {
    "real": "every tensor of a batch through one layer of each kind of the 27B shape (random weights, bf16), "
    "the allocator and its cap, kernels, lengths of chat exchanges cut into batches by plan_batches",
    "ballast": "one block for the weights of the missing layers; one block a batch for the states that they "
    "would have captured by the end of the last layer; in `filled` one more up to the budget's margin",
    "left out": "copies to the host and writing; what the missing layers would do to fragmentation",
}
log = logging.getLogger("memory")


class Batch(NamedTuple):
    """A planned batch: `tokens` are real ones, without padding."""

    rows: int
    longest: int
    tokens: int


class CutTarget:
    """The first layer of each kind of a target; what the others would hold is ballast."""

    def __init__(self, card: Card, name: str = LARGE, dtype: str = "bfloat16") -> None:
        config = load_config(name)
        self.card, self.shape = card, target_shape(config)
        self.taps = tuple(default_tap_ids(config.num_hidden_layers))
        kinds = sorted(set(self.shape.layer_types))
        self.cut = replace(self.shape, layer_types=tuple(kinds), sparse=(False,) * len(kinds))
        fields = {**config.to_dict(), "num_hidden_layers": len(kinds), "layer_types": kinds}
        with tempfile.TemporaryDirectory() as folder:
            files.write_json(Path(folder) / "config.json", fields)
            self.target = load(f"random:{folder}/config.json", card.device, len(kinds) - 1, dtype)
        skip_tuning()
        path = speed_up(self.target, "auto")
        if path.errors and path.plain:
            raise RuntimeError(f"Only some layers are fused, which no account covers: {path.summary()}")
        kept = tuple(range(len(kinds)))
        self.setup = ExtractionSetup(
            batch=1, length=1, tap_ids=kept, dtype=dtype, kernels=kernels(), fused=bool(path.errors)
        )
        missing = self.shape.body_parameters(self.taps[-1] + 1) - self.cut.body_parameters()
        self.weights = card.ballast(dtype_bytes(dtype) * missing)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.shape.vocab, (TOKEN_CAP,), generator=generator)
        self.ids = ids.to(card.device)
        self.missing = cache(self._missing)

    def budget(self, limit_gib: float) -> ExtractionBudget:
        """Ask the planner, for the whole model."""
        longest = replace(self.setup, length=MAX_LENGTH, tap_ids=self.taps)
        return extraction_budget(self.shape, longest, limit_gib, max_batch=MAX_BATCH, cuda=self.card.cuda)

    def account(self, rows: int, longest: int) -> Account:
        """The account of a batch through the whole model."""
        setup = replace(self.setup, batch=rows, length=longest, tap_ids=self.taps)
        return predict_extraction(self.shape, setup, cuda=self.card.cuda)

    def _missing(self, rows: int, longest: int) -> int:
        """Bytes that the missing layers' captured states bring to a batch's peak."""
        setup = replace(self.setup, batch=rows, length=longest)
        cut = predict_extraction(self.cut, setup, cuda=self.card.cuda)
        return self.account(rows, longest).moving - cut.moving

    def batch(self, rows: int, longest: int) -> None:
        """Run one batch beside what the missing layers would have captured by then."""
        states = self.card.ballast(self.missing(rows, longest))
        setup = replace(self.setup, batch=rows, length=longest)
        forward_once(self.target, setup, ids=self.ids[: rows * longest].view(rows, longest))
        del states

    def run(self, batches: Sequence[Batch], seconds: float) -> dict[str, Any]:
        """Run batches until done or out of time; one that does not fit is counted and left."""
        shapes = {(one.rows, one.longest): self.missing(one.rows, one.longest) for one in batches}
        tokens = done = failed = 0
        self.card.wait()
        start = time.perf_counter()
        for rows, longest, real in batches:
            if time.perf_counter() - start > seconds or failed == GIVEN_UP:
                break
            if fitted(lambda size=(rows, longest): self.batch(*size)):  # type: ignore[misc]
                tokens += real
            else:
                failed += 1
                clean(self.target.device)
            done += 1
            if done % 50 == 0:
                self.card.wait()  # or the clock would run on launches, seconds ahead of the device
        self.card.wait()
        spent = time.perf_counter() - start
        rate = round(tokens / spent)
        counts = {"batches": done, "out_of_memory": failed, "shapes": len(shapes)}
        return {**counts, "seconds": round(spent, 1), "tokens_per_s_with_compiling": rate}

    def window(self, batches: Sequence[Batch]) -> int | None:
        """Run batches once; return their real tokens, None if memory lacked."""

        def run() -> None:
            for one in batches:
                self.batch(one.rows, one.longest)

        return sum(one.tokens for one in batches) if fitted(run) else None


def batches_of(lengths: np.ndarray, token_budget: int, count: int = 0) -> list[Batch]:
    """Plan `lengths` and return `count` of the batches in the order of the plan, spread over all of it.

    0: as many as a window takes. They come from the middles of equal parts of the plan, so that budgets of
    all sizes meet the same mix of lengths.
    """
    plan = plan_batches(lengths, token_budget=token_budget, max_batch=MAX_BATCH, chunk=CHUNK)
    tokens = np.add.reduceat(lengths[plan.order], plan.offsets[:-1])
    count = min(count or max(WINDOW_BATCHES, WINDOW_TOKENS // token_budget), len(plan))
    keep = ((np.arange(count) + 0.5) * len(plan) / count).astype(int)
    return [Batch(*map(int, found)) for found in zip(plan.sizes[keep], plan.longest[keep], tokens[keep])]


def extraction_runs(
    card: Card,
    clock: Clock,
    count: int,
    limits: Sequence[float],
    keep: Keep,
    before: dict[str, Any],
    name: str = LARGE,
    dtype: str = "bfloat16",
) -> None:
    """Run what `before` (an earlier result) does not hold yet; `keep` is called with what there is after each
    part.

    First every limit's planned batches, then the comparisons, then the filled batches, with the time that is
    left.
    """
    began = time.monotonic()
    cut = CutTarget(card, name, dtype)
    lengths = real_lengths(200_000)
    cut.run([Batch(8, 335, 0), Batch(2, MAX_LENGTH, 0)] if card.cuda else [Batch(2, 64, 0)], 60)  # compiles
    limits_found: dict[str, Any] = dict(before.get("limits", {}))
    result = {"target": name, "layers_run": len(cut.cut.layer_types), "about": ABOUT, "limits": limits_found}
    log.info("extraction: ready after %.1f s", time.monotonic() - began)
    for number, limit in enumerate(limits):
        found = limits_found.get(f"{limit:g}", {})
        if found.get("planned", {}).get("batches", 0) >= count:
            continue
        card.limit(limit)
        budget = cut.budget(limit)
        seconds = max(10.0, clock.left() - 24 * (len(limits) - number - 1))
        planned = cut.run(batches_of(lengths, budget.token_budget, count), seconds)
        limits_found[f"{limit:g}"] = {
            "token_budget": budget.token_budget,
            "fits_tokens": budget.fits_tokens,
            "planned": planned,
            "peak_reserved_gib": round(card.reserved() / GIB, 2),
        }
        log.info("extraction under %g GiB: %s", limit, limits_found[f"{limit:g}"])
        keep(result)
    for key, part in (("compare", compare), ("filled", fill)):
        todo = [limit for limit in limits if key not in limits_found[f"{limit:g}"]]
        for number, limit in enumerate(todo):
            if clock.left() < ROUND_S:
                break
            card.limit(limit)
            share_s = clock.left() / (len(todo) - number) / (2 if part is compare else 1)
            limits_found[f"{limit:g}"] |= part(cut, limit, lengths, share_s)
            log.info("extraction under %g GiB, %s: %s", limit, key, limits_found[f"{limit:g}"])
            keep(result)
    card.unlimit()


def compare(cut: CutTarget, limit_gib: float, lengths: np.ndarray, seconds: float) -> dict[str, Any]:
    """Let windows of the planned budget and of those set by hand take turns."""
    planned = cut.budget(limit_gib).token_budget
    pool = lengths[:32_768]  # sorted as one
    plans = {budget: batches_of(pool, budget) for budget in sorted({planned, *HAND_SET})}
    windows = {str(budget): partial(cut.window, batches) for budget, batches in plans.items()}
    found = alternating(windows, cut.card, seconds)
    return {"compare": {**found, "unit": "real tokens/s"}, "share_of_best_pct": share(found, str(planned))}


def fill(cut: CutTarget, limit_gib: float, lengths: np.ndarray, seconds: float) -> dict[str, Any]:
    """Fill the budget to its margin: a large batch of each length, topped up with ballast."""
    budget = cut.budget(limit_gib)
    total = {"batches": 0, "out_of_memory": 0}
    start = time.perf_counter()
    for length in reversed(budget.batches):
        rows = min(budget.batches[length], TOKEN_CAP // length)
        spare = usable(limit_gib) - cut.account(rows, length).peak
        clean(cut.target.device)
        ballast = cut.card.ballast(spare)
        found = cut.run([Batch(rows, length, rows * length)] * 2, seconds)
        del ballast
        total = {name: total[name] + found[name] for name in total}
        if time.perf_counter() - start > seconds:
            break
    return {"filled": total}
