"""Taps: the layer-id rule, one tensor a layer, nothing left behind (conformance tests 1 and 2)."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from support.tiny_targets import KINDS, build_tiny
from support.wording import refused
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from dflash_lab.errors import InputError
from dflash_lab.models.hooks import TapError, Taps, check_tap_ids, default_tap_ids
from dflash_lab.models.load import load_target

IDS = [1, 4, 5]


def hooks_of(target):
    return sum(len(layer._forward_hooks) for layer in target.layers)


@pytest.mark.parametrize(
    ("layers", "count", "expected"),
    [
        (64, 5, [1, 16, 31, 46, 61]),
        (36, 5, [1, 9, 17, 25, 33]),
        (40, 8, [1, 6, 11, 16, 22, 27, 32, 37]),
        (30, 1, [15]),
        (61, 1, [30]),
    ],
)
def test_default_ids_follow_the_dflash_rule(layers, count, expected):
    assert default_tap_ids(layers, count) == expected


@pytest.mark.parametrize("count", [6, 0])
def test_default_ids_that_do_not_fit_are_refused(count):
    assert default_tap_ids(8, 5) == [1, 2, 3, 4, 5]
    with refused(InputError):
        default_tap_ids(8, count)


@pytest.mark.parametrize("model", [None, "llama", torch.nn.Linear(2, 2)], ids=["none", "name", "module"])
def test_taps_of_what_is_no_model_are_refused(model):
    with refused(InputError):
        Taps(model)


@pytest.mark.parametrize("wrong", [[], [8], [-1], [3, 2], [2, 2], [1.5], [True], "12", ["a"]], ids=str)
def test_layers_that_are_not_there_or_no_whole_numbers_are_refused(wrong):
    with refused(InputError):
        check_tap_ids(wrong, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_taps_equal_hidden_states_and_the_last_is_before_the_norm(tiny_target, kind):
    target = load_target(str(tiny_target(kind)))
    ids = torch.randint(0, 256, (2, 70), generator=torch.Generator().manual_seed(1))
    last = target.num_layers - 1
    with torch.no_grad(), Taps(target, [*IDS, last]) as taps:
        out = target.body(input_ids=ids, use_cache=False, output_hidden_states=True)
        states = taps.take()
    for k, state in zip(IDS, states[:-1], strict=True):
        assert torch.equal(state, out.hidden_states[k + 1])
    assert not torch.allclose(states[-1], out.hidden_states[last + 1], rtol=1e-2)
    assert torch.equal(target.final_norm(states[-1]), out.last_hidden_state)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "qwen3_5_wrapped"])
def test_taps_take_a_model_of_transformers_as_it_is(tiny_target, kind):
    folder = tiny_target(kind)
    config = AutoConfig.from_pretrained(folder)
    wrapped = config is not config.get_text_config()
    loads = AutoModelForImageTextToText if wrapped else AutoModelForCausalLM
    ids = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(1))
    model, target = loads.from_pretrained(folder).eval(), load_target(str(folder))
    with torch.no_grad(), Taps(model) as taps, Taps(target) as wanted:
        model(input_ids=ids, use_cache=False)
        target.body(input_ids=ids, use_cache=False)
        assert taps.ids == wanted.ids == default_tap_ids(target.num_layers)
        for state, expected in zip(taps.take(), wanted.take(), strict=True):
            assert torch.allclose(state, expected, atol=1e-5)


def test_hooks_go_after_an_exception_and_leave_no_tensor(tiny_target):
    target = load_target(str(tiny_target("llama")))
    before = hooks_of(target)
    seen: list[weakref.ref] = []

    def explode(module, inputs, output):
        raise RuntimeError("in the middle")

    handle = target.layers[5].register_forward_hook(explode)
    taps = Taps(target, [1, 6])
    with pytest.raises(RuntimeError, match="in the middle"), taps:
        watch = target.layers[1].register_forward_hook(lambda m, i, o: seen.append(weakref.ref(o)))
        target.body(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
    watch.remove()
    handle.remove()
    gc.collect()
    assert hooks_of(target) == before
    assert len(seen) == 1 and seen[0]() is None
    with torch.no_grad(), taps:  # usable again, and without a tensor of the failed forward
        target.body(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
        assert [s.shape for s in taps.take()] == [(1, 3, 48), (1, 3, 48)]


def test_anything_but_one_tensor_a_layer_is_an_error(tiny_target):
    target = load_target(str(tiny_target("llama")))
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad(), Taps(target, [1, 2]) as taps:
        with refused(TapError):
            taps.take()
        target.body(input_ids=ids, use_cache=False)
        target.body(input_ids=ids, use_cache=False)
        with refused(TapError):
            taps.take()
        target.body(input_ids=ids, use_cache=False)
        assert len(taps.take()) == 2
        with refused(TapError):
            taps.__enter__()
    assert hooks_of(target) == 0 or all(
        "keep" not in str(h) for h in target.layers[1]._forward_hooks.values()
    )


def test_taps_set_before_compiling_are_seen_by_the_compiled_body(tmp_path):
    target = load_target(str(build_tiny("llama", tmp_path, num_hidden_layers=3)))
    ids = torch.randint(0, 256, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), Taps(target, [1, 2]) as taps:
        target.body(input_ids=ids, use_cache=False)
        plain = taps.take()
        compiled = torch.compile(target.body, backend="eager")
        compiled(input_ids=ids, use_cache=False)
        assert all(torch.equal(a, b) for a, b in zip(plain, taps.take(), strict=True))
    torch.compiler.reset()
