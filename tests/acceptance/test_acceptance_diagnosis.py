"""Each fault, put in on purpose, is named by the check that looks for it, and by no unrelated one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from drafters import overfit, random_drafter
from support.tiny_targets import THINKING, build_tiny

from dflash_lab.acceptance import decode as decode_module
from dflash_lab.acceptance import diagnose as diagnose_module
from dflash_lab.acceptance.decode import TargetRun, plain_decode
from dflash_lab.acceptance.diagnose import FINE, SKIPPED, SUSPECT, Case, diagnose, likely_cause
from dflash_lab.data.samples import FeatureItem
from dflash_lab.files import write_json
from dflash_lab.models.load import load_target
from dflash_lab.models.source import template_hash, tokenizer_hash
from dflash_lab.models.template import render_prompt

PROMPTS = [[257, 84, 104, 105, 115, 32, 105], [257, 80, 44, 10, 32], [257, 66, 67, 12]]


@torch.no_grad()
def states(target, ids, layers):
    with TargetRun(target, tuple(layers)) as run:
        return run.step(torch.tensor(ids), certain=True).taps


def items_of(target, tap_ids, answers=None, count=30, prompts=PROMPTS):
    """Items as extraction makes them, with final states before the norm."""
    items = []
    for number, prompt in enumerate(prompts):
        answer = (
            answers[number]
            if answers
            else plain_decode(target, prompt, max_new_tokens=count, stop_ids=()).tokens
        )
        ids = prompt + answer
        mask = torch.tensor([0] * len(prompt) + [1] * len(answer), dtype=torch.uint8)
        final = states(target, ids, [target.num_layers - 1])
        taps = states(target, ids, tap_ids)
        items.append(FeatureItem("00" * 16, torch.tensor(ids).int(), mask, taps, final, True))
    return items


@pytest.fixture(scope="module")
def healthy(loaded):
    """A target, a drafter trained on its answers, and the items."""
    made = {}

    def get(kind):
        if kind not in made:
            target = loaded(kind)
            items = items_of(target, (1, 4))
            drafter = random_drafter(target, block_size=4, initializer_range=0.1)
            made[kind] = target, overfit(target, drafter, items, steps=40), items
        return made[kind]

    return get


def verdicts(checks):
    return {check.name: check.verdict for check in checks}


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_a_healthy_drafter_has_no_suspects(healthy, kind):
    target, drafter, items = healthy(kind)
    checks = diagnose(target, drafter, items)
    found = verdicts(checks)
    assert found.pop("chat template") == SKIPPED
    assert set(found.values()) == {FINE}, [c for c in checks if c.verdict == SUSPECT]
    assert (
        next(c.value for c in checks if c.name == "tap layers") > 0.7
    )  # the checks look at a drafter that works
    assert likely_cause(checks, disagree=True).startswith("No check found a cause")


def suspects(checks):
    return {check.name for check in checks if check.verdict == SUSPECT}


def test_answers_that_are_not_the_targets(healthy):
    target, drafter, _ = healthy("llama")
    foreign = [[70 + i for i in range(20)] for _ in PROMPTS]
    checks = diagnose(target, drafter, items_of(target, (1, 4), foreign))
    assert "answers of the target" in suspects(checks)
    assert "template or thinking mode" in likely_cause(checks, disagree=True)


def test_a_drafter_trained_on_layers_off_by_one(healthy):
    target, _, items = healthy("llama")
    wrong = items_of(target, (2, 5))
    drafter = overfit(target, random_drafter(target, block_size=4, initializer_range=0.1), wrong, steps=40)
    found = suspects(diagnose(target, drafter, items))
    assert found == {"tap layers"}
    both = {c.name: c.detail for c in diagnose(target, drafter, wrong)}
    assert "off by one" in both["stored states"] and "tap ids +1" in both["stored states"]


def test_final_states_taken_after_the_norm(healthy):
    target, drafter, items = healthy("qwen3_5")
    normed = [dataclasses.replace(item, final=target.final_norm(item.final)) for item in items]
    checks = diagnose(target, drafter, normed)
    assert suspects(checks) == {"final norm"}
    assert "after the final norm" in likely_cause(checks, disagree=False)
    none = [dataclasses.replace(item, final=None) for item in items]
    assert verdicts(diagnose(target, drafter, none))["final norm"] == SKIPPED


def test_another_mask_token_than_in_training(healthy):
    target, _, items = healthy("llama")
    usual = len(target.tokenizer)
    drafter = random_drafter(target, block_size=4, initializer_range=0.1, mask_token_id=usual)
    overfit(target, drafter, items, steps=60)
    drafter.config = dataclasses.replace(drafter.config, mask_token_id=70)
    checks = diagnose(target, drafter, items)
    assert suspects(checks) == {"mask token"}
    assert f"with mask token {usual}" in likely_cause(checks, disagree=True)


def test_a_mask_token_that_is_an_ordinary_one(healthy):
    target, _, items = healthy("llama")
    ordinary = int(items[0].input_ids[-2])
    drafter = random_drafter(target, block_size=4, initializer_range=0.1, mask_token_id=ordinary)
    overfit(target, drafter, items, steps=40)
    assert suspects(diagnose(target, drafter, items)) == {"mask token"}


def test_context_that_reaches_the_anchor_in_training(healthy, monkeypatch):
    """Random text of eight tokens, whose states tell the next token: only the anchor's own state gives
    slot 1 away.
    """
    target, _, _ = healthy("llama")
    generator = torch.Generator().manual_seed(0)
    answers = [(65 + torch.randint(0, 8, (80,), generator=generator)).tolist() for _ in PROMPTS]
    items = []
    for item in items_of(target, (1, 4), answers):
        following = target.head.embed(item.input_ids.long().roll(-1))
        items.append(dataclasses.replace(item, taps=torch.cat([following, following], dim=-1)))
    monkeypatch.setattr(Case, "live_taps", lambda case, index, shift=0: case.items[index].taps)
    drafter = random_drafter(target, block_size=4, initializer_range=0.1)
    overfit(target, drafter, items, steps=40, visible_shift=1)
    checks = diagnose(target, drafter, items)
    assert "anchor position" in suspects(checks)
    assert "including the anchor" in likely_cause(checks, disagree=True)


def test_labels_shifted_by_one_in_training(healthy):
    target, _, items = healthy("llama")
    drafter = random_drafter(target, block_size=4, initializer_range=0.1)
    overfit(target, drafter, items, steps=40, label_shift=1)
    assert suspects(diagnose(target, drafter, items)) == {"slot labels"}


def test_states_spoilt_by_storage(healthy):
    target, drafter, items = healthy("llama")
    generator = torch.Generator().manual_seed(0)
    noisy = [
        dataclasses.replace(
            item, taps=item.taps + 3 * item.taps.std() * torch.randn(item.taps.shape, generator=generator)
        )
        for item in items
    ]
    assert {"stored states", "precision of states"} <= suspects(diagnose(target, drafter, noisy))


def test_recurrent_state_that_is_not_restored(healthy, monkeypatch):
    target, drafter, items = healthy("qwen3_5")
    monkeypatch.setattr(decode_module, "restore_states", lambda cache, saved: None)
    checks = diagnose(target, drafter, items)
    assert "rollback of the target" in suspects(checks)
    assert "recurrent states" in likely_cause(checks, disagree=True)


def test_a_draft_cache_that_forgets(healthy, monkeypatch):
    target, drafter, items = healthy("llama")

    class Forgetful(diagnose_module.Proposer):
        def extend(self, taps):
            super().extend(taps if self.cache.length == 0 else torch.zeros_like(taps))

    monkeypatch.setattr(diagnose_module, "Proposer", Forgetful)
    assert "draft cache" in suspects(diagnose(target, drafter, items))


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """A target whose template knows thinking."""
    return load_target(str(build_tiny("llama", tmp_path_factory.mktemp("thinker"), template=THINKING)))


def test_template_and_thinking_mode_of_the_samples(thinker, loaded, tmp_path):
    path = tmp_path / "samples.parquet"
    made = {"format": 1, "tokenizer_hash": tokenizer_hash(thinker.tokenizer), "thinking": False}

    def check(target, now=None, **changes):
        made["template_hash"] = template_hash(target.tokenizer)
        write_json(path.with_suffix(".json"), made | changes)
        return diagnose_module.rendered_alike(target, path, now)

    assert check(thinker).verdict == check(thinker, False).verdict == FINE
    assert "another template_hash" in check(thinker, template_hash="other").detail
    found = check(thinker, True)
    assert found.verdict == SUSPECT
    assert found.detail == "the samples were made with thinking off, these prompts with thinking on"
    assert check(thinker, False, thinking=True).verdict == SUSPECT
    unsaid = check(thinker, True, thinking=None)
    assert unsaid.verdict == FINE and unsaid.detail.endswith("thinking not recorded")
    assert check(loaded("llama"), True).verdict == FINE  # a template that does not know thinking
    assert diagnose_module.rendered_alike(thinker, None).verdict == SKIPPED


def test_answers_given_in_the_other_thinking_mode(thinker):
    """Stored without thinking, answered with it: here the target would say something else."""
    asked = {
        thinking: [
            render_prompt(thinker.tokenizer, [{"role": "user", "content": text}], thinking=thinking)
            for text in ("Hi", "Tell me", "Ten")
        ]
        for thinking in (False, True)
    }
    drafter = random_drafter(thinker, block_size=4)
    for thinking, verdict in ((False, FINE), (True, SUSPECT)):
        answers = [
            plain_decode(thinker, ids, max_new_tokens=30, stop_ids=()).tokens for ids in asked[thinking]
        ]
        checks = diagnose(thinker, drafter, items_of(thinker, (1, 4), answers, prompts=asked[False]))
        assert verdicts(checks)["answers of the target"] == verdict
    assert "thinking mode" in likely_cause(checks, disagree=True)


def test_states_read_as_another_dtype(healthy):
    target, drafter, items = healthy("llama")
    rounded = [dataclasses.replace(item, taps=item.taps.bfloat16()) for item in items]
    assert not suspects(diagnose(target, drafter, rounded))  # what storage rounds does no harm
    misread = [
        dataclasses.replace(item, taps=item.taps.bfloat16().view(torch.float16).float()) for item in items
    ]
    checks = diagnose(target, drafter, misread)
    assert {"stored states", "precision of states"} <= suspects(checks)
    assert "dtype" in likely_cause(checks, disagree=True)
