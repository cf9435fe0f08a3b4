"""Trees in the target: logits at every node, compaction, decoding, and the refusals."""

from __future__ import annotations

import pytest
import torch
from drafters import chain_tree, close, oracle, random_drafter, same_law, second_drafter, tree_from_logits
from support.tiny_targets import build_tiny
from support.wording import refused

from dflash_lab.acceptance import decode as decode_module
from dflash_lab.acceptance.decode import Proposer, TargetRun, decode, plain_decode
from dflash_lab.errors import UnsupportedTarget
from dflash_lab.models.load import load_target

PROMPT = [257, 84, 104, 105, 115, 32, 105, 115, 32, 97]
DENSE = ("llama", "qwen3", "qwen3_moe")
COUNT = 40


def _fresh_logits(target, ids):
    hidden = target.body(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    return target.head.logits(hidden)


def _path_tokens(tree, node):
    tokens = []
    while node:
        tokens.append(int(tree.tokens[node - 1]))
        node = int(tree.parents[node - 1])
    return tokens[::-1]


@torch.no_grad()
@pytest.mark.parametrize("kind", DENSE)
def test_tree_logits_at_every_node_equal_plain_ones_and_compaction_equals_a_fresh_prefill(loaded, kind):
    target = loaded(kind)
    tree = tree_from_logits(6 * torch.randn(5, 280, generator=torch.Generator().manual_seed(1)), 24)
    anchor = 65
    with TargetRun(target) as run:
        run.step(torch.tensor(PROMPT), certain=True)
        run.commit(len(PROMPT))
        step = run.step_tree(torch.tensor([anchor]), tree)
        logits = target.head.logits(step.normed)
        for node in range(len(tree) + 1):
            alone = _fresh_logits(target, [*PROMPT, anchor, *_path_tokens(tree, node)])[-1]
            assert close(logits[node], alone)
        path = max(reversed(tree.leaf_paths()), key=len)
        assert path != list(range(1, len(path) + 1)) and len(path) > 1  # rows really have to move
        run.commit_path([0, *path])
        ids = [*PROMPT, anchor, *_path_tokens(tree, path[-1])]
        assert run.length == len(ids)
        after = run.step(torch.tensor([66, 67]))
        wanted = _fresh_logits(target, [*ids, 66, 67])[-2:]
        assert close(target.head.logits(after.normed), wanted)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "qwen3_5_moe"])
def test_after_a_partial_commit_the_next_logits_equal_a_fresh_prefill(loaded, kind):
    """On hybrid targets this fails when the recurrent state is not restored (transformers' crop does not)."""
    target = loaded(kind)
    with TargetRun(target, (1, 4)) as run:
        run.step(torch.tensor(PROMPT), certain=True)
        run.commit(len(PROMPT))
        ids = list(PROMPT)
        for junk, keep in ([5, 6, 7, 8, 9, 10], 2), ([11, 12, 13, 14], 1), ([15, 16], 2):
            run.step(torch.tensor(junk))
            run.commit(keep)
            ids += junk[:keep]
        last = run.step(torch.tensor([66]), certain=True)
        assert close(target.head.logits(last.normed)[0], _fresh_logits(target, [*ids, 66])[-1])


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("budget", [1, 7, 40])
def test_greedy_tree_output_equals_plain_decoding_and_finds_second_choices(loaded, kind, budget, monkeypatch):
    target = loaded(kind)
    tokens = plain_decode(target, PROMPT, max_new_tokens=COUNT, stop_ids=()).tokens
    monkeypatch.setattr(decode_module, "Proposer", oracle(PROMPT + tokens, 0.4))
    options = {"max_new_tokens": COUNT, "block_size": 6, "stop_ids": ()}
    drafter = random_drafter(target)
    tree = decode(target, drafter, PROMPT, tree_budget=budget, **options)
    chain = decode(target, drafter, PROMPT, **options)
    assert tree.tokens == chain.tokens == tokens
    if budget == 40:
        assert len(tree.rounds) < len(chain.rounds)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_tree_never_accepts_fewer_tokens_than_its_own_chain(loaded, kind):
    """Round by round on the same anchors: the tree of B-1 nodes or more that holds the chain accepts at least
    as much."""
    target = loaded(kind)
    drafter = random_drafter(target, block_size=5, initializer_range=0.6)
    tokens = plain_decode(target, PROMPT, max_new_tokens=COUNT, stop_ids=()).tokens
    ids = torch.tensor(PROMPT + tokens)
    with torch.no_grad(), TargetRun(target, drafter.config.tap_ids) as run:
        taps = run.step(ids, certain=True).taps
    accepted = []
    for place in range(len(PROMPT), len(ids) - 5):
        proposer = Proposer(drafter, target.head)
        proposer.extend(taps[:place])
        draft = proposer.draft(ids[place : place + 1], 5)
        truth = ids[place + 1 : place + 5].tolist()
        chain = draft.greedy().tolist()
        counts = [next((i for i in range(4) if chain[i] != truth[i]), 4)]
        for budget in (1, 4, 5, 8, 16, 64, 256, 1024):
            tree = draft.tree(budget)
            assert budget <= len(tree) <= budget + 4
            choices = [truth[d] if d < 4 else -1 for d in [0, *tree.depths.tolist()]]
            counts.append(len(tree.walk(choices)[0]) - 1)
            assert counts[-1] >= counts[0]
        assert counts[1:] == sorted(counts[1:])
        accepted.append(counts)
    assert max(c[-1] for c in accepted) >= 1


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_chain_shaped_tree_equals_linear_decoding(loaded, kind, monkeypatch):
    target = loaded(kind)
    tokens = plain_decode(target, PROMPT, max_new_tokens=COUNT, stop_ids=()).tokens
    monkeypatch.setattr(decode_module, "Proposer", oracle(PROMPT + tokens, 0.3))
    monkeypatch.setattr(decode_module.Draft, "tree", lambda draft, *_: chain_tree(draft.greedy().tolist()))
    options = {"max_new_tokens": COUNT, "block_size": 6, "stop_ids": ()}
    tree = decode(target, random_drafter(target), PROMPT, tree_budget=5, **options)
    chain = decode(target, random_drafter(target), PROMPT, **options)
    assert tree.tokens == chain.tokens
    assert tree.lengths == chain.lengths


