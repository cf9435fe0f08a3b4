"""The best-first tree as tensor operations of fixed shape: no host, no loop over nodes, fit for a CUDA graph.

The heap of `tree.py` pops one node at a time and needs the draft's scores on the host. Here the `budget` best
prefixes are kept while the depth grows: a level adds the children of the nodes that the last level brought
in, and one sort keeps the best. Among parents in order of probability, child (i-th parent, r-th token) is
beaten by all (i' <= i, r' <= r), so only pairs with (i + 1)(r + 1) <= budget can enter, about budget * ln
budget of them. (Scores that depend on the token before have no such order; all children are looked at.)

Costs are whole numbers, 2^-24 nat each, so sums are exact and a sort key can hold the cost and, below it, the
place of the path in lexicographic order of its ranks: equal probabilities are ordered as the heap orders
them. After the `budget` nodes stand those of the draft's own chain (`tree.with_chain`), one slot a depth;
those that the tree has already are switched off.
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


class _Nodes(NamedTuple):
    """The best nodes so far, best first, [M] each; `place` is the rank of the path in lexicographic order."""

    costs: torch.Tensor
    place: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor  # index + 1, 0: the root
    depths: torch.Tensor
    rows: torch.Tensor  # row of the next level
    chain: torch.Tensor  # bool: every token on the path is the best after the one before


class Pairs(NamedTuple):
    """All (parent, token rank) [n] that can be among the best; they outlive the graphs that read them."""

    parents: torch.Tensor
    ranks: torch.Tensor


def candidate_pairs(budget: int, width: int, depth: int, conditional: bool, device: torch.device) -> Pairs:
    """Return the pairs for trees of `budget` nodes; `InputError` if such a tree does not fit the sort key."""
    bits = (MOST_NATS * UNITS_A_NAT * depth).bit_length() + 1 + ((budget + 1) * (width + 1)).bit_length()
    if bits > 63:
        raise InputError(
            f"a tree of {budget} nodes over {depth} slots is too large to be built on the device: take a "
            "smaller budget or block size."
        )
    i, r = torch.meshgrid(torch.arange(budget), torch.arange(width), indexing="ij")
    kept = i + r + 2 <= budget if conditional else (i + 1) * (r + 1) <= budget
    return Pairs(i[kept].to(device), r[kept].to(device))


def best_tree(choices: Choices, drafts: torch.Tensor, budget: int, pairs: Pairs) -> LevelTree:
    """Return the tree of the `budget` best prefixes, then the chain `drafts` [L]: n = budget + L entries."""
    depth, _, width = choices.costs.shape
    device = drafts.device
    shift = ((budget + 1) * (width + 1)).bit_length()
    never = (1 << (63 - shift)) - 1  # the cost of what is not there
    count = torch.arange(budget, device=device)
    nothing = torch.zeros_like(count)
    nodes = _Nodes(nothing + never, count, nothing, nothing, nothing, nothing, nothing.bool())
    first = torch.arange(width, device=device)
    nodes = _merge(
        nodes,
        _Nodes(
            choices.costs[0, 0],
            first,
            choices.tokens[0, 0],
            torch.zeros_like(first),
            torch.ones_like(first),
            choices.rows[0, 0],
            first == 0,
        ),
        budget,
        shift,
    )
    parent, rank = pairs
    for level in range(2, depth + 1):
        # Nodes of the last level, best first, stand in the first places of `beam`; `budget` is nobody.
        last = (nodes.depths == level - 1) & (nodes.costs < never)
        slot = torch.where(last, last.cumsum(0) - 1, budget)
        beam = torch.full((budget + 1,), budget, device=device).scatter_(0, slot, count.where(last, budget))
        above = beam[parent]
        here = above.clamp_max(budget - 1)
        row = nodes.rows[here]
        costs = nodes.costs[here] + choices.costs[level - 1, row, rank]
        nodes = _merge(
            nodes._replace(place=nodes.place * (width + 1)),
            _Nodes(
                torch.where(above < budget, costs, never),
                nodes.place[here] * (width + 1) + 1 + rank,
                choices.tokens[level - 1, row, rank],
                here + 1,
                torch.full_like(here, level),
                choices.rows[level - 1, row, rank],
                nodes.chain[here] & (rank == 0),
            ),
            budget,
            shift,
        )
    return _with_chain(nodes, nodes.costs < never, drafts)


def _merge(old: _Nodes, new: _Nodes, budget: int, shift: int) -> _Nodes:
    """Keep the `budget` best of both."""
    both = _Nodes(*(torch.cat(pair) for pair in zip(old, new)))
    order = ((both.costs << shift) + both.place).argsort()
    kept = order[:budget]
    where = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    nodes = _Nodes(*(column[kept] for column in both))
    parents = torch.where(nodes.parents > 0, where[nodes.parents - 1] + 1, 0)
    count = torch.arange(budget, device=order.device)
    place = torch.empty_like(kept).scatter_(0, nodes.place.argsort(), count)
    return nodes._replace(parents=parents, place=place)


def _with_chain(nodes: _Nodes, active: torch.Tensor, drafts: torch.Tensor) -> LevelTree:
    budget, depth = len(active), len(drafts)
    levels = torch.arange(depth + 1, device=drafts.device)
    inside = nodes.chain & active
    # The chain's node at each depth: one of the tree's, else its own slot after it; depth 0 is the root.
    own = torch.where(levels > 0, budget + levels, 0)
    found = torch.zeros_like(own).scatter_reduce_(
        0, nodes.depths * inside, (torch.arange(budget, device=drafts.device) + 1) * inside, "amax"
    )
    node = torch.where(found > 0, found, own)
    return LevelTree(
        torch.cat([torch.where(active, nodes.tokens, 0), drafts]),
        torch.cat([torch.where(active, nodes.parents, 0), node[:-1]]),
        torch.cat([torch.where(active, nodes.depths, 0), levels[1:]]),
        torch.cat([active, found[1:] == 0]),
    )
