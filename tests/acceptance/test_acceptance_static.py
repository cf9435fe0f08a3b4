"""Decoding at fixed shapes against the growing cache: the same tokens, round by round, and the same trees.

On CUDA the same code runs as graphs (tests marked gpu); here it runs as it is.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from drafters import PROMPT, lying_logits, paths_of, random_drafter, second_drafter
from hypothesis import given, settings
from hypothesis import strategies as st
from support.wording import check_wording, refused

from dflash_lab.acceptance.decode import Draft, decode, plain_decode
from dflash_lab.acceptance.fixed_shapes import StaticDecoder, Workspace, why_not
from dflash_lab.acceptance.tree import Choices, best_tree, build_tree, marginal_edges, plan_build, with_chain
from dflash_lab.errors import UnsupportedTarget
from dflash_lab.models.load import load_target

COUNT = 31
CPU = torch.device("cpu")
KINDS = ("llama", "qwen3")


@pytest.mark.parametrize(
    ("kind", "budget", "second"),
    [("llama", 0, False), ("qwen3", 7, True), ("llama", 40, True), ("qwen3", 40, False)],
)
def test_rounds_equal_those_of_the_growing_cache(loaded, kind, budget, second):
    target = loaded(kind)
    drafter = second_drafter(target) if second else random_drafter(target, initializer_range=0.6)
    fast = StaticDecoder(Workspace(target), drafter, block_size=6, budget=budget)
    for prompt in (PROMPT, PROMPT[:4]):
        options = {"max_new_tokens": COUNT, "stop_ids": ()}
        wanted = decode(target, drafter, prompt, block_size=6, tree_budget=budget, **options)
        got = fast(prompt, **options)
        assert got.tokens == wanted.tokens and got.rounds == wanted.rounds
    assert len(fast._rounds) == 1


@pytest.mark.parametrize("budget", [0, 30])
@pytest.mark.parametrize("lie", [0.0, 0.5])
def test_partial_acceptance_leaves_the_plain_answer(loaded, plain, budget, lie):
    target, tokens = loaded("llama"), plain("llama")
    fast = StaticDecoder(Workspace(target), random_drafter(target), block_size=6, budget=budget)
    now = fast.prepared(len(PROMPT) + COUNT)
    draft, generator = now.steps["draft"], torch.Generator().manual_seed(0)

    def lying():
        draft()
        truth = (PROMPT + tokens)[int(now.length) + 1 :]
        now._logits.copy_(lying_logits(truth, now._logits.shape, lie, generator))
        now._drafts.copy_(now._logits.argmax(-1))

    now.steps["draft"] = lying
    got = fast(PROMPT, max_new_tokens=COUNT, stop_ids=())
    assert got.tokens == tokens[:COUNT]
    assert set(got.lengths) == {6} if lie == 0 else len(set(got.lengths)) > 1


def test_plain_decoding_equals_the_growing_cache_up_to_a_stop_token(loaded, plain):
    for kind in KINDS:
        got = StaticDecoder(Workspace(loaded(kind)))(PROMPT, max_new_tokens=COUNT, stop_ids=())
        assert got.tokens == plain(kind)[:COUNT] and got.rounds == []
    tokens = plain("llama")
    fast = StaticDecoder(Workspace(loaded("llama")))
    got = fast(PROMPT, max_new_tokens=COUNT, stop_ids={tokens[11]})
    assert got.tokens == tokens[: tokens.index(tokens[11]) + 1] and got.stopped
    assert fast.prepared(40) is fast.prepared(300)  # capacity follows the request
    assert fast.prepared(600).keys.capacity == 1024


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([0.0, 0.5]),
    st.integers(1, 5),
    st.integers(2, 30),
    st.sampled_from([1, 3, 16, 60]),
)
def test_the_tree_built_by_levels_equals_the_heaps_node_by_node(seed, grid, depth, vocab, budget):
    generator = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(depth, vocab, generator=generator)
    # Rounded scores tie exactly, as bf16 logits do.
    scores = -(scores.abs() / grid).round() * grid if grid else torch.log_softmax(scores, -1)
    edges = marginal_edges(scores, budget)
    heap = with_chain(build_tree(edges, root=0, depth=depth, budget=budget), edges, root=0, depth=depth)
    draft = torch.tensor([edges(level, 0)[0][0] for level in range(1, depth + 1)])
    rows = [edges(level, 0) for level in range(1, depth + 1)]
    tokens = torch.tensor([ids for ids, _ in rows])[:, None]
    costs = -(torch.tensor([values for _, values in rows], dtype=torch.double)[:, None] * (1 << 24))
    choices = Choices(tokens, costs.long(), torch.zeros_like(tokens))
    tree = best_tree(choices, draft, plan_build(budget, depth, tokens.shape[2], False, CPU))
    assert paths_of(tree.tokens, tree.parents, tree.active) == paths_of(heap.tokens, heap.parents)
    seen = tree.visibility(depth)
    paths = [(), *paths_of(tree.tokens, tree.parents)]
    used = [True, *tree.active.tolist()]
    for row, column in itertools.product(range(len(paths)), repeat=2):
        if used[row] and used[column]:
            assert bool(seen[row, column]) == (paths[row][: len(paths[column])] == paths[column])


def test_a_conditional_tree_built_by_levels_equals_the_heaps(loaded):
    drafter = second_drafter(loaded("qwen3"))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 48, generator=generator)
    logits = 4 * torch.randn(5, 288, generator=generator)
    draft = Draft(drafter, torch.tensor([65]), hidden, logits)
    for budget in (1, 8, 50, 200):
        heap = draft.tree(budget)
        choices = draft.choices(budget)
        tree = best_tree(choices, draft.greedy(), plan_build(budget, 5, choices.tokens.shape[2], True, CPU))
        assert paths_of(tree.tokens, tree.parents, tree.active) == paths_of(heap.tokens, heap.parents)


def test_targets_without_a_fixed_form_say_why(loaded, sliding):
    assert why_not(loaded("llama")) == why_not(loaded("qwen3")) == ""
    for kind in ("qwen3_5", "qwen3_moe"):
        check_wording(why_not(loaded(kind)))
    with refused(UnsupportedTarget):
        Workspace(sliding)


@pytest.fixture(scope="module")
def on_cuda(tiny_target):
    targets = {kind: load_target(str(tiny_target(kind)), device="cuda", dtype="float32") for kind in KINDS}
    return targets.get


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [0, 7, 40])
@pytest.mark.parametrize("second", [False, True])
def test_graphs_equal_the_growing_cache(on_cuda, kind, budget, second):
    target = on_cuda(kind)
    make = second_drafter if second else random_drafter
    drafter = make(target, initializer_range=0.6).to("cuda")
    fast = StaticDecoder(Workspace(target), drafter, block_size=6, budget=budget)
    for prompt in (PROMPT, PROMPT[:4]):
        options = {"max_new_tokens": COUNT, "stop_ids": ()}
        wanted = decode(target, drafter, prompt, block_size=6, tree_budget=budget, **options)
        got = fast(prompt, **options)
        assert got.tokens == wanted.tokens
        assert got.rounds == wanted.rounds
        assert got.waits <= len(got.rounds) + 1
    spent = sum(got.phase_seconds.values())
    assert spent <= 1.05 * got.seconds and got.phase_seconds["verify"] > 0
    assert (got.phase_seconds["build"] > 0) == (budget > 0)


@pytest.mark.gpu
def test_plain_graphs_equal_the_growing_cache(on_cuda):
    for kind in KINDS:
        wanted = plain_decode(on_cuda(kind), PROMPT, max_new_tokens=COUNT, stop_ids=()).tokens
        got = StaticDecoder(Workspace(on_cuda(kind)))(PROMPT, max_new_tokens=COUNT, stop_ids=())
        assert got.tokens == wanted


@pytest.mark.gpu
def test_a_round_does_not_wait_for_the_device(on_cuda):
    target = on_cuda("llama")
    drafter = random_drafter(target).to("cuda")
    fast = StaticDecoder(Workspace(target), drafter, block_size=6, budget=40)
    fast(PROMPT, max_new_tokens=4, stop_ids=())
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            for launch in fast.prepared(64).steps.values():
                launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
