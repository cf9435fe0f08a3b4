"""A batch of prompts gives what each prompt gives alone, on dense and hybrid targets, whatever its rows
accept.
"""

from __future__ import annotations

import pytest
import torch
from drafters import overfit, random_drafter, same_law
from support.tiny_targets import build_tiny
from support.wording import refused

from dflash_lab.acceptance.batch import decode_batch
from dflash_lab.acceptance.decode import Study, decode, plain_decode
from dflash_lab.acceptance.offline import answered_items
from dflash_lab.errors import InputError, UnsupportedTarget
from dflash_lab.models.load import load_target

PROMPTS = [
    [257, 84, 104, 105, 115, 32, 105],
    [257, 80],
    [257, 66, 67, 12, 9, 9, 44, 45, 46, 47],
    [70, 71, 72],
]
LIMITS = [30, 1, 24, 17]


@pytest.fixture(scope="module")
def trained(loaded):
    made = {}

    def get(kind):
        if kind not in made:
            target = loaded(kind)
            study = Study("plain")
            for prompt in PROMPTS:
                study.answers.append(plain_decode(target, prompt, max_new_tokens=30, stop_ids=()))
                study.asked.append(tuple(prompt))
            drafter = random_drafter(target, block_size=6, initializer_range=0.1)
            made[kind] = (
                target,
                overfit(target, drafter, list(answered_items(target, (1, 4), study)), steps=15),
            )
        return made[kind]

    return get


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"])
def test_rows_equal_single_decoding(trained, kind):
    target, drafter = trained(kind)
    batch = decode_batch(target, drafter, PROMPTS, max_new_tokens=LIMITS, stop_ids=())
    lengths = []
    for prompt, limit, answer in zip(PROMPTS, LIMITS, batch):
        alone = decode(target, drafter, prompt, max_new_tokens=limit, stop_ids=())
        assert answer.tokens == alone.tokens
        assert answer.rounds == alone.rounds
        lengths += answer.lengths
    assert len(set(lengths)) > 2  # rows did part company


def test_a_stop_token_ends_one_row_and_not_the_others(trained):
    target, drafter = trained("qwen3_5")
    free = [plain_decode(target, p, max_new_tokens=20, stop_ids=()).tokens for p in PROMPTS]
    stop = free[0][5]
    batch = decode_batch(target, drafter, PROMPTS, max_new_tokens=20, stop_ids={stop})
    for answer, tokens in zip(batch, free):
        end = tokens.index(stop) + 1 if stop in tokens else 20
        assert answer.tokens == tokens[:end]
        assert answer.stopped == (stop in tokens)


def test_sampled_rows_follow_the_targets_law(trained):
    target, drafter = trained("llama")
    options = {"temperature": 0.7, "top_k": 3, "stop_ids": (), "generator": torch.Generator().manual_seed(0)}
    batch = decode_batch(target, drafter, [PROMPTS[0]] * 200, max_new_tokens=3, **options)
    plain = [plain_decode(target, PROMPTS[0], max_new_tokens=3, **options) for _ in range(200)]
    for length in (1, 2, 3):
        assert same_law([tuple(a.tokens[:length]) for a in batch], [tuple(a.tokens[:length]) for a in plain])


def test_what_cannot_be_batched_says_so(trained, tmp_path):
    target, drafter = trained("llama")
    with refused(InputError):
        decode_batch(target, drafter, PROMPTS, max_new_tokens=[1, 2], stop_ids=())
    kinds = ["sliding_attention", "full_attention"] * 4
    folder = build_tiny("qwen3", tmp_path, use_sliding_window=True, sliding_window=8, layer_types=kinds)
    sliding = load_target(str(folder))
    with refused(UnsupportedTarget):
        decode_batch(sliding, random_drafter(sliding), PROMPTS, max_new_tokens=4, stop_ids=())
