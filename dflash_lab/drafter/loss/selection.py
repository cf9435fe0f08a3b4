"""Which rows take part, in which chunks, and which target rows each chunk needs: decided on the CPU, before
any matmul.

Rows of weight zero are left out here, once, by index; nothing later multiplies by a mask. Deciding on the CPU
costs one copy of the small index tensors (none at all when the caller keeps them on the CPU, as a sampler
does) and spares the device every data-dependent shape. A chunk holds whole anchors, so that weights that
depend on a block can be computed within one chunk, and so that the target rows of neighbouring anchors
overlap and are projected once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_lab.errors import InputError

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
