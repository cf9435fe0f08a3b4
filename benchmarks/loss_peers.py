"""Other ways to compute the draft loss, for comparison: dense, checkpointed, and the public kernels that
install.

The public ones are called as their own documentation says, through their installed packages; each computes
what it can (the name says which part), with the same inputs.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dflash_lab.drafter.loss_terms import LossConfig

if TYPE_CHECKING:
    from loss import Inputs

Step = Callable[[], Tensor]


def dense(
    hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, target: Tensor, config: LossConfig
) -> Tensor:
    """Weighted sum of CE, KL and CAP over full logits; hidden, target [A, B, H], float32 softmax or wider."""
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    log_p = (hidden @ head.T).to(wide).log_softmax(-1)
    row = config.hard_weight * -log_p.gather(-1, labels[..., None])[..., 0]
    if config.soft_weight:
        with torch.no_grad():
            q = (target @ head.T).to(wide).softmax(-1)
        row = row + config.soft_weight * F.kl_div(log_p, q, reduction="none").sum(-1)
    if config.cap_weight:
        entropy = -(log_p.exp() * log_p).sum(-1)
        row = row + config.cap_weight * entropy * (log_p.detach().argmax(-1) == labels)
    return (weights * row).sum()


def _plain(config: LossConfig) -> LossConfig:
    """CE and KL alone: what people write by hand."""
    return LossConfig(hard_weight=config.hard_weight, soft_weight=config.soft_weight)


def naive(inputs: Inputs, config: LossConfig) -> Step:
    """Full logits of both sides under autograd, CE + KL."""
    target = inputs.target_hidden[inputs.target_rows.to(inputs.hidden.device)]
    arguments = (inputs.labels, inputs.weights, target, _plain(config))
    return lambda: dense(inputs.hidden, inputs.head, *arguments) / inputs.weights.sum()


def checkpointed(inputs: Inputs, config: LossConfig, rows: int = 1024) -> Step:
    """Chunks of about `rows` positions, each recomputed in the backward, CE + KL."""
    target = inputs.target_hidden[inputs.target_rows.to(inputs.hidden.device)]
    anchors = max(1, rows // inputs.shape.block)
    plain = _plain(config)

    def step() -> Tensor:
        total = torch.zeros((), device=inputs.hidden.device)
        for start in range(0, inputs.shape.anchors, anchors):
            part = slice(start, start + anchors)
            chunk = (
                inputs.hidden[part],
                inputs.head,
                inputs.labels[part],
                inputs.weights[part],
                target[part],
            )
            total = total + checkpoint(dense, *chunk, plain, use_reentrant=False)
        return total / inputs.weights.sum()

    return step


def liger_cross_entropy(inputs: Inputs, config: LossConfig) -> Step:
    """Liger's fused linear cross-entropy, without per-position weights: it has none."""
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    labels = inputs.labels.flatten()
    return lambda: loss(inputs.head, inputs.hidden.flatten(0, 1), labels) / labels.numel()


def speculators_kl(inputs: Inputs, config: LossConfig) -> Step:
    """speculators' fused KL over full logits of both sides."""
    kernel = speculators_losses().fused_kl_div_loss
    target = inputs.target_hidden[inputs.target_rows.to(inputs.hidden.device)].flatten(0, 1)[None]
    weights = inputs.weights.flatten()[None]

    def step() -> Tensor:
        with torch.no_grad():
            s = target @ inputs.head.T
        z = inputs.hidden.flatten(0, 1)[None] @ inputs.head.T
        return (kernel(z, s) * weights).sum() / weights.sum()

    return step


def speculators_losses() -> types.ModuleType:
    """The kernels' module without the package's own __init__, which imports servers and data sets."""
    if (loaded := sys.modules.get("speculators.losses.fused")) is not None:
        return loaded
    found = importlib.util.find_spec("speculators")
    if found is None or found.submodule_search_locations is None:
        raise ImportError("speculators")
    folder = found.submodule_search_locations[0]
    for name in ("speculators", "speculators.losses", "speculators.utils"):
        if name not in sys.modules:
            package = types.ModuleType(name)
            package.__path__ = ["/".join([folder, *name.split(".")[1:]])]
            sys.modules[name] = package
    return importlib.import_module("speculators.losses.fused")


PEERS: dict[str, Callable[[Inputs, LossConfig], Step]] = {
    "naive full logits, CE + KL": naive,
    "checkpointed chunks of 1,024, CE + KL": checkpointed,
    "Liger fused linear CE, CE only": liger_cross_entropy,
    "speculators fused KL, KL only": speculators_kl,
}


def versions() -> dict[str, str]:
    """Installed versions of the peers."""
    found = {}
    for name in ("liger-kernel", "speculators"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
