"""Speculative decoding against plain decoding, on llama-like, qwen3-like, sliding-window and hybrid
targets."""

from __future__ import annotations

import pytest
import torch
from drafters import oracle, random_drafter, same_law, second_drafter
from support.tiny_targets import build_tiny
from support.wording import refused

from dflash_lab.acceptance import decode as decode_module
from dflash_lab.acceptance.decode import PHASES, decode, plain_decode
from dflash_lab.acceptance.results import summarize
from dflash_lab.errors import InputError
from dflash_lab.models.load import load_target

PROMPT = [257, 84, 104, 105, 115, 32, 105, 115, 32, 97]
DENSE, HYBRID = ("llama", "qwen3", "qwen3_moe"), ("qwen3_5", "qwen3_5_moe")
COUNT = 40


@pytest.fixture(scope="module")
def plain(loaded):
    """Plain greedy answers of COUNT tokens, one a target kind."""
    answers = {}

    def get(kind):
        if kind not in answers:
            answers[kind] = plain_decode(loaded(kind), PROMPT, max_new_tokens=COUNT, stop_ids=()).tokens
        return answers[kind]

    return get


@pytest.mark.parametrize("kind", [*DENSE, *HYBRID])
@pytest.mark.parametrize("block_size", [2, 6])
def test_greedy_output_of_a_random_drafter_equals_plain_decoding(loaded, plain, kind, block_size):
    target = loaded(kind)
    drafter = random_drafter(target)
    fast = decode(target, drafter, PROMPT, max_new_tokens=COUNT, block_size=block_size, stop_ids=())
    assert fast.tokens == plain(kind)
    assert sum(fast.produced) == COUNT - 1
    assert summarize([fast.produced], [fast.lengths]).mean < 1.5


@pytest.mark.parametrize("kind", [*DENSE, *HYBRID])
@pytest.mark.parametrize("lie", [0.1, 0.5])
def test_partial_acceptance_rolls_the_target_back(loaded, plain, kind, lie, monkeypatch):
    target = loaded(kind)
    monkeypatch.setattr(decode_module, "Proposer", oracle(PROMPT + plain(kind), lie))
    fast = decode(target, random_drafter(target), PROMPT, max_new_tokens=COUNT, block_size=8, stop_ids=())
    assert fast.tokens == plain(kind)
    assert {1, 8} & set(fast.lengths) and len(
        set(fast.lengths)
    ) > 2  # rejections at several depths did happen


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_a_perfect_drafter_reaches_tau_equal_to_the_block_size(loaded, plain, kind, monkeypatch):
    target = loaded(kind)
    monkeypatch.setattr(decode_module, "Proposer", oracle(PROMPT + plain(kind)))
    fast = decode(target, random_drafter(target), PROMPT, max_new_tokens=37, block_size=6, stop_ids=())
    assert fast.tokens == plain(kind)[:37]
    assert fast.lengths == [6] * 6
    assert summarize([fast.produced]).mean == 6


def test_sliding_window_layers_of_the_target_are_rolled_back(tmp_path, monkeypatch):
    kinds = ["sliding_attention", "full_attention"] * 4
    folder = build_tiny("qwen3", tmp_path, use_sliding_window=True, sliding_window=8, layer_types=kinds)
    target = load_target(str(folder))
    tokens = plain_decode(target, PROMPT, max_new_tokens=COUNT, stop_ids=()).tokens
    monkeypatch.setattr(decode_module, "Proposer", oracle(PROMPT + tokens, 0.3))
    fast = decode(target, random_drafter(target), PROMPT, max_new_tokens=COUNT, block_size=6, stop_ids=())
    assert fast.tokens == tokens
    assert len(set(fast.lengths)) > 2


def test_dflash_2_drafts_decode_losslessly(loaded, plain):
    target = loaded("qwen3")
    fast = decode(target, second_drafter(target), PROMPT, max_new_tokens=COUNT, stop_ids=())
    assert fast.tokens == plain("qwen3")


def test_stop_token_inside_an_accepted_run_ends_the_answer(loaded, plain, monkeypatch):
    target, tokens = loaded("llama"), plain("llama")
    place = next(i for i in range(8, COUNT) if tokens[i] not in tokens[:i])
    monkeypatch.setattr(decode_module, "Proposer", oracle(PROMPT + tokens))
    options = {"max_new_tokens": COUNT, "stop_ids": {tokens[place]}}
    fast = decode(target, random_drafter(target), PROMPT, block_size=16, **options)
    assert fast.tokens == tokens[: place + 1]
    assert fast.stopped
    assert sum(fast.produced) == place
    assert fast.lengths[-1] >= fast.produced[-1]
    slow = plain_decode(target, PROMPT, **options)
    assert slow.tokens == fast.tokens and slow.stopped


