"""The draft loss written the long way: full logits, float64, autograd; no code of the package's loss."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_lab.drafter.loss import DraftLoss
from dflash_lab.drafter.loss_terms import LossConfig

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
CONFIGS = {
    "ce": LossConfig(),
    "kl": LossConfig(hard_weight=0, soft_weight=1),
    "kl_hot": LossConfig(hard_weight=0, soft_weight=0.7, temperature=2),
    "ce_kl_cap": LossConfig(hard_weight=0.85, soft_weight=0.15, cap_weight=0.3),
    "ce_kl_cap_hot": LossConfig(hard_weight=0.85, soft_weight=0.15, cap_weight=0.3, temperature=2),
    "tv": LossConfig(hard_weight=0, tv_weight=1),
    "lk": LossConfig(hard_weight=0, lk_weight=1),
    "all": LossConfig(hard_weight=0.5, soft_weight=0.2, cap_weight=0.1, tv_weight=0.3, lk_weight=0.4),
    "dpace": LossConfig(weighting="dpace", soft_weight=0.3, cap_weight=0.2),
    "length": LossConfig(hard_weight=0, length_weight=1),
    "length_overlap": LossConfig(hard_weight=0, length_weight=1, acceptance="overlap"),
    "length_ce_cap": LossConfig(hard_weight=0.5, cap_weight=0.2, length_weight=0.7, logit_scale=1.5),
    "length_all": LossConfig(
        soft_weight=0.3,
        tv_weight=0.2,
        lk_weight=0.1,
        length_weight=0.7,
        acceptance="overlap",
        logit_scale=1.5,
    ),
    "argmax": LossConfig(label_source="argmax", soft_weight=0.3, cap_weight=0.2),
    "softcap": LossConfig(soft_weight=0.3, cap_weight=0.2, tv_weight=0.1, logit_scale=1.5, logit_softcap=3.0),
}


@dataclass
class Case:
    """One set of inputs; `arguments()` are those of fused_draft_loss."""

    hidden: Tensor
    head: Tensor
    labels: Tensor
    weights: Tensor
    target_hidden: Tensor
    target_rows: Tensor

    def arguments(self, *, target: bool = True) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        given = {"target_hidden": self.target_hidden, "target_rows": self.target_rows} if target else {}
        return (self.hidden, self.head, self.labels, self.weights), given


def make_case(
    anchors: int = 7, block: int = 5, vocab: int = 97, size: int = 16, *, dtype: torch.dtype = torch.float64,
    device: str = "cpu", seed: int = 0, sharp: float = 0.4, hole: float = 0.2, target_size: int | None = None,
) -> Case:  # fmt: skip
    """Random states whose logits are neither flat nor one-hot; slot 0 and some other slots have weight 0.

    About half of the labels are the drafter's own argmax, so that CAP has rows to act on.
    """
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(anchors, block, size, generator=g, dtype=torch.float64)
    head = torch.randn(vocab, size, generator=g, dtype=torch.float64) * sharp
    rows = target_size or max(2, anchors * block // 3)
    target_rows = torch.randint(rows, (anchors, block), generator=g)
    target = torch.randn(rows, size, generator=g, dtype=torch.float64)
    hidden, head, target = hidden.to(dtype), head.to(dtype), target.to(dtype)
    labels = torch.randint(vocab, (anchors, block), generator=g)
    own = (hidden.double() @ head.double().T).argmax(-1)
    labels = torch.where(torch.rand(anchors, block, generator=g) < 0.5, own, labels)
    weights = torch.rand(anchors, block, generator=g) + 0.1
    weights[torch.rand(anchors, block, generator=g) < hole] = 0
    weights[:, 0] = 0
    others = (tensor.to(device) for tensor in (head, labels, weights, target, target_rows))
    return Case(hidden.to(device).requires_grad_(), *others)


def agree(
    found: DraftLoss, grad: Tensor, case: Case, wanted: tuple[Tensor, Tensor, dict[str, Tensor]],
    *, total: float, gradient: float, stats: float,
) -> None:  # fmt: skip
    """Hold a loss, its gradient and its statistics of live slots against the reference's, up to errors."""
    live = case.weights.cpu() != 0
    assert relative(found.total, wanted[0]) < total
    assert relative(grad, wanted[1]) < gradient
    for field, value in wanted[2].items():
        mine: Any = getattr(found.rows, field)
        if mine is not None:
            close = torch.allclose(mine.cpu()[live].double(), value[live].double(), rtol=stats, atol=stats)
            assert close, field


