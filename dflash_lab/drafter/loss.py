"""The draft loss: full vocabulary, both sides from hidden states, chunk by chunk, its gradient computed in
the same pass. docs/loss.md tells what it computes and how fast.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dflash_lab.drafter.loss_rows import RowPass, TorchRows
from dflash_lab.drafter.loss_terms import (
    Blocks,
    Coefficients,
    DrafterSums,
    Length,
    LossConfig,
    Rows,
    TargetSums,
    TargetTerms,
    Terms,
    coefficients,
    dpace_weights,
    finish_drafter,
    finish_target,
    length_term,
    lk_mixture,
)
from dflash_lab.errors import InputError, near
from dflash_lab.machine import available_memory
from dflash_lab.models.compiled import NotCompiled, compiling

logger = logging.getLogger(__name__)

BACKENDS = ("torch", "triton")  # row passes: any device and dtype; kernels for CUDA and float32 logits
GPU_BUDGET_GIB = 1.25  # chunk buffers; with the gradient of 24,576 x 5,120 bf16 states all stays < 1.5 GiB
CPU_BUDGET_GIB = 0.25
ROW_TILE = 128  # rows of a matmul tile


@dataclass(frozen=True)
class RowStats:
    """Statistics of each slot, all [A, B], detached; 0 (index -1) where the slot is not live. Logarithms are
    natural.

    kl and target_argmax are None without the target's side, tv is None unless a term needs it.
    """

    live: Tensor  # bool: weight is not 0
    weight: Tensor  # the weight the loss used (D-PACE included)
    ce: Tensor  # cross-entropy with the label
    entropy: Tensor  # of the drafter's distribution, nats
    p_max: Tensor  # largest drafter probability
    kl: Tensor | None  # KL(target || drafter) at the soft term's temperature
    tv: Tensor | None  # total variation distance at temperature 1
    label: Tensor  # int64: the label the loss used
    argmax: Tensor  # int64: drafter's first largest logit
    rank: Tensor  # int64: tokens before the label in the drafter's order, ties by index; < k: in the top k
    target_argmax: Tensor | None  # int64: target's first largest logit

    @property
    def correct(self) -> Tensor:
        """[A, B] bool: the drafter's argmax is the label."""
        return self.live & (self.rank == 0)

    def accepted(self) -> tuple[Tensor, Tensor]:
        """Return (sum, count): drafts accepted before the first miss over all blocks with a live slot, and
        those blocks.

        Slots before a block's first live one are skipped; a slot that is not live ends the run. Pool across
        chunks and ranks by adding both; tau = 1 + sum / count.
        """
        started = self.live.cumsum(1) > 0
        run = (self.correct | ~started).cumprod(1).bool() & self.live
        return run.sum(), self.live.any(1).sum()


@dataclass(frozen=True)
class DraftLoss:
    """The unnormalised loss and what normalises it.

    total: scalar, float32 (float64 for float64 input), the only differentiable part: the sum over rows, times
        the caller's scale if one was given.
    weight_sum, row_count: the two usual denominators, detached scalars; all-reduce one of them and divide
        outside, so that accumulation and data-parallel ranks stay exact.
    sums: detached weighted sums of the terms without their factors ('ce', 'kl' (times T^2), 'cap', 'tv',
        'lk', 'length'), so that total = scale * sum of factor * sums[term], and the count 'correct'.
    """

    total: Tensor
    weight_sum: Tensor
    row_count: Tensor
    sums: dict[str, Tensor]
    rows: RowStats


_not_compiled: set[str] = set()  # backends that "auto" tried in vain in this process
_chosen_rows: dict[tuple[Any, ...], int] = {}  # rows a chunk, for each kind of call in this process


