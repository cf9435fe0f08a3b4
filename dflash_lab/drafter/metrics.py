"""What training and held-out rows say about a drafter, as sums that add over rows, steps and processes.

All come from the row statistics of the loss, so nothing is projected twice. Definitions: `streak` is the mean
over blocks of accepted drafts + 1, the +1 being the token that every verify round adds, hence the unit of
tau. It ends at the response's end, which biases it low there; decoding starts each block after a miss, which
biases tau below it. `top_k_streak` is the same if the label only had to be among the k best: what a tree or a
selector could reach. `agreement` is how often the target's own argmax is the data token: the ceiling that the
data sets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dflash_lab.drafter.objective import RowLoss

TOP_K = (1, 2, 4, 8, 16)
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
            "denominator": (),
        }
        sizes = [math.prod(shape) for shape in shapes.values()]
        self.flat = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        parts = zip(shapes.items(), self.flat.split(sizes), strict=True)
        self.sums: dict[str, Tensor] = {name: part.view(shape) for (name, shape), part in parts}

    @torch.no_grad()
    def add(self, row: RowLoss) -> None:
        """Add one row."""
        stats = row.rows
        mask, labels, sums = stats.live, stats.label, self.sums
        correct = (stats.argmax == labels) & mask
        run = correct[:, 1:].long().cumprod(1)  # [A, B-1]
        before = torch.cat([torch.ones_like(run[:, :1]), run[:, :-1]], 1).bool()
        sums["slots"] += mask.sum(0)
        sums["correct"] += correct.sum(0)
        sums["reached"][1:] += (before & mask[:, 1:]).sum(0)
        sums["accepted"][1:] += run.sum(0)
        sums["blocks"] += mask.any(1).sum()
        for i, k in enumerate(TOP_K):
            sums["top_k"][i] += ((stats.rank < k) & mask)[:, 1:].long().cumprod(1).sum()
        sums["ce"] += torch.where(mask, stats.ce, 0).sum(dtype=torch.float64)
        sums["entropy"] += torch.where(mask, stats.entropy, 0).sum(dtype=torch.float64)
        if stats.kl is not None:
            sums["kl"] += torch.where(mask, stats.kl, 0).sum(dtype=torch.float64)
        if stats.target_argmax is not None:
            sums["agree"] += ((stats.target_argmax == labels) & mask).sum()
            sums["judged"] += mask.sum()
        counted, confidence = mask.flatten().double(), stats.p_max.flatten().double()
        where = (confidence * BINS).long().clamp(0, BINS - 1)
        sums["bin_count"].index_add_(0, where, counted)
        sums["bin_confidence"].index_add_(0, where, torch.where(mask.flatten(), confidence, 0))
        sums["bin_correct"].index_add_(0, where, correct.flatten().double())
        if row.chosen is not None:
            right = (row.chosen == labels) & mask
            sums["selected"] += right.sum()
            sums["selected_run"] += right[:, 1:].long().cumprod(1).sum()
            sums["selectable"] += mask.sum()
        sums["loss"] += row.total.detach().double()
        sums["denominator"] += row.below

    def reduced(self, total: Callable[[Tensor], Tensor]) -> Tally:
        """A copy with `total` (a sum over processes) applied to all sums at once."""
        copy = Tally(len(self.sums["slots"]), self.flat.device)
        copy.flat.copy_(total(self.flat))
        return copy

    def merge(self, other: Tally, where: Tensor | None = None) -> None:
        """Add the sums of another tally, or, with a false flag `where` on the device, nothing."""
        self.flat += other.flat if where is None else torch.where(where, other.flat, 0)

    def load(self, sums: dict[str, Tensor]) -> None:
        """Take over sums that `self.sums` gave."""
        for name, value in self.sums.items():
            value.copy_(sums[name])

    def report(self) -> dict[str, Any]:
        """Headline numbers and per-position lists (slots 1 .. B-1). A ratio without data is None."""
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
    return float(above) / float(below) if float(below) > 0 else None


def _ratios(above: Tensor, below: Tensor) -> list[float | None]:
    return [_ratio(a, b) for a, b in zip(above, below, strict=True)]
