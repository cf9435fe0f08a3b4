"""Decoding at fixed shapes against the growing cache: the same tokens, round by round.

On CUDA the same code runs as graphs (tests marked gpu); here it runs as it is.
"""

from __future__ import annotations

import pytest
import torch
from drafters import PROMPT, lying_logits, random_drafter, second_drafter
from support.wording import check_wording, refused

from dflash_lab.acceptance.decode import decode, plain_decode
from dflash_lab.acceptance.fixed_shapes import StaticDecoder, Workspace, why_not
from dflash_lab.errors import UnsupportedTarget
from dflash_lab.models.load import load_target

COUNT = 31
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
