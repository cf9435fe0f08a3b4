"""The tree built level by level, and by one kernel, against the heap's: node by node and tie by tie.

The kernel runs on a CUDA device, or on the CPU under TRITON_INTERPRET=1 where triton is installed.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from drafters import paths_of, second_drafter

from dflash_lab.acceptance.decode import Draft
from dflash_lab.acceptance.tree import (
    Choices,
    LevelTree,
    best_tokens,
    build_tree,
    marginal_edges,
    plan_build,
    with_chain,
)
from dflash_lab.acceptance.tree import best_tree as best_tree_by_levels
from dflash_lab.models.compiled import captured, new_pool

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs triton, TRITON_INTERPRET=1")),
]


def _log_probs(depth, vocab, ties, device, seed):
    scores = 2 * torch.randn(depth, vocab, generator=torch.Generator().manual_seed(seed))
    if ties:  # whole numbers tie all the time, and a best one of 0 makes a child as probable as its parent
        scores = (scores - scores.amax(-1, keepdim=True)).round()
        return scores.to(device)
    return torch.log_softmax(scores, -1).to(device)


def _marginals(log_probs, budget):
    tokens, costs = best_tokens(log_probs, budget)
    return Choices(tokens[:, None], costs[:, None], torch.zeros_like(tokens)[:, None])


def _heap(log_probs, budget):
    edges, depth = marginal_edges(log_probs, budget), len(log_probs)
    heap = build_tree(edges, root=0, depth=depth, budget=budget)
    return with_chain(heap, edges, root=0, depth=depth)


@pytest.mark.parametrize("device", [*DEVICES, pytest.param("", id="levels")])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("depth", "vocab", "budget"),
    [(1, 5, 3), (3, 2, 60), (4, 300, 1), (5, 9, 16), (7, 300, 64), (15, 700, 200)],
)
def test_the_tree_equals_the_heaps(device, ties, depth, vocab, budget):
    best_tree, visibility = best_tree_by_levels, LevelTree.visibility
    if device:
        from dflash_lab.acceptance.tree_kernel import best_tree, visibility

    log_probs = _log_probs(depth, vocab, ties, device or "cpu", seed=depth)
    heap = _heap(log_probs, budget)
    choices = _marginals(log_probs, budget)
    plan = plan_build(budget, depth, choices.tokens.shape[2], False, log_probs.device)
    tree = best_tree(choices, choices.tokens[:, 0, 0], plan)
    active = tree.active.tolist()
    assert paths_of(tree.tokens, tree.parents, tree.active) == paths_of(heap.tokens, heap.parents)
    assert len(tree.tokens) == plan.nodes + depth and sum(active) == len(heap)
    kept = [0, *(i + 1 for i, used in enumerate(active) if used)]
    assert torch.equal(visibility(tree, depth).cpu()[kept][:, kept], torch.from_numpy(heap.visibility()))
    assert tree.depths.tolist()[: plan.nodes] == heap.depths.tolist()[: plan.nodes]


def test_a_conditional_tree_built_by_levels_equals_the_heaps(loaded):
    drafter = second_drafter(loaded("qwen3"))
    generator = torch.Generator().manual_seed(0)
    hidden, logits = (torch.randn(5, width, generator=generator) for width in (48, 288))
    draft = Draft(drafter, torch.tensor([65]), hidden, 4 * logits)
    for budget in (1, 8, 50, 200):
        heap, choices = draft.tree(budget), draft.choices(budget)
        plan = plan_build(budget, 5, choices.tokens.shape[2], True, torch.device("cpu"))
        tree = best_tree_by_levels(choices, draft.greedy(), plan)
        assert paths_of(tree.tokens, tree.parents, tree.active) == paths_of(heap.tokens, heap.parents)


@pytest.mark.parametrize("device", DEVICES)
def test_a_kernels_conditional_tree_equals_that_built_by_levels(device):
    from dflash_lab.acceptance.tree_kernel import best_tree, visibility

    depth, fan, budget = 5, 6, 80
    generator = torch.Generator().manual_seed(0)
    scores = torch.log_softmax(2 * torch.randn(depth, fan, fan, generator=generator), -1)
    costs, rows = (-scores.double() * (1 << 24)).round().long().sort(-1)
    choices = Choices(rows + 100 * torch.arange(depth)[:, None, None], costs, rows)
    choices = Choices(*(table.to(device) for table in choices))
    drafts, row = [], torch.tensor(0)
    for level in range(depth):
        drafts.append(choices.tokens[level, row, 0])
        row = choices.rows[level, row, 0]
    plan = plan_build(budget, depth, fan, True, costs.to(device).device)
    wanted = best_tree_by_levels(choices, torch.stack(drafts), plan)
    got = best_tree(choices, torch.stack(drafts), plan)
    on = wanted.active
    assert torch.equal(got.active, on)
    for ours, theirs in zip(got, wanted):
        assert torch.equal(ours[on], theirs[on])
    on = torch.cat([on.new_ones(1), on])
    assert torch.equal(visibility(got, depth)[on][:, on], wanted.visibility(depth)[on][:, on])


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [16, 64, 512, 1024])
def test_a_graph_of_the_kernel_builds_the_tree_of_new_logits(budget):
    from dflash_lab.acceptance.tree_kernel import best_tree

    depth, device = 15, torch.device("cuda")
    log_probs = _log_probs(depth, 49152, True, device, seed=0)
    plan = plan_build(budget, depth, budget, False, device)
    out = LevelTree(
        *(torch.zeros(plan.nodes + depth, dtype=torch.long, device=device) for _ in range(3)),
        torch.zeros(plan.nodes + depth, dtype=torch.bool, device=device),
    )

    def build():
        choices = _marginals(log_probs, budget)
        for own, new in zip(out, best_tree(choices, choices.tokens[:, 0, 0], plan)):
            own.copy_(new)

    launch = captured(build, device, pool=new_pool(device))
    for seed in (1, 2):
        log_probs.copy_(_log_probs(depth, 49152, seed == 1, device, seed))
        launch()
        heap = _heap(log_probs, budget)
        assert paths_of(out.tokens, out.parents, out.active) == paths_of(heap.tokens, heap.parents)
