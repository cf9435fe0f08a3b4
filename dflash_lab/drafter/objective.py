"""From a packed row to its loss and its metrics, under the settings of a training run."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.drafter.loss import DraftLoss, FusedDraftLoss, RowStats, VocabShard
from dflash_lab.drafter.loss_terms import LossConfig
from dflash_lab.drafter.model import Drafter
from dflash_lab.drafter.optim import OptimizerConfig
from dflash_lab.drafter.rows import Row, decay_weights
from dflash_lab.errors import InputError

if TYPE_CHECKING:
    from dflash_lab.models.load import TargetHead

logger = logging.getLogger(__name__)

DENOMINATORS = ("weights", "mask")
SELECTOR_ELEMENTS = 1 << 26  # of the selector's logits held at once


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """A run: its length, batch, objective, optimizer, and what it writes when.

    Attributes:
        max_steps: optimizer steps of the whole run; the schedule ends there.
        context_tokens, anchors: size of a packed row; a step sees `accumulate` rows on each process.
        selector_weight: factor of the cross-entropy of DFlash 2's selector; no matter for DFlash.
        gamma: slot k weighs exp(-(k-1)/gamma); 0: all slots alike.
        denominator: a step's loss is divided by the sum of its slot `weights` (SpecForge, the default) or by
            their number, `mask` (speculators). The two differ by sum(w)/sum(mask), 0.20 to 0.46 for gamma 4
            to 12 at 24 slots, which the learning rate feels.
        noise_std: uniform noise in (-noise_std, noise_std) added to the tapped states of training rows.
        warmup, floor: share of the run spent warming up; final learning rate as a share of the peak.
        clip_norm: gradient norm above which gradients are scaled down; 0: never.
        max_bad_steps: the run ends after this many skipped steps in a row.
        explode_factor: a gradient norm above this many times the median of the last 64 is skipped like a NaN.
        time_limit_s: seconds of training; the schedule then follows the larger of step share and time share,
            so the rate has come down when time is up. 0: none, and only then is a run reproducible bit for
            bit.
    """

    max_steps: int
    context_tokens: int
    anchors: int
    accumulate: int = 1
    loss: LossConfig = field(default_factory=LossConfig)
    selector_weight: float = 1.0
    gamma: float = 7.0
    denominator: str = "weights"
    noise_std: float = 0.0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    warmup: float = 0.04
    floor: float = 0.0
    clip_norm: float = 1.0
    log_every: int = 10
    eval_every: int = 100
    eval_rows: int = 4
    checkpoint_every: int = 500
    keep: int = 2
    max_bad_steps: int = 5
    explode_factor: float = 50.0
    time_limit_s: float = 0.0
    attention: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        low = dict(
            max_steps=1, context_tokens=2, anchors=1, accumulate=1, log_every=1, eval_every=1, eval_rows=0
        )
        low |= dict(checkpoint_every=1, keep=1, max_bad_steps=1)
        for name, least in low.items():
            if getattr(self, name) < least:
                raise InputError(f"training: {name} = {getattr(self, name)} must be at least {least}.")
        for name in ("gamma", "noise_std", "clip_norm", "time_limit_s"):
            if not getattr(self, name) >= 0:
                raise InputError(f"training: {name} = {getattr(self, name)} must not be negative.")
        for name in ("warmup", "floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"training: {name} = {getattr(self, name)} is a share, between 0 and 1.")
        if self.denominator not in DENOMINATORS:
            raise InputError(f"training: denominator = {self.denominator!r}: choose 'weights' or 'mask'.")
        if self.explode_factor <= 1:
            raise InputError(f"training: explode_factor = {self.explode_factor} must be above 1.")

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        values = dataclasses.asdict(self)
        values["optimizer"]["betas"] = list(values["optimizer"]["betas"])
        return values


def selector_loss(
    drafter: Drafter, hidden: Tensor, head: Tensor, labels: Tensor, rows: RowStats
) -> tuple[Tensor, Tensor]:
    """Weighted sum of the cross-entropy of DFlash 2's selector; its choices [A, B] (-1 where none counts).

    The selector learns to pick the label among the drafter's own top k (their indices are not differentiated,
    their logits are), given the data token before the slot (teacher forcing). A label that is not among them
    takes the last place, so that there is always something to learn. Slots weigh as in the main loss.

    hidden [A, B, H] of the drafter, head [V, H], labels [A, B] data tokens (slot 0: the anchor), `rows` the
    main loss's statistics, whose labels and weights are used. A choice is one of the true top k: it is wrong
    wherever the label had to be put in.
    """
    previous = labels.to(hidden.device).roll(1, dims=1)[rows.live]  # slot 0 is never live
    states, wanted, weights = hidden[rows.live], rows.label[rows.live], rows.weight[rows.live]
    total = hidden.new_zeros((), dtype=torch.float32)
    picks = [previous[:0]]
    size = max(1, SELECTOR_ELEMENTS // head.shape[0])
    for start in range(0, len(states), size):
        part = slice(start, start + size)
        losses, pick = checkpoint(
            _choose, drafter, states[part], head, previous[part], wanted[part], use_reentrant=False
        )
        total = total + (losses * weights[part]).sum()
        picks.append(pick)
    chosen = torch.full_like(rows.label, -1)
    chosen[rows.live] = torch.cat(picks)
    return total, chosen


def _choose(
    drafter: Drafter, states: Tensor, head: Tensor, previous: Tensor, wanted: Tensor
) -> tuple[Tensor, Tensor]:
    """states [n, H] -> cross-entropy [n] over the candidates, and the token the selector would choose [n]."""
    selector = drafter.candidate_selector
    assert selector is not None
    with torch.no_grad():
        candidates = drafter.logits(states, head).topk(min(selector.top_k, head.shape[0]), dim=-1).indices
        missing = (candidates != wanted[:, None]).all(-1)
        taught = candidates.clone()
        taught[missing, -1] = wanted[missing]
    unary = drafter.capped(torch.einsum("nh,nkh->nk", states, head[taught])).float()
    scores = selector.scores(unary, taught, states, previous).float()
    where = (taught == wanted[:, None]).long().argmax(-1)
    losses = F.cross_entropy(scores, where, reduction="none")
    with torch.no_grad():
        # Where the label was put among the candidates, it is no choice of the drafter's.
        free = torch.where(missing, scores[:, :-1].argmax(-1), scores.argmax(-1))
    return losses, taught.gather(-1, free[:, None])[:, 0]


def add_noise(taps: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """taps + uniform noise in (-std, std), independent for every element; `generator` lives on the taps'
    device.
    """
    noise = torch.rand(taps.shape, generator=generator, device=taps.device, dtype=torch.float32)
    return noise.mul_(2).sub_(1).mul_(std).to(taps.dtype).add_(taps)


# The terms of a loss, in the order of `RowLoss.parts`; `selector` is DFlash 2's.
TERMS = ("ce", "kl", "cap", "tv", "lk", "length", "selector")


@dataclass(frozen=True)
class RowLoss:
    """What a row costs: `total` (differentiable, unnormalised), the part that each of TERMS has in it [7],
    `denominator`, statistics of its slots, and the tokens [A, B] that DFlash 2's selector
    chose (None without one).
    """

    total: Tensor
    parts: Tensor
    denominator: Tensor
    rows: RowStats
    chosen: Tensor | None


class Objective:
    """The loss of packed rows under a run's settings, on the device of `head`: embed the blocks, run the
    drafter, compare with what the target says. Head and embedding are the target's, and frozen.
    """

    def __init__(
        self,
        head: TargetHead,
        config: DrafterConfig,
        settings: TrainSettings,
        plan_group: Any = None,
        *,
        shard: VocabShard | None = None,
        target_device: torch.device | str | None = None,
    ) -> None:
        """`plan_group`: processes that must use the same loss chunks. With `shard`, head.weight is this
        rank's slice of the head. On a `target_device` of its own the target's logits are made, by a copy of
        norm and head there; None: beside `head`.
        """
        self.head, self.settings, self.shard = head, settings, shard
        self.teacher = head if target_device is None else on_device(head, target_device)
        self.hosts = None if shard is None else shard.group
        if shard is not None and dist.get_backend(shard.group) == "nccl":
            self.hosts = dist.new_group(backend="gloo")  # labels and their like are on the host
        self.attention = settings.attention  # `warm_up` takes another where this one does not compile
        self.weights = decay_weights(config.block_size, settings.gamma)
        scaled = dataclasses.replace(
            settings.loss, logit_scale=config.output_multiplier, logit_softcap=config.final_logit_softcapping
        )
        self.fused = FusedDraftLoss(scaled, shard=shard, group=plan_group)
        on = settings.loss
        factors = [on.hard_weight, on.soft_weight, on.cap_weight, on.tv_weight, on.lk_weight]
        factors += [on.length_weight, settings.selector_weight]
        self.factors = dict(zip(TERMS, factors, strict=True))
        self._factors = torch.tensor(factors, dtype=torch.float64).to(head.weight.device)
        self._none = torch.zeros_like(self._factors[0])

    def __call__(
        self, model: nn.Module, drafter: Drafter, row: Row, taps: Tensor, *, teacher: bool
    ) -> RowLoss:
        """Loss of one row. `model` is `drafter` or a wrapper of it; `taps` [S, K*H] the row's states, with
        noise or without. `teacher` compares with the target where the row has its final states, even if no
        term needs it (one more matrix product).

        These are the target's own last hidden states at a + k - 1, through its own final norm: they give its
        distribution of the token at a + k, exact when slots 1 .. k-1 are right, the case that acceptance
        depends on.
        """
        head, device = self.head, self.head.weight.device
        embeddings = head.embed(row.block_ids.to(device)).to(taps.device)
        hidden = model(embeddings, taps, row.layout, self.attention).to(device)
        target_hidden = None
        if row.final is None:
            if self.settings.loss.needs_target:
                raise InputError(
                    "this loss compares with the target's distribution, but the store has no final states. "
                    "Extract with store_final: true, or train on hard labels from the data alone."
                )
        elif teacher or self.settings.loss.needs_target:
            with torch.no_grad():
                final = row.final.to(self.teacher.weight.device, head.weight.dtype)
                target_hidden = self.teacher.normed(final)
        weights = row.slot_mask * self.weights
        target_rows = None if target_hidden is None else row.target_rows
        mine = (hidden, row.labels, weights, target_hidden, target_rows)
        if self.shard is None:
            loss = self.compare(*mine)
        else:  # all ranks compute each one's loss, the owner of the rows keeps it
            for turn in self.shard.turns(*mine, self.hosts):
                of_turn = self.compare(*turn[1:])
                if turn.mine:
                    loss = of_turn
        total, chosen, sums = loss.total, None, loss.sums
        if drafter.candidate_selector is not None and self.settings.selector_weight:
            selector, chosen = selector_loss(drafter, hidden, head.weight, row.labels, loss.rows)
            total = total + self.settings.selector_weight * selector
            sums = {**sums, "selector": selector.detach()}
        found = [sums[name] if name in sums and self.factors[name] else self._none for name in TERMS]
        parts = torch.stack(found) * self._factors
        denominator = loss.weight_sum if self.settings.denominator == "weights" else loss.row_count
        return RowLoss(total, parts, denominator, loss.rows, chosen)

    def compare(
        self,
        hidden: Tensor,
        labels: Tensor,
        weights: Tensor,
        target_hidden: Tensor | None,
        target_rows: Tensor | None,
    ) -> DraftLoss:
        """The draft loss of hidden states [A, B, H]; see `fused_draft_loss`."""
        own = target_hidden is not None and self.teacher is not self.head
        return self.fused(
            hidden,
            self.head.weight,
            labels,
            weights,
            target_hidden=target_hidden,
            target_rows=target_rows,
            target_head=self.teacher.weight if own else None,
        )


def on_device(head: TargetHead, device: torch.device | str) -> TargetHead:
    """A copy of norm and head matrix on `device`, with the embedding where it was."""
    norm = copy.deepcopy(head.norm).to(device)
    return dataclasses.replace(head, norm=norm, weight=head.weight.to(device, copy=True))


TOP_K = (1, 2, 4, 8, 16)  # powers of two, in order
BINS = 15  # of confidence, for calibration


class Tally:
    """What rows say about a drafter, as running sums that add over rows, steps and processes; all come from
    the loss's row statistics, so nothing is projected twice. `add` never waits for the device, `report` does.
    """

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
            "denominator": row.denominator,
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

        `streak` is the mean over blocks of accepted drafts + 1, the +1 being the token that every verify
        round adds, hence the unit of tau. It ends at the response's end, which biases it low there; decoding
        starts each block after a miss, which biases tau below it. `top<k>_streak` is the same if the label
        only had to be among the k best: what a tree or a selector could reach. `agreement` is how often the
        target's own argmax is the data token: the ceiling that the data sets. `ce`, `kl` and `entropy` are
        plain means over slots; `loss_<term>` is the part that a term has in the loss, with its factor and the
        slots' weights.
        """
        host = Tally(len(self.sums["slots"]), "cpu")
        host.flat.copy_(self.flat)
        sums = host.sums
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


def _ratio(numerator: Tensor | float, denominator: Tensor | float) -> float | None:
    ratio = float(numerator) / float(denominator) if float(denominator) > 0 else math.nan
    return ratio if math.isfinite(ratio) else None


def _ratios(numerators: Tensor, denominators: Tensor) -> list[float | None]:
    return [_ratio(a, b) for a, b in zip(numerators, denominators, strict=True)]