def test_dflash_2_trees_use_conditional_scores(loaded):
    target = loaded("qwen3")
    drafter = second_drafter(target)
    proposer = Proposer(drafter, target.head)
    proposer.extend(torch.randn(7, 96, generator=torch.Generator().manual_seed(0)))
    draft = proposer.draft(torch.tensor([65]), 6)
    greedy = draft.greedy().tolist()
    tree = draft.tree(400)
    # Following the best child from the root is the selector's own greedy walk.
    path, _ = tree.walk([*greedy[:1], *[greedy[d] if d < 5 else -1 for d in tree.depths.tolist()]])
    assert [int(tree.tokens[n - 1]) for n in path[1:]] == greedy[: len(path) - 1] and len(path) > 2
    # The same token after different parents has different scores: conditional, not marginal.
    gains = {}
    for node, (token, parent, depth) in enumerate(zip(tree.tokens, tree.parents, tree.depths), start=1):
        if depth == 2:
            base = tree.log_probs[parent - 1]
            gains.setdefault(int(token), set()).add(round(float(tree.log_probs[node - 1] - base), 6))
    assert any(len(values) > 1 for values in gains.values())
    plain = plain_decode(target, PROMPT, max_new_tokens=20, stop_ids=())
    assert (
        decode(target, drafter, PROMPT, max_new_tokens=20, tree_budget=12, stop_ids=()).tokens == plain.tokens
    )


def test_sampled_tree_follows_the_targets_law(loaded):
    target = loaded("llama")
    options = {"max_new_tokens": 2, "temperature": 0.7, "top_k": 3, "stop_ids": ()}
    generator = torch.Generator().manual_seed(0)
    drafter = random_drafter(target)
    options["generator"] = generator
    tree = [tuple(decode(target, drafter, PROMPT, tree_budget=8, **options).tokens) for _ in range(300)]
    plain = [tuple(plain_decode(target, PROMPT, **options).tokens) for _ in range(300)]
    assert same_law(tree, plain)


def test_targets_that_cannot_verify_a_tree_say_why(loaded, tmp_path):
    hybrid = loaded("qwen3_5")
    with refused(UnsupportedTarget):
        decode(hybrid, random_drafter(hybrid), PROMPT, max_new_tokens=4, tree_budget=8, stop_ids=())
    kinds = ["sliding_attention", "full_attention"] * 4
    folder = build_tiny("qwen3", tmp_path, use_sliding_window=True, sliding_window=8, layer_types=kinds)
    sliding = load_target(str(folder))
    with refused(UnsupportedTarget):
        decode(sliding, random_drafter(sliding), PROMPT, max_new_tokens=4, tree_budget=8, stop_ids=())


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "qwen3_5_moe"])
def test_leaf_paths_verify_a_tree_on_any_target(loaded, kind, monkeypatch):
    target = loaded(kind)
    tokens = plain_decode(target, PROMPT, max_new_tokens=COUNT, stop_ids=()).tokens
    monkeypatch.setattr(decode_module, "Proposer", oracle(PROMPT + tokens, 0.4))
    options = {"max_new_tokens": COUNT, "block_size": 6, "stop_ids": (), "tree_budget": 20}
    drafter = random_drafter(target)
    paths = decode(target, drafter, PROMPT, tree_mode="paths", **options)
    assert paths.tokens == tokens
    assert len(set(paths.lengths)) > 2
    if kind == "llama":
        assert paths.lengths == decode(target, drafter, PROMPT, **options).lengths


@torch.no_grad()
def test_leaf_path_rows_equal_fresh_passes_and_leave_the_cache_alone(loaded, monkeypatch):
    monkeypatch.setattr("dflash_lab.acceptance.decode.PATHS_A_FORWARD", 5)
    target = loaded("qwen3_5")
    tree = tree_from_logits(6 * torch.randn(5, 280, generator=torch.Generator().manual_seed(1)), 24)
    with TargetRun(target) as run:
        run.step(torch.tensor(PROMPT), certain=True)
        run.commit(len(PROMPT))
        normed = run.step_paths(torch.tensor([65]), tree).normed
        for node in range(len(tree) + 1):
            wanted = _fresh_logits(target, [*PROMPT, 65, *_path_tokens(tree, node)])[-1]
            assert close(target.head.logits(normed[node]), wanted)
        path = [0, *max(tree.leaf_paths(), key=len)]
        run.commit_path(path)
        ids = [*PROMPT, 65, *_path_tokens(tree, path[-1])]
        after = run.step(torch.tensor([66]), certain=True).normed
        assert close(target.head.logits(after), _fresh_logits(target, [*ids, 66])[-1:])
