"""Draft trees: the `budget` most probable prefixes of a draft, as a tree that one target forward can verify.
Built with a heap on the host, by levels on the device, and ranked for thousands of stored answers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

import numpy as np
import torch

from dflash_lab.errors import InputError

# One draft pass gives L = block_size - 1 independent marginals; under them a path u has probability prod_d
# q_d(u_d), and the expected number of accepted drafts of a prefix-closed set T is the sum of the
# probabilities of its members. The best T of a given size is therefore the most probable prefixes, and those
# are prefix-closed by themselves (DDTree, arXiv 2604.12989). Trees of growing budget are nested: the tree of
# budget b is the first b nodes of any larger one.

# edges(depth, previous token) -> (token ids, log-probabilities), the latter non-increasing. Plain DFlash does
# not look at the token before; the scores of DFlash 2's selector depend on it.
Edges = Callable[[int, int], tuple[Sequence[int], Sequence[float]]]

# Log-probabilities are whole multiples of 2^-24 nat (finer than fp32 holds them beyond 1 nat), so that sums
# along a path are exact and equal in every order: heap, ranks, the device's builder and its kernel
# (`tree_kernel`) then agree on every tie. What is less likely than e^-64 is in no tree that matters.
UNITS_A_NAT = 1 << 24
MOST_NATS = 64


@dataclass(frozen=True)
class DraftTree:
    """Nodes 1..n, most probable first, so that parents come first; node 0 is the root (the anchor), of which
    the arrays have no entry.
    """

    tokens: np.ndarray  # [n] int64
    parents: np.ndarray  # [n] int64, 0: the root
    depths: np.ndarray  # [n] int64, from 1
    log_probs: np.ndarray  # [n] float64, of the whole path

    def __len__(self) -> int:
        return len(self.tokens)

    def visibility(self) -> np.ndarray:
        """Return [1+n, 1+n] bool: row i sees column j when j is i itself or one of its ancestors (root
        included)."""
        size = len(self) + 1
        parents = np.concatenate([[0], self.parents])
        seen = np.eye(size, dtype=bool)
        seen[:, 0] = True
        rows, ancestor = np.arange(size), parents
        while ancestor.any():
            seen[rows, ancestor] = True
            ancestor = parents[ancestor]
        return seen

    def walk(self, choices: Sequence[int]) -> tuple[list[int], int]:
        """Follow the target's choice at every node, `choices` [1+n], from the root while a child carries that
        token.

        Returns the accepted nodes, root first (so their count is the acceptance length of the round), and the
        bonus token.
        """
        children = {edge: i + 1 for i, edge in enumerate(zip(self.parents.tolist(), self.tokens.tolist()))}
        path = [0]
        while (child := children.get((path[-1], int(choices[path[-1]])))) is not None:
            path.append(child)
        return path, int(choices[path[-1]])

    def leaf_paths(self) -> list[list[int]]:
        """Return every root-to-leaf path as node indices, the root left out."""
        inner = set(self.parents.tolist())
        paths = []
        for leaf in (i for i in range(1, len(self) + 1) if i not in inner):
            path = []
            while leaf:
                path.append(leaf)
                leaf = int(self.parents[leaf - 1])
            paths.append(path[::-1])
        return paths


def exact_costs(log_probs: torch.Tensor) -> torch.Tensor:
    """Return -log_probs as int64 in units of 2^-24 nat."""
    return (-log_probs.double() * UNITS_A_NAT).round().clamp(0, MOST_NATS * UNITS_A_NAT).long()


def best_tokens(log_probs: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `width` best tokens of each row of `log_probs` [.., V] and their exact costs, both [..,
    width].

    Equal ones stand in the order of their ids, so the first is what argmax takes.
    """
    values, tokens = log_probs.float().topk(min(width, log_probs.shape[-1]), dim=-1)
    costs = exact_costs(values)
    order = ((costs << 32) + tokens).argsort(dim=-1)
    return tokens.gather(-1, order), costs.gather(-1, order)


def marginal_edges(log_probs: torch.Tensor, width: int) -> Edges:
    """Return edges that do not look at the token before: the `width` best of each row of `log_probs` [L,
    V]."""
    tokens, costs = torch.stack(best_tokens(log_probs, width)).cpu()  # one copy
    rows = list(zip(tokens.tolist(), (costs.double() / -UNITS_A_NAT).tolist()))
    return lambda level, _: rows[level - 1]


