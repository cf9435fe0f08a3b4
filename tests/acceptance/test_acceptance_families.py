"""What `Target.spans` says of every family of transformers, against experiments on its layers; and every way
of decoding, which equals forwards without a cache or is refused by name.
"""

from __future__ import annotations

import pytest
import torch
from drafters import close, random_drafter
from support.families import WINDOW, families, tiny_family
from support.wording import refused
from transformers import DynamicCache

from dflash_lab.acceptance.batch import check_batch_target, decode_batch
from dflash_lab.acceptance.decode import TargetRun, check_tree_target, plain_decode
from dflash_lab.acceptance.fixed_shapes import StaticDecoder, Workspace, why_not
from dflash_lab.acceptance.tree import build_tree, marginal_edges
from dflash_lab.errors import UnsupportedTarget
from dflash_lab.models.generate import generate
from dflash_lab.models.kv_cache import check_goes_on, growing_cache
from dflash_lab.models.spans import CHUNKED, FULL, SLIDING, Span

LENGTH, CHANGED = 40, 8  # tokens of the text, and the one that is changed in it
COUNT = 18  # tokens decoded: a short prompt with its answer is longer than a window too
FEW = 13  # the same again in a batch
SHORT, LONG = 6, 24  # prompt tokens
SPANS = {
    "mistral": [Span(SLIDING, WINDOW)] * 4,
    "qwen2": [Span()] * 2 + [Span(SLIDING, WINDOW)] * 2,
    "qwen3": [Span()] * 2 + [Span(SLIDING, WINDOW)] * 2,
    "qwen3_moe": [Span(SLIDING, WINDOW)] * 4,
    "gemma2": [Span(SLIDING, WINDOW), Span()] * 2,
    "gemma3_text": [Span(SLIDING, WINDOW), Span()] * 2,
    "gemma3n_text": [
        Span(SLIDING, WINDOW), Span(), Span(SLIDING, WINDOW, shared=True), Span(FULL, shared=True)
    ],
    "cohere2": [Span(SLIDING, WINDOW)] * 3 + [Span()],
    "gpt_oss": [Span(SLIDING, WINDOW), Span()] * 2,
    "gpt_neo": [Span(), Span(SLIDING, WINDOW)] * 2,
    "llama4_text": [Span(CHUNKED, WINDOW)] * 3 + [Span()],
    "qwen3_5_text": [Span("linear_attention")] * 3 + [Span()],
    "lfm2": [Span("conv"), Span()] * 2,
    "mamba": [Span("linear_attention")] * 4,
    "rwkv": [Span("own_state")] * 4,
    "llama": [Span()] * 4,
}  # fmt: skip


