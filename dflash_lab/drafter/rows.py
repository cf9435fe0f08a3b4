"""Samples into packed rows: several documents side by side up to a budget of context tokens, with drawn
anchors.

A source answers `row(epoch, index)` from its parameters alone (no hidden state), so a run resumes at any row,
and a prefetch thread may work ahead. An item of a feature store is read with its states; `Unfilled` items
have none, and the loop asks for them once the row is on its device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from dflash_lab.data.samples import FeatureItem
from dflash_lab.drafter.anchors import draw_anchors, seeded, slot_labels, valid_anchors
from dflash_lab.drafter.attention import BlockLayout, Segment
from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.errors import InputError

OPEN_ROWS = 64  # that a sample may still join while rows are planned


class Items(Protocol):
    """What rows are made of: a sequence of samples with known lengths; which are held out is known
    beforehand.
    """

    @property
    def lengths(self) -> np.ndarray: ...  # [n] tokens

    @property
    def heldout(self) -> np.ndarray: ...  # [n] bool

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> FeatureItem: ...


@runtime_checkable
class Bare(Protocol):
    """Samples without states, from which rows are planned and packed all the same."""

    @property
    def lengths(self) -> np.ndarray: ...

    @property
    def heldout(self) -> np.ndarray: ...

    def bare(self, index: int) -> FeatureItem:
        """Item with states of width 0."""
        ...


@runtime_checkable
class Unfilled(Items, Bare, Protocol):
    """Items whose states come from a target that is running: rows are packed bare and filled later."""

    def begin(self, epoch: int, index: int) -> None:
        """Told once where the run starts."""
        ...

    def fill(self, row: Row, epoch: int, index: int) -> Row:
        """`row`, already on its device, with its states there. Rows are asked for in the order of the
        run.
        """
        ...

    def fill_heldout(self, row: Row, number: int) -> Row:
        """The same for held-out row `number`; asked for in order, before `begin`."""
        ...


@dataclass(frozen=True)
class Row:
    """One packed row: S context tokens, A blocks of B slots. Padding, if any, stands at the end and counts
    nowhere.
    """

    input_ids: Tensor  # [S]
    taps: Tensor  # [S, K*H]; width 0 until an unfilled row is filled
    final: Tensor | None  # [S, H] before the target's final norm
    layout: BlockLayout
    block_ids: Tensor  # [A, B] anchor token, then masks
    labels: Tensor  # [A, B] data tokens at a + k
    slot_mask: Tensor  # [A, B] bool, slots that count
    target_rows: Tensor  # [A, B] row index of the target state that predicts the slot, a + k - 1
    hashes: tuple[str, ...]
    tokens: int  # without padding
    blocks: int  # without padding

    def to(self, device: torch.device | str) -> Row:
        """Copy what the model reads to `device`; labels and masks stay, for the loss selects its rows on the
        host.
        """
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Row:
        """The same in pinned host memory, from where copies to a GPU overlap with its work."""
        return self._map(lambda tensor: tensor.pin_memory())

    def tensors(self) -> list[Tensor]:
        """What `to` copies."""
        found: list[Tensor] = []
        self._map(lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
        return found

    def _map(self, change: Callable[[Tensor], Tensor]) -> Row:
        return dataclasses.replace(
            self,
            input_ids=change(self.input_ids),
            taps=change(self.taps),
            final=None if self.final is None else change(self.final),
            block_ids=change(self.block_ids),
            layout=self.layout.map(change),
        )


def plan_rows(lengths: Sequence[int], context_tokens: int, generator: torch.Generator) -> list[list[int]]:
    """Pack shuffled samples into rows of at most `context_tokens`; every sample stands in exactly one row.

    In shuffled order each sample goes into the fullest of the open rows that takes it (64 stay open), so that
    company changes from epoch to epoch. A sample above the budget fills a row alone (and is cut to it).
    """
    rows: list[list[int]] = []
    room: dict[int, int] = {}  # open row -> tokens left
    for index in torch.randperm(len(lengths), generator=generator).tolist():
        need = min(int(lengths[index]), context_tokens)
        fits = [(left - need, row) for row, left in room.items() if left >= need]
        row = min(fits)[1] if fits else len(rows)
        if not fits:
            rows.append([])
            room[row] = context_tokens
            if len(room) > OPEN_ROWS:
                del room[min(room, key=lambda r: (room[r], r))]
        rows[row].append(index)
        room[row] -= need
    return [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]


class PackedRows:
    """Rows of a collection of items; the plan is drawn anew each epoch from the seed."""

    def __init__(
        self,
        items: Items | Bare,
        indices: Sequence[int] | np.ndarray,
        config: DrafterConfig,
        *,
        context_tokens: int,
        anchors: int,
        seed: int,
        pad: bool = False,
    ) -> None:
        """`indices` of the items to use; `anchors` blocks a row; `pad` gives every row one shape (compiled
        kernels).
        """
        if len(indices) == 0:
            raise InputError(
                "no samples to train on: the collection, or this side of its held-out split, is empty."
            )
        if anchors < 1 or context_tokens < 2:
            raise InputError(
                f"anchors = {anchors}, context_tokens = {context_tokens}: need at least 1 and 2."
            )
        self.config, self.indices = config, [int(i) for i in indices]
        self.read = items.bare if isinstance(items, Bare) else items.__getitem__
        self.context_tokens, self.anchors, self.seed, self.pad = context_tokens, anchors, seed, pad
        self.lengths = [int(items.lengths[i]) for i in self.indices]
        self.cut = sum(length > context_tokens for length in self.lengths)  # samples longer than a row
        self._plan = lru_cache(maxsize=2)(self._draw_plan)

    def _draw_plan(self, epoch: int) -> list[list[int]]:
        return plan_rows(self.lengths, self.context_tokens, seeded("rows", self.seed, epoch))

    def count(self, epoch: int) -> int:
        """Rows in an epoch."""
        return len(self._plan(epoch))

    def row(self, epoch: int, index: int) -> Row:
        """Read and pack row `index` of `epoch`."""
        items = [self.read(self.indices[i]) for i in self._plan(epoch)[index]]
        generator = seeded("anchors", self.seed, epoch, index)
        room = self.context_tokens if self.pad else 0
        row = pack(items, self.config, self.context_tokens, self.anchors, generator, room)
        if self.pad:
            return padded(row, self.context_tokens, self.anchors, self.config)
        # A row may hold no place to start a block (all its samples cut within their prompts): one that never
        # counts keeps every shape the model and the loss know.
        return row if row.blocks else padded(row, row.tokens, 1, self.config)


def pack(
    items: Sequence[FeatureItem],
    config: DrafterConfig,
    context_tokens: int,
    anchors: int,
    generator: torch.Generator,
    room: int = 0,
) -> Row:
    """Put documents side by side and draw their anchors. States are copied once, to where they stay: with
    `room` into that many tokens, zeros at the end, in pinned memory where there is a GPU.
    """
    cut = [min(len(item), context_tokens) for item in items]
    tokens = torch.cat([item.input_ids[:n] for item, n in zip(items, cut, strict=True)]).long()
    mask = torch.cat([item.loss_mask[:n] for item, n in zip(items, cut, strict=True)])
    stops = np.cumsum(cut)
    starts = stops - cut
    valid = valid_anchors(mask, starts)
    counts = np.diff(np.searchsorted(valid, stops), prepend=0)
    drawn = valid[draw_anchors(counts, anchors, generator)]
    size = config.block_size
    document = np.searchsorted(stops, drawn, side="right")  # of each anchor
    labels, counted = slot_labels(tokens, mask, drawn, stops[document], size)
    ends = np.searchsorted(drawn, stops).tolist()  # one past the last block of each document
    bounds = zip(starts.tolist(), stops.tolist(), [0, *ends[:-1]], ends, strict=True)
    layout = BlockLayout(
        anchors=torch.from_numpy(drawn),
        starts=torch.from_numpy(starts[document]),
        positions=torch.from_numpy(np.arange(len(tokens)) - np.repeat(starts, cut)),
        segments=tuple(Segment(*each) for each in bounds),
        block_size=size,
    )
    block_ids = torch.full((len(drawn), size), config.mask_token_id)
    block_ids[:, 0] = tokens[layout.anchors]
    before = (drawn[:, None] + np.arange(-1, size - 1)).clip(0, len(tokens) - 1)
    finals = [item.final[:n] for item, n in zip(items, cut, strict=True) if item.final is not None]
    return Row(
        input_ids=tokens,
        taps=_side_by_side([item.taps[:n] for item, n in zip(items, cut, strict=True)], room),
        final=_side_by_side(finals, room) if len(finals) == len(items) else None,
        layout=layout,
        block_ids=block_ids,
        labels=torch.from_numpy(labels),
        slot_mask=torch.from_numpy(counted),
        target_rows=torch.from_numpy(before),
        hashes=tuple(item.hash for item in items),
        tokens=len(tokens),
        blocks=len(block_ids),
    )


def without_bad_states(row: Row) -> tuple[Row, list[str]]:
    """`row`, and the hashes of its documents with a state that is not a finite number. Those count nowhere:
    their states become zeros, for attention would carry a NaN into other documents, and no slot of theirs
    counts.
    """
    bad = ~row.taps.isfinite().all(1)
    if row.final is not None:
        bad |= ~row.final.isfinite().all(1)
    if not bad.any():
        return row, []
    taps, slot_mask = row.taps.clone(), row.slot_mask.clone()
    final = None if row.final is None else row.final.clone()
    hashes = []
    documents = row.layout.segments[: len(row.hashes)]  # padding has a segment of its own
    for digest, part in zip(row.hashes, documents, strict=True):
        context = slice(part.context_start, part.context_stop)
        if bad[context].any():
            hashes.append(digest)
            slot_mask[part.block_start : part.block_stop] = False
            for states in (taps, *(() if final is None else (final,))):
                states[context] = 0
    return dataclasses.replace(row, taps=taps, final=final, slot_mask=slot_mask), hashes


def _side_by_side(parts: list[Tensor], room: int) -> Tensor:
    if not room or not parts[0].shape[1]:
        return torch.cat(parts)
    shape = room, parts[0].shape[1]
    whole = torch.empty(shape, dtype=parts[0].dtype, pin_memory=torch.cuda.is_available())
    end = sum(map(len, parts))
    torch.cat(parts, out=whole[:end])
    whole[end:] = 0
    return whole


def padded(row: Row, context_tokens: int, anchors: int, config: DrafterConfig) -> Row:
    """Pad to [context_tokens] and [anchors]: padded blocks see only themselves and no slot of theirs
    counts.
    """
    more, blocks = context_tokens - row.tokens, anchors - row.blocks

    def grow(tensor: Tensor, count: int, value: int = 0) -> Tensor:
        return torch.cat([tensor, tensor.new_full((count, *tensor.shape[1:]), value)])

    def states(tensor: Tensor) -> Tensor:
        return grow(tensor, context_tokens - len(tensor)) if len(tensor) < context_tokens else tensor

    layout = row.layout
    segments = layout.segments
    if blocks:
        segments = (*segments, Segment(0, 0, row.blocks, anchors))
    return dataclasses.replace(
        row,
        input_ids=grow(row.input_ids, more),
        taps=states(row.taps),
        final=None if row.final is None else states(row.final),
        layout=BlockLayout(
            grow(layout.anchors, blocks),
            grow(layout.starts, blocks),
            grow(layout.positions, more),
            segments,
            layout.block_size,
        ),
        block_ids=grow(row.block_ids, blocks, config.mask_token_id),
        labels=grow(row.labels, blocks),
        slot_mask=grow(row.slot_mask, blocks),
        target_rows=grow(row.target_rows, blocks),
    )
