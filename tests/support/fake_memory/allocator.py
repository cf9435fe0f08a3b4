"""Replay a trace of allocations through a model of PyTorch's CUDA caching allocator: what will be reserved,
not only live.

The rules are the allocator's documented defaults: sizes round up to 512 bytes; requests up to 1 MiB come
from 2 MiB segments; up to 10 MiB from 20 MiB segments; larger ones get a segment of their own, rounded to 2
MiB. A free block is used best-fit and split unless the rest would be small (under 512 bytes in the small
pool, under 1 MiB in the large one). With `expandable` one segment grows by 20 MiB pages at its end instead,
which is what `expandable_segments:True` does: freed neighbours merge whatever batch they came from.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from support.fake_memory.tracker import LabelledTensors

from dflash_lab.memory.shapes import MIB

ROUND = 512
SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE_REQUEST = 10 * MIB
SEGMENT_ROUND = 2 * MIB


@dataclass(frozen=True)
class Replayed:
    """Bytes: `reserved` with room to spare, `needed` when there is none, `allocated` live at the peak
    (rounded).

    Without a limit the allocator keeps every segment it ever took. At a limit it first gives free segments
    back, so what must fit lies between `allocated` and `reserved`: `needed`, the smallest limit under which
    nothing fails.
    """

    reserved: int
    needed: int
    allocated: int


class _Block:
    __slots__ = ("after", "before", "free", "pool", "size", "start")

    def __init__(self, start: int, size: int, pool: _Pool) -> None:
        self.start, self.size, self.pool = start, size, pool
        self.free = False
        self.before: _Block | None = None
        self.after: _Block | None = None

    def __lt__(self, other: _Block) -> bool:
        return (self.size, self.start) < (other.size, other.start)


class _Pool:
    def __init__(self, small: bool) -> None:
        self.small = small
        self.free: list[_Block] = []


class CachingAllocator:
    """A model of one device's allocator, in bytes. `allocate` returns a handle for `release`.

    With a `limit`, a request that would pass it first flushes the cache and then raises `MemoryError`.
    """

    def __init__(self, *, expandable: bool = False, limit: int | None = None) -> None:
        self.expandable, self.limit = expandable, limit
        self.reserved = 0
        self.flushes = 0  # times the cache was given back to stay under the limit
        self.allocated = 0
        self.peak_allocated = 0
        self._small, self._large = _Pool(True), _Pool(False)
        self._tail: dict[_Pool, _Block] = {}
        self._next_start = 0

    def allocate(self, size: int) -> _Block:
        """Take `size` bytes."""
        size = -(-max(size, 1) // ROUND) * ROUND
        pool = self._small if size <= SMALL else self._large
        block = self._best_fit(pool, size) or self._grow(pool, size)
        rest = block.size - size
        if rest >= ROUND if pool.small or self.expandable else rest > SMALL:
            self._split(block, size)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def release(self, block: _Block) -> None:
        """Give a block back and merge it with free neighbours."""
        self.allocated -= block.size
        block.free = True
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._drop(neighbour)
                block = self._merge(neighbour, block)
        insort(block.pool.free, block)

    def empty_cache(self) -> None:
        """Give whole free segments back to the device."""
        for pool in (self._small, self._large):
            for block in [block for block in pool.free if block.before is None and block.after is None]:
                self._drop(block)
                self.reserved -= block.size
                if self._tail.get(pool) is block:
                    del self._tail[pool]

    def _best_fit(self, pool: _Pool, size: int) -> _Block | None:
        probe = _Block(-1, size, pool)
        place = bisect_left(pool.free, probe)
        if place == len(pool.free):
            return None
        block = pool.free.pop(place)
        block.free = False
        return block

    def _grow(self, pool: _Pool, size: int) -> _Block:
        if self.expandable:
            return self._extend(pool, size)
        if pool.small:
            segment = SMALL_SEGMENT
        elif size < LARGE_REQUEST:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // SEGMENT_ROUND) * SEGMENT_ROUND
        self._take(segment)
        block = _Block(self._next_start, segment, pool)
        self._next_start += segment
        return block

    def _take(self, size: int) -> None:
        if self.limit is not None and self.reserved + size > self.limit:
            self.flushes += 1
            self.empty_cache()
            if self.reserved + size > self.limit:
                raise MemoryError(f"{size} bytes asked for, {self.reserved} of {self.limit} reserved")
        self.reserved += size

    def _extend(self, pool: _Pool, size: int) -> _Block:
        """Map more pages behind the pool's last block; a free last block is used first."""
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        tail = self._tail.get(pool)
        have = tail.size if tail is not None and tail.free else 0
        grown = -(-(size - have) // page) * page
        self._take(grown)
        if tail is not None and tail.free and pool in self._tail:
            self._drop(tail)
            tail.free = False
            tail.size += grown
            return tail
        start = tail.start + tail.size if tail is not None else (1 << 50 if pool.small else 0)
        block = _Block(start, grown, pool)
        if tail is not None:
            tail.after, block.before = block, tail
        self._tail[pool] = block
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.start + size, block.size - size, block.pool)
        rest.free, rest.before, rest.after = True, block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        if self._tail.get(block.pool) is block:
            self._tail[block.pool] = rest
        insort(block.pool.free, rest)

    def _merge(self, one: _Block, other: _Block) -> _Block:
        first, second = (one, other) if one.start < other.start else (other, one)
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        if self._tail.get(first.pool) is second:
            self._tail[first.pool] = first
        first.free = True
        return first

    def _drop(self, block: _Block) -> None:
        place = bisect_left(block.pool.free, block)
        del block.pool.free[place]


def replay(
    tracker: LabelledTensors, *, static_labels: tuple[str, ...] = (), expandable: bool = False, start: int = 0
) -> Replayed:
    """Replay a tracker's trace and return what the allocator would have reserved and needed.

    Blocks labelled with one of `static_labels` are counted but take no part: weights and optimizer state
    lie in segments of their own. Events before `start` are left out (a first step that later ones do not
    repeat).
    """
    labels = [tracker.label(number) for number in range(len(tracker.blocks))]
    sizes = [block.size for block in tracker.blocks]
    static = sum(size for size, label in zip(sizes, labels) if label in static_labels)
    before = {number for number, sign in tracker.trace[:start] if sign > 0}
    before -= {number for number, sign in tracker.trace[:start] if sign < 0}
    alive = [(number, 1) for number in sorted(before) if labels[number] not in static_labels]
    events = alive + [event for event in tracker.trace[start:] if labels[event[0]] not in static_labels]
    free = CachingAllocator(expandable=expandable)
    _run(events, sizes, free)
    low, high = free.peak_allocated, free.reserved
    while high - low > max(SEGMENT_ROUND, high // 200):  # half a percent is finer than any other error here
        middle = (low + high) // 2
        if _fits(events, sizes, expandable, middle):
            high = middle
        else:
            low = middle
    return Replayed(free.reserved + static, high + static, free.peak_allocated + static)


def _run(events: list[tuple[int, int]], sizes: list[int], allocator: CachingAllocator) -> None:
    held: dict[int, _Block] = {}
    for number, sign in events:
        if sign > 0:
            held[number] = allocator.allocate(sizes[number])
        else:
            allocator.release(held.pop(number))
    for block in held.values():
        allocator.release(block)


def _fits(events: list[tuple[int, int]], sizes: list[int], expandable: bool, limit: int) -> bool:
    try:
        _run(events, sizes, CachingAllocator(expandable=expandable, limit=limit))
    except MemoryError:
        return False
    return True