def _text(target):
    return torch.randint(3, 60, (LENGTH,), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def _moved(target, ids):
    """Change what one place brings into a layer; return for each layer the places whose output moves."""
    outputs, changed = [], []

    def change(module, args, kwargs):
        hidden = (args[0] if args else kwargs["hidden_states"]).clone()
        place = hidden[..., CHANGED, :]
        place += torch.randn(place.shape, generator=torch.Generator().manual_seed(1))
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    def keep(module, args, kwargs, output):
        changed.append(output[0] if isinstance(output, tuple) else output)

    hooks = [layer.register_forward_hook(keep, with_kwargs=True) for layer in target.layers]
    target.body(input_ids=ids[None], use_cache=False)
    outputs, changed[:] = list(changed), []
    for hook in hooks:
        hook.remove()
    moved = []
    for layer, output in zip(target.layers, outputs):
        with (
            layer.register_forward_pre_hook(change, with_kwargs=True),
            layer.register_forward_hook(keep, with_kwargs=True),
        ):
            target.body(input_ids=ids[None], use_cache=False)
        error = (changed.pop() - output).norm(dim=-1) / output.norm(dim=-1)
        moved.append((error.reshape(-1, LENGTH).amax(0) > 3e-6).nonzero()[:, 0].tolist())
    return moved


def check_spans(target, ids):
    for layer, (span, moved) in enumerate(zip(target.spans, _moved(target, ids), strict=True)):
        said = f"{target.config.model_type} layer {layer}: {span}, but {moved} moved"
        assert moved[0] == CHANGED, said
        if span.shared or span.kind in ("moe", "mlp"):
            assert len(moved) == 1, said
        elif span.kind == SLIDING:
            assert CHANGED + WINDOW - 4 < moved[-1] < CHANGED + WINDOW, said
        elif span.kind == CHUNKED:
            assert WINDOW - 3 < moved[-1] < WINDOW, said
        elif span.kind == FULL:
            assert moved[-1] > CHANGED + 1.5 * WINDOW, said
        elif span.recurrent:
            assert moved[-1] > CHANGED, said


def check_refused(target, call):
    with pytest.raises(UnsupportedTarget) as error:  # families come and go with versions: no recorded words
        call()
    assert target.name in str(error.value)


def refusal(check, target):
    """The refusal of a check, or None."""
    try:
        check(target)
    except UnsupportedTarget as error:
        assert target.name in str(error)
        return error
    return None


@torch.no_grad()
def _states(target, ids):
    return target.body(input_ids=ids[None], use_cache=False).last_hidden_state[0]


@torch.no_grad()
def check_rollback(target, ids):
    """Drafts of which two are right and two are wrong, over and over, on the way through the text."""
    truth, rows = _states(target, ids), []
    with TargetRun(target) as run:
        rows.append(run.step(ids[:SHORT], certain=True).normed)
        run.commit(SHORT)
        while run.length < len(ids):
            right = ids[run.length : run.length + 2]
            rows.append(run.step(torch.cat([right, right + 1])).normed[:2])
            run.commit(2)
    assert close(torch.cat(rows), truth, 1e-4), target.config.model_type


@torch.no_grad()
def check_tree(target, ids):
    """A tree's states, each as if its path alone had followed the prompt."""
    scores = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    tree = build_tree(marginal_edges(scores, 8), root=0, depth=3, budget=8)
    assert max(map(len, tree.leaf_paths())) < len(tree)
    for length in (SHORT, LONG):
        with TargetRun(target) as run:
            run.step(ids[:length], certain=True)
            run.commit(length)
            states = run.step_tree(ids[length : length + 1], tree).normed
        for path in tree.leaf_paths():
            tokens = torch.from_numpy(tree.tokens)[torch.tensor(path) - 1]
            truth = _states(target, torch.cat([ids[: length + 1], tokens]))[length:]
            assert close(states[[0, *path]], truth, 1e-4), target.config.model_type


def check_decoding(target, ids):
    """Plain decoding, fixed shapes, batches, trees, generation: right, or refused by name."""
    pair = prompts = [ids[:SHORT].tolist(), ids[:LONG].tolist()]
    count, few, end = COUNT, FEW, LENGTH
    if all(span == Span() for span in target.spans):  # there is no window to be shorter than, or to pass
        prompts, count, few, end = prompts[1:], 6, 4, SHORT + 8
    options, fewer = ({"max_new_tokens": number, "stop_ids": ()} for number in (count, few))
    if refusal(growing_cache, target):
        check_refused(target, lambda: plain_decode(target, prompts[0], **options))
        check_refused(target, lambda: generate(target, prompts, **options))
        assert refusal(check_tree_target, target) and refusal(Workspace, target)
        return
    if not refusal(check_goes_on, target):
        check_rollback(target, ids[:end])
    answers = [plain_decode(target, prompt, **options).tokens for prompt in prompts]
    for prompt, answer in zip(prompts, answers):
        states = _states(target, torch.tensor(prompt + answer[:-1]))[len(prompt) - 1 :]
        assert target.head.logits(states).argmax(-1).tolist() == answer, target.config.model_type
    assert generate(target, prompts, **fewer) == [answer[:few] for answer in answers]
    if why_not(target):
        assert refusal(Workspace, target)
    else:
        decoder = StaticDecoder(Workspace(target))
        assert [decoder(prompt, **options).tokens for prompt in prompts] == answers
    if target.is_hybrid or any(span != Span() for span in target.spans):
        assert refusal(check_tree_target, target)
    elif not refusal(check_tree_target, target):
        check_tree(target, ids)
    if not refusal(check_batch_target, target):
        options_of = {"tap_ids": (1, 2), "mask_token_id": 63, "vocab_size": target.vocab_size}
        batch = decode_batch(target, random_drafter(target, **options_of), pair, block_size=3, **fewer)
        assert [answer.tokens for answer in batch][-len(prompts) :] == [answer[:few] for answer in answers]


@pytest.mark.parametrize("family", SPANS)
def test_spans_are_what_the_layers_attend_to_and_decoding_follows_them(family, tmp_path):
    target = tiny_family(family, tmp_path)
    ids = _text(target)
    assert list(target.spans) == SPANS[family]
    check_spans(target, ids)
    check_decoding(target, ids)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_every_family_that_can_be_built_is_decoded_right_or_refused_by_name(part, tmp_path):
    wrong, decoded = [], 0
    for family in families()[part::4]:
        if family in SPANS:
            continue
        try:
            target = tiny_family(family, tmp_path / family)
            check_spans(target, _text(target))
            check_decoding(target, _text(target))
        except UnsupportedTarget as error:  # at loading, by name, before anything is decoded
            assert str(tmp_path / family) in str(error)
            continue
        except Exception as error:
            wrong.append(f"{family}: {type(error).__name__}: {error}")
        decoded += 1
    assert not wrong, "\n".join(wrong)
    assert decoded > 5


def test_a_cache_that_forgets_is_refused_before_a_token_is_decoded(tmp_path, monkeypatch):
    """As a version of Falcon Mamba did, without any error."""
    from dflash_lab.models import kv_cache

    target = tiny_family("qwen3", tmp_path)
    two = {"max_new_tokens": 2, "stop_ids": ()}
    monkeypatch.setattr(kv_cache, "_empty", lambda target: Forgetful())
    ways = (lambda: plain_decode(target, [1, 2], **two), lambda: generate(target, [[1, 2]], **two))
    for use in ways:
        with refused(UnsupportedTarget):
            use()


class Forgetful(DynamicCache):
    """Gives every forward its own keys and values alone."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return key_states, value_states

    def get_mask_sizes(self, query_length, layer_idx):
        return getattr(query_length, "shape", [query_length])[0], 0
