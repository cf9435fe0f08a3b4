"""Each fault, put in on purpose, is named by the check that looks for it, and by no unrelated one."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
from drafters import PROMPTS, answered, greedy, overfit, random_drafter
from support.tiny_targets import THINKING, build_tiny
from support.wording import check_wording

from dflash_lab.acceptance import decode as decode_module
from dflash_lab.acceptance import diagnose as diagnose_module
from dflash_lab.acceptance.diagnose import FINE, SKIPPED, SUSPECT, Case, diagnose, likely_cause
from dflash_lab.files import write_json
from dflash_lab.models.load import load_target
from dflash_lab.models.source import template_hash, tokenizer_hash

ASKED = [PROMPTS[0], [257, 80, 44, 10, 32], [257, 66, 67, 12]]
STORED = {"stored states", "precision of states"}


def drafter_for(target, items, steps=30, mask_token_id=280, **faults):
    drafter = random_drafter(target, block_size=4, initializer_range=0.1, mask_token_id=mask_token_id)
    return overfit(target, drafter, items, steps=steps, **faults)


@pytest.fixture(scope="module")
def healthy(loaded):
    """A target, a drafter trained on its answers, and the items."""

    @functools.cache
    def get(kind="llama"):
        items = answered(loaded(kind), ASKED, greedy(loaded(kind), ASKED, 24))
        return loaded(kind), drafter_for(loaded(kind), items), items

    return get


def verdicts(checks):
    return {check.name: check.verdict for check in checks}


def suspects(checks):
    return {check.name for check in checks if check.verdict == SUSPECT}


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_a_healthy_drafter_has_no_suspects(healthy, kind):
    checks = diagnose(*healthy(kind))
    found = verdicts(checks)
    assert found.pop("chat template") == SKIPPED
    assert set(found.values()) == {FINE}, [c for c in checks if c.verdict == SUSPECT]
    assert next(c.value for c in checks if c.name == "tap layers") > 0.7  # of a drafter that works
    check_wording(likely_cause(checks, disagree=True))
    check_wording(likely_cause(checks, disagree=False))


def of_items(change):
    """A fault of the stored states: the healthy drafter on changed items."""

    def fault(healthy, kind="llama"):
        target, drafter, items = healthy(kind)
        return target, drafter, [dataclasses.replace(item, **change(target, item)) for item in items]

    return fault


def noise(_target, item):
    random = torch.randn(item.taps.shape, generator=torch.Generator().manual_seed(0))
    return {"taps": item.taps + 3 * item.taps.std() * random}


def misread(_target, item):
    return {"taps": item.taps.bfloat16().view(torch.float16).float()}


def foreign(healthy):
    target, drafter, _ = healthy()
    return target, drafter, answered(target, ASKED, [[70 + i for i in range(20)]] * 3)


def other_layers(healthy):
    target, _, items = healthy()
    return target, drafter_for(target, answered(target, ASKED, greedy(target, ASKED, 24), (2, 5))), items


def other_mask(healthy):
    target, _, items = healthy()
    drafter = drafter_for(target, items, steps=50, mask_token_id=len(target.tokenizer))
    drafter.config = dataclasses.replace(drafter.config, mask_token_id=70)
    return target, drafter, items


def ordinary_mask(healthy):
    target, _, items = healthy()
    return target, drafter_for(target, items, mask_token_id=int(items[0].input_ids[-2])), items


def shifted_labels(healthy):
    target, _, items = healthy()
    return target, drafter_for(target, items, label_shift=1), items


def normed(healthy):
    return of_items(lambda target, item: {"final": target.final_norm(item.final)})(healthy, "qwen3_5")


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (foreign, {"answers of the target"}),
        (other_layers, {"tap layers"}),
        (normed, {"final norm"}),
        (other_mask, {"mask token"}),
        (ordinary_mask, {"mask token"}),
        (shifted_labels, {"slot labels"}),
        (of_items(noise), STORED),
        (of_items(misread), STORED),
    ],
    ids=["foreign", "other layers", "normed", "other mask", "ordinary mask", "labels", "noise", "misread"],
)
def test_a_fault_is_named(healthy, fault, named):
    checks = diagnose(*fault(healthy))
    found = suspects(checks)
    assert found == named if len(named) == 1 and fault is not foreign else named <= found
    check_wording("\n".join(check.detail for check in checks if check.name in named))


def test_what_storage_rounds_does_no_harm_and_states_that_are_not_stored_are_not_judged(healthy):
    rounded = of_items(lambda _, item: {"taps": item.taps.bfloat16(), "final": None})(healthy)
    checks = diagnose(*rounded)
    assert not suspects(checks) and verdicts(checks)["final norm"] == SKIPPED


def test_states_of_layers_off_by_one_are_told_from_spoilt_ones(healthy):
    target, drafter, items = healthy()
    wrong = [
        dataclasses.replace(i, taps=w.taps)
        for i, w in zip(items, answered(target, ASKED, greedy(target, ASKED, 24), (2, 5)))
    ]
    detail = {c.name: c.detail for c in diagnose(target, drafter, wrong)}["stored states"]
    assert "off by one" in detail and "tap ids +1" in detail


def test_context_that_reaches_the_anchor_in_training(healthy, monkeypatch):
    """Random text, whose states tell the next token: only the anchor's own state gives slot 1 away."""
    target, _, _ = healthy()
    generator = torch.Generator().manual_seed(0)
    answers = [(65 + torch.randint(0, 8, (80,), generator=generator)).tolist() for _ in ASKED]
    items = []
    for item in answered(target, ASKED, answers):
        following = target.head.embed(item.input_ids.long().roll(-1))
        items.append(dataclasses.replace(item, taps=torch.cat([following, following], dim=-1)))
    monkeypatch.setattr(Case, "live_taps", lambda case, index, shift=0: case.items[index].taps)
    checks = diagnose(target, drafter_for(target, items, steps=40, visible_shift=1), items)
    assert "anchor position" in suspects(checks)
    assert "including the anchor" in likely_cause(checks, disagree=True)