def with_chain(tree: DraftTree, edges: Edges, *, root: int, depth: int) -> DraftTree:
    """Return `tree` and, after its nodes, those of the draft's own best chain that it lacks (at most
    `depth`).

    Whatever the target says, such a tree accepts at least what the chain alone would, and at least what
    `tree` would. Cutting nodes of the tree to make room instead would cost more than it guards: a weak
    drafter's mass lies in its breadth.
    """
    children = {edge: i + 1 for i, edge in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist()))}
    missing: list[tuple[int, int, int, float]] = []  # token, parent, depth, log-probability
    node, previous, weight = 0, root, 0.0
    for level in range(1, depth + 1):
        ids, scores = edges(level, previous)
        previous, weight = ids[0], weight + scores[0]
        found = None if missing else children.get((node, previous))
        if found is None:
            missing.append((previous, node, level, weight))
            found = len(tree) + len(missing)
        node = found
    if not missing:
        return tree
    tokens, parents, depths, log_probs = (np.asarray(column) for column in zip(*missing))
    return DraftTree(
        np.concatenate([tree.tokens, tokens.astype(np.int64)]),
        np.concatenate([tree.parents, parents.astype(np.int64)]),
        np.concatenate([tree.depths, depths.astype(np.int64)]),
        np.concatenate([tree.log_probs, log_probs]),
    )


def build_tree(edges: Edges, *, root: int, depth: int, budget: int) -> DraftTree:
    """Return the `budget` most probable prefixes of at most `depth` tokens after the token `root`.

    Best-first with a heap: each popped prefix pushes its next sibling and its first child, so that every
    prefix is generated once and the cost is O(budget log budget) whatever the vocabulary. Equal
    probabilities are ordered by the tuple of ranks along the path, as DDTree does. Budget 0 is the root
    alone.
    """
    if budget < 0:
        raise InputError(f"tree budget {budget}: give 0 (no tree) or a positive number of nodes.")
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    log_probs: list[float] = []
    heap: list[tuple] = []
    if depth > 0 and budget > 0:
        ids, scores = edges(1, root)
        heap.append((-scores[0], (0,), 0, 0.0, ids, scores))
    while heap and len(tokens) < budget:
        cost, ranks, parent, base, ids, scores = heap[0]
        rank = ranks[-1]
        level = len(ranks)
        tokens.append(ids[rank])
        parents.append(parent)
        depths.append(level)
        log_probs.append(-cost)
        if rank + 1 < len(ids):
            sibling = (base - scores[rank + 1], (*ranks[:-1], rank + 1), parent, base, ids, scores)
            heapreplace(heap, sibling)
        else:
            heappop(heap)
        if level < depth:
            below, below_scores = edges(level + 1, ids[rank])
            heappush(heap, (cost - below_scores[0], (*ranks, 0), len(tokens), cost, below, below_scores))
    return DraftTree(
        np.asarray(tokens, np.int64),
        np.asarray(parents, np.int64),
        np.asarray(depths, np.int64),
        np.asarray(log_probs, np.float64),
    )


# The same tree on the device, as tensor operations of fixed shape: no host, no loop over nodes, fit for a
# CUDA graph. The `budget` best prefixes of each depth are found from those of the depth before, and the best
# of all depths are the tree. Among parents in order of probability, child (i-th parent, r-th token) is beaten
# by all (i' <= i, r' <= r), so only pairs with (i + 1)(r + 1) <= budget can enter, about budget * ln budget
# of them. (Scores that depend on the token before have no such order; more children are looked at.) A prefix
# is one whole number: its cost in units of 2^-24 nat, exact, above its place among all prefixes found so far
# in lexicographic order of their ranks. So equal probabilities are ordered as the heap orders them, a child's
# number is its parent's plus one that is known for all parents beforehand, and a choice is one sort. After
# the tree's nodes stand those of the draft's own chain (`with_chain`), one slot a depth; those that the tree
# has already are switched off.


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


# Where a stored answer stands in the tree, for thousands of anchors at once and every budget together. A
# block is accepted to depth j by the tree of budget b exactly when the answer's first j tokens are among the
# b best prefixes, so all that is needed is the rank of each answer prefix. A heap an anchor would take hours
# for ten thousand answers; here the M best prefixes are found level by level, from the same pairs as above.
# Ties follow the heap's order (tuple of token ranks): bf16 logits tie all the time. Only a tie that straddles
# rank M itself may be cut differently.

NEVER = 1 << 30  # rank of a prefix that is in no tree of at most M nodes