def reference(
    case: Case, config: LossConfig, *, target: bool = True
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(total, d total / d hidden, statistics of slots) by autograd over full logits in float64."""
    hidden = case.hidden.detach().cpu().double().requires_grad_()
    head = case.head.cpu().double()
    weights = case.weights.cpu().double()
    live = weights != 0
    z = _shape(hidden @ head.T, config)
    s = None
    if target:
        s = _shape(case.target_hidden.cpu().double() @ head.T, config)[
            case.target_rows.cpu().clamp(0, len(case.target_hidden) - 1)
        ]
    labels = s.argmax(-1) if config.label_source == "argmax" else case.labels.cpu()
    labels = torch.where(live, labels, 0)
    log_p = z.log_softmax(-1)
    ce = -log_p.gather(-1, labels[..., None])[..., 0]
    p = log_p.exp()
    entropy = -(p * torch.where(p > 0, log_p, 0)).sum(-1)
    correct = (z.argmax(-1) == labels) & live
    row = config.hard_weight * ce + config.cap_weight * torch.where(correct, entropy, 0)
    order = z.argsort(dim=-1, descending=True, stable=True)
    stats = {
        "ce": ce, "entropy": entropy, "p_max": p.amax(-1), "argmax": z.argmax(-1), "label": labels,
        "rank": (order == labels[..., None]).int().argmax(-1),
    }  # fmt: skip
    if s is not None:
        t = config.temperature
        kl = (
            F.kl_div((z / t).log_softmax(-1), (s / t).log_softmax(-1), reduction="none", log_target=True)
            .nan_to_num(0.0)
            .sum(-1)
        )
        q = s.softmax(-1)
        tv = 0.5 * (p - q).abs().sum(-1)
        lam = torch.exp(-config.lk_decay * (1 - tv)).detach()
        row = (
            row
            + config.soft_weight * t**2 * kl
            + config.tv_weight * tv
            + config.lk_weight * (lam * kl + (1 - lam) * tv)
        )
        stats |= {"kl": kl, "tv": tv, "target_argmax": s.argmax(-1)}
    if config.length_weight:
        acceptance = 1 - tv if config.acceptance == "overlap" else torch.exp(-ce)
        row = row + config.length_weight * (1 - torch.where(live, acceptance, 1.0).cumprod(1))
    if config.weighting == "dpace":
        weights = weights * _dpace(ce.detach(), live, config.dpace_alpha)
    total = torch.where(live, weights * row, 0).sum()
    stats["weight"] = weights
    (grad,) = torch.autograd.grad(total, hidden)
    return total.detach(), grad, {name: value.detach() for name, value in stats.items()}


def _dpace(ce: Tensor, live: Tensor, alpha: float) -> Tensor:
    """Slot by slot, as the formula reads."""
    out = torch.zeros_like(ce)
    for a in range(ce.shape[0]):
        reached, product = [], 1.0
        for k in range(ce.shape[1]):
            product = product * ((1 - alpha) * torch.exp(-ce[a, k]) + alpha if live[a, k] else 1.0)
            reached.append(product if live[a, k] else 0.0)
        for k in range(ce.shape[1]):
            out[a, k] = sum(reached[k:]) if live[a, k] else 0.0
    return out


def _shape(logits: Tensor, config: LossConfig) -> Tensor:
    logits = logits * config.logit_scale
    return (
        config.logit_softcap * torch.tanh(logits / config.logit_softcap) if config.logit_softcap else logits
    )


def relative(value: Tensor, wanted: Tensor) -> float:
    """||value - wanted|| / ||wanted|| in float64 on the CPU."""
    value, wanted = value.detach().cpu().double(), wanted.detach().cpu().double()
    return ((value - wanted).norm() / wanted.norm()).item()