# One clean break of a caller's compiled graph. Keep the call outside activation checkpointing too, which
# would run the sweep twice.
@torch.compiler.disable
def fused_draft_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor | None,
    weights: Tensor,
    *,
    target_hidden: Tensor | None = None,
    target_rows: Tensor | None = None,
    config: LossConfig | None = None,
    chunk_rows: int | None = None,
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
            with label_source='argmax'.
        weights: [A, B] float >= 0; slots of weight 0 (slot 0, masked positions) take no part at all.
        target_hidden: [R, H] target states AFTER the target's final norm, so that target_hidden @ head.T are
            its logits.
        target_rows: [A, B] int: the row of target_hidden that predicts slot k's token, that of position
            a+k-1.
        config: terms and options; None: plain cross-entropy.
        chunk_rows: rows a chunk holds; None measures free memory at the first call of this shape and keeps
            the answer.
        backend: 'auto', 'torch' or 'triton'.
        target_head: the target's head beside target_hidden, on a second device if you like; None projects
            with `head`.
        shard: vocabulary-parallel mode; hidden, labels, weights and target states are the same on every rank.
        scale: factor of total and of its gradient, world_size / denominator where the denominator is known
            before the forward: a bfloat16 gradient is then rounded once, not again by the division outside.

    labels, weights and target_rows may stay on the CPU; then the call never waits for the device.

    Raises:
        InputError: a wrong shape, dtype, device or value; the message says which and where. Asking for a
            second derivative (create_graph=True) raises it in the backward pass.

    >>> hidden = torch.randn(2, 4, 8, requires_grad=True)  # 2 blocks of 4 slots
    >>> head, labels = torch.randn(11, 8), torch.randint(11, (2, 4))
    >>> weights = torch.tensor([0.0, 1.0, 1.0, 1.0]).expand(2, 4)  # slot 0 is the anchor
    >>> loss = fused_draft_loss(hidden, head, labels, weights)
    >>> (loss.total / loss.weight_sum).backward()
    >>> hidden.grad.shape
    torch.Size([2, 4, 8])
    """
    config = config or LossConfig()
    head = _whole(head)
    check_tensors(hidden, head, labels, weights, target_hidden, target_rows, target_head, config)
    if shard is not None:
        shard.check(head)
    name = choose_backend(backend, hidden.device, hidden.dtype)
    if backend == "auto" and name in _not_compiled:
        name = "torch"
    if chunk_rows is None:
        key = (hidden.device, hidden.dtype, hidden.shape[1], head.shape[0], target_hidden is not None, shard)
        if key not in _chosen_rows:
            _chosen_rows[key] = _measured_rows(hidden, head, target_hidden is not None, shard)
        chunk_rows = _chosen_rows[key]
    live = select_live(
        None if config.label_source == "argmax" else labels,
        weights,
        target_rows,
        vocab=head.shape[0] if shard is None else shard.total,
        target_size=0 if target_hidden is None else target_hidden.shape[0],
        chunk_rows=chunk_rows,
        device=hidden.device,
        dtype=logit_dtype(hidden.dtype),
    )
    if scale is not None:
        scale = torch.as_tensor(scale, device=hidden.device).to(live.weight.dtype)
    want_gradient = torch.is_grad_enabled() and hidden.requires_grad

    @torch.no_grad()
    def sweep(name: str) -> tuple[Tensor | None, Terms]:
        # Triton launches on the current device, which with a head on a GPU of its own is another one.
        with torch.autocast(hidden.device.type, enabled=False), torch.cuda.device_of(hidden):
            return _Sweep(
                hidden, head, live, target_hidden, target_head, config, load_backend(name), shard, scale,
                want_gradient,
            ).run()  # fmt: skip

    instead = "Give backend='torch', which needs no compiler"
    instead += "." if shard is None else ", or train without head_parallel."
    try:
        with compiling(f"the loss's backend {name!r}", instead):
            grad, terms = sweep(name)
    except NotCompiled as refused:
        if backend != "auto" or shard is not None:  # ranks of a shard could only change together
            raise
        logger.warning("%s It is taken from now on; it runs more and slower kernels a chunk.", refused)
        _not_compiled.add(name)
        grad, terms = sweep("torch")

    weighted = _weighted(terms, config)
    total = torch.stack([factor * value for factor, value in weighted.values() if factor]).sum()
    if scale is not None:
        total = total * scale
    if grad is not None:
        total = _FinishedGradient.apply(hidden, grad, total)
    sums = {name: value for name, (_, value) in weighted.items()}
    sums["correct"] = (terms.rank == 0).sum()
    return DraftLoss(
        total,
        terms.weight.sum(dtype=torch.float64).to(terms.weight.dtype),
        torch.full((), len(live), device=total.device),  # a copied number would wait
        sums,
        _row_stats(terms, live.position, hidden.shape[:2]),
    )


class FusedDraftLoss(nn.Module):
    """`fused_draft_loss` with its options bound: the rows of a chunk are measured at the first call and then
    kept.

    Args:
        config: terms and options.
        chunk_rows: rows a chunk holds, or None to measure once.
        backend: 'auto', 'torch' or 'triton'.
        shard: vocabulary-parallel mode.
        group: ranks that must use the same chunks (all data-parallel ranks); None measures alone.
    """

    def __init__(
        self,
        config: LossConfig,
        *,
        chunk_rows: int | None = None,
        backend: str = "auto",
        shard: VocabShard | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.config, self.chunk_rows, self.backend = config, chunk_rows, backend
        self.shard, self.group = shard, group

    def forward(
        self, hidden: Tensor, head: Tensor, labels: Tensor | None, weights: Tensor, **options: Any
    ) -> DraftLoss:
        """As `fused_draft_loss`; options: its target_hidden, target_rows, target_head and scale."""
        head = _whole(head)
        if self.chunk_rows is None and hidden.ndim == 3 and head.ndim == 2:
            soft = options.get("target_hidden") is not None
            self.chunk_rows = _measured_rows(hidden, head, soft, self.shard, self.group)
        return fused_draft_loss(
            hidden, head, labels, weights, config=self.config, chunk_rows=self.chunk_rows,
            backend=self.backend, shard=self.shard, **options,
        )  # fmt: skip


class _FinishedGradient(torch.autograd.Function):
    """`total`, whose gradient by `hidden` is there already: backward only scales it, out of place."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, grad: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return total.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None]:
        # PyTorch's `once_differentiable` notices a second derivative only where the incoming gradient depends
        # on something. That of a plain `loss.backward(create_graph=True)` is the constant 1.
        if torch.is_grad_enabled():  # a backward pass has it off, except to build a graph of itself
            raise InputError(
                "the fused loss has a first derivative only, and create_graph=True asks for a second: a "
                "penalty on its gradient would be dropped. Take it without create_graph, or put the penalty "
                "on a loss of plain torch operations over the logits."
            )
        (grad,) = ctx.saved_tensors
        # with dimensions the scale stays float32; a 0-dimensional one would first be rounded to bfloat16
        return torch.mul(grad, scale.view(1, 1, 1), out=torch.empty_like(grad)), None, None


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


