"""The draft loss: full vocabulary, both sides from hidden states, chunk by chunk, its gradient computed in
the same pass.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dflash_lab.drafter.loss_rows import RowPass
from dflash_lab.drafter.loss_terms import (
    Coefficients,
    DrafterSums,
    Length,
    LossConfig,
    Places,
    Rows,
    TargetSums,
    TargetTerms,
    Terms,
    coefficients,
    dpace_weights,
    finish_drafter,
    finish_target,
    first_order,
    length,
    lk_mixture,
)
from dflash_lab.errors import InputError, near
from dflash_lab.machine import available_memory
from dflash_lab.models.compiled import NotCompiled, compiling

# ----------------------------------------------------------------------------------------------------
# The two row passes behind one contract, and the choice between them.
#
# torch   plain operations on any device and dtype; the reference. triton  hand-written kernels for CUDA;
# float32 logits, so not for float64 hidden states.


def _torch() -> RowPass:
    from dflash_lab.drafter.loss_rows import TorchRows

    return TorchRows()


def _triton() -> RowPass:
    from dflash_lab.drafter.kernels import TritonRows

    return TritonRows()


_BACKENDS: dict[str, Callable[[], RowPass]] = {"torch": _torch, "triton": _triton}


def choose_backend(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Resolve 'auto' to the fastest backend that works here; refuse one that cannot.

    Raises:
        InputError: unknown name, or a backend that this device, dtype or installation cannot run.
    """
    known = ("auto", *_BACKENDS)
    if name not in known:
        raise InputError(f"backend {name!r}: choose one of {', '.join(known)}{near(name, known)}.")
    reason = _no_triton(device, dtype)
    if name == "auto":
        return "torch" if reason else "triton"
    if name == "triton" and reason:
        raise InputError(f"backend 'triton' {reason}: use 'auto' or 'torch'.")
    return name


@functools.cache
def load_backend(name: str) -> RowPass:
    """Import and return a backend by its resolved name."""
    return _BACKENDS[name]()


def _no_triton(device: torch.device, dtype: torch.dtype) -> str:
    """Why the Triton pass cannot run, or an empty string. With TRITON_INTERPRET=1 it runs on the CPU too
    (tests).
    """
    if dtype == torch.float64:
        return "computes in float32 but the hidden states are float64"
    if not _installed("triton"):
        return "needs the triton package, which is not installed"
    if device.type != "cuda" and not _interpreted():
        return f"needs a CUDA device but the hidden states are on {device}"
    return ""


@functools.cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


# ----------------------------------------------------------------------------------------------------
# Refuse wrong tensors before any work, saying which tensor, what is wrong with it and what is expected.


_DTYPES = (torch.float64, torch.float32, torch.bfloat16)
_INDEX_DTYPES = (torch.int64, torch.int32)


def plain(weight: Tensor) -> Tensor:
    """Return a sharded (DTensor) parameter as the whole plain tensor, gathered once; any other tensor as it
    is.
    """
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


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
    """Check shapes, dtypes and devices of the arguments of `fused_draft_loss`; values are checked by
    `select_rows`.
    """
    if hidden.ndim != 3:
        raise InputError(f"hidden has shape {_shape(hidden)}: expected [anchors, block, hidden size].")
    if hidden.dtype not in _DTYPES:
        raise InputError(
            f"hidden is {hidden.dtype}: use bfloat16, float32 or float64 (float16 logit gradients underflow)."
        )
    _check_head("head", head, hidden.shape[2], hidden.dtype)
    if head.device != hidden.device:
        raise InputError(f"head is on {head.device} but hidden on {hidden.device}: move one of them.")
    block = hidden.shape[:2]
    _check_index("weights", weights, block, hidden.device, integer=False)
    if labels is not None:
        _check_index("labels", labels, block, hidden.device)
    elif config.label_source == "data":
        raise InputError("labels is missing: give [anchors, block] token ids, or label_source='argmax'.")
    if target_hidden is None:
        if config.needs_target:
            raise InputError(
                "target_hidden is missing: soft_weight, tv_weight, lk_weight, label_source='argmax' and "
                "acceptance='overlap' need "
                "the target's hidden states after its final norm, [rows, hidden size], and target_rows."
            )
        if target_rows is not None or target_head is not None:
            raise InputError("target_rows or target_head was given without target_hidden.")
        return
    if target_rows is None:
        raise InputError(
            "target_rows is missing: give the row of target_hidden that predicts each slot, [anchors, block]."
        )
    _check_index("target_rows", target_rows, block, hidden.device)
    if target_hidden.ndim != 2:
        raise InputError(f"target_hidden has shape {_shape(target_hidden)}: expected [rows, hidden size].")
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
        raise InputError(f"{name} has shape {_shape(head)}: expected [vocabulary, {hidden_size}].")
    if head.dtype != dtype:
        raise InputError(
            f"{name} is {head.dtype} but the hidden states {dtype}: cast one of them once, outside the step."
        )
    if head.requires_grad:
        raise InputError(
            f"{name} requires grad, but this loss never computes the head's gradient: "
            f"call {name}.requires_grad_(False)."
        )


