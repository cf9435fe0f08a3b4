"""Draft trees: the `budget` most probable prefixes of a draft, as a tree that one target forward can verify.

One draft pass gives L = block_size - 1 independent marginals; under them a path u has probability prod_d
q_d(u_d), and the expected number of accepted drafts of a prefix-closed set T is the sum of the probabilities
of its members. The best T of a given size is therefore the most probable prefixes, and those are
prefix-closed by themselves (DDTree, arXiv 2604.12989). They are found best-first with a heap: each popped
prefix pushes its next sibling and its first child, so that every prefix is generated once and the cost is
O(budget log budget) whatever the vocabulary. Trees of growing budget are nested: the tree of budget b is the
first b nodes of any larger one.

The builder asks an `edges` function for the continuations of a token, so a drafter whose scores depend on the
token before (DFlash 2's selector) builds its trees here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

import numpy as np
import torch

from dflash_lab.errors import InputError

# edges(depth, previous token) -> (token ids, log-probabilities), the latter non-increasing
Edges = Callable[[int, int], tuple[Sequence[int], Sequence[float]]]

# Log-probabilities are whole multiples of 2^-24 nat (finer than fp32 holds them beyond 1 nat), so that sums
# along a path are exact and equal in every order: the heap, the ranks and the device's builder then agree on
# every tie. What is less likely than e^-64 is in no tree that matters.
UNITS_A_NAT = 1 << 24
MOST_NATS = 64


@dataclass(frozen=True)
class DraftTree:
    """Nodes 1..n in the order of non-increasing probability, so that parents come first; node 0 is the root
    (the anchor).

    Arrays have one entry a node, without the root: `tokens` [n] int64, `parents` [n] int64 (0 = root),
    `depths` [n] int64 (children of the root are at depth 1), `log_probs` [n] float64 of the whole path.
    """

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    log_probs: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def head(self, budget: int) -> DraftTree:
        """Return the tree of a smaller budget: the first `budget` nodes."""
        return DraftTree(
            self.tokens[:budget], self.parents[:budget], self.depths[:budget], self.log_probs[:budget]
        )

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

    Equal probabilities are ordered by the tuple of ranks along the path, as DDTree does. Budget 0 is the root
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


def tree_from_logits(
    logits: torch.Tensor, budget: int, *, temperature: float = 0.0, root: int = 0
) -> DraftTree:
    """Build the tree of the marginals `logits` [L, V] (slots 1..L); at T > 0 they are scaled by 1/T first."""
    scaled = logits.float() / temperature if temperature > 0 else logits.float()
    edges = marginal_edges(torch.log_softmax(scaled, dim=-1), max(budget, 1))
    return build_tree(edges, root=root, depth=len(logits), budget=budget)
