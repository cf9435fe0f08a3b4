"""The draft loss as one function and one module: hard and soft targets, CAP, TV and every slot's metrics.

    loss = fused_draft_loss(hidden, head, labels, weights, target_hidden=..., target_rows=..., config=config)
    (loss.total * world_size / denominator).backward()

The sum is returned without a denominator on purpose: the gradient it carries only needs one scalar at
backward time, so a denominator all-reduced over accumulation steps and ranks may arrive late and everything
stays exact. Anything divided by a total that depends on the model could not be computed in one pass; CAP
therefore shares the same denominator.

The gradient is first order: create_graph=True raises in the backward pass. Keep the call outside activation
checkpointing, which would run the sweep twice, and outside compiled regions, where it is one clean graph
break.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dflash_lab.drafter.compiling import NotCompiled, compiling
from dflash_lab.drafter.loss.backends import choose_backend, load_backend
from dflash_lab.drafter.loss.config import LossConfig
from dflash_lab.drafter.loss.inputs import check_tensors, plain
from dflash_lab.drafter.loss.plan import ChunkPlan, plan_chunks
from dflash_lab.drafter.loss.result import DraftLoss, RowStats, scatter
from dflash_lab.drafter.loss.selection import select_rows
from dflash_lab.drafter.loss.shard import VocabShard
from dflash_lab.drafter.loss.sweep import SweepJob, sweep
from dflash_lab.drafter.loss.terms import Terms
from dflash_lab.drafter.loss.weighting import lk_mixture
from dflash_lab.first_order import first_order

logger = logging.getLogger(__name__)
_not_compiled: set[str] = set()  # backends that "auto" tried in vain in this process
_frozen_plans: dict[tuple[Any, ...], ChunkPlan] = {}


@torch.compiler.disable
def fused_draft_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor | None,
    weights: Tensor,
    *,
    target_hidden: Tensor | None = None,
    target_rows: Tensor | None = None,
    config: LossConfig,
    plan: ChunkPlan | None = None,
    backend: str = "auto",
    target_head: Tensor | None = None,
    shard: VocabShard | None = None,
    scale: Tensor | float | None = None,
) -> DraftLoss:
    """Weighted sum of the draft loss over all live slots, with its gradient and every slot's statistics.

    Args:
        hidden: [A, B, H] drafter states after its final norm, A blocks of B slots; any strides. bf16, fp32 or
            fp64.
        head: [V, H] frozen head in the same dtype (this rank's slice of it with `shard`).
        labels: [A, B] int: the token at position a+k for slot k; read only where the weight is not 0. None
            with
            label_source='argmax'.
        weights: [A, B] float >= 0; slots of weight 0 (slot 0, masked positions) take no part at all.
        target_hidden: [R, H] target states AFTER the target's final norm, so that target_hidden @ head.T are
            its logits.
        target_rows: [A, B] int: the row of target_hidden that predicts slot k's token, that of position
            a+k-1.
        config: terms and options.
        plan: rows a chunk holds; None measures free memory at the first call of this shape and keeps the
            answer.
        backend: 'auto', 'torch' or 'triton'.
        target_head: the target's head beside target_hidden, on a second device if you like; None projects
            with `head`.
        shard: vocabulary-parallel mode; hidden, labels, weights and target states are the same on every rank.
        scale: factor of total and of its gradient, world_size / denominator where the denominator is known
            before
            the forward: a bfloat16 gradient is then rounded once, not again by the division outside.

    labels, weights and target_rows may stay on the CPU; then the call never waits for the device.

    Raises:
        InputError: a wrong shape, dtype, device or value; the message says which and where.
    """
    head = plain(head)
    check_tensors(hidden, head, labels, weights, target_hidden, target_rows, target_head, config)
    if shard is not None:
        shard.check(head)
    name = choose_backend(backend, hidden.device, hidden.dtype)
    if backend == "auto" and name in _not_compiled:
        name = "torch"
    plan = plan or _frozen_plan(hidden, head, target_hidden is not None, shard)
    selection = select_rows(
        None if config.label_source == "argmax" else labels,
        weights,
        target_rows,
        vocab=head.shape[0] if shard is None else shard.total,
        target_size=0 if target_hidden is None else target_hidden.shape[0],
        chunk_rows=plan.rows,
        device=hidden.device,
        dtype=torch.float64 if hidden.dtype == torch.float64 else torch.float32,
    )
    factor = (
        None if scale is None else torch.as_tensor(scale, device=hidden.device).to(selection.weight.dtype)
    )
    job = SweepJob(head, selection, target_hidden, target_head, config, load_backend(name), shard, factor)
    holder: list[tuple[Terms, dict[str, Tensor]]] = []
    want = torch.is_grad_enabled() and hidden.requires_grad
    instead = "Give backend='torch', which needs no compiler"
    instead += "." if shard is None else ", or train without head_parallel."
    try:
        with compiling(f"the loss's backend {name!r}", instead):
            total = _Sweep.apply(hidden, job, want, holder)
    except NotCompiled as refused:
        if backend != "auto" or shard is not None:  # ranks of a shard could only change together
            raise
        logger.warning("%s It is taken from now on; it runs more and slower kernels a chunk.", refused)
        _not_compiled.add(name)
        job = dataclasses.replace(job, row_pass=load_backend("torch"))
        total = _Sweep.apply(hidden, job, want, holder)
    return _result(total, *holder[0], job, hidden.shape[:2])


class FusedDraftLoss(nn.Module):
    """`fused_draft_loss` with its options bound: the chunk plan is measured at the first call and then kept.

    Args:
        config: terms and options.
        plan: rows a chunk holds, or None to measure once.
        backend: 'auto', 'torch' or 'triton'.
        shard: vocabulary-parallel mode.
        plan_group: ranks that must use the same plan (all data-parallel ranks); None measures alone.
    """

    def __init__(
        self,
        config: LossConfig,
        *,
        plan: ChunkPlan | None = None,
        backend: str = "auto",
        shard: VocabShard | None = None,
        plan_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.plan = plan
        self.backend = backend
        self.shard = shard
        self.plan_group = plan_group

    def forward(
        self,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor | None,
        weights: Tensor,
        *,
        target_hidden: Tensor | None = None,
        target_rows: Tensor | None = None,
        target_head: Tensor | None = None,
        scale: Tensor | float | None = None,
    ) -> DraftLoss:
        """As `fused_draft_loss`."""
        head = plain(head)
        if self.plan is None and hidden.ndim == 3 and head.ndim == 2:
            self.plan = _measure(hidden, head, target_hidden is not None, self.shard, self.plan_group)
        return fused_draft_loss(
            hidden, head, labels, weights, target_hidden=target_hidden, target_rows=target_rows,
            config=self.config, plan=self.plan, backend=self.backend, target_head=target_head,
            shard=self.shard, scale=scale,
        )  # fmt: skip


class _Sweep(torch.autograd.Function):
    """Runs the sweep in forward; backward only scales the finished gradient, out of place."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, job: SweepJob, want: bool, holder: list[tuple[Terms, dict[str, Tensor]]]
    ) -> Tensor:
        # Triton launches on the current device, which with a head on a GPU of its own is another one.
        with torch.autocast(hidden.device.type, enabled=False), torch.cuda.device_of(hidden):
            grad, terms = sweep(hidden, job, want_gradient=want)
        weighted = _weighted(terms, job.config)
        holder.append((terms, {name: value for name, (_, value) in weighted.items()}))
        if grad is not None:
            ctx.save_for_backward(grad)
        parts = [factor * value for factor, value in weighted.values() if factor]
        total = torch.stack(parts).sum()
        return total if job.scale is None else total * job.scale

    @staticmethod
    @first_order("the fused loss")
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = ctx.saved_tensors
        # with dimensions the scale stays float32; a 0-dimensional one would first be rounded to bfloat16
        return torch.mul(grad, scale.view(1, 1, 1), out=torch.empty_like(grad)), None, None, None


