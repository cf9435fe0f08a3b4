"""Decoding at fixed shapes against the growing cache: the same tokens, round by round, and the same trees.

On CUDA the same code runs as graphs (tests marked gpu); here it runs as it is.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from drafters import random_drafter, second_drafter
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_targets import build_tiny
from support.wording import refused

from dflash_lab.acceptance.decode import Draft, decode, plain_decode
from dflash_lab.acceptance.fixed_shapes import StaticDecoder, Workspace, why_not
from dflash_lab.acceptance.tree import Choices, best_tree, build_tree, marginal_edges, plan_build, with_chain
from dflash_lab.errors import UnsupportedTarget
from dflash_lab.models.load import load_target

PROMPT = [257, 84, 104, 105, 115, 32, 105, 115, 32, 97]
COUNT = 40
CPU = torch.device("cpu")
KINDS = ("llama", "qwen3")


def _paths(tokens, parents, active):
    """Return the token path of every active node, in order."""
    paths = [()]
    for token, parent in zip(tokens.tolist(), parents.tolist()):
        paths.append((*paths[parent], token))
    return [path for path, used in zip(paths[1:], active.tolist()) if used]


def _lying(round_, answer, lie, generator):
    """Put drafts of `answer` in place of the drafter's, each wrong with chance `lie`, the truth second."""
    place = int(round_.length) + 1
    for slot in range(round_.block_size - 1):
        truth = answer[place + slot] if place + slot < len(answer) else 0
        row = torch.randn(round_._logits.shape[1], generator=generator)
        lies = torch.rand(1, generator=generator).item() < lie
        row[truth] = 10.0
        row[(truth + 1) % len(row)] = 11.0 if lies else 5.0
        round_._logits[slot] = row
    round_._drafts.copy_(round_._logits.argmax(-1))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_plain_decoding_equals_the_growing_cache(loaded, kind):
    target = loaded(kind)
    wanted = plain_decode(target, PROMPT, max_new_tokens=COUNT, stop_ids=()).tokens
    got = StaticDecoder(Workspace(target))(PROMPT, max_new_tokens=COUNT, stop_ids=())
    assert got.tokens == wanted and got.rounds == []


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("budget", [0, 7, 40])
@pytest.mark.parametrize("second", [False, True])
def test_rounds_equal_those_of_the_growing_cache(loaded, kind, budget, second):
    target = loaded(kind)
    drafter = second_drafter(target) if second else random_drafter(target, initializer_range=0.6)
    fast = StaticDecoder(Workspace(target), drafter, block_size=6, budget=budget)
    for prompt in (PROMPT, PROMPT[:4]):
        options = {"max_new_tokens": COUNT, "stop_ids": ()}
        wanted = decode(target, drafter, prompt, block_size=6, tree_budget=budget, **options)
        got = fast(prompt, **options)
        assert got.tokens == wanted.tokens
        assert got.rounds == wanted.rounds
    assert len(fast._rounds) == 1


@pytest.mark.parametrize("budget", [0, 30])
@pytest.mark.parametrize("lie", [0.0, 0.5])
def test_partial_acceptance_leaves_the_plain_answer(loaded, budget, lie):
    target = loaded("llama")
    tokens = plain_decode(target, PROMPT, max_new_tokens=COUNT, stop_ids=()).tokens
    fast = StaticDecoder(Workspace(target), random_drafter(target), block_size=6, budget=budget)
    now = fast.prepared(len(PROMPT) + COUNT)
    draft, generator = now.steps["draft"], torch.Generator().manual_seed(0)

    def lying():
        draft()
        _lying(now, PROMPT + tokens, lie, generator)

    now.steps["draft"] = lying
    got = fast(PROMPT, max_new_tokens=COUNT, stop_ids=())
    assert got.tokens == tokens
    # The last round drafts past the answer that the liar knows.
    assert set(got.lengths[:-1]) == {6} if lie == 0 else len(set(got.lengths[:-1])) > 1


def test_a_stop_token_ends_the_answer(loaded):
    target = loaded("llama")
    tokens = plain_decode(target, PROMPT, max_new_tokens=COUNT, stop_ids=()).tokens
    stop = {tokens[11]}
    end = tokens.index(tokens[11])
    got = StaticDecoder(Workspace(target))(PROMPT, max_new_tokens=COUNT, stop_ids=stop)
    assert got.tokens == tokens[: end + 1] and got.stopped


def test_capacity_follows_the_request(loaded):
    fast = StaticDecoder(Workspace(loaded("llama")))
    assert fast.prepared(40) is fast.prepared(300)
    assert fast.prepared(600).keys.capacity == 1024


@settings(max_examples=40, deadline=None)
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
    everyone = torch.ones(len(heap), dtype=torch.bool)
    ours = _paths(tree.tokens, tree.parents, tree.active)
    assert ours == _paths(torch.from_numpy(heap.tokens), torch.from_numpy(heap.parents), everyone)
    seen = tree.visibility(depth)
    paths = [(), *_paths(tree.tokens, tree.parents, torch.ones_like(tree.active))]
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
        everyone = torch.ones(len(heap), dtype=torch.bool)
        assert _paths(tree.tokens, tree.parents, tree.active) == _paths(
            torch.from_numpy(heap.tokens), torch.from_numpy(heap.parents), everyone
        )


def test_targets_without_a_fixed_form_say_why(loaded, tmp_path):
    assert why_not(loaded("llama")) == why_not(loaded("qwen3")) == ""
    assert "a recurrent state" in why_not(loaded("qwen3_5"))
    assert "experts" in why_not(loaded("qwen3_moe"))
    kinds = ["sliding_attention", "full_attention"] * 4
    folder = build_tiny("qwen3", tmp_path, use_sliding_window=True, sliding_window=8, layer_types=kinds)
    with refused(UnsupportedTarget):
        Workspace(load_target(str(folder)))


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
