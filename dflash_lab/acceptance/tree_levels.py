"""The best-first tree as tensor operations of fixed shape: no host, no loop over nodes, fit for a CUDA graph.

The heap of `tree.py` pops one node at a time and needs the draft's scores on the host. Here the `budget` best
prefixes of each depth are found from those of the depth before, and the best of all depths are the tree.
Among parents in order of probability, child (i-th parent, r-th token) is beaten by all (i' <= i, r' <= r), so
only pairs with (i + 1)(r + 1) <= budget can enter, about budget * ln budget of them. (Scores that depend on
the token before have no such order; more children are looked at.)

A prefix is one whole number: its cost in units of 2^-24 nat, exact, above its place among all prefixes found
so far in lexicographic order of their ranks. So equal probabilities are ordered as the heap orders them, a
child's number is its parent's plus one that is known for all parents beforehand, and a choice is one sort.
After the tree's nodes stand those of the draft's own chain (`tree.with_chain`), one slot a depth; those that
the tree has already are switched off.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dflash_lab.acceptance.tree import MOST_NATS, UNITS_A_NAT
from dflash_lab.errors import InputError


class Choices(NamedTuple):
    """What may follow what, best first: `tokens` and `costs` [L, P, R], for each of P rows of the level; the
    child taken from place r of a row is followed by row `rows` [L, P, R] of the next level. Marginals have
    one row.
    """

    tokens: torch.Tensor
    costs: torch.Tensor  # int64 in units of 2^-24 nat, rising along R
    rows: torch.Tensor


class LevelTree(NamedTuple):
    """Node i+1 is entry i; 0 is the root. `tokens`, `parents`, `depths` [n] int64; `active` [n] bool: the
    node exists.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    active: torch.Tensor

    def visibility(self, depth: int) -> torch.Tensor:
        """Return [1+n, 1+n] bool: row i sees i and its ancestors. `depth`: of the deepest node."""
        size = len(self.tokens) + 1
        parents = torch.cat([self.parents.new_zeros(1), self.parents])
        reach = torch.eye(size, device=parents.device)
        reach.scatter_(1, parents[:, None], 1.0)
        for _ in range(max(depth - 1, 0).bit_length()):  # twice as far each time
            reach = (reach @ reach).clamp_max_(1.0)
        return reach > 0


class TreePlan(NamedTuple):
    """Sizes of a build, and its constant tensors, which outlive the graphs that read them.

    Of each level: `parents` and `ranks` of the children that are looked at and both as one number, `codes` =
    parent * R + rank; how many are `kept`. Of all kept children together, T: `level`, `above`, where the
    parents of their level begin (-1: the root), and `spread`, places R + 1 apart.
    """

    budget: int
    width: int  # R
    conditional: bool
    shift: int  # bits of a place
    parents: tuple[torch.Tensor, ...]
    ranks: tuple[torch.Tensor, ...]
    codes: tuple[torch.Tensor, ...]
    kept: tuple[int, ...]
    level: torch.Tensor
    above: torch.Tensor
    spread: torch.Tensor

    @property
    def nodes(self) -> int:
        """Nodes of the tree without its chain; fewer than the budget where so many prefixes do not exist."""
        return min(self.budget, sum(self.kept))


def plan_build(budget: int, depth: int, width: int, conditional: bool, device: torch.device) -> TreePlan:
    """Return the plan of trees of `budget` nodes; `InputError` if their numbers do not fit 63 bits."""
    shift = (depth * budget * (width + 1)).bit_length()
    if (MOST_NATS * UNITS_A_NAT * depth).bit_length() + shift > 63:
        raise InputError(
            f"a tree of {budget} nodes over {depth} slots is too large to be built on the device: take a "
            "smaller budget or block size."
        )
    parents, ranks = [], []
    kept: list[int] = []
    for _ in range(depth):
        i, r = torch.meshgrid(torch.arange(kept[-1] if kept else 1), torch.arange(width), indexing="ij")
        possible = i + r + 1 <= budget if conditional else (i + 1) * (r + 1) <= budget
        parents.append(i[possible].to(device))
        ranks.append(r[possible].to(device))
        kept.append(min(budget, len(parents[-1])))
    counts = torch.tensor(kept)
    starts = torch.cat([torch.tensor([-1]), counts.cumsum(0) - counts])[:depth]
    level = torch.arange(depth).repeat_interleave(counts)
    above = starts.repeat_interleave(counts)
    return TreePlan(
        budget,
        width,
        conditional,
        shift,
        tuple(parents),
        tuple(ranks),
        tuple(p * width + r for p, r in zip(parents, ranks)),
        tuple(kept),
        level.to(device),
        above.to(device),
        torch.arange(len(level), device=device) * (width + 1),
    )


