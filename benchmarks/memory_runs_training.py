"""Planned training steps under a limit, beside steps with other numbers of anchors; see `memory_runs.py`.

A drafter of the embedded shape is trained with as many anchors as the planner lets into a small budget; all
memory of the card above that budget lies there as ballast, so that a step that took more would fail as on a
full card. Rows are packed as the training loop packs them: real lengths side by side, padded to one shape.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from memory_runs import GIVEN_UP, MAX_LENGTH, Card, Clock, Keep, alternating, fitted, real_lengths
from memory_runs import share_of_best as share

from dflash_lab.data.samples import FeatureItem
from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.drafter.rows import PackedRows, Row
from dflash_lab.memory.account import OUTSIDE_TORCH
from dflash_lab.memory.measure import TrainingStep, clean, training_parts
from dflash_lab.memory.planner import training_fits
from dflash_lab.memory.shapes import GIB, TargetShape, TrainingSetup, target_shape
from dflash_lab.models.source import load_config

SMALL = "random:smollm2-135m"
LAYERS, BLOCK = 2, 16
BUDGET_GIB = 1.75
CHUNK = 1024  # rows of logits
WINDOW_STEPS = 24
ABOUT = {
    "real": "every tensor of a step (forward, fused loss with the target's distribution, backward, AdamW "
    "with fp32 masters), rows of packed chat lengths padded to one shape, the allocator and its cap, kernels",
    "ballast": "one block: all memory of the card above the small budget that the planner was asked for",
    "left out": "reading states from a store (a row's states are zeros that lie there), compiled layers",
}
log = logging.getLogger("memory")


class SkewedSamples:
    """Samples of given lengths without states, the first third of each its prompt."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths, self.heldout = lengths, np.zeros(len(lengths), dtype=bool)

    def __len__(self) -> int:
        return len(self.lengths)

    def bare(self, index: int) -> FeatureItem:
        """A sample of the right length."""
        length = int(self.lengths[index])
        mask = torch.ones(length, dtype=torch.uint8)
        mask[: length // 3] = 0
        ids = torch.full((length,), index % 97, dtype=torch.int32)
        return FeatureItem(f"{index:032x}", ids, mask, torch.zeros(length, 0), None, False)


def packed(config: DrafterConfig, context: int, anchors: int, count: int) -> list[Row]:
    """Pack `count` rows of `context` tokens and `anchors` blocks; without states."""
    samples = SkewedSamples(np.minimum(real_lengths(count * 24), context))
    rows = PackedRows(
        samples,
        np.arange(len(samples)),
        config,
        context_tokens=context,
        anchors=anchors,
        seed=0,
        pad=True,
    )
    if rows.count(0) < count:
        raise RuntimeError(f"Only {rows.count(0)} rows of {context} tokens came of {len(samples)} samples.")
    return [rows.row(0, index) for index in range(count)]


class Training:
    """A step of one shape of target and drafter, set up anew under each limit."""

    def __init__(
        self, card: Card, shape: TargetShape, drafter: DrafterConfig, context: int, chunk: int = CHUNK
    ) -> None:
        self.card, self.shape, self.drafter = card, shape, drafter
        self.setup = TrainingSetup(anchors=1, context=context, block_size=drafter.block_size, chunk=chunk)

    def planned(self, budget_gib: float) -> int:
        """Ask the planner for the most anchors that fit."""
        asked = training_fits(
            self.shape,
            self.drafter,
            replace(self.setup, anchors=8),
            budget_gib,
            cuda=self.card.cuda,
        )
        if not asked.largest_anchors:
            raise RuntimeError(f"No anchor fits {budget_gib} GiB: {asked.account.explain()}")
        return asked.largest_anchors

    def start(self) -> None:
        """Build drafter, optimizer and one row's states on the device."""
        first = replace(self.setup, anchors=8)
        model, head, row = training_parts(self.shape, self.drafter, first, self.card.device)
        self.taps, self.final = row.taps, row.final
        whole = replace(self.setup, anchors=max(1, self.setup.chunk // self.setup.block_size))
        self.step = TrainingStep(model, head, row, whole)  # takes its rows of logits from the setup

    def stop(self) -> None:
        """Drop all of it."""
        del self.step, self.taps, self.final
        clean(self.card.device)

    def run(self, rows: Sequence[Row]) -> None:
        """Make a step on each row, whose states are zeros."""
        for row in rows:
            self.step.row = replace(row.to(self.card.device), taps=self.taps, final=self.final)
            self.step.run()

    def many(self, rows: Sequence[Row], seconds: float) -> dict[str, Any]:
        """Step through `rows` until done or out of time; one that does not fit is counted and left."""
        done = failed = blocks = 0
        self.card.wait()
        start = time.perf_counter()
        for row in rows:
            if time.perf_counter() - start > seconds or failed == GIVEN_UP:
                break
            if fitted(lambda row=row: self.run([row])):  # type: ignore[misc]
                blocks += row.blocks
            else:
                failed += 1
                self.step.optimizer.zero_grad()
                clean(self.card.device)
            done += 1
            if done % 50 == 0:
                self.card.wait()
        self.card.wait()
        spent = time.perf_counter() - start
        counts = {"steps": done, "out_of_memory": failed, "seconds": round(spent, 1)}
        return {**counts, "anchors_per_s_with_compiling": round(blocks / spent)}

    def window(self, rows: Sequence[Row]) -> int | None:
        """Step through `rows`; return their blocks, None if memory lacked."""
        if fitted(lambda: self.run(rows)):
            return sum(row.blocks for row in rows)
        self.step.optimizer.zero_grad()
        return None


def brim(planned: int, used: int, still: int, room: int) -> int:
    """Return the anchors that would fill `room` bytes, where `planned` of them took `used`, `still` without
    any.
    """
    each = max(1.0, (used - still) / planned)
    return max(planned + 8, int(planned + 0.98 * (room - used) / each) // 8 * 8)


def training_runs(
    card: Card,
    clock: Clock,
    count: int,
    limits: Sequence[float],
    keep: Keep,
    before: dict[str, Any],
    *,
    budget_gib: float = BUDGET_GIB,
    context: int = MAX_LENGTH,
    chunk: int = CHUNK,
    target: str = SMALL,
    layers: int = LAYERS,
) -> None:
    """Run what `before` (an earlier result) does not hold yet; `keep` is called with what there is after each
    part.
    """
    began = time.monotonic()
    config = load_config(target)
    drafter = DrafterConfig.from_target(config, mask_token_id=0, block_size=BLOCK, num_layers=layers)
    training = Training(card, target_shape(config), drafter, context, chunk)
    anchors = training.planned(budget_gib)
    rows = packed(drafter, context, anchors, count)
    limits_found: dict[str, Any] = dict(before.get("limits", {}))
    result = {
        "target": target, "drafter_layers": layers, "budget_gib": budget_gib, "anchors": anchors,
        "block_size": BLOCK, "context": context, "chunk": chunk, "about": ABOUT, "limits": limits_found,
    }  # fmt: skip
    log.info("training: %d anchors, %d rows packed in %.1f s", anchors, count, time.monotonic() - began)
    room = int(budget_gib * GIB) - OUTSIDE_TORCH
    others: dict[int, list[Row]] = {}
    for number, limit in enumerate(limits):
        found = limits_found.get(f"{limit:g}", {})
        if found.get("planned", {}).get("steps", 0) >= count and "compare" in found:
            continue
        card.limit(limit)
        ballast = card.ballast(int((limit - budget_gib) * GIB) if card.cuda else 0)
        training.start()
        still = card.allocated() - ballast.nbytes
        planned = training.many(rows, max(5.0, clock.left() - 18 * (len(limits) - number - 1)))
        used = card.reserved() - ballast.nbytes
        limits_found[f"{limit:g}"] = {
            "planned": planned,
            "ballast_gib": round(ballast.nbytes / GIB, 2),
            "peak_reserved_gib": round(used / GIB, 3),
            "room_gib": round(room / GIB, 3),
        }
        log.info("training under %g GiB: %s", limit, limits_found[f"{limit:g}"])
        keep(result)
        if not others:
            full = brim(anchors, used, still, room) if card.cuda else anchors + 8
            sizes = {max(8, anchors // 16 * 8), anchors, full}
            others = {size: packed(drafter, context, size, WINDOW_STEPS) for size in sorted(sizes)}
        windows = {str(size): partial(training.window, some) for size, some in others.items()}
        compared = alternating(windows, card, max(2.0, 0.1 * clock.left()))
        limits_found[f"{limit:g}"] |= {
            "compare": {**compared, "unit": "anchors/s"},
            "share_of_best_pct": share(compared, str(anchors)),
        }
        log.info("training under %g GiB: %s", limit, limits_found[f"{limit:g}"])
        keep(result)
        training.stop()
        del ballast
    card.unlimit()
