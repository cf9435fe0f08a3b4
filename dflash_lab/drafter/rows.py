"""Training rows: anchors drawn, samples packed, rows carried to the device ahead of their step."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
import xxhash
from torch import Tensor

from dflash_lab.data.samples import FeatureItem
from dflash_lab.drafter.attention import BlockLayout, Segment, block_mask
from dflash_lab.drafter.config import SLIDING, DrafterConfig
from dflash_lab.errors import InputError

# Where training blocks start, and which of their slots count ------------------------------------------------
# A whole row is worked on at once, in numpy: a thread packs rows beside the one that starts the device's
# kernels, and each of thousands of small operations would stop it on its way.


def stream_seed(*parts: int | str) -> int:
    """A seed for one purpose at one point of a run, such as ("anchors", seed, epoch, row).

    Streams depend on their parts alone, so a resumed run draws what the uninterrupted one drew.
    """
    return xxhash.xxh3_64(repr(parts).encode()).intdigest() & (2**63 - 1)


def seeded(*parts: int | str) -> torch.Generator:
    """A CPU generator for `stream_seed` of the same parts."""
    return torch.Generator().manual_seed(stream_seed(*parts))


def valid_anchors(loss_mask: Tensor, starts: np.ndarray | Sequence[int] = (0,)) -> np.ndarray:
    """Sorted indices [n] where a block may start, for the loss_mask [S] of a row whose documents begin at
    `starts`: what decoding would start a block from.

    Position a of a document of L tokens is valid when 1 <= a, a + 1 < L and both loss_mask[a] and
    loss_mask[a + 1] are 1 (SpecForge's rule; a = 0 has no context).
    """
    on = loss_mask.numpy() != 0
    first = np.zeros(len(on) + 1, dtype=bool)
    first[np.asarray(starts)] = True
    return np.flatnonzero(on[:-1] & on[1:] & ~first[: max(len(on) - 1, 0)] & ~first[1 : len(on)])


def draw_anchors(counts: np.ndarray, total: int, generator: torch.Generator) -> np.ndarray:
    """Draw `total` of the valid positions of documents that have `counts` of them, or all if there are fewer:
    sorted places among all of them, [n].

    Shares are proportional, rounded at random without bias (systematic sampling), so short documents get
    their turn. Drawn anew each epoch: random anchors train better than fixed ones (DFlash paper: tau 5.64 /
    4.94).
    """
    available = int(counts.sum())
    if available <= total:
        return np.arange(available)
    ends = counts.cumsum() * float(total) / available
    ends += torch.rand(1, generator=generator, dtype=torch.float64).numpy()
    ends[-1] = total + ends[-1] % 1  # exact, whatever the sum rounded to
    shares = np.diff(np.floor(ends), prepend=0.0).astype(np.int64).tolist()
    drawn, before = [], 0
    for count, share in zip(counts.tolist(), shares, strict=True):
        drawn.append(torch.randperm(count, generator=generator).numpy()[:share] + before)
        before += count
    return np.sort(np.concatenate(drawn))


def slot_labels(
    input_ids: Tensor, loss_mask: Tensor, anchors: np.ndarray, ends: np.ndarray, block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """labels [n, B] = input_ids[a + k] (0 past the end) and valid [n, B] bool; slot 0 is never valid.

    Slot k >= 1 counts while every slot up to it stands on a response token of the same document: what lies
    behind a gap could never be accepted in one round.

    `anchors` [n] are indices of a row [S] of documents, `ends` [n] lie one past the last token of each
    anchor's document.
    """
    length = len(input_ids)
    off = np.append(np.where(loss_mask.numpy() != 0, length, np.arange(length)), length)
    next_off = np.minimum.accumulate(off[::-1])[::-1]  # [S + 1] first index from here on that does not count
    slots = np.arange(block_size)
    where = anchors[:, None] + slots
    labels = input_ids.numpy().astype(np.int64, copy=False).take(where, mode="clip")
    labels[where >= ends[:, None]] = 0
    valid = where < np.minimum(next_off[anchors + 1], ends)[:, None]
    valid[:, :1] = False
    return labels, valid


def decay_weights(block_size: int, gamma: float) -> Tensor:
    """w [B]: exp(-(k-1)/gamma) for slots k >= 1, 0 for the anchor; gamma 0 means no decay. Source: DFlash
    paper.
    """
    slots = torch.arange(block_size, dtype=torch.float32)
    weights = torch.exp(-(slots - 1) / gamma) if gamma > 0 else torch.ones(block_size)
    weights[0] = 0.0
    return weights


# Samples into packed rows -----------------------------------------------------------------------------------

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
    """Rows of a collection of items; the plan is drawn anew each epoch from the seed.

    `row(epoch, index)` depends on nothing else, so a run resumes at any row, and a thread may work ahead.
    """

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


# Rows on their way to the device ----------------------------------------------------------------------------
# A thread reads, packs, pins and copies them on a stream of its own: the copy of a row of a 27B target (half
# a gigabyte) takes a hundredth of its step, for which the device would stand still on the step's own stream.


T = TypeVar("T")
DEPTH = 2  # rows that lie ready; the memory room counts them


@dataclass(frozen=True)
class Fed:
    """A row at its place in the data: on the host, and on the device once `copied` (an event) has passed."""

    epoch: int
    index: int
    host: Row
    row: Row
    copied: Any = None

    def arrived(self) -> Row:
        """The device's row, safe to use on the current stream."""
        if self.copied is not None:
            stream = torch.cuda.current_stream(self.row.taps.device)
            stream.wait_event(self.copied)
            for tensor in self.row.tensors():
                if tensor.is_cuda:
                    tensor.record_stream(stream)
        return self.row


def feed(rows: Iterable[tuple[int, int, Row]], device: torch.device) -> Iterator[Fed]:
    """Send rows to `device`; to be run in a thread (`prefetch`)."""
    if device.type != "cuda":
        yield from (Fed(epoch, index, row, row.to(device)) for epoch, index, row in rows)
        return
    torch.cuda.set_device(device)  # each thread has its own
    stream = torch.cuda.Stream(device)
    for epoch, index, row in rows:
        host = row.pinned()
        with torch.cuda.stream(stream):
            sent = host.to(device)
            copied = torch.cuda.Event()
            copied.record(stream)
        yield Fed(epoch, index, host, sent, copied)


def prefetch(source: Iterable[T], depth: int = DEPTH) -> Generator[T]:
    """Run `source` in a thread, at most `depth` ahead. Its exceptions are raised here; closing ends the
    thread.
    """
    ready: queue.Queue = queue.Queue(maxsize=depth)
    stop = threading.Event()

    def put(entry: tuple[str, object]) -> None:
        while not stop.is_set():
            try:
                return ready.put(entry, timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for value in source:
                if stop.is_set():
                    return
                put(("value", value))
            put(("end", None))
        except BaseException as error:
            put(("error", error))

    thread = threading.Thread(target=work, name="row-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "error":
                raise value  # type: ignore[misc]
            if kind == "end":
                return
            yield value  # type: ignore[misc]
    finally:
        stop.set()
        thread.join()


# One real packed row as plain data, for a person to see what its blocks see ---------------------------------

SHOWN = 160  # tokens of the document


def inspect_row(
    items: Items | Bare,
    config: DrafterConfig,
    context_tokens: int,
    anchors: int,
    seed: int,
    decode: Callable[[int], str] | None,
) -> dict[str, Any]:
    """The first document with anchors of the first training row: its tokens, anchors, and each layer kind's
    rule.

    `low[i][k] <= p < anchors[i]` is the context that slot k of block i sees; `block[k][j]` says whether slot
    k sees slot j of its own block.
    """
    source = PackedRows(
        items,
        np.flatnonzero(~np.asarray(items.heldout)),
        config,
        context_tokens=context_tokens,
        anchors=anchors,
        seed=seed,
    )
    row = source.row(0, 0)
    layout = row.layout
    filled = [s for s in layout.segments if s.block_stop > s.block_start]
    if not filled:
        return {"tokens": [], "texts": [], "anchors": [], "kinds": [], "documents": len(layout.segments)}
    segment = filled[0]
    start, blocks = segment.context_start, slice(segment.block_start, segment.block_stop)
    shown = min(segment.context_stop - start, SHOWN)
    keep = layout.anchors[blocks] - start < shown
    ids = row.input_ids[start : start + shown].tolist()
    kinds = []
    for name in dict.fromkeys(config.layer_types):
        layers = [i for i, kind in enumerate(config.layer_types) if kind == name]
        mask = config.layer_mask(layers[0])
        low, _ = layout.visible(mask.window)
        kinds.append(
            {
                "name": "sliding" if name == SLIDING else "full",
                "layers": layers,
                "window": mask.window,
                "causal": mask.causal,
                "low": (low[blocks][keep] - start).tolist(),
                "block": block_mask(config.block_size, mask).int().tolist(),
            }
        )
    return {
        "tokens": ids,
        "texts": [decode(token) for token in ids] if decode else [str(token) for token in ids],
        "anchors": (layout.anchors[blocks][keep] - start).tolist(),
        "slot_mask": row.slot_mask[blocks][keep].int().tolist(),
        "block_size": config.block_size,
        "kinds": kinds,
        "documents": len(layout.segments),
        "row_tokens": row.tokens,
        "row_blocks": row.blocks,
    }