def test_caches_that_forget(healthy, monkeypatch):
    class Forgetful(diagnose_module.Proposer):
        def extend(self, taps):
            super().extend(taps if self.cache.length == 0 else torch.zeros_like(taps))

    with monkeypatch.context() as patched:
        patched.setattr(diagnose_module, "Proposer", Forgetful)
        assert "draft cache" in suspects(diagnose(*healthy()))
    monkeypatch.setattr(decode_module, "restore_states", lambda cache, saved: None)
    checks = diagnose(*healthy("qwen3_5"))
    assert "rollback of the target" in suspects(checks)
    assert "recurrent states" in likely_cause(checks, disagree=True)


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
    assert check(loaded("llama"), True).verdict == FINE  # a template that does not know thinking
    assert "another template_hash" in check(thinker, template_hash="other").detail
    for now, stored, verdict in ((True, False, SUSPECT), (False, True, SUSPECT), (True, None, FINE)):
        found = check(thinker, now, thinking=stored)
        assert found.verdict == verdict
        check_wording(found.detail)
    assert diagnose_module.rendered_alike(thinker, None).verdict == SKIPPED


@pytest.mark.parametrize(("anchors", "verdict"), [(38, FINE), (1000, SUSPECT)])
def test_what_chance_makes_of_few_anchors_is_no_suspect(anchors, verdict):
    case = SimpleNamespace(own_accuracy=0.45, accuracy=lambda **options: 0.55, anchors=anchors)
    found = diagnose_module.compared(case, "tap layers", "own: {own}", [("{other}, not {own}", {})])
    assert found.verdict == verdict
    assert found.detail == ("own: 45 %" if verdict == FINE else "55 %, not 45 %")