def _row_stats(terms: Terms, position: Tensor, shape: torch.Size) -> RowStats:
    """The terms of the live rows, put back into [A, B]."""

    def place(values: list[Tensor | None], fill: int) -> list[Any]:
        """Values of one dtype in one go; None stays."""
        found = torch.stack([value for value in values if value is not None])
        out = found.new_full((len(found), shape.numel()), fill)
        out[:, position] = found
        placed = iter(out.unflatten(1, shape).unbind())
        return [None if value is None else next(placed) for value in values]

    floats = place([terms.weight, terms.ce, terms.entropy, terms.p_max, terms.kl, terms.tv], 0)
    indices = place([terms.label, terms.argmax, terms.rank, terms.target_argmax], -1)
    (live,) = place([torch.ones_like(terms.rank, dtype=torch.bool)], 0)
    return RowStats(live, *floats, *indices)


# ---- what is asked: tensors, backend, rows of a chunk


def check_tensors(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor | None,
    weights: Tensor,
    target_hidden: Tensor | None,
    target_rows: Tensor | None,
    target_head: Tensor | None,
    config: LossConfig,
) -> None:
    """Refuse wrong shapes, dtypes and devices of `fused_draft_loss`'s arguments (`InputError`) before any
    work; values are checked by `select_live`.
    """
    if not isinstance(config, LossConfig):
        raise InputError(f"config is a {type(config).__name__}: expected a LossConfig, or None.")
    given = dict(
        hidden=hidden, head=head, labels=labels, weights=weights, target_hidden=target_hidden,
        target_rows=target_rows, target_head=target_head,
    )  # fmt: skip
    for name, value in given.items():
        if not isinstance(value, Tensor) and (value is not None or name in ("hidden", "head", "weights")):
            raise InputError(f"{name} is a {type(value).__name__}: expected a torch tensor.")
    if hidden.ndim != 3:
        raise InputError(f"hidden has shape {[*hidden.shape]}: expected [anchors, block, hidden size].")
    if hidden.dtype not in (torch.float64, torch.float32, torch.bfloat16):
        raise InputError(
            f"hidden is {hidden.dtype}: use bfloat16, float32 or float64 (float16 logit gradients underflow)."
        )
    _check_head("head", head, hidden.shape[2], hidden.dtype)
    if head.device != hidden.device:
        raise InputError(f"head is on {head.device} but hidden on {hidden.device}: move one of them.")
    _check_slots("weights", weights, hidden, integer=False)
    if labels is not None:
        _check_slots("labels", labels, hidden)
    elif config.label_source == "data":
        raise InputError("labels is missing: give [anchors, block] token ids, or label_source='argmax'.")
    if target_hidden is None:
        if config.needs_target:
            raise InputError(
                "target_hidden is missing: soft_weight, tv_weight, lk_weight, label_source='argmax' and "
                "acceptance='overlap' need the target's hidden states after its final norm, "
                "[rows, hidden size], and target_rows."
            )
        if target_rows is not None or target_head is not None:
            raise InputError("target_rows or target_head was given without target_hidden.")
        return
    if target_rows is None:
        raise InputError(
            "target_rows is missing: give the row of target_hidden that predicts each slot, [anchors, block]."
        )
    _check_slots("target_rows", target_rows, hidden)
    if target_hidden.ndim != 2:
        raise InputError(f"target_hidden has shape {[*target_hidden.shape]}: expected [rows, hidden size].")
    if target_hidden.requires_grad:
        raise InputError(
            "target_hidden requires grad: the target is not trained here; pass target_hidden.detach()."
        )
    side = head if target_head is None else target_head
    if target_head is not None:
        _check_head("target_head", target_head, target_hidden.shape[1], target_hidden.dtype)
        if target_head.shape[0] != head.shape[0]:
            raise InputError(
                f"target_head has {target_head.shape[0]} rows but head {head.shape[0]}: "
                "both sides need the same vocabulary."
            )
    if target_hidden.shape[1] != side.shape[1]:
        raise InputError(
            f"target_hidden has hidden size {target_hidden.shape[1]} but its head {side.shape[1]}."
        )
    if target_hidden.dtype != side.dtype or target_hidden.device != side.device:
        raise InputError(
            f"target_hidden is {target_hidden.dtype} on {target_hidden.device} but its head "
            f"{side.dtype} on {side.device}: give both the same dtype and device (both may lie on a second "
            "device, with target_head)."
        )


def _check_head(name: str, head: Tensor, hidden_size: int, dtype: torch.dtype) -> None:
    if head.ndim != 2 or head.shape[1] != hidden_size or head.shape[0] == 0:
        raise InputError(f"{name} has shape {[*head.shape]}: expected [vocabulary, {hidden_size}].")
    if head.dtype != dtype:
        raise InputError(
            f"{name} is {head.dtype} but the hidden states {dtype}: cast one of them once, outside the step."
        )
    if head.requires_grad:
        raise InputError(
            f"{name} requires grad, but this loss never computes the head's gradient: "
            f"call {name}.requires_grad_(False)."
        )


def _check_slots(name: str, value: Tensor, hidden: Tensor, *, integer: bool = True) -> None:
    if value.shape != hidden.shape[:2]:
        raise InputError(
            f"{name} has shape {[*value.shape]}: expected [anchors, block] = {[*hidden.shape[:2]]}, as "
            "hidden."
        )
    if value.device != hidden.device and value.device.type != "cpu":
        raise InputError(f"{name} is on {value.device}: put it on the CPU or on {hidden.device}.")
    if integer and value.dtype not in (torch.int64, torch.int32):
        raise InputError(f"{name} is {value.dtype}: expected int64 or int32.")
    if not integer and not value.dtype.is_floating_point:
        raise InputError(f"{name} is {value.dtype}: expected a floating dtype.")


def _whole(head: Tensor) -> Tensor:
    """A sharded (DTensor) head as the whole plain tensor, gathered once; any other as it is."""
    return head.full_tensor() if hasattr(head, "full_tensor") else head