def _check_index(
    name: str, value: Tensor, block: torch.Size, device: torch.device, *, integer: bool = True
) -> None:
    if value.shape != block:
        raise InputError(
            f"{name} has shape {_shape(value)}: expected [anchors, block] = {list(block)}, as hidden."
        )
    if value.device != device and value.device.type != "cpu":
        raise InputError(f"{name} is on {value.device}: put it on the CPU or on {device}.")
    if integer and value.dtype not in _INDEX_DTYPES:
        raise InputError(f"{name} is {value.dtype}: expected int64 or int32.")
    if not integer and not value.dtype.is_floating_point:
        raise InputError(f"{name} is {value.dtype}: expected a floating dtype.")


def _shape(value: Tensor) -> list[int]:
    return list(value.shape)


# ----------------------------------------------------------------------------------------------------
# What the draft loss returns: a sum to differentiate, its denominators, and every row's statistics.


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
    the
        caller's scale if one was given.
    weight_sum, row_count: the two usual denominators, detached scalars; all-reduce one of them and divide
    outside, so
        that accumulation and data-parallel ranks stay exact.
    sums: detached weighted sums of the terms without their factors ('ce', 'kl' (times T^2), 'cap', 'tv',
    'lk', 'length'), so that
        total = scale * sum of factor * sums[term], and the count 'correct'.
    """

    total: Tensor
    weight_sum: Tensor
    row_count: Tensor
    sums: dict[str, Tensor]
    rows: RowStats


def scatter(
    values: list[Tensor | None], position: Tensor, shape: torch.Size, fill: float | int = 0
) -> list[Any]:
    """Place values of the live rows [n] of one dtype into new [A, B] tensors, all in one go; None stays."""
    found = torch.stack([value for value in values if value is not None])
    out = found.new_full((len(found), shape.numel()), fill)
    out[:, position] = found
    placed = iter(out.unflatten(1, shape).unbind())
    return [None if value is None else next(placed) for value in values]


# ----------------------------------------------------------------------------------------------------
# Which rows take part, in which chunks, and which target rows each chunk needs: decided on the CPU, before
# any matmul.
#
# Rows of weight zero are left out here, once, by index; nothing later multiplies by a mask. Deciding on the
# CPU costs one copy of the small index tensors (none at all when the caller keeps them on the CPU, as a
# sampler does) and spares the device every data-dependent shape. A chunk holds whole anchors, so that
# weights that depend on a block can be computed within one chunk, and so that the target rows of
# neighbouring anchors overlap and are projected once.


_STAGED_BYTES = 64 << 10


@dataclass(frozen=True)
class Chunk:
    """Rows [start, end) of the selection: whole anchors, at most the plan's rows."""

    start: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Selection:
    """The n live rows in order of anchor and slot. `anchor`, `slot` [n] place them in [A, B]; `weight` and
    `label` follow.
    """

    anchor: Tensor  # [n] int64, device
    slot: Tensor  # [n] int64, device
    position: Tensor  # [n] int64, device: anchor * B + slot
    weight: Tensor  # [n] accumulation dtype, device
    label: Tensor | None  # [n] int64, device; None: the target's argmax decides
    target_row: Tensor | None  # [n] int64, CPU
    block_of: Tensor  # [n] int64, CPU: how many live anchors come before the row's own
    chunks: list[Chunk]

    @property
    def rows(self) -> int:
        return self.anchor.shape[0]