def best_tree(choices: Choices, drafts: torch.Tensor, plan: TreePlan) -> LevelTree:
    """Return the tree of `choices`, then the chain `drafts` [L]: n = plan.nodes + L entries."""
    steps = (choices.costs << plan.shift) + torch.arange(1, plan.width + 1, device=drafts.device)
    numbers = drafts.new_zeros(0)  # of all kept children so far, level after level
    last = drafts.new_zeros(1)  # of the last level, best first; at first the root
    row = drafts.new_zeros(1)
    codes, rows = [], []
    for level, (parents, ranks, kept) in enumerate(zip(plan.parents, plan.ranks, plan.kept)):
        if plan.conditional:
            own = steps[level, row[parents], ranks]
        else:
            own = steps[level, 0].index_select(0, ranks)
        found, pick = (last.index_select(0, parents) + own).sort()
        codes.append(plan.codes[level].index_select(0, pick[:kept]))
        if plan.conditional:
            rows.append(row[codes[-1] // plan.width])
            row = choices.rows[level, rows[-1], codes[-1] % plan.width]
        numbers = torch.cat([numbers, found[:kept]])
        if level + 1 < len(plan.kept):
            numbers = _placed_anew(numbers, plan)
            last = numbers[-kept:]
    code = torch.cat(codes)
    parent, rank = code // plan.width, code % plan.width
    row = torch.cat(rows) if plan.conditional else torch.zeros_like(rank)
    return _tree(choices.tokens[plan.level, row, rank], parent, rank, numbers, drafts, plan)


def _placed_anew(numbers: torch.Tensor, plan: TreePlan) -> torch.Tensor:
    """Count places again from 0, R + 1 apart, so that children fit between their parent and who follows."""
    mask = (1 << plan.shift) - 1
    order = (numbers & mask).argsort()
    return (numbers & ~mask).scatter_add_(0, order, plan.spread[: len(numbers)])


def _tree(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    ranks: torch.Tensor,
    numbers: torch.Tensor,
    drafts: torch.Tensor,
    plan: TreePlan,
) -> LevelTree:
    """Choose among all kept children [T], `parents` being places in the level above, and add the chain."""
    depth, count = len(drafts), plan.nodes
    best = numbers.argsort()[:count]
    # The node of each child, 0 of those that are not in the tree; the root's comes last, where -1 finds it.
    node = torch.zeros(len(numbers) + 1, dtype=torch.long, device=drafts.device)
    node[:-1].scatter_(0, best, torch.arange(1, count + 1, device=drafts.device))
    above = torch.where(plan.above < 0, -1, plan.above + parents)
    on_chain = _on_chain(ranks, above, plan)
    inside = node[:-1] * on_chain
    found = torch.zeros(depth, dtype=torch.long, device=drafts.device)
    found = found.scatter_reduce_(0, plan.level, inside, "amax")
    slots = torch.arange(count + 1, count + 1 + depth, device=drafts.device)
    chain = torch.where(found > 0, found, slots)
    return LevelTree(
        torch.cat([tokens[best], drafts]),
        torch.cat([node[above[best]], chain.new_zeros(1), chain[:-1]]),
        torch.cat([plan.level[best] + 1, torch.arange(1, depth + 1, device=drafts.device)]),
        torch.cat([torch.ones_like(best, dtype=torch.bool), found == 0]),
    )


def _on_chain(ranks: torch.Tensor, above: torch.Tensor, plan: TreePlan) -> torch.Tensor:
    """Return [T] bool: every token on the path is the best after the one before."""
    flags = torch.cat([ranks == 0, ranks.new_ones(1).bool()])
    steps = above
    for _ in range(len(plan.kept).bit_length()):  # twice as far up each time; -1, the root, stays
        flags = torch.cat([flags[:-1] & flags[steps], flags[-1:]])
        steps = torch.where(steps < 0, -1, steps[steps])
    return flags[:-1]