def test_last_block_conventions(loaded, plain, monkeypatch):
    target = loaded("llama")
    monkeypatch.setattr(decode_module, "Proposer", oracle(PROMPT + plain("llama")))
    options = {"max_new_tokens": 10, "block_size": 6, "stop_ids": ()}
    full = decode(target, random_drafter(target), PROMPT, **options)
    assert (full.produced, full.lengths) == ([6, 3], [6, 6])
    shrunk = decode(target, random_drafter(target), PROMPT, last_block="shrink", **options)
    assert (shrunk.produced, shrunk.lengths) == ([6, 3], [6, 4])
    assert [r.drafted for r in shrunk.rounds] == [5, 3]


def test_sampled_decoding_follows_the_targets_law(loaded):
    """The second token of many sampled answers, given the most common first one, against the target's
    probabilities."""
    target = loaded("llama")
    drafter = random_drafter(target, initializer_range=0.05)
    options = {"max_new_tokens": 3, "temperature": 0.7, "top_k": 3, "stop_ids": ()}
    generator = torch.Generator().manual_seed(0)
    options["generator"] = generator
    answers = [decode(target, drafter, PROMPT, block_size=4, **options).tokens for _ in range(150)]
    plain = [plain_decode(target, PROMPT, **options).tokens for _ in range(150)]
    for length in (1, 2, 3):
        ours, theirs = ([tuple(a[:length]) for a in group] for group in (answers, plain))
        assert same_law(ours, theirs)


def test_drafts_that_are_often_accepted_leave_the_law_alone(loaded, monkeypatch):
    """Drafts of the very tokens that the target may say, in other proportions: most rounds accept one, and
    the second token is still the target's.
    """
    target = loaded("llama")
    options = {"temperature": 0.7, "top_k": 3, "stop_ids": (), "max_new_tokens": 2}
    with torch.no_grad():
        ids = torch.tensor([PROMPT])
        for _ in range(2):
            logits = target.head.logits(target.body(input_ids=ids, use_cache=False).last_hidden_state[0, -1])
            ids = torch.cat([ids, logits.argmax()[None, None]], dim=1)
    first, (values, tokens) = int(ids[0, -2]), logits.topk(3)

    class Tilted(decode_module.Proposer):
        def draft(self, anchor, block_size):
            draft = super().draft(anchor, block_size)
            draft.logits.fill_(-30.0)[:, tokens] = 0.7 * torch.log(torch.tensor([0.2, 0.3, 0.5]))
            return draft

    monkeypatch.setattr(decode_module, "Proposer", Tilted)
    generator = torch.Generator().manual_seed(0)
    drafter, count, accepted = random_drafter(target), torch.zeros(3), 0
    while count.sum() < 400:
        answer = decode(target, drafter, PROMPT, block_size=2, generator=generator, **options)
        if answer.tokens[0] == first:
            count += torch.tensor([answer.tokens[1] == int(token) for token in tokens]).float()
            accepted += answer.rounds[0].accepted
    law = torch.softmax(values / 0.7, -1)
    assert float(((count - 400 * law) ** 2 / (400 * law)).sum()) < 13.8  # chi-square, 2 degrees: 1 in 1,000
    assert 0.3 < accepted / 400 < 0.95


def test_rounds_time_and_rejected_tokens_are_recorded(loaded, plain, monkeypatch):
    target, tokens = loaded("llama"), plain("llama")
    monkeypatch.setattr(decode_module, "Proposer", oracle(PROMPT + tokens, 0.5))
    fast = decode(target, random_drafter(target), PROMPT, max_new_tokens=COUNT, block_size=6, stop_ids=())
    place = 1
    for r in fast.rounds:
        broke = place + r.accepted
        if r.accepted < r.drafted and broke < COUNT:
            assert r.rejected == (tokens[broke] + 1) % 288
        place += r.produced
    assert set(fast.phase_seconds) == set(PHASES)
    assert 0.5 * fast.seconds < sum(fast.phase_seconds.values()) <= fast.seconds


def test_what_cannot_work_is_refused_with_the_reason(loaded):
    target = loaded("llama")
    drafter = random_drafter(target)
    with refused(InputError):
        decode(target, drafter, PROMPT, max_new_tokens=4, block_size=1, stop_ids=())
    with refused(InputError):
        decode(target, drafter, [], max_new_tokens=4, stop_ids=())
    with refused(InputError):
        decode(target, drafter, PROMPT, max_new_tokens=4, last_block="cut", stop_ids=())
    other = random_drafter(target, vocab_size=300)
    with refused(InputError):
        decode(target, other, PROMPT, max_new_tokens=4, stop_ids=())