def select_rows(
    labels: Tensor | None,
    weights: Tensor,
    target_rows: Tensor | None,
    *,
    vocab: int,
    target_size: int,
    chunk_rows: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Selection:
    """Check the values and select the live rows.

    Args:
        labels, weights, target_rows: [A, B] as in `fused_draft_loss`; labels None when the target's argmax is
            the label.
        vocab: size of the whole vocabulary, which bounds labels.
        target_size: rows of target_hidden, which bounds target_rows.
        chunk_rows: most live rows a chunk may hold.
        device, dtype: where the selection is used and in which dtype it accumulates.

    Raises:
        InputError: a weight that is NaN, infinite or negative; a label or target row out of range where the
            weight is
            not zero; a block with more live rows than a chunk holds. The message names the anchor and the
            slot.
    """
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
    counts = counts[counts > 0]
    whole = [anchor, slot, position] + ([] if label is None else [label])
    places = upload(torch.stack(whole), device).unbind(0)
    return Selection(
        anchor=places[0],
        slot=places[1],
        position=places[2],
        weight=upload(weight.flatten()[position].to(dtype), device),
        label=None if label is None else places[3],
        target_row=row,
        block_of=torch.repeat_interleave(counts),
        chunks=_chunks(counts, chunk_rows),
    )


def upload(value: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to `device` without waiting for the device.

    The driver takes small copies from ordinary memory at once; a larger one waits unless it is pinned.
    """
    if device.type == "cuda" and value.numel() * value.element_size() > _STAGED_BYTES:
        value = value.pin_memory()
    return value.to(device, non_blocking=True)


def _chunks(counts: Tensor, chunk_rows: int) -> list[Chunk]:
    """Fill chunks with whole anchors in order; `counts` are the live rows of each anchor that has any."""
    if counts.numel() and (most := int(counts.max())) > chunk_rows:
        raise InputError(
            f"a chunk of {chunk_rows} rows cannot hold a block of {most} live rows: "
            "give a larger ChunkPlan.rows."
        )
    chunks: list[Chunk] = []
    ends = counts.cumsum(0).numpy()
    start = 0
    while ends.size and start < ends[-1]:
        end = int(ends[ends.searchsorted(start + chunk_rows, side="right") - 1])
        chunks.append(Chunk(start, end))
        start = end
    return chunks


def _refuse(bad: Tensor, values: Tensor, name: str, rule: str) -> None:
    if not bad.any():
        return
    anchor, slot = bad.nonzero()[0].tolist()
    more = int(bad.sum()) - 1
    also = f" and {more} more" if more else ""
    raise InputError(f"{name}[{anchor}, {slot}] = {values[anchor, slot].item()}{also}: {rule}.")


# ----------------------------------------------------------------------------------------------------
# How many rows a chunk holds: measured from free memory once, then frozen.
#
# On an H200 matmuls of 512 rows run as fast as those of 4,096, so a chunk need not be large to be fast, and
# memory decides. A reading every step would cost a query, change shapes (recompiles) and make runs differ;
# so the first step measures, and what it found is kept. Ranks that work together agree on the smallest.


GPU_BUDGET_GIB = (
    1.25  # chunk buffers; with the gradient of 24,576 x 5,120 bf16 hidden states the whole stays < 1.5 GiB
)
CPU_BUDGET_GIB = 0.25
ROW_TILE = 128  # rows of a matmul tile


@dataclass(frozen=True)
class ChunkPlan:
    """Rows of the chunk buffers, fixed for a whole run."""

    rows: int

    def __post_init__(self) -> None:
        if isinstance(self.rows, bool) or not isinstance(self.rows, int) or self.rows < 1:
            raise InputError(f"ChunkPlan.rows = {self.rows!r}: give a positive number of rows.")


def bytes_per_row(vocab: int, dtype: torch.dtype, *, soft: bool) -> int:
    """Bytes of chunk buffers one row needs: drafter logits, its logit gradient, and with `soft` the target's
    logits.

    Logits are float32 (float64 for float64 input); the logit gradient has the dtype of the hidden states.
    """
    logits = 8 if dtype == torch.float64 else 4
    return vocab * (logits * (2 if soft else 1) + dtype.itemsize)


def free_bytes(device: torch.device) -> int:
    """Bytes that new tensors can use on `device` now: free plus what the caching allocator holds unused."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return available_memory()


def plan_chunks(
    *,
    vocab: int,
    block: int,
    dtype: torch.dtype,
    device: torch.device,
    soft: bool,
    rows: int | None = None,
    free: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> ChunkPlan:
    """Choose the rows of a chunk: at most half of what is free and at most the budget, in whole matmul tiles
    if it can.

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
    return ChunkPlan(rows=max(block, fit if rows is None else min(fit, rows)))


# ----------------------------------------------------------------------------------------------------
# Vocabulary-parallel mode: each rank of a group holds a slice of the head, and a few numbers a row cross.
#
# Every rank sees the same hidden states, labels and weights (`VocabShard.turns`, where ranks have rows of
# their own). Per chunk the ranks exchange the label's logit (1 number a row), their sums (10 numbers a
# row), and the hidden gradient [n, H]; logits never leave their rank.


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
        """`InputError` for a head that is not this rank's slice."""
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


# ----------------------------------------------------------------------------------------------------
# The two matmuls of the loss: hidden states to logits in float32, and the logit gradient back to hidden
# states.
#
# Logits leave the matmul in float32 (float64 for float64): logits rounded to bfloat16 flip 2 % of the
# argmaxes and, near convergence, make the KL's gradient 40 % wrong. On CUDA the matmul unit writes its
# float32 accumulator directly; elsewhere bfloat16 operands are widened a strip of the vocabulary at a time.


_WIDEN_ROWS = 8192
_ALIGN = 32


def logit_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of logits, statistics and sums for hidden states of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def logit_buffer(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, vocab] uninitialised, its rows padded on CUDA so that every row starts on 64 bytes, as fast
    loads need.
    """
    pitch = -(-vocab // _ALIGN) * _ALIGN if device.type == "cuda" else vocab
    return torch.empty(rows, pitch, dtype=dtype, device=device)[:, :vocab]


def project(states: Tensor, head: Tensor, out: Tensor, *, scale: float = 1.0, softcap: float = 0.0) -> Tensor:
    """Write the logits of `states` [n, H] under `head` [V, H] into `out` [n, V] and return it."""
    if states.dtype == out.dtype:
        torch.mm(states, head.t(), out=out)
    elif states.device.type == "cuda":
        torch.mm(states, head.t(), out_dtype=out.dtype, out=out)
    else:
        wide = states.to(out.dtype)
        for start in range(0, head.shape[0], _WIDEN_ROWS):
            strip = head[start : start + _WIDEN_ROWS].to(out.dtype)
            out[:, start : start + _WIDEN_ROWS] = wide @ strip.t()
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
    for start in range(0, head.shape[0], _WIDEN_ROWS):
        strip = head[start : start + _WIDEN_ROWS].to(out.dtype)
        out += grad[:, start : start + _WIDEN_ROWS].to(out.dtype) @ strip
    return out


# ----------------------------------------------------------------------------------------------------
# The target's side of a chunk: the distinct target rows it needs, projected once, here or on a second
# device.
#
# Blocks of neighbouring anchors overlap, so a chunk of n drafter rows needs only u <= n distinct target
# rows (rho = u / n). They are a contiguous slice of the target's states when the anchors lie close, else
# they are gathered. With the target's head on another device the projection runs there, and only the
# chunk's logits [u, V] cross.


@dataclass(frozen=True)
class Teacher:
    """The target's states, with buffers of its own only where its head is another than the drafter's."""

    states: Tensor  # [R, H] after the target's final norm
    head: Tensor | None  # [V, H] beside states; None: the drafter's head serves both sides
    here: Tensor | None  # [c, V] logits on the drafter's device, with a head of its own
    there: Tensor | None  # [c, V] logits on the device of states, likewise
    config: LossConfig

    @classmethod
    def allocate(
        cls, states: Tensor, head: Tensor | None, rows: int, device: torch.device, config: LossConfig
    ) -> Teacher:
        """Buffers for chunks of at most `rows` rows."""
        if head is None:
            return cls(states, None, None, None, config)
        dtype, vocab = logit_dtype(states.dtype), head.shape[0]
        return cls(
            states,
            head,
            logit_buffer(rows, vocab, dtype, device),
            logit_buffer(rows, vocab, dtype, states.device),
            config,
        )

    def select(self, target_row: Tensor) -> tuple[Tensor, Tensor]:
        """(distinct states [u, H], which of them each drafter row uses [n], CPU) for target rows [n] (int64,
        CPU).
        """
        needed, source = torch.unique(target_row, return_inverse=True)
        first, count = int(needed[0]), needed.numel()
        if int(needed[-1]) - first + 1 == count:
            return self.states[first : first + count], source
        return self.states.index_select(0, upload(needed, self.states.device)), source

    def logits(self, states: Tensor) -> Tensor:
        """[u, V] on the drafter's device, projected where the target's own head lies."""
        assert self.head is not None and self.here is not None and self.there is not None
        out = self.there[: states.shape[0]]
        project(states, self.head, out, scale=self.config.logit_scale, softcap=self.config.logit_softcap)
        return self.here[: states.shape[0]].copy_(out, non_blocking=True)


# ----------------------------------------------------------------------------------------------------
# One sweep over chunks of whole anchors: logits, terms, logit gradient, hidden gradient, and on to the next
# chunk.
#
# The gradient of the hidden states is finished inside the forward, so nothing of size [chunk, V] outlives
# its chunk, and a [rows, V] tensor never exists. (A loop over chunks under autograd keeps every chunk's
# logits: it saves nothing.) One set of buffers serves all chunks. Forward and backward see the same logits
# by construction. Both sides of a chunk are projected by one matmul, so that the head is read twice a
# chunk, not three times.


@dataclass(frozen=True)
class SweepJob:
    """Everything a sweep needs beside the hidden states."""

    head: Tensor  # [V, H] (this rank's slice of it with a shard)
    selection: Selection
    target_states: Tensor | None
    target_head: Tensor | None
    config: LossConfig
    row_pass: RowPass
    shard: VocabShard | None
    scale: Tensor | None  # scalar that multiplies the gradient before it is rounded


def sweep(hidden: Tensor, job: SweepJob, *, want_gradient: bool) -> tuple[Tensor | None, Terms]:
    """Return (scale * d total / d hidden [A, B, H] or None, terms of the live rows)."""
    chosen, target = job.selection, job.target_states is not None
    overlap = target and job.config.needs_overlap
    terms = Terms.empty(
        chosen.label, chosen.weight, target=target, overlap=overlap, length=job.config.length_weight > 0
    )
    grad = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if want_gradient else None
    if chosen.chunks:
        _Sweep(hidden, job, terms, grad).run()
    return grad, terms


class _Sweep:
    """The buffers of one sweep and the steps of a chunk."""

    def __init__(self, hidden: Tensor, job: SweepJob, terms: Terms, grad: Tensor | None) -> None:
        self.hidden, self.job, self.terms, self.grad = hidden, job, terms, grad
        self.config = job.config
        self.offset = 0 if job.shard is None else job.shard.start
        most, device = max(chunk.rows for chunk in job.selection.chunks), hidden.device
        self.teacher = None
        if job.target_states is not None:
            self.teacher = Teacher.allocate(job.target_states, job.target_head, most, device, self.config)
        both = 2 * most if self.teacher is not None and self.teacher.head is None else most
        vocab, size = job.head.shape
        self.states = torch.empty(both, size, dtype=hidden.dtype, device=device)
        self.logits = logit_buffer(both, vocab, logit_dtype(hidden.dtype), device)
        self.part = torch.empty(most, size, dtype=self.logits.dtype, device=device)
        self.logit_grad = None if grad is None else logit_buffer(most, vocab, hidden.dtype, device)
        self.flat = hidden.view(-1, size) if hidden.is_contiguous() else None
        varies = self.config.lk_weight or self.config.length_weight
        fixed = self.config.weighting == "given" and not varies
        self.fixed = coefficients(terms, self.config, job.scale) if fixed else None
        if self.config.weighting == "dpace" or self.config.length_weight:
            block_of, chunks = job.selection.block_of, job.selection.chunks
            within = torch.cat([block_of[c.start : c.end] - block_of[c.start] for c in chunks])
            self.block_of = upload(within, device)  # counted from 0 in each chunk
            self.back = hidden.shape[1] - 1 - job.selection.slot

    def run(self) -> None:
        for chunk in self.job.selection.chunks:
            out = self.terms.slice(chunk.start, chunk.end)
            rows = self.project(chunk, out)
            if self.grad is None or self.logit_grad is None:
                self.fill_terms(chunk, rows, out)
                if self.config.length_weight:
                    self.length(chunk, out)
                continue
            g = self.logit_grad[: chunk.rows]
            lost, scale = self.logit_gradient(chunk, rows, out, g)
            self.hidden_gradient(chunk, rows, g, lost, scale, self.grad)

    def project(self, chunk: Chunk, out: Terms) -> Rows:
        """Logits of both sides of a chunk."""
        job, n = self.job, chunk.rows
        states = self.states[:n]
        place = self.place(chunk)
        if self.flat is not None:
            torch.index_select(self.flat, 0, job.selection.position[chunk.start : chunk.end], out=states)
        else:
            states.copy_(self.hidden[place])
        s = source = None
        u = 0
        if self.teacher is not None and job.selection.target_row is not None:
            target, source = self.teacher.select(job.selection.target_row[chunk.start : chunk.end])
            source = upload(source, self.hidden.device)
            if self.teacher.head is None:
                u = target.shape[0]
                self.states[n : n + u].copy_(target)
            else:
                s = self.teacher.logits(target)
        shape = {"scale": self.config.logit_scale, "softcap": self.config.logit_softcap}
        logits = project(self.states[: n + u], job.head, self.logits[: n + u], **shape)
        return Rows(logits[:n], out.label, logits[n:] if u else s, source, None, self.offset)

    def place(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        chosen = self.job.selection
        return chosen.anchor[chunk.start : chunk.end], chosen.slot[chunk.start : chunk.end]

    def logit_gradient(self, chunk: Chunk, rows: Rows, out: Terms, g: Tensor) -> tuple[Tensor, Tensor | None]:
        """Fill the terms and the logit gradient g [n, V]; (what rounding lost at the label, factor still to
        apply).
        """
        row_pass, config = self.job.row_pass, self.config
        alone = (
            rows.s is None
            and self.job.shard is None
            and config.hard_weight > 0
            and not config.logit_softcap
            and not config.length_weight
        )
        if row_pass.one_pass_hard and alone:
            lost, scale = row_pass.hard_gradient(rows, out, config, g)
            self.weigh(chunk, out)
            factor = self.factors(chunk, out).hard
            assert factor is not None
            return lost, scale * factor
        rows = self.fill_terms(chunk, rows, out)
        lost, kl = row_pass.gradient(rows, out, self.factors(chunk, out), config, g)
        if kl is not None and out.kl is not None and not config.needs_overlap:
            out.kl.copy_(kl if self.job.shard is None else self.job.shard.sum(kl))
        return lost, None

    def factors(self, chunk: Chunk, out: Terms) -> Coefficients:
        if self.fixed is not None:
            return self.fixed.slice(chunk.start, chunk.end)
        hanging = self.length(chunk, out) if self.config.length_weight else None
        return coefficients(out, self.config, self.job.scale, hanging)

    def length(self, chunk: Chunk, out: Terms) -> Length:
        """The length term of a chunk whose other terms are there; fills `reached`."""
        if self.config.overlaps:
            assert out.tv is not None
            acceptance = 1 - out.tv
        else:
            acceptance = torch.exp(-out.ce)
        found = length(acceptance, out.weight, self.places(chunk))
        assert out.reached is not None
        out.reached.copy_(found.reached)
        return found

    def fill_terms(self, chunk: Chunk, rows: Rows, out: Terms) -> Rows:
        """Fill the terms of a chunk; return its rows with the target's terms in place."""
        if rows.s is not None and rows.source is not None:
            target = self.target_terms(rows.s)
            assert out.target_argmax is not None
            torch.index_select(target.argmax, 0, rows.source, out=out.target_argmax)
            if self.job.selection.label is None:
                out.label.copy_(out.target_argmax)
            rows = Rows(rows.z, rows.label, rows.s, rows.source, target, rows.offset)
        self.drafter_terms(rows, out)
        self.weigh(chunk, out)
        if rows.s is not None and (self.config.needs_overlap or self.grad is None):
            sums = torch.stack(self.job.row_pass.divergence(rows, out, self.config.temperature))
            if self.job.shard is not None:
                sums = self.job.shard.sum(sums)
            for field, value in zip((out.kl, out.tv, out.below), sums):
                if field is not None:
                    field.copy_(value)
        return rows

    def target_terms(self, s: Tensor) -> TargetTerms:
        row_pass, temperature = self.job.row_pass, self.config.temperature
        if self.job.shard is None:
            return row_pass.target_terms(s, temperature)
        sums = self.job.shard.merge_target(row_pass.target_sums(s, self.offset, temperature), temperature)
        return finish_target(sums, temperature)

    def drafter_terms(self, rows: Rows, out: Terms) -> None:
        row_pass, shard, temperature = self.job.row_pass, self.job.shard, self.config.temperature
        if shard is None:
            row_pass.drafter_terms(rows, temperature, out)
            return
        logit = shard.maximum(rows.label_logit())
        sums = shard.merge_drafter(row_pass.drafter_sums(rows, logit, temperature), temperature)
        finish_drafter(sums, logit, rows.label, shard.total, temperature, out)

    def weigh(self, chunk: Chunk, out: Terms) -> None:
        """Multiply in the weights that depend on the chunk's terms; given weights are in place already."""
        if self.config.weighting == "dpace":
            out.weight.mul_(dpace_weights(out.ce, self.places(chunk), self.config.dpace_alpha))

    def places(self, chunk: Chunk) -> Places:
        """Where a chunk's rows stand in its blocks."""
        part, block_of = slice(chunk.start, chunk.end), self.job.selection.block_of
        blocks = int(block_of[chunk.end - 1] - block_of[chunk.start]) + 1  # on the CPU
        slot = self.job.selection.slot[part]
        return Places(self.block_of[part], slot, self.back[part], blocks, self.hidden.shape[1])

    def hidden_gradient(
        self, chunk: Chunk, rows: Rows, g: Tensor, lost: Tensor, scale: Tensor | None, grad: Tensor
    ) -> None:
        """The logit gradient through the head, summed in the accumulation dtype, over the shards too, into
        grad.
        """
        job = self.job
        part = project_back(g, job.head, self.part[: chunk.rows])
        give_back = None if g.dtype == part.dtype else lost
        if job.shard is not None:
            if give_back is not None:
                part.addcmul_(give_back[:, None], job.head[rows.local_label].to(part.dtype))
            part, give_back = job.shard.sum(part), None
        job.row_pass.deposit(grad, self.place(chunk), part, rows, job.head, lost=give_back, scale=scale)


# ----------------------------------------------------------------------------------------------------
# The draft loss as one function and one module: hard and soft targets, CAP, TV and every slot's metrics.
#
#     loss = fused_draft_loss(hidden, head, labels, weights, target_hidden=..., target_rows=..., config=...)
#     (loss.total * world_size / denominator).backward()
#
# The sum is returned without a denominator on purpose: the gradient it carries only needs one scalar at
# backward time, so a denominator all-reduced over accumulation steps and ranks may arrive late and
# everything stays exact. Anything divided by a total that depends on the model could not be computed in one
# pass; CAP therefore shares the same denominator.
#
# The gradient is first order: create_graph=True raises in the backward pass. Keep the call outside
# activation checkpointing, which would run the sweep twice, and outside compiled regions, where it is one
# clean graph break.


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
            total = _LossFunction.apply(hidden, job, want, holder)
    except NotCompiled as refused:
        if backend != "auto" or shard is not None:  # ranks of a shard could only change together
            raise
        logger.warning("%s It is taken from now on; it runs more and slower kernels a chunk.", refused)
        _not_compiled.add(name)
        job = dataclasses.replace(job, row_pass=load_backend("torch"))
        total = _LossFunction.apply(hidden, job, want, holder)
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


class _LossFunction(torch.autograd.Function):
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
