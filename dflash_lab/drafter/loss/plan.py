"""How many rows a chunk holds: measured from free memory once, then frozen.

On an H200 matmuls of 512 rows run as fast as those of 4,096, so a chunk need not be large to be fast, and
memory decides. A reading every step would cost a query, change shapes (recompiles) and make runs differ; so
the first step measures, and what it found is kept. Ranks that work together agree on the smallest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from dflash_lab.errors import InputError
from dflash_lab.machine import available_memory

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
