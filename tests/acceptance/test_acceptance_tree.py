"""The heap tree against DDTree's published algorithm, and the vectorised ranks against the heap."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import torch
from drafters import chain_tree, paths_of, tree_from_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from support.wording import refused

from dflash_lab.acceptance.tree import (
    NEVER,
    accepted_by_budget,
    best_tokens,
    build_tree,
    marginal_edges,
    path_ranks,
    with_chain,
)
from dflash_lab.errors import InputError


def _paths(tree):
    return paths_of(tree.tokens, tree.parents)


def _ddtree_nodes(logits: np.ndarray, budget: int):
    """DDTree's builder as its paper and code describe it: incremental weights, heap keyed by (-weight,
    ranks)."""
    depth, vocab = logits.shape
    width = min(budget, vocab)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :width]
    best = np.take_along_axis(logits, order, 1)
    shift = logits.max(1, keepdims=True)
    best = best - (np.log(np.exp(logits - shift).sum(1, keepdims=True)) + shift)
    heap, nodes = [(-best[0, 0], (0,), 0, best[0, 0])], []
    while heap and len(nodes) < budget:
        _, ranks, parent, weight = heapq.heappop(heap)
        level, rank = len(ranks), ranks[-1]
        nodes.append((int(order[level - 1, rank]), parent, level))
        if rank + 1 < width:
            other = weight - best[level - 1, rank] + best[level - 1, rank + 1]
            heapq.heappush(heap, (-other, (*ranks[:-1], rank + 1), parent, other))
        if level < depth:
            below = weight + best[level, 0]
            heapq.heappush(heap, (-below, (*ranks, 0), len(nodes), below))
    return nodes


def test_nodes_equal_the_published_builder_and_budgets_are_nested():
    logits = 3 * torch.randn(15, 2000, generator=torch.Generator().manual_seed(16))
    wanted = _ddtree_nodes(logits.double().numpy(), 1024)
    for budget in (0, 1, 16, 256, 1024):
        tree = tree_from_logits(logits, budget)
        ours = list(zip(tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist()))
        assert ours == wanted[:budget]
        assert (np.diff(tree.log_probs) <= 1e-12).all()


def test_exact_ties_follow_the_ranks():
    log_probs = torch.log(torch.full((3, 2), 0.5))
    tree = build_tree(marginal_edges(log_probs, 8), root=0, depth=3, budget=14)
    assert tree.depths.tolist() == sorted(tree.depths.tolist())
    assert _paths(tree)[:6] == [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]


def test_conditional_edges_are_walked_with_the_token_before():
    follow = {7: ([1, 2], [-0.1, -3.0]), 1: ([5, 6], [-0.2, -0.3]), 2: ([9, 8], [-0.01, -5.0])}
    tree = build_tree(lambda depth, token: follow[token], root=7, depth=2, budget=5)
    assert _paths(tree) == [(1,), (1, 5), (1, 6), (2,), (2, 9)]


def test_visibility_walk_and_leaf_paths():
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    tree = tree_from_logits(logits, 25)
    paths = [(), *_paths(tree)]
    seen = tree.visibility()
    for row, column in itertools.product(range(len(paths)), repeat=2):
        assert seen[row, column] == (paths[row][: len(paths[column])] == paths[column])
    deepest = max(paths, key=len)
    choices = [deepest[len(p)] if deepest[: len(p)] == p and len(p) < len(deepest) else 99 for p in paths]
    accepted, bonus = tree.walk(choices)
    assert [paths[i] for i in accepted] == [deepest[:n] for n in range(len(deepest) + 1)]
    assert bonus == 99
    covered = {node for path in tree.leaf_paths() for node in path}
    assert covered == set(range(1, 26))


def test_a_chain_is_a_tree_without_branches():
    tree = chain_tree([4, 2, 9])
    assert tree.visibility().tolist() == np.tril(np.ones((4, 4), bool)).tolist()
    assert tree.walk([4, 2, 1, 0]) == ([0, 1, 2], 1)
    with refused(InputError):
        tree_from_logits(torch.randn(3, 5), -1)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.5]), st.integers(1, 5), st.integers(1, 9))
def test_vectorised_ranks_equal_the_heap_with_and_without_ties(seed, grid, depth, vocab):
    generator = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(3, depth, vocab, generator=generator)
    # Rounded scores tie exactly, as bf16 logits do; they are left unnormalised so that their sums tie exactly
    # too.
    scores = -(scores.abs() / grid).round() * grid if grid else torch.log_softmax(scores, -1)
    labels = torch.randint(-1, vocab, (3, depth), generator=generator)
    space = sum(vocab**d for d in range(1, depth + 1))
    budget = min(space, 60)
    ranks = path_ranks(*best_tokens(scores, budget), labels, budget)
    for anchor in range(3):
        tree = build_tree(marginal_edges(scores[anchor], budget), root=0, depth=depth, budget=budget)
        place = {path: node for node, path in enumerate(_paths(tree), start=1)}
        edge = tree.log_probs[-1]
        for length in range(1, depth + 1):
            wanted = place.get(tuple(labels[anchor, :length].tolist()), NEVER)
            if grid and wanted != NEVER and tree.log_probs[wanted - 1] == edge:
                continue  # a tie across the budget itself may be cut differently (documented)
            got = int(ranks[anchor, length - 1])
            if grid and wanted == NEVER and got != NEVER:
                assert got >= budget - int((tree.log_probs == edge).sum())
                continue
            assert got == wanted


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.2, 4.0), st.integers(1, 6), st.integers(2, 30))
def test_a_tree_with_its_chain_inside_accepts_the_longer_of_both(seed, scale, depth, vocab):
    generator = torch.Generator().manual_seed(seed)
    log_probs = torch.log_softmax(scale * torch.randn(2, depth, vocab, generator=generator), -1)
    labels = log_probs.argmax(-1)  # the chain, with one slot of each answer changed
    labels[0, seed % depth] = seed % vocab
    labels[1, 0] = (labels[1, 0] + 1) % vocab
    budgets = (1, depth, depth + 3, 40)
    accepted = accepted_by_budget(log_probs, labels, budgets)
    for anchor in range(2):
        chain = log_probs[anchor].argmax(-1).tolist()
        smaller: set = set()
        for column, budget in enumerate(budgets):
            edges = marginal_edges(log_probs[anchor], budget)
            pure = build_tree(edges, root=0, depth=depth, budget=budget)
            tree = with_chain(pure, edges, root=0, depth=depth)
            paths = _paths(tree)
            assert len(set(paths)) == len(paths) <= len(pure) + depth
            assert set(paths) == set(_paths(pure)) | {tuple(chain[:d]) for d in range(1, depth + 1)}
            assert smaller <= set(paths)
            smaller = set(paths)
            weights = [sum(float(log_probs[anchor, d, t]) for d, t in enumerate(path)) for path in paths]
            assert np.allclose(weights, tree.log_probs, atol=1e-5)
            answer = labels[anchor].tolist()
            choices = [answer[d] if d < depth else -1 for d in (0, *tree.depths.tolist())]
            assert accepted[anchor, column] == len(tree.walk(choices)[0]) - 1