def _weighted(terms: Terms, config: LossConfig) -> dict[str, tuple[float, Tensor]]:
    """(factor, weighted sum) of every term that can be computed, accumulated in float64."""

    def total(value: Tensor) -> Tensor:
        return (terms.weight * value).sum(dtype=torch.float64).to(terms.ce.dtype)

    correct_entropy = torch.where(terms.rank == 0, terms.entropy, 0)
    found = {"ce": (config.hard_weight, total(terms.ce)), "cap": (config.cap_weight, total(correct_entropy))}
    if terms.kl is not None:
        found["kl"] = (config.soft_weight, total(terms.kl * config.temperature**2))
    if terms.tv is not None:
        found["tv"] = (config.tv_weight, total(terms.tv))
        if terms.kl is not None and config.lk_weight:
            lam = lk_mixture(terms.tv, config)
            found["lk"] = (config.lk_weight, total(lam * terms.kl + (1 - lam) * terms.tv))
    if terms.reached is not None:
        found["length"] = (config.length_weight, total(1 - terms.reached))
    return found


def _result(
    total: Tensor, terms: Terms, sums: dict[str, Tensor], job: SweepJob, shape: torch.Size
) -> DraftLoss:
    def place(values: list[Tensor | None], fill: int) -> list[Any]:
        return scatter(values, job.selection.position, shape, fill)

    sums["correct"] = (terms.rank == 0).sum()
    floats = place([terms.weight, terms.ce, terms.entropy, terms.p_max, terms.kl, terms.tv], 0)
    indices = place([terms.label, terms.argmax, terms.rank, terms.target_argmax], -1)
    (live,) = place([torch.ones_like(terms.rank, dtype=torch.bool)], 0)
    rows = RowStats(live, *floats, *indices)
    count = torch.full((), job.selection.rows, device=total.device)  # a copied number would wait
    weight_sum = terms.weight.sum(dtype=torch.float64).to(terms.weight.dtype)
    return DraftLoss(total, weight_sum, count, sums, rows)


def _frozen_plan(hidden: Tensor, head: Tensor, soft: bool, shard: VocabShard | None) -> ChunkPlan:
    """The plan of this process for such blocks over such a vocabulary, measured at its first use."""
    key = (hidden.device, hidden.dtype, hidden.shape[1], head.shape[0], soft, shard)
    if key not in _frozen_plans:
        _frozen_plans[key] = _measure(hidden, head, soft, shard, None)
    return _frozen_plans[key]


def _measure(
    hidden: Tensor, head: Tensor, soft: bool, shard: VocabShard | None, group: dist.ProcessGroup | None
) -> ChunkPlan:
    """Plan from the memory that is free now; ranks of a shard, or of the group given, take the smallest."""
    if group is None and shard is not None:
        group = shard.group or dist.group.WORLD
    return plan_chunks(
        vocab=head.shape[0],
        block=hidden.shape[1],
        dtype=hidden.dtype,
        device=hidden.device,
        soft=soft,
        group=group,
    )
