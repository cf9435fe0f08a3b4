"""Generation in batches equals generation one prompt at a time, for attention and recurrent layers."""

from __future__ import annotations

import pytest
import torch
from support.draws import assert_follows
from support.tiny_targets import build_tiny
from support.wording import refused

from dflash_lab.errors import InputError
from dflash_lab.models.generate import _batches, generate, prompts_of, self_prompts
from dflash_lab.models.load import load_target
from dflash_lab.models.template import render_prompt

LENGTHS = (5, 70, 9, 66, 5, 33, 1, 64, 65)


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


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_5", "qwen3_moe", "qwen3_5_wrapped"])
def test_batches_equal_the_definition(tiny_target, kind):
    target = load_target(str(tiny_target(kind)))
    expected = [naive(target, prompt, 12) for prompt in prompts()]
    assert generate(target, prompts(), max_new_tokens=12) == expected
    assert generate(target, prompts(), max_new_tokens=12, batch=2) == expected


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_rows_that_stop_leave_and_the_others_go_on(tiny_target, kind):
    target = load_target(str(tiny_target(kind)))
    asked = prompts((20,) * 12)
    free = generate(target, asked, max_new_tokens=30, stop_ids=[])
    assert {len(new) for new in free} == {30}
    stop = sorted({token for new in free[:8] for token in new[4:6]})
    stopped = generate(target, asked, max_new_tokens=30, stop_ids=stop)
    for new, whole in zip(stopped, free, strict=True):
        end = next((i + 1 for i, token in enumerate(whole) if token in stop), 30)
        assert new == whole[:end]
    assert len({len(new) for new in stopped}) > 2


def test_prompts_of_unlike_lengths_are_not_fed_token_by_token():
    runs = _batches([10, 11, 12, 28, 29, 500, 510, 2000], 32)
    assert [(run.start, run.stop) for run in runs] == [(0, 4), (4, 5), (5, 7), (7, 8)]
    assert [len(run) for run in _batches([7] * 70, 32)] == [32, 32, 6]
    assert _batches([], 32) == []


def test_sampling_is_seeded_and_follows_the_distribution(tiny_target):
    target = load_target(str(tiny_target("qwen3")))
    asked = [prompts((8,))[0]] * 6000
    drawn = generate(target, asked, max_new_tokens=1, temperature=1.5, seed=1, stop_ids=[], batch=6000)
    assert drawn == generate(
        target, asked, max_new_tokens=1, temperature=1.5, seed=1, stop_ids=[], batch=6000
    )
    assert drawn != generate(
        target, asked, max_new_tokens=1, temperature=1.5, seed=2, stop_ids=[], batch=6000
    )
    assert_follows(target, asked[0], [token for (token,) in drawn], 1.5)


def test_wrong_questions_are_refused(tiny_target):
    target = load_target(str(tiny_target("llama")))
    for bad, words in (
        ([[]], "Prompt 0 is empty"),
        ([[1], [288]], r"Prompt 1 .*0\.\.287"),
        ([[-1]], "Prompt 0"),
    ):
        with refused(InputError):
            generate(target, bad, max_new_tokens=2)
    with refused(InputError):
        generate(target, [[1]], max_new_tokens=0)
    with refused(InputError):
        generate(target, [[1]], max_new_tokens=1, temperature=-1)
    assert generate(target, [], max_new_tokens=1) == []


def test_progress_counts_prompts(tiny_target):
    target, seen = load_target(str(tiny_target("llama"))), []
    generate(target, prompts((4,) * 5), max_new_tokens=1, batch=2, progress=lambda *a: seen.append(a))
    assert seen == [("generate", 2, 5), ("generate", 4, 5), ("generate", 5, 5)]


def test_self_prompts_are_different_closed_user_turns(tiny_target):
    target = load_target(str(tiny_target("llama")))
    found = self_prompts(target, 6, seed=3, temperature=2.0, max_new_tokens=200)
    assert len(found) == len(set(found)) == 6 and all(found)
    assert not any("<|im_end|>" in text for text in found)
    assert found == self_prompts(target, 6, seed=3, temperature=2.0, max_new_tokens=200)
    assert self_prompts(target, 6, seed=4, temperature=2.0, max_new_tokens=200) != found


def test_self_prompts_go_on_from_given_words(tiny_target):
    target = load_target(str(tiny_target("llama")))
    found = self_prompts(target, 6, temperature=2.0, max_new_tokens=200, begin=["Why ", "How do"])
    assert len(found) == 6 and {text[:4] for text in found} == {"Why ", "How "}


def test_prompts_in_bulk_are_those_of_the_template(tiny_target):
    target = load_target(str(tiny_target("llama")))
    texts = ["Why?", "a\nb  c", "\u00e9"]
    expected = [render_prompt(target.tokenizer, [{"role": "user", "content": text}]) for text in texts]
    assert prompts_of(target, texts) == expected
    assert prompts_of(target, []) == []


def test_self_prompts_that_never_end_are_fewer_and_said(tiny_target, caplog):
    target = load_target(str(tiny_target("llama")))
    assert self_prompts(target, 50, temperature=0.0, max_new_tokens=2) == []
    assert "0 of 50 user turns after 8 rounds" in caplog.text


def test_self_prompts_need_a_closing_token(tmp_path):
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    target = load_target(str(build_tiny("llama", tmp_path, template=template)))
    with refused(InputError):
        self_prompts(target, 1)