def accepted_by_budget(log_probs: torch.Tensor, labels: torch.Tensor, budgets: Sequence[int]) -> torch.Tensor:
    """Return [A, len(budgets)]: drafts that the trees of `Draft.tree` accept of the answer `labels` [A, L].

    Such a tree holds the `budget` best prefixes and the draft's own chain, so it accepts the longer of the
    two. `log_probs` [A, L, V] are the draft's log marginals.
    """
    tokens, costs = best_tokens(log_probs, max(budgets))
    places = path_ranks(tokens, costs, labels, max(budgets))
    chain = (tokens[..., 0] == labels).int().cumprod(-1).sum(-1)
    return torch.stack([torch.maximum((places <= budget).sum(-1), chain) for budget in budgets], dim=1)


def path_ranks(
    tokens: torch.Tensor, costs: torch.Tensor, labels: torch.Tensor, max_budget: int
) -> torch.Tensor:
    """Return [A, L] int64: the 1-based rank of every answer prefix among all draft prefixes, NEVER beyond
    `max_budget`.

    `tokens` and `costs` [A, L, R] are the best of each slot (`best_tokens`), `labels` [A, L] the answer's
    tokens (negative: unknown, never in a tree). The tree of budget b holds the prefix of length j exactly
    when its rank is <= b.
    """
    scores = costs.double() / -UNITS_A_NAT
    hit = tokens == labels[..., None]
    found = hit.any(-1)
    rank = hit.int().argmax(-1)  # [A, L] rank of the answer's token in its row
    own = torch.where(found, scores.gather(-1, rank[..., None])[..., 0], -torch.inf)
    weights = _running_sum(own)  # [A, L] log-probability of each answer prefix
    beam = _Beam.first(scores[:, 0], rank[:, 0])
    place = 1 + beam.ahead_of(weights)
    for level in range(1, labels.shape[1]):
        beam = beam.extend(scores[:, level], rank[:, level], max_budget)
        place += beam.ahead_of(weights)
    return torch.where(found.cumprod(-1).bool() & (place <= max_budget), place, NEVER)


def _running_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum along the last axis strictly left to right, so that equal paths get bit-equal sums here and in the
    beam."""
    sums = [values[:, 0]]
    for column in range(1, values.shape[1]):
        sums.append(sums[-1] + values[:, column])
    return torch.stack(sums, dim=1)


@lru_cache(maxsize=32)
def _pairs(parents: int, width: int, keep: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all (parent index, token rank) with (i+1)(r+1) <= keep."""
    i, r = torch.meshgrid(torch.arange(parents), torch.arange(width), indexing="ij")
    kept = (i + 1) * (r + 1) <= keep
    return i[kept].to(device), r[kept].to(device)


@dataclass(frozen=True)
class _Beam:
    """The best prefixes of one depth for each anchor, best first, beside the answer's path."""

    depth: int
    scores: torch.Tensor  # [A, m]
    split: torch.Tensor  # [A, m]: the depth at which the prefix leaves the answer's path; 0: it has not
    before: torch.Tensor  # [A, m]: whether it leaves it by a smaller token rank

    @classmethod
    def first(cls, scores: torch.Tensor, answer_rank: torch.Tensor) -> _Beam:
        ranks = torch.arange(scores.shape[1], device=scores.device)[None]
        return cls(1, scores, (ranks != answer_rank[:, None]).long(), ranks < answer_rank[:, None])

    def extend(self, scores: torch.Tensor, answer_rank: torch.Tensor, keep: int) -> _Beam:
        """Go one level deeper: `scores` [A, R] of that level's tokens, best first; keep the `keep` best
        prefixes."""
        parent, rank = _pairs(self.scores.shape[1], scores.shape[1], keep, scores.device)
        total = self.scores[:, parent] + scores[:, rank]
        total, kept = total.topk(min(keep, total.shape[1]), dim=-1)
        parent, rank = parent[kept], rank[kept]
        split, before = self.split.gather(1, parent), self.before.gather(1, parent)
        on_path = split == 0
        leaves = on_path & (rank != answer_rank[:, None])
        return _Beam(
            self.depth + 1,
            total,
            torch.where(leaves, self.depth + 1, split),
            torch.where(on_path, rank < answer_rank[:, None], before),
        )

    def ahead_of(self, weights: torch.Tensor) -> torch.Tensor:
        """Count, for each answer prefix (`weights` [A, L]), the prefixes of this beam that the heap would pop
        earlier."""
        scores, split, before = self.scores[:, None], self.split[:, None], self.before[:, None]  # [A, 1, m]
        lengths = torch.arange(1, weights.shape[1] + 1, device=weights.device)[:, None]  # [L, 1]
        left_in_time = (split > 0) & (split <= lengths)
        smaller = (left_in_time & before) | (~left_in_time & (self.depth < lengths))
        weights = weights[..., None]
        return ((scores > weights) | ((scores == weights) & smaller)).sum(-1)
