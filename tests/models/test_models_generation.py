"""Generation in batches equals generation one prompt at a time, for attention and recurrent layers."""

from __future__ import annotations

import pytest
import torch
from support.draws import assert_follows
from support.tiny_targets import build_tiny
from support.wording import refused

from dflash_lab.errors import InputError
from dflash_lab.models.generate import generate, prompts_of, self_prompts
from dflash_lab.models.load import load_target
from dflash_lab.models.template import render_prompt

LENGTHS = (5, 70, 9, 5, 1, 64, 65)


def prompts(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def naive(target, prompt, count):
    """Greedy without cache, batch or early stop of others: the definition."""
    ids = list(prompt)
    for _ in range(count):
        states = target.body(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state
        ids.append(int(target.head.logits(states[0, -1]).argmax()))
        if ids[-1] in target.stop_ids:
            break
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def llama(tiny_target):
    return load_target(str(tiny_target("llama")))


@pytest.fixture(scope="module")
def talker(tiny_target):
    """A target that ends its turns soon: the weights of its closing token are larger than the others."""
    target = load_target(str(tiny_target("llama")))
    target.head.weight[258] *= 3
    return target


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "qwen3_moe"])
def test_batches_equal_the_definition(tiny_target, kind):
    target = load_target(str(tiny_target(kind)))
    expected = [naive(target, prompt, 6) for prompt in prompts()]
    assert generate(target, prompts(), max_new_tokens=6) == expected
    assert generate(target, prompts(), max_new_tokens=6, batch=2) == expected


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_rows_that_stop_leave_and_the_others_go_on(tiny_target, kind):
    target = load_target(str(tiny_target(kind)))
    asked = prompts((20,) * 10)
    free = generate(target, asked, max_new_tokens=20, stop_ids=[])
    assert {len(new) for new in free} == {20}
    stop = sorted({token for new in free[:6] for token in new[4:6]})
    stopped = generate(target, asked, max_new_tokens=20, stop_ids=stop)
    for new, whole in zip(stopped, free, strict=True):
        end = next((i + 1 for i, token in enumerate(whole) if token in stop), 20)
        assert new == whole[:end]
    assert len({len(new) for new in stopped}) > 2


def test_prompts_of_unlike_lengths_are_not_fed_token_by_token(llama):
    """A batch is of prompts of like lengths; progress counts the prompts of each."""
    for lengths, batch, done in (
        ((10, 11, 12, 28, 29, 150, 160, 300), 0, [4, 5, 7, 8]),
        ((4,) * 5, 2, [2, 4, 5]),
        ((), 0, []),
    ):
        seen = []
        asked = prompts(lengths)
        generate(llama, asked, max_new_tokens=1, batch=batch, progress=lambda *a: seen.append(a))  # noqa: B023
        assert seen == [("generate", count, len(lengths)) for count in done]


def test_sampling_is_seeded_and_follows_the_distribution(tiny_target):
    target = load_target(str(tiny_target("qwen3")))

    def draw(count, seed):
        asked = [prompts((8,))[0]] * count
        options = {"max_new_tokens": 1, "temperature": 1.5, "stop_ids": [], "batch": count}
        return generate(target, asked, seed=seed, **options)

    assert draw(100, 1) == draw(100, 1) != draw(100, 2)
    assert_follows(target, prompts((8,))[0], [token for (token,) in draw(4000, 1)], 1.5)


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ([[]], {}),
        ([[1], [288]], {}),
        ([[-1]], {}),
        ([[1]], {"max_new_tokens": 0}),
        ([[1]], {"batch": -1}),
        ([[1]], {"temperature": -1}),
    ],
)
def test_wrong_questions_are_refused(llama, asked, options):
    with refused(InputError):
        generate(llama, asked, **{"max_new_tokens": 2, **options})


def test_self_prompts_are_different_closed_user_turns(talker):
    def drawn(seed):
        return self_prompts(talker, 6, seed=seed, temperature=2.0, max_new_tokens=40)

    found = drawn(3)
    assert len(found) == len(set(found)) == 6 and all(found)
    assert not any("<|im_end|>" in text for text in found)
    assert found == drawn(3) != drawn(4)


def test_self_prompts_go_on_from_given_words(talker):
    found = self_prompts(talker, 6, temperature=2.0, max_new_tokens=40, begin=["Why ", "How do"])
    assert len(found) == 6 and {text[:4] for text in found} == {"Why ", "How "}


def test_prompts_in_bulk_are_those_of_the_template(llama):
    texts = ["Why?", "a\nb  c", "\u00e9"]
    expected = [render_prompt(llama.tokenizer, [{"role": "user", "content": text}]) for text in texts]
    assert prompts_of(llama, texts) == expected
    assert prompts_of(llama, []) == []


def test_self_prompts_that_never_end_are_fewer_and_said(llama, caplog):
    assert self_prompts(llama, 50, temperature=0.0, max_new_tokens=2) == []
    assert "0 of 50 user turns after 8 rounds" in caplog.text


def test_self_prompts_need_a_closing_token(tmp_path):
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    target = load_target(str(build_tiny("llama", tmp_path, template=template)))
    with refused(InputError):
        self_prompts(target, 1)
