"""Speculative decoding, alone and in batches: greedily the plain answer, sampled the target's law."""

from __future__ import annotations

import itertools

import pytest
import torch
from drafters import PROMPT, PROMPTS, greedy, oracle, random_drafter, second_drafter
from support.wording import refused

from dflash_lab.acceptance import batch as batch_module
from dflash_lab.acceptance import decode as decode_module
from dflash_lab.acceptance.batch import decode_batch
from dflash_lab.acceptance.decode import PHASES, Proposer, decode, plain_decode
from dflash_lab.errors import InputError, UnsupportedTarget

KINDS = ("llama", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe")
COUNT = 28


@pytest.fixture
def knowing(monkeypatch, loaded, plain):
    """Decode PROMPT with drafts of the plain answer, each wrong with a chance."""

    def run(lie=0.0, target=None, answer=None, count=COUNT, **options):
        target = target or loaded("llama")
        monkeypatch.setattr(decode_module, "Proposer", oracle(PROMPT + (answer or plain("llama")), lie))
        options = {"block_size": 6, "stop_ids": ()} | options
        return decode(target, random_drafter(target), PROMPT, max_new_tokens=count, **options)

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_equals_plain_decoding_whatever_is_accepted(loaded, plain, kind, knowing):
    target = loaded(kind)
    for drafter in (random_drafter(target), second_drafter(target))[: 2 if kind == "qwen3" else 1]:
        fast = decode(target, drafter, PROMPT, max_new_tokens=COUNT, block_size=2, stop_ids=())
        assert fast.tokens == plain(kind)[:COUNT] and sum(fast.produced) == COUNT - 1
    for lie in (0.1, 0.5):
        fast = knowing(lie, target, plain(kind), block_size=8)
        assert fast.tokens == plain(kind)[:COUNT]
        assert {1, 8} & set(fast.lengths) and len(set(fast.lengths)) > 2  # rejections at several depths
    fast = knowing(0.0, target, plain(kind), count=25)
    assert fast.tokens == plain(kind)[:25] and fast.lengths == [6] * 4  # tau is the block size


def test_sliding_window_layers_of_the_target_are_rolled_back(sliding, knowing):
    (tokens,) = greedy(sliding, [PROMPT], COUNT)
    fast = knowing(0.3, sliding, tokens)
    assert fast.tokens == tokens and len(set(fast.lengths)) > 2


def test_a_stop_token_inside_an_accepted_run_ends_the_answer(loaded, plain, knowing):
    tokens = plain("llama")
    place = next(i for i in range(8, COUNT) if tokens[i] not in tokens[:i])
    fast = knowing(block_size=16, stop_ids={tokens[place]})
    assert fast.tokens == tokens[: place + 1] and fast.stopped
    assert sum(fast.produced) == place and fast.lengths[-1] >= fast.produced[-1]
    slow = plain_decode(loaded("llama"), PROMPT, max_new_tokens=COUNT, stop_ids={tokens[place]})
    assert slow.tokens == fast.tokens and slow.stopped


def test_last_block_conventions(knowing):
    full = knowing(count=10)
    assert (full.produced, full.lengths) == ([6, 3], [6, 6])
    shrunk = knowing(count=10, last_block="shrink")
    assert (shrunk.produced, shrunk.lengths) == ([6, 3], [6, 4])
    assert [r.drafted for r in shrunk.rounds] == [5, 3]


def test_rounds_time_and_rejected_tokens_are_recorded(plain, knowing):
    tokens, fast, place = plain("llama"), knowing(0.5), 1
    for r in fast.rounds:
        broke = place + r.accepted
        if r.accepted < r.drafted and broke < COUNT:
            assert r.rejected == (tokens[broke] + 1) % 288
        place += r.produced
    assert set(fast.phase_seconds) == set(PHASES)
    assert 0.5 * fast.seconds < sum(fast.phase_seconds.values()) <= fast.seconds


@torch.no_grad()
def test_sampled_answers_follow_the_targets_law(loaded, monkeypatch):
    """Drafts of the very tokens that the target may say, in other proportions: chains accept most of them,
    and the first two tokens are still the target's, by chi-square against the nine pairs' true chances.
    """
    target, heat, top = loaded("llama"), 0.7, 3
    options = {"temperature": heat, "top_k": top, "stop_ids": (), "max_new_tokens": 2}

    def law(ids):
        state = target.body(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0, -1]
        values, tokens = target.head.logits(state).topk(top)
        return dict(zip(tokens.tolist(), torch.softmax(values / heat, -1).tolist()))

    first = law(PROMPT)
    second = {token: law([*PROMPT, token]) for token in first}
    pairs = {(a, b): first[a] * second[a][b] for a in first for b in second[a]}

    class Tilted(Proposer):
        def draft(self, anchor, block_size):
            draft = super().draft(anchor, block_size)
            follow = list(second[int(anchor)])
            draft.logits.fill_(-30.0)[:, follow] = heat * torch.log(torch.tensor([0.2, 0.3, 0.5]))
            return draft

    monkeypatch.setattr(decode_module, "Proposer", Tilted)
    monkeypatch.setattr(batch_module, "Proposer", Tilted)
    drafter, options["generator"] = random_drafter(target), torch.Generator().manual_seed(0)
    ways = {
        "plain": lambda: [plain_decode(target, PROMPT, **options)],
        "chain": lambda: [decode(target, drafter, PROMPT, block_size=2, **options)],
        "tree": lambda: [decode(target, drafter, PROMPT, block_size=3, tree_budget=5, **options)],
        "batch": lambda: decode_batch(target, drafter, [PROMPT] * 50, block_size=2, **options),
    }
    for way, run in ways.items():
        times = {"chain": 200, "batch": 4}.get(way, 100)
        answers = list(itertools.chain.from_iterable(run() for _ in range(times)))
        found, count = [tuple(answer.tokens) for answer in answers], len(answers)
        assert set(found) <= set(pairs), way
        wrong = sum((found.count(p) - count * chance) ** 2 / (count * chance) for p, chance in pairs.items())
        assert wrong < 26.1, way  # 8 degrees of freedom: 1 in 1,000
        if way in ("chain", "batch"):
            assert 0.3 < sum(answer.rounds[0].accepted for answer in answers) / 200 < 0.95


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_batch_equal_single_decoding(trained, kind):
    target, drafter, _ = trained(kind)
    limits = [20, 1, 16, 11]
    batch = decode_batch(target, drafter, PROMPTS, max_new_tokens=limits, stop_ids=())
    lengths = []
    for prompt, limit, answer in zip(PROMPTS, limits, batch):
        alone = decode(target, drafter, prompt, max_new_tokens=limit, stop_ids=())
        assert answer.tokens == alone.tokens and answer.rounds == alone.rounds
        lengths += answer.lengths
    assert len(set(lengths)) > 1  # rows did part company
    if kind == "qwen3_5":  # a stop token ends one row and not the others
        free = greedy(target, PROMPTS, 20)
        stop = free[0][5]
        batch = decode_batch(target, drafter, PROMPTS, max_new_tokens=20, stop_ids={stop})
        for answer, tokens in zip(batch, free):
            assert answer.tokens == (tokens[: tokens.index(stop) + 1] if stop in tokens else tokens)
            assert answer.stopped == (stop in tokens)


def test_what_cannot_work_is_refused_with_the_reason(loaded, sliding):
    target, hybrid = loaded("llama"), loaded("qwen3_5")
    drafter, few = random_drafter(target), {"max_new_tokens": 4, "stop_ids": ()}
    for wrong in ({"block_size": 1}, {"prompt_ids": []}, {"last_block": "cut"}, {"tree_mode": "leaves"}):
        with refused(InputError):
            decode(target, drafter, **({"prompt_ids": PROMPT} | few | wrong))
    with refused(InputError):
        decode(target, random_drafter(target, vocab_size=300), PROMPT, **few)
    with refused(InputError):
        decode_batch(target, drafter, PROMPTS, max_new_tokens=[1, 2], stop_ids=())
    for other in (hybrid, sliding):
        with refused(UnsupportedTarget):
            decode(other, random_drafter(other), PROMPT, tree_budget=8, **few)
    with refused(UnsupportedTarget):
        decode_batch(sliding, random_drafter(sliding), PROMPTS, **few)
