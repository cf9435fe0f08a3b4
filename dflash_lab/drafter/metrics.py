"""What training and held-out rows say about a drafter, as sums that add over rows, steps and processes.

All come from the row statistics of the loss, so nothing is projected twice. Definitions: `streak` is the mean
over blocks of accepted drafts + 1, the +1 being the token that every verify round adds, hence the unit of
tau. It ends at the response's end, which biases it low there; decoding starts each block after a miss, which
biases tau below it. `top_k_streak` is the same if the label only had to be among the k best: what a tree or a
selector could reach. `agreement` is how often the target's own argmax is the data token: the ceiling that the
data sets. `ce`, `kl` and `entropy` are plain means over slots; `loss_<term>` is the part that a term has in
the loss, with its factor and the slots' weights.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dflash_lab.drafter.objective import TERMS, RowLoss

logger = logging.getLogger(__name__)
TOP_K = (1, 2, 4, 8, 16)  # powers of two, in order
BINS = 15  # of confidence, for calibration


class Tally:
    """Running sums on one device; `add` never waits for it, `report` does."""

    def __init__(self, block_size: int, device: torch.device | str) -> None:
        shapes: dict[str, tuple[int, ...]] = {
            "slots": (block_size,),  # counted slots by position
            "correct": (block_size,),
            "reached": (block_size,),  # counted slots whose predecessors are all correct
            "accepted": (block_size,),  # ... and that are correct themselves
            "blocks": (),
            "top_k": (len(TOP_K),),
            "ce": (),
            "kl": (),
            "entropy": (),
            "agree": (),
            "judged": (),  # slots with a target argmax
            "bin_count": (BINS,),
            "bin_confidence": (BINS,),
            "bin_correct": (BINS,),
            "selected": (),  # slots where DFlash 2's selector, told the slot before, chose the label
            "selected_run": (),
            "selectable": (),
            "loss": (),
            "parts": (len(TERMS),),  # of the loss, by term
            "denominator": (),
        }
        sizes = [math.prod(shape) for shape in shapes.values()]
        self.flat = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        parts = zip(shapes.items(), self.flat.split(sizes), strict=True)
        self.sums: dict[str, Tensor] = {name: part.view(shape) for (name, shape), part in parts}

    @torch.no_grad()
    def add(self, row: RowLoss) -> None:
        """Add one row, in few operations: a small drafter's step is short enough to feel them."""
        stats = row.rows
        mask, labels = stats.live, stats.label
        none = torch.zeros((), dtype=torch.float64, device=mask.device)
        numbers = mask & ~stats.ce.isnan()  # of a row that is none every comparison says "not above": rank 0
        correct = (stats.argmax == labels) & numbers
        run = correct[:, 1:].long().cumprod(1)  # [A, B-1]
        before = torch.cat([torch.ones_like(run[:, :1]), run[:, :-1]], 1).bool()
        at_first = mask.new_zeros(1, dtype=torch.int64)  # slot 0, where nothing is reached
        best = 1 << torch.arange(len(TOP_K), device=mask.device)
        among = ((stats.rank[..., None] < best) & numbers[..., None])[:, 1:].long().cumprod(1)
        measured = [stats.ce, stats.entropy, *([] if stats.kl is None else [stats.kl])]
        means = torch.where(mask, torch.stack(measured), 0).sum((1, 2), dtype=torch.float64)
        slots, count = mask.sum(0), mask.sum()
        confidence = stats.p_max.flatten().double()
        bins = none.new_zeros(3, BINS).index_add_(
            1,
            (confidence * BINS).long().clamp(0, BINS - 1),
            torch.stack([mask.flatten(), torch.where(mask.flatten(), confidence, 0), correct.flatten()]),
        )
        judged = stats.target_argmax is not None
        right = None if row.chosen is None else (row.chosen == labels) & mask
        found = {
            "slots": slots,
            "correct": correct.sum(0),
            "reached": torch.cat([at_first, (before & mask[:, 1:]).sum(0)]),
            "accepted": torch.cat([at_first, run.sum(0)]),
            "blocks": mask.any(1).sum(),
            "top_k": among.sum((0, 1)),
            "ce": means[0],
            "kl": none if stats.kl is None else means[2],
            "entropy": means[1],
            "agree": ((stats.target_argmax == labels) & mask).sum() if judged else none,
            "judged": count if judged else none,
            "bin_count": bins[0],
            "bin_confidence": bins[1],
            "bin_correct": bins[2],
            "selected": none if right is None else right.sum(),
            "selected_run": none if right is None else right[:, 1:].long().cumprod(1).sum(),
            "selectable": none if right is None else count,
            "loss": row.total.detach(),
            "parts": row.parts,
            "denominator": row.below,
        }
        self.flat += torch.cat([found[name].reshape(-1).to(torch.float64) for name in self.sums])

    def reduced(self, total: Callable[[Tensor], Tensor]) -> Tally:
        """A copy with `total` (a sum over processes) applied to all sums at once."""
        copy = Tally(len(self.sums["slots"]), self.flat.device)
        copy.flat.copy_(total(self.flat))
        return copy

    def merge(self, other: Tally, where: Tensor | None = None) -> None:
        """Add the sums of another tally, or, with a false flag `where` (on any device), nothing."""
        self.flat += other.flat if where is None else torch.where(where.to(self.flat.device), other.flat, 0)

    def load(self, sums: dict[str, Tensor]) -> None:
        """Take over sums that `self.sums` gave; those of a version that kept others begin at zero."""
        if {name: value.shape for name, value in sums.items()} != {n: v.shape for n, v in self.sums.items()}:
            logger.warning("the checkpoint's open sums are of another version: the next record begins anew")
            self.flat.zero_()
            return
        for name, value in self.sums.items():
            value.copy_(sums[name])

    def report(self) -> dict[str, Any]:
        """Headline numbers and per-position lists (slots 1 .. B-1). A ratio without data, or of sums that are
        not numbers, is None.
        """
        sums = self._on_host()
        slots = float(sums["slots"].sum())
        bins = sums["bin_count"]
        gap = (sums["bin_confidence"] - sums["bin_correct"]).abs().sum()
        streak = _ratio(sums["accepted"].sum(), sums["blocks"])
        report: dict[str, Any] = {
            "loss": _ratio(sums["loss"], sums["denominator"]),
            "ce": _ratio(sums["ce"], slots),
            "kl": _ratio(sums["kl"], sums["judged"]),
            "entropy": _ratio(sums["entropy"], slots),
            "accuracy": _ratio(sums["correct"].sum(), slots),
            "streak": None if streak is None else 1 + streak,
            "agreement": _ratio(sums["agree"], sums["judged"]),
            "ece": _ratio(gap, bins.sum()),
            "blocks": int(sums["blocks"]),
            "slots": int(slots),
            "position_accuracy": _ratios(sums["correct"][1:], sums["slots"][1:]),
            "conditional_accuracy": _ratios(sums["accepted"][1:], sums["reached"][1:]),
        }
        for name, part in zip(TERMS, sums["parts"].tolist(), strict=True):
            if part:  # those of terms that are off are 0
                report[f"loss_{name}"] = _ratio(part, sums["denominator"])
        if sums["selectable"]:
            report["selector_accuracy"] = _ratio(sums["selected"], sums["selectable"])
            report["selector_streak"] = 1 + float(sums["selected_run"]) / float(sums["blocks"])
        for i, k in enumerate(TOP_K[1:], start=1):
            hits = _ratio(sums["top_k"][i], sums["blocks"])
            report[f"top{k}_streak"] = None if hits is None else 1 + hits
        return report

    def _on_host(self) -> dict[str, Tensor]:
        copy = Tally(len(self.sums["slots"]), "cpu")
        copy.flat.copy_(self.flat)
        return copy.sums


def _ratio(above: Tensor | float, below: Tensor | float) -> float | None:
    ratio = float(above) / float(below) if float(below) > 0 else math.nan
    return ratio if math.isfinite(ratio) else None


def _ratios(above: Tensor, below: Tensor) -> list[float | None]:
    return [_ratio(a, b) for a, b in zip(above, below, strict=True)]
