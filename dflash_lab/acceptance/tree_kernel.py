"""The best-first tree as one Triton kernel: the heap of `tree.build_tree`, kept in the registers of a few
warps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dflash_lab.acceptance.tree import Choices, LevelTree, TreePlan

# `tree.best_tree` builds the same tree with three hundred operations, thirty of them sorts, which take two
# milliseconds at 512 nodes even as a graph. Popping one node at a time is sequential, but a step is short:
# the frontier of b pops has at most b entries, so its least is one reduction over a few registers a lane, and
# its two successors are one load each. Nothing is launched, sorted or waited for in between.
#
# Equal costs are popped in lexicographic order of their rank tuples. The frontier's entries know their place
# in that order: what follows a popped prefix u, its first child and its next sibling in turn, lies where u
# lay, so the child takes u's place, the sibling the next, and all later places move up by one.


@triton.jit
def _grow(
    tokens, costs, rows, drafts, out_tokens, out_parents, out_depths, out_active,
    depth, parents_a_level, width,
    NODES: tl.constexpr, FRONTIER: tl.constexpr, DEPTH: tl.constexpr, PLACE: tl.constexpr,
):  # fmt: skip
    # An entry: cost << PLACE | place, and parent << 40 | level << 32 | row << 16 | rank.
    slot = tl.arange(0, FRONTIER)
    never = tl.full((), 1 << 62, tl.int64)
    last_bits = tl.full((), (1 << PLACE) - 1, tl.int64)
    key = tl.where(slot == 0, tl.load(costs) << PLACE, never)
    entry = tl.zeros((FRONTIER,), tl.int64)
    chain_node = tl.full((), 0, tl.int64)
    chain_depth = tl.full((), 0, tl.int64)
    for i in range(NODES):
        best = tl.min(key, 0)
        popped = key == best
        what = tl.sum(tl.where(popped, entry, 0), 0)
        rank, row, level, parent = what & 0xFFFF, (what >> 16) & 0xFFFF, (what >> 32) & 0xFF, what >> 40
        cost, place = best >> PLACE, best & last_bits
        at = (level * parents_a_level + row) * width + rank
        sibling_there, child_there = rank + 1 < width, level + 1 < depth
        below = tl.load(rows + at)
        own = tl.load(costs + at)
        beside = tl.load(costs + at + 1, mask=sibling_there, other=0)
        first = tl.load(
            costs + ((level + 1) * parents_a_level + below) * width, mask=child_there, other=0
        )  # fmt: skip
        sibling = tl.where(sibling_there, ((cost - own + beside) << PLACE) + place + 1, never)
        child = tl.where(child_there, ((cost + first) << PLACE) + place, never)
        key += ((key & last_bits) > place).to(tl.int64)
        key = tl.where(popped, sibling, key)
        entry = tl.where(popped, what + 1, entry)
        added = slot == i + 1
        node = tl.full((), 1, tl.int64) + i
        key = tl.where(added, child, key)
        entry = tl.where(added, (node << 40) + ((level + 1) << 32) + (below << 16), entry)
        tl.store(out_tokens + i, tl.load(tokens + at))
        tl.store(out_parents + i, parent)
        tl.store(out_depths + i, level + 1)
        tl.store(out_active + i, tl.full((), 1, tl.int8))
        on_chain = (rank == 0) & (parent == chain_node)
        chain_depth += on_chain.to(tl.int64)
        chain_node = tl.where(on_chain, node, chain_node)
    # The draft's own chain: one slot a depth, off where the tree has it already.
    d = tl.arange(0, DEPTH)
    inside = d < depth
    active = d >= chain_depth
    before = tl.where(d == chain_depth, chain_node, tl.where(active, d + NODES, 0))
    tl.store(out_tokens + NODES + d, tl.load(drafts + d, mask=inside, other=0), mask=inside)
    tl.store(out_parents + NODES + d, before, mask=inside)
    tl.store(out_depths + NODES + d, (d + 1).to(tl.int64), mask=inside)
    tl.store(out_active + NODES + d, active.to(tl.int8), mask=inside)


@triton.jit
def _see(parents, seen, size, DEPTH: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, SIZE)
    node = row.to(tl.int64)
    found = column == node
    for _ in range(DEPTH):
        node = tl.load(parents + node - 1, mask=node > 0, other=0)
        found = found | (column == node)
    tl.store(seen + row * size + column, found.to(tl.int8), mask=column < size)


def best_tree(choices: Choices, drafts: torch.Tensor, plan: TreePlan) -> LevelTree:
    """Return what `tree.best_tree` does, entry for entry but for those that are not active."""
    tokens, costs, rows, drafts = (table.contiguous() for table in (*choices, drafts))
    depth, parents_a_level, width = costs.shape
    size = plan.nodes + depth
    found, parents, depths = torch.empty((3, size), dtype=torch.long, device=drafts.device)
    active = torch.empty(size, dtype=torch.bool, device=drafts.device)
    frontier = triton.next_power_of_2(plan.nodes)
    with torch.cuda.device_of(drafts):
        _grow[(1,)](
            tokens, costs, rows, drafts, found, parents, depths, active.view(torch.int8),
            depth, parents_a_level, width,
            NODES=plan.nodes, FRONTIER=frontier, DEPTH=triton.next_power_of_2(depth),
            PLACE=plan.nodes.bit_length() + 1, num_warps=min(max(1, frontier // 128), 8),
        )  # fmt: skip
    return LevelTree(found, parents, depths, active)


def visibility(tree: LevelTree, depth: int) -> torch.Tensor:
    """Return what `LevelTree.visibility` does."""
    size = len(tree.tokens) + 1
    seen = torch.empty((size, size), dtype=torch.bool, device=tree.tokens.device)
    with torch.cuda.device_of(seen):
        _see[(size,)](
            tree.parents, seen.view(torch.int8), size,
            DEPTH=depth, SIZE=triton.next_power_of_2(size), num_warps=4,
        )  # fmt: skip
    return seen