def choose_backend(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Resolve 'auto' to the fastest backend that works here; refuse one that cannot.

    Raises:
        InputError: unknown name, or a backend that this device, dtype or installation cannot run.
    """
    known = ("auto", *BACKENDS)
    if name not in known:
        raise InputError(f"backend {name!r}: choose one of {', '.join(known)}{near(name, known)}.")
    reason = ""  # why not Triton
    if dtype == torch.float64:
        reason = "computes in float32 but the hidden states are float64"
    elif not _has_triton():
        reason = "needs the triton package, which is not installed"
    elif device.type != "cuda" and not _triton_interprets():
        reason = f"needs a CUDA device but the hidden states are on {device}"
    if name == "auto":
        return "torch" if reason else "triton"
    if name == "triton" and reason:
        raise InputError(f"backend 'triton' {reason}: use 'auto' or 'torch'.")
    return name


@functools.cache
def load_backend(name: str) -> RowPass:
    """The row pass of a backend's resolved name."""
    if name == "torch":
        return TorchRows()
    from dflash_lab.drafter.kernels import TritonRows

    return TritonRows()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _triton_interprets() -> bool:
    """Whether kernels run on the CPU (TRITON_INTERPRET=1, for tests)."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def bytes_per_row(vocab: int, dtype: torch.dtype, *, soft: bool) -> int:
    """Bytes of chunk buffers one row needs: drafter logits, its logit gradient, and with `soft` the target's
    logits.

    Logits are float32 (float64 for float64 input); the logit gradient has the dtype of the hidden states.
    """
    return vocab * (logit_dtype(dtype).itemsize * (2 if soft else 1) + dtype.itemsize)


def free_bytes(device: torch.device) -> int:
    """Bytes that new tensors can use on `device` now: free plus what the caching allocator holds unused."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return available_memory()


def plan_chunk_rows(
    *,
    vocab: int,
    block: int,
    dtype: torch.dtype,
    device: torch.device,
    soft: bool,
    rows: int | None = None,
    free: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> int:
    """Choose the rows of a chunk: at most half of what is free and at most the budget, in whole matmul tiles
    if it can. (On an H200 matmuls of 512 rows run as fast as those of 4,096, so memory decides.)

    Args:
        vocab: rows of the head on this device.
        block: slots of a block, the fewest rows a chunk must hold.
        soft: whether target logits are needed too.
        rows: all rows of a step where they are known; a chunk is then never larger.
        free: free bytes, measured when None.
        group: ranks that must use the same chunks; the smallest wins.

    Raises:
        InputError: not even one block fits.
    """
    measured = free_bytes(device) if free is None else free
    budget_gib = GPU_BUDGET_GIB if device.type == "cuda" else CPU_BUDGET_GIB
    row_bytes = bytes_per_row(vocab, dtype, soft=soft)
    fit = int(min(measured * 0.5, budget_gib * 2**30)) // row_bytes
    if fit < block:
        fit = int(measured * 0.5) // row_bytes  # a budget is a wish, one block is a need
    if group is not None:
        # NCCL moves tensors of each process's own GPU, and the head may live on another.
        agreed = torch.tensor(fit, device="cuda" if dist.get_backend(group) == "nccl" else device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
        fit = int(agreed)
    if fit < block:
        raise InputError(
            f"the draft loss needs {2 * block * row_bytes / 2**30:.2f} GiB free on {device} for one block of "
            f"{block} slots over {vocab:,} tokens, but {measured / 2**30:.2f} GiB are: free memory, or shard "
            "the head (VocabShard)."
        )
    if fit > ROW_TILE:
        fit -= fit % ROW_TILE
    return max(block, fit if rows is None else min(fit, rows))


def _measured_rows(
    hidden: Tensor,
    head: Tensor,
    soft: bool,
    shard: VocabShard | None,
    group: dist.ProcessGroup | None = None,
) -> int:
    """Rows a chunk by the memory that is free now; ranks of a shard, or of the group given, take the
    smallest. Asked once: a reading every step would cost a query, change shapes and make runs differ.
    """
    if group is None and shard is not None:
        group = shard.group or dist.group.WORLD
    return plan_chunk_rows(
        vocab=head.shape[0],
        block=hidden.shape[1],
        dtype=hidden.dtype,
        device=hidden.device,
        soft=soft,
        group=group,
    )


# ---- which rows take part, and in which chunks: decided on the CPU, before any matmul


@dataclass(frozen=True)
class LiveRows:
    """The n rows of weight above 0 in order of anchor and slot, and their chunks of whole anchors: weights
    that depend on a block are computed within a chunk, and neighbouring anchors share target rows.
    """

    anchor: Tensor  # [n] int64, device
    slot: Tensor  # [n] int64, device
    position: Tensor  # [n] int64, device: anchor * B + slot
    weight: Tensor  # [n] accumulation dtype, device
    label: Tensor | None  # [n] int64, device; None: the target's argmax decides
    target_row: Tensor | None  # [n] int64, CPU
    block_of: Tensor  # [n] int64, CPU: how many live anchors come before the row's own
    chunks: list[slice]

    def __len__(self) -> int:
        return len(self.anchor)


def select_live(
    labels: Tensor | None,
    weights: Tensor,
    target_rows: Tensor | None,
    *,
    vocab: int,
    target_size: int,
    chunk_rows: int,
    device: torch.device,
    dtype: torch.dtype,
) -> LiveRows:
    """Check the values and select the live rows, once and by index: nothing later multiplies by a mask.

    Deciding on the CPU costs one copy of the small index tensors (none when the caller keeps them there, as
    a sampler does) and spares the device every data-dependent shape.

    Args:
        labels, weights, target_rows: [A, B] as in `fused_draft_loss`; labels None when the target's argmax is
            the label.
        vocab: size of the whole vocabulary, which bounds labels.
        target_size: rows of target_hidden, which bounds target_rows.
        chunk_rows: most live rows a chunk may hold.
        device, dtype: where the selection is used and in which dtype it accumulates.

    Raises:
        InputError: a weight that is NaN, infinite or negative; a label or target row out of range where the
            weight is not zero; a block with more live rows than a chunk holds. The message names the anchor
            and the slot.
    """
    if isinstance(chunk_rows, bool) or not isinstance(chunk_rows, int) or chunk_rows < 1:
        raise InputError(f"chunk_rows = {chunk_rows!r}: give a positive number of rows.")
    weight = weights.detach().cpu()
    if weight.numel() and not (weight.min() >= 0 and weight.max() < torch.inf):  # false for NaN too
        _refuse(~torch.isfinite(weight) | (weight < 0), weight, "weights", "weights are finite and >= 0")
    live = weight != 0
    position = live.flatten().nonzero()[:, 0]
    anchor, slot = position // weights.shape[1], position % weights.shape[1]

    def chosen(values: Tensor, size: int, name: str, rule: str) -> Tensor:
        ids = values.cpu()
        found = ids.flatten()[position].long()
        if found.numel() and not (found.min() >= 0 and found.max() < size):
            _refuse(live & ((ids < 0) | (ids >= size)), ids, name, rule)
        return found

    label = row = None
    if labels is not None:
        label = chosen(labels, vocab, "labels", f"0 <= label < {vocab} wherever the weight is not 0")
    if target_rows is not None:
        wanted = f"0 <= row < {target_size} (rows of target_hidden) wherever the weight is not 0"
        row = chosen(target_rows, target_size, "target_rows", wanted)
    counts = live.sum(1)
    counts = counts[counts > 0]  # live rows of each anchor that has any
    if counts.numel() and (most := int(counts.max())) > chunk_rows:
        raise InputError(
            f"a chunk of {chunk_rows} rows cannot hold a block of {most} live rows: give a larger chunk_rows."
        )
    chunks: list[slice] = []
    ends = counts.cumsum(0).numpy()
    start = 0
    while ends.size and start < ends[-1]:
        end = int(ends[ends.searchsorted(start + chunk_rows, side="right") - 1])
        chunks.append(slice(start, end))
        start = end
    together = torch.stack([anchor, slot, position] + ([] if label is None else [label]))
    places = upload(together, device).unbind(0)
    return LiveRows(
        anchor=places[0],
        slot=places[1],
        position=places[2],
        weight=upload(weight.flatten()[position].to(dtype), device),
        label=None if label is None else places[3],
        target_row=row,
        block_of=torch.repeat_interleave(counts),
        chunks=chunks,
    )


def _refuse(bad: Tensor, values: Tensor, name: str, rule: str) -> None:
    if not bad.any():
        return
    anchor, slot = bad.nonzero()[0].tolist()
    more = int(bad.sum()) - 1
    also = f" and {more} more" if more else ""
    raise InputError(f"{name}[{anchor}, {slot}] = {values[anchor, slot].item()}{also}: {rule}.")


def upload(value: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to `device` without waiting for the device."""
    # The driver takes small copies from ordinary memory at once; a larger one waits unless it is pinned.
    if device.type == "cuda" and value.numel() * value.element_size() > 64 << 10:
        value = value.pin_memory()
    return value.to(device, non_blocking=True)


# ---- the sweep: logits, terms, logit gradient, hidden gradient, and on to the next chunk


@dataclass
class _Sweep:
    """One pass over the chunks, through one set of buffers.

    The gradient of the hidden states is finished here, inside the forward, so nothing of size [chunk, V]
    outlives its chunk, and a [rows, V] tensor never exists. (A loop over chunks under autograd keeps every
    chunk's logits: it saves nothing.) Forward and backward see the same logits by construction.
    """

    hidden: Tensor  # [A, B, H]
    head: Tensor  # [V, H] (this rank's slice of it with a shard)
    live: LiveRows
    target_states: Tensor | None  # [R, H]
    target_head: Tensor | None  # [V, H] beside target_states; None: `head` serves both sides
    config: LossConfig
    row_pass: RowPass
    shard: VocabShard | None
    scale: Tensor | None  # scalar that multiplies the gradient before it is rounded
    want_gradient: bool

    def __post_init__(self) -> None:
        live, config = self.live, self.config
        self.offset = 0 if self.shard is None else self.shard.start
        target = self.target_states is not None
        self.terms = Terms.empty(
            live.label,
            live.weight,
            target=target,
            overlap=target and config.needs_overlap,
            length=config.length_weight > 0,
        )
        self.grad = None
        if self.want_gradient:
            self.grad = torch.zeros_like(self.hidden, memory_format=torch.contiguous_format)
        varies = config.weighting == "dpace" or config.lk_weight or config.length_weight
        self.fixed = None if varies else coefficients(self.terms, config, self.scale)

    def run(self) -> tuple[Tensor | None, Terms]:
        """(scale * d total / d hidden [A, B, H], None if it is not wanted; terms of the live rows)."""
        if self.live.chunks:
            self.allocate()
        for chunk in self.live.chunks:
            terms = self.terms[chunk]
            rows = self.project(chunk, terms)
            if self.grad is None:
                self.fill_terms(chunk, rows, terms)
                if self.config.length_weight:
                    self.length(chunk, terms)
            else:
                self.hidden_gradient(chunk, rows, *self.logit_gradient(chunk, rows, terms))
        return self.grad, self.terms

    def allocate(self) -> None:
        """The buffers of a chunk."""
        most = max(chunk.stop - chunk.start for chunk in self.live.chunks)
        (vocab, size), device, dtype = self.head.shape, self.hidden.device, logit_dtype(self.hidden.dtype)
        if self.target_states is not None and self.target_head is not None:  # projected there, copied here
            wide = logit_dtype(self.target_states.dtype)
            self.target_here = logit_buffer(most, vocab, wide, device)
            self.target_there = logit_buffer(most, vocab, wide, self.target_states.device)
        both = 2 * most if self.target_states is not None and self.target_head is None else most
        self.states = torch.empty(both, size, dtype=self.hidden.dtype, device=device)
        self.logits = logit_buffer(both, vocab, dtype, device)
        self.part = torch.empty(most, size, dtype=dtype, device=device)
        if self.grad is not None:
            self.logit_grad = logit_buffer(most, vocab, self.hidden.dtype, device)

    def project(self, chunk: slice, terms: Terms) -> Rows:
        """Logits of both sides of a chunk: under one head by one matmul, so that the head is read twice a
        chunk, not three times.
        """
        count = both = chunk.stop - chunk.start
        states = self.states[:count]
        if self.hidden.is_contiguous():
            torch.index_select(
                self.hidden.view(-1, states.shape[1]), 0, self.live.position[chunk], out=states
            )
        else:
            states.copy_(self.hidden[self.live.anchor[chunk], self.live.slot[chunk]])
        shape = {"scale": self.config.logit_scale, "softcap": self.config.logit_softcap}
        s = source = None
        if self.target_states is not None:
            assert self.live.target_row is not None
            target, source = distinct_states(self.target_states, self.live.target_row[chunk])
            source = upload(source, self.hidden.device)
            if self.target_head is None:
                both += len(target)
                self.states[count:both].copy_(target)
            else:
                there = project(target, self.target_head, self.target_there[: len(target)], **shape)
                s = self.target_here[: len(target)].copy_(there, non_blocking=True)
        logits = project(self.states[:both], self.head, self.logits[:both], **shape)
        if both > count:
            s = logits[count:]
        return Rows(logits[:count], terms.label, s, source, None, self.offset)

    def fill_terms(self, chunk: slice, rows: Rows, terms: Terms) -> Rows:
        """Fill the terms of a chunk; return its rows with the target's terms in place."""
        if rows.s is not None and rows.source is not None:
            target = self.target_terms(rows.s)
            assert terms.target_argmax is not None
            torch.index_select(target.argmax, 0, rows.source, out=terms.target_argmax)
            if self.live.label is None:
                terms.label.copy_(terms.target_argmax)
            rows = Rows(rows.z, rows.label, rows.s, rows.source, target, rows.offset)
        self.drafter_terms(rows, terms)
        self.weigh(chunk, terms)
        # KL alone comes with the gradient, which reads both rows anyway
        if rows.s is not None and (self.config.needs_overlap or self.grad is None):
            sums = torch.stack(self.row_pass.divergence(rows, terms, self.config.temperature))
            if self.shard is not None:
                sums = self.shard.sum(sums)
            for field, value in zip((terms.kl, terms.tv, terms.less_mass), sums):
                if field is not None:
                    field.copy_(value)
        return rows

    def target_terms(self, s: Tensor) -> TargetTerms:
        temperature = self.config.temperature
        if self.shard is None:
            return self.row_pass.target_terms(s, temperature)
        sums = self.shard.merge_target(self.row_pass.target_sums(s, self.offset, temperature), temperature)
        return finish_target(sums, temperature)

    def drafter_terms(self, rows: Rows, terms: Terms) -> None:
        temperature = self.config.temperature
        if self.shard is None:
            self.row_pass.drafter_terms(rows, temperature, terms)
            return
        logit = self.shard.maximum(rows.label_logit())
        sums = self.shard.merge_drafter(self.row_pass.drafter_sums(rows, logit, temperature), temperature)
        finish_drafter(sums, logit, rows.label, self.shard.total, temperature, terms)

    def weigh(self, chunk: slice, terms: Terms) -> None:
        """Multiply in the weights that depend on the chunk's terms; given weights are in place already."""
        if self.config.weighting == "dpace":
            terms.weight.mul_(dpace_weights(terms.ce, self.blocks(chunk), self.config.dpace_alpha))

    def length(self, chunk: slice, terms: Terms) -> Length:
        """The length term of a chunk whose other terms are there; fills `reached`."""
        if self.config.overlaps:
            assert terms.tv is not None
            acceptance = 1 - terms.tv
        else:
            acceptance = torch.exp(-terms.ce)
        found = length_term(acceptance, terms.weight, self.blocks(chunk))
        assert terms.reached is not None
        terms.reached.copy_(found.reached)
        return found

    def blocks(self, chunk: slice) -> Blocks:
        """Where a chunk's rows stand in its blocks."""
        within = self.live.block_of[chunk] - self.live.block_of[chunk.start]
        count = int(within[-1]) + 1  # on the CPU
        return Blocks(upload(within, self.hidden.device), self.live.slot[chunk], count, self.hidden.shape[1])

    def logit_gradient(self, chunk: slice, rows: Rows, terms: Terms) -> tuple[Tensor, Tensor, Tensor | None]:
        """Fill the terms; return (logit gradient [n, V], what its rounding lost at the label, row factor
        still to apply).
        """
        g, row_pass, config = self.logit_grad[: chunk.stop - chunk.start], self.row_pass, self.config
        hard_alone = (
            rows.s is None
            and self.shard is None
            and config.hard_weight > 0
            and not config.logit_softcap
            and not config.length_weight
        )
        if row_pass.one_pass_hard and hard_alone:
            lost, scale = row_pass.hard_gradient(rows, terms, config, g)
            self.weigh(chunk, terms)
            hard = self.factors(chunk, terms).hard
            assert hard is not None
            return g, lost, scale * hard
        rows = self.fill_terms(chunk, rows, terms)
        lost, kl = row_pass.gradient(rows, terms, self.factors(chunk, terms), config, g)
        if kl is not None and terms.kl is not None and not config.needs_overlap:
            terms.kl.copy_(kl if self.shard is None else self.shard.sum(kl))
        return g, lost, None

    def factors(self, chunk: slice, terms: Terms) -> Coefficients:
        if self.fixed is not None:
            return self.fixed[chunk]
        length = self.length(chunk, terms) if self.config.length_weight else None
        return coefficients(terms, self.config, self.scale, length)

    def hidden_gradient(
        self, chunk: slice, rows: Rows, g: Tensor, lost: Tensor | None, scale: Tensor | None
    ) -> None:
        """The logit gradient through the head, summed in the accumulation dtype, over the shards too, and
        rounded once into `grad`.
        """
        assert self.grad is not None
        part = project_back(g, self.head, self.part[: len(g)])
        if g.dtype == part.dtype:
            lost = None
        if self.shard is not None:
            if lost is not None:
                part.addcmul_(lost[:, None], self.head[rows.local_label].to(part.dtype))
            part, lost = self.shard.sum(part), None
        place = (self.live.anchor[chunk], self.live.slot[chunk])
        self.row_pass.deposit(self.grad, place, part, rows, self.head, lost=lost, scale=scale)


def distinct_states(states: Tensor, target_row: Tensor) -> tuple[Tensor, Tensor]:
    """(distinct states [u, H], which of them each drafter row uses [n], CPU) for target rows [n] (int64,
    CPU).

    Blocks of neighbouring anchors overlap, so a chunk of n drafter rows needs only u <= n target rows
    (rho = u / n): a slice of the target's states when the anchors lie close, else they are gathered.
    """
    needed, source = torch.unique(target_row, return_inverse=True)
    first, count = int(needed[0]), needed.numel()
    if int(needed[-1]) - first + 1 == count:
        return states[first : first + count], source
    return states.index_select(0, upload(needed, states.device)), source


# Logits leave the matmul in float32 (float64 for float64): rounded to bfloat16 they flip 2 % of the argmaxes
# and, near convergence, make the KL's gradient 40 % wrong. On CUDA the matmul unit writes its float32
# accumulator directly; elsewhere bfloat16 operands are widened a strip of the vocabulary at a time.
_STRIP = 8192


def logit_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of logits, statistics and sums for hidden states of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def logit_buffer(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, vocab] uninitialised; on CUDA every row starts on 64 bytes, as fast loads need."""
    pitch = -(-vocab // 32) * 32 if device.type == "cuda" else vocab
    return torch.empty(rows, pitch, dtype=dtype, device=device)[:, :vocab]


def project(states: Tensor, head: Tensor, out: Tensor, *, scale: float = 1.0, softcap: float = 0.0) -> Tensor:
    """Write the logits of `states` [n, H] under `head` [V, H] into `out` [n, V] and return it."""
    if states.dtype == out.dtype:
        torch.mm(states, head.t(), out=out)
    elif states.device.type == "cuda":
        torch.mm(states, head.t(), out_dtype=out.dtype, out=out)
    else:
        wide = states.to(out.dtype)
        for start in range(0, head.shape[0], _STRIP):
            strip = head[start : start + _STRIP].to(out.dtype)
            out[:, start : start + _STRIP] = wide @ strip.t()
    if scale != 1.0:
        out.mul_(scale)
    if softcap:
        out.div_(softcap).tanh_().mul_(softcap)
    return out


def project_back(grad: Tensor, head: Tensor, out: Tensor) -> Tensor:
    """Write the gradient of the hidden states, `grad` [n, V] @ `head` [V, H], into `out` [n, H] and return
    it.
    """
    if grad.dtype == out.dtype:
        return torch.mm(grad, head, out=out)
    if grad.device.type == "cuda":
        return torch.mm(grad, head, out_dtype=out.dtype, out=out)
    out.zero_()
    for start in range(0, head.shape[0], _STRIP):
        strip = head[start : start + _STRIP].to(out.dtype)
        out += grad[:, start : start + _STRIP].to(out.dtype) @ strip
    return out


# ---- vocabulary-parallel mode


class Turn(NamedTuple):
    """The rows of one rank, `mine` those of this one: hidden [A, B, H] and target_hidden [R, H] on the
    device, labels, weights and target_rows [A, B] on the CPU.
    """

    mine: bool
    hidden: Tensor
    labels: Tensor
    weights: Tensor
    target_hidden: Tensor | None
    target_rows: Tensor | None


@dataclass(frozen=True)
class VocabShard:
    """This rank's slice of a vocabulary of `total` tokens, split evenly over the ranks of `group` (None:
    all), the first ones taking one more; a rank's head is `head[shard.slice()]`.

    Every rank sees the same hidden states, labels and weights (`turns`, where ranks have rows of their own).
    Per chunk the ranks exchange the label's logit (1 number a row), their sums (10 numbers a row), and the
    hidden gradient [n, H]; logits never leave their rank.
    """

    total: int
    group: dist.ProcessGroup | None = None

    @property
    def start(self) -> int:
        """The first token of this rank's slice."""
        return self.slice().start

    def slice(self) -> slice:
        """The rows of the whole head that are this rank's."""
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        bounds = [each * (self.total // size) + min(each, self.total % size) for each in (rank, rank + 1)]
        return slice(*bounds)

    def check(self, head: Tensor) -> None:
        """`InputError` for a head that is not this rank's slice. No other rank is asked."""
        mine = self.slice()
        if len(head) != mine.stop - mine.start:
            raise InputError(
                f"the head has {len(head)} tokens, but this rank's slice of a vocabulary of {self.total} is "
                f"[{mine.start}, {mine.stop}): give head[shard.slice()]."
            )

    def turns(
        self,
        hidden: Tensor,
        labels: Tensor,
        weights: Tensor,
        target_hidden: Tensor | None,
        target_rows: Tensor | None,
        hosts: dist.ProcessGroup | None = None,
    ) -> Iterator[Turn]:
        """Each rank's rows in turn, on every rank: data-parallel ranks have rows of their own, of which each
        computes the loss of all with its slice of the head.

        Gathered all at once they would outweigh the head that is saved; so one rank's are there at a time.
        labels, weights and target_rows [A, B] are on the CPU, and cross over `hosts`, a group that moves
        CPU tensors, so that no rank waits for its device. Blocks and target states may be more on one rank
        than on another; whether there are target states may not.
        """
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        every: list[Any] = [None] * size
        target_size = None if target_hidden is None else len(target_hidden)
        dist.all_gather_object(every, (labels, weights, target_rows, target_size), group=hosts)
        for turn, (labels, weights, target_rows, target_size) in enumerate(every):
            mine = turn == rank
            source = turn if self.group is None else dist.get_global_rank(self.group, turn)
            states = (
                hidden.detach().contiguous() if mine else hidden.new_empty(*labels.shape, hidden.shape[2])
            )
            dist.broadcast(states, source, group=self.group)
            teacher = None
            if target_hidden is not None:
                wide = target_hidden.shape[1]
                teacher = target_hidden.contiguous() if mine else target_hidden.new_empty(target_size, wide)
                dist.broadcast(teacher, source, group=self.group)
            # A gradient is asked for on all ranks or on none, as they exchange its parts.
            given = hidden if mine else states.requires_grad_(hidden.requires_grad)
            yield Turn(mine, given, labels, weights, teacher, target_rows)

    def maximum(self, value: Tensor) -> Tensor:
        """Elementwise maximum over the ranks."""
        value = value.clone()
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
        return value

    def sum(self, value: Tensor) -> Tensor:
        """Elementwise sum over the ranks."""
        value = value.clone()
        dist.all_reduce(value, group=self.group)
        return value

    def merge_drafter(self, sums: DrafterSums, temperature: float) -> DrafterSums:
        """Combine all ranks' sums of drafter rows into those of the whole vocabulary."""
        real = self._gather(torch.stack((sums.peak, sums.mass, sums.slope, sums.mass_t)))
        whole = self._gather(torch.stack((sums.argmax, sums.above)))
        return merge_drafter(DrafterSums(*real.unbind(1), *whole.unbind(1)), temperature)

    def merge_target(self, sums: TargetSums, temperature: float) -> TargetSums:
        """Combine all ranks' sums of target rows into those of the whole vocabulary."""
        peak, mass, mass_t = self._gather(torch.stack((sums.peak, sums.mass, sums.mass_t))).unbind(1)
        return merge_target(TargetSums(peak, mass, mass_t, self._gather(sums.argmax)), temperature)

    def _gather(self, value: Tensor) -> Tensor:
        """[ranks, *shape]"""
        every = [torch.empty_like(value) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(every, value, group=self.group)
        return torch.stack(every)


def merge_drafter(every: DrafterSums, temperature: float) -> DrafterSums:
    """Merge sums of slices in vocabulary order (every field [slices, n]) as an online softmax does."""
    peak = every.peak.amax(0)
    shift = every.peak - peak  # <= 0; -inf for a slice of padding
    mass = _scaled(every.mass, shift)
    # sum e^(z - peak) (z - peak): each slice's own slope, plus its shift times its mass
    slope = _scaled(every.slope, shift) + torch.where(mass == 0, 0, mass * shift)
    mass_t = _scaled(every.mass_t, shift / temperature)
    return DrafterSums(
        peak, mass.sum(0), slope.sum(0), mass_t.sum(0), _first(every.argmax, every.peak), every.above.sum(0)
    )


def merge_target(every: TargetSums, temperature: float) -> TargetSums:
    """As `merge_drafter` for target rows."""
    peak = every.peak.amax(0)
    shift = every.peak - peak
    mass, mass_t = _scaled(every.mass, shift), _scaled(every.mass_t, shift / temperature)
    return TargetSums(peak, mass.sum(0), mass_t.sum(0), _first(every.argmax, every.peak))


def _first(token: Tensor, value: Tensor) -> Tensor:
    """The token of the largest value over the slices [n]; the lowest slice, so the lowest token, among
    equals.
    """
    return token.gather(0, value.argmax(0, keepdim=True))[0]


def _scaled(value: Tensor, shift: Tensor) -> Tensor:
    """value * e^shift, 0 where the slice is all padding (shift -inf), whose own sums are NaN."""
    return torch.where(shift == -torch.inf, 0, value * shift.exp())
