"""Which samples go into one forward: sorted windows under a token budget, longest first.

Padding is what a batch wastes. Sorting everything would remove it, but reads the file in random order and, on
resume, changes every batch; sorting inside windows of 32,768 samples loses under 1% and keeps reads local.
The budget counts what the device computes: B rows padded to the longest, and to whole chunks of 64 where the
target has gated delta-net layers (their kernels hold a state a chunk, so B * chunk * ceil(L / chunk) is the
memory, not the sum of lengths).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dflash_lab.errors import InputError


@dataclass(frozen=True, eq=False)
class Plan:
    """Batches over samples 0..N-1: batch b is ``order[offsets[b]:offsets[b + 1]]``, its longest sample
    first."""

    order: np.ndarray  # [N] i64, every sample exactly once
    offsets: np.ndarray  # [batches + 1] i64
    lengths: np.ndarray  # [N] i64, as given
    token_budget: int
    chunk: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def batches(self) -> list[np.ndarray]:
        """Index arrays, one a batch, in the order to run them."""
        return np.split(self.order, self.offsets[1:-1]) if len(self) else []

    @cached_property
    def sizes(self) -> np.ndarray:
        """Rows of each batch, [batches]."""
        return np.diff(self.offsets)

    @cached_property
    def longest(self) -> np.ndarray:
        """Padded length L of each batch in tokens, [batches]."""
        return self.lengths[self.order[self.offsets[:-1]]]

    @property
    def real_tokens(self) -> int:
        """Tokens that are asked for."""
        return int(self.lengths.sum())

    @property
    def padded_tokens(self) -> int:
        """Tokens that are computed: sum of B * L."""
        return int((self.sizes * self.longest).sum())

    @property
    def waste_pct(self) -> float:
        """Share of the computed tokens that is padding, in percent."""
        return 100 * (1 - self.real_tokens / self.padded_tokens) if self.padded_tokens else 0.0

    @cached_property
    def costs(self) -> np.ndarray:
        """Budget tokens of each batch, B * chunk * ceil(L / chunk), [batches]."""
        return self.sizes * round_up(self.longest, self.chunk)

    @property
    def over_budget(self) -> int:
        """Batches above the budget: samples longer than it, each alone in its batch."""
        return int((self.costs > self.token_budget).sum())


def round_up(lengths: np.ndarray, chunk: int) -> np.ndarray:
    """Round token counts up to whole chunks."""
    return -(-lengths // chunk) * chunk


def plan_batches(
    lengths: np.ndarray,
    *,
    token_budget: int,
    max_batch: int,
    window: int = 32768,
    chunk: int = 1,
    longest_first: bool = True,
) -> Plan:
    """Cut samples into batches of at most `max_batch` rows and `token_budget` padded tokens.

    lengths: [N] token counts, all >= 1. window: samples sorted together, in file order; 0 sorts all. chunk:
    rows count as whole chunks of this many tokens. A sample longer than the budget gets a batch of its own.
    With `longest_first`, each window runs from long to short and the window with the longest sample runs
    first, so that a run which will not fit fails in its first minute; without it, from short to long in file
    order. Raises `InputError` on a length below 1.
    """
    lengths = _checked(lengths)
    for name, value in (("token_budget", token_budget), ("max_batch", max_batch), ("chunk", chunk)):
        if value < 1:
            raise InputError(f"{name}={value}: give at least 1.")
    count = len(lengths)
    window = window if window > 0 else max(count, 1)
    order, bounds = _sorted_windows(lengths, window, longest_first)
    descending = lengths[order]
    cost = round_up(descending, chunk)
    # Rows of a batch in which it is the longest.
    capacity = np.minimum(max_batch, np.maximum(token_budget // np.maximum(cost, 1), 1))
    starts: list[int] = []
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        position, rows = begin, capacity[begin:end].tolist()
        while position < end:
            starts.append(position)
            position += rows[position - begin]
    offsets = np.append(np.asarray(starts, dtype=np.int64), count)
    if not longest_first:  # the greedy cut goes from long to short; only the order of running is turned
        turned = [np.arange(a, b) for a, b in zip(offsets[:-1][::-1], offsets[1:][::-1], strict=True)]
        sizes = np.diff(offsets)[::-1]
        order = order[np.concatenate(turned)] if turned else order
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Plan(order, offsets, lengths, token_budget, chunk)


def _checked(lengths: np.ndarray) -> np.ndarray:
    lengths = np.asarray(lengths)
    if lengths.ndim != 1 or (lengths.size and lengths.dtype.kind not in "iu"):
        raise InputError(
            f"lengths must be whole numbers in one dimension, not {lengths.dtype} of {lengths.shape}."
        )
    lengths = lengths.astype(np.int64)
    if lengths.size and lengths.min() < 1:
        where = int(lengths.argmin())
        raise InputError(
            f"sample {where} has length {lengths[where]}: every sample needs at least one token."
        )
    return lengths


def _sorted_windows(lengths: np.ndarray, window: int, longest_first: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return sample indices sorted from long to short within windows, and where each window begins and
    ends."""
    count = len(lengths)
    number = np.arange(count) // window
    edges = np.arange(0, count, window)
    longest = np.maximum.reduceat(lengths, edges) if count else np.empty(0, np.int64)
    windows = np.argsort(-longest, kind="stable") if longest_first else np.arange(len(edges))[::-1]
    rank = np.empty(len(edges), np.int64)
    rank[windows] = np.arange(len(edges))
    order = np.lexsort((-lengths, rank[number]))  # stable: equal lengths stay in file order
    sizes = np.minimum(window, count - edges)[windows]
    return order.astype(np.int64), np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def balance_shards(costs: np.ndarray, num_shards: int, *, keys: np.ndarray | None = None) -> np.ndarray:
    """Return the shard of each item, [N] i32, so that the summed costs of shards differ as little as
    possible.

    Longest processing time first: the costliest item goes to the least loaded shard; shards then differ by at
    most one item's cost, in practice by far less. `keys` (such as content hashes) break ties, so that the
    shard of a sample depends on the set of samples and not on their order in the file; without, ties go by
    position.
    """
    costs = np.asarray(costs, dtype=np.float64)
    if num_shards < 1:
        raise InputError(f"num_shards={num_shards}: give at least 1.")
    if costs.size and not (np.isfinite(costs).all() and costs.min() >= 0):
        raise InputError("costs must be finite and not negative.")
    shards = np.zeros(len(costs), dtype=np.int32)
    order = np.argsort(-costs, kind="stable") if keys is None else np.lexsort((np.asarray(keys), -costs))
    loads = [(0.0, shard) for shard in range(num_shards)]
    assigned = []
    for cost in costs[order].tolist():
        load, shard = loads[0]
        assigned.append(shard)
        heapq.heapreplace(loads, (load + cost, shard))
    shards[order] = assigned
    return shards


def predicted_cost(lengths: np.ndarray, *, chunk: int = 1, attention_per_token: float = 0.0) -> np.ndarray:
    """Return each sample's relative forward cost: padded tokens x (1 + attention_per_token x tokens), [N]
    f64.

    `attention_per_token` is the attention work of one more token of context, as a share of the work of the
    matrices for one token; for a decoder with full attention in every layer about 1 / (6 x hidden_size), 0
    leaves it out.
    """
    tokens = round_up(np.asarray(lengths, dtype=np.int64), chunk).astype(np.float64)
    return tokens * (1 + attention_per_token * tokens)
