"""A model of PyTorch's caching allocator: what a trace of allocations reserves, not only what is live."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import attrgetter

from support.fake_memory.tracker import LabelledTensors

from dflash_lab.memory.shapes import MIB

ROUND, SEGMENT = 512, 2 * MIB
_ORDER = attrgetter("size", "start")


@dataclass(frozen=True)
class Replayed:
    """Bytes beside the static ones: `reserved` with room to spare, `needed` (the smallest limit under which
    nothing fails), and `allocated`, live in whole blocks.
    """

    reserved: int
    needed: int
    allocated: int


@dataclass(slots=True, eq=False)
class Block:
    start: int
    size: int
    small: bool
    free: bool = False
    before: Block | None = None
    after: Block | None = None


class CachingAllocator:
    """The documented defaults: sizes round up to 512 bytes; requests up to 1 MiB come from 2 MiB segments, up
    to 10 MiB from 20 MiB segments, larger ones from their own, rounded to 2 MiB. The best fit is taken and
    split unless the rest is small. With `expandable` one segment grows by pages at its end, so that freed
    neighbours merge whatever batch they came from. At a `limit` the cache is flushed, then `MemoryError`.
    """

    def __init__(self, *, expandable: bool = False, limit: int | None = None) -> None:
        self.expandable, self.limit = expandable, limit
        self.reserved = self.allocated = self.peak_allocated = self._next = 0
        self._free: dict[bool, list[Block]] = {True: [], False: []}  # by pool, the smallest first
        self._tail: dict[bool, Block] = {}  # the last block of a pool's expandable segment

    def allocate(self, size: int) -> Block:
        size = -(-max(size, 1) // ROUND) * ROUND
        small = size <= MIB
        free = self._free[small]
        place = bisect_left(free, (size, -1), key=_ORDER)
        block = free[place] if place < len(free) else self._grow(small, size)
        if block.free:
            self._drop(block)
        rest = block.size - size
        if rest >= ROUND if small or self.expandable else rest > MIB:
            other = Block(block.start + size, rest, small, True, block, block.after)
            if block.after is not None:
                block.after.before = other
            block.after, block.size = other, size
            if self._tail.get(small) is block:
                self._tail[small] = other
            insort(free, other, key=_ORDER)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def release(self, block: Block) -> None:
        self.allocated -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._drop(neighbour)
                block = self._merge(*sorted((neighbour, block), key=attrgetter("start")))
        block.free = True
        insort(self._free[block.small], block, key=_ORDER)

    def _merge(self, first: Block, second: Block) -> Block:
        first.size, first.after = first.size + second.size, second.after
        if second.after is not None:
            second.after.before = first
        if self._tail.get(first.small) is second:
            self._tail[first.small] = first
        return first

    def _drop(self, block: Block) -> None:
        free = self._free[block.small]
        del free[bisect_left(free, _ORDER(block), key=_ORDER)]
        block.free = False

    def _reserve(self, size: int) -> None:
        if self.limit is not None and self.reserved + size > self.limit:
            for block in [b for pool in self._free.values() for b in pool if b.before is b.after is None]:
                self._drop(block)
                self.reserved -= block.size
                if self._tail.get(block.small) is block:
                    del self._tail[block.small]
            if self.reserved + size > self.limit:
                raise MemoryError(f"{size} bytes asked for, {self.reserved} of {self.limit} reserved")
        self.reserved += size

    def _grow(self, small: bool, size: int) -> Block:
        page = SEGMENT if small else 10 * SEGMENT
        if not self.expandable:
            segment = page if size < 10 * MIB else -(-size // SEGMENT) * SEGMENT
            self._reserve(segment)
            self._next += segment
            return Block(self._next - segment, segment, small)
        tail = self._tail.get(small)
        have = tail.size if tail is not None and tail.free else 0
        grown = -(-(size - have) // page) * page
        self._reserve(grown)
        if tail is not None and tail.free and small in self._tail:
            self._drop(tail)
            tail.size += grown
            return tail
        block = Block(tail.start + tail.size if tail else (1 << 50 if small else 0), grown, small)
        if tail is not None:
            tail.after, block.before = block, tail
        self._tail[small] = block
        return block


def replay(tracker: LabelledTensors, static_label: str, *, expandable: bool = False) -> Replayed:
    """Replay a tracker's trace without the blocks of `static_label`, which lie in segments of their own."""
    sizes = [block.size for block in tracker.blocks]
    events = [event for event in tracker.trace if tracker.label(event[0]) != static_label]

    def run(limit: int | None = None) -> CachingAllocator:
        allocator, held = CachingAllocator(expandable=expandable, limit=limit), {}
        for number, sign in events:
            if sign > 0:
                held[number] = allocator.allocate(sizes[number])
            else:
                allocator.release(held.pop(number))
        return allocator

    free = run()
    low, high = free.peak_allocated, free.reserved
    while high - low > max(SEGMENT, high // 200):  # half a percent is finer than any other error here
        middle = (low + high) // 2
        try:
            run(middle)
            high = middle
        except MemoryError:
            low = middle
    return Replayed(free.reserved, high, free.peak_allocated)
