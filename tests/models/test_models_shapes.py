"""Random targets: right shape, seeded weights of a sane scale, named shapes found from any folder."""

from __future__ import annotations

import json

import pytest
import torch
from support.tiny_targets import tiny_config
from support.wording import refused
from test_models_head import assert_same

from dflash_lab.errors import InputError, UnsupportedTarget
from dflash_lab.models import source
from dflash_lab.models.load import load_head, load_target
from dflash_lab.models.source import load_config, load_tokenizer


@pytest.fixture
def shape(tmp_path):
    def write(kind, **changes):
        path = tmp_path / f"{kind}.json"
        path.write_text(json.dumps({**tiny_config(kind, **changes).to_dict()}))
        return f"random:{path}"

    return write


def parameters(name):
    target = load_target(name, device="meta")
    body = sum(p.numel() for p in target.body.parameters())
    return body + (0 if target.head_weight is target.embedding.weight else target.head_weight.numel())


@pytest.mark.parametrize(
    ("name", "billions", "layers", "hidden"),
    [
        ("qwen3.6-27b", 26.896, 64, 5120),
        ("qwen3-8b", 8.191, 36, 4096),
        ("qwen3-0.6b", 0.596, 28, 1024),
        ("smollm2-135m", 0.1345, 30, 576),
    ],
)
def test_named_shapes_have_the_size_of_the_model(name, billions, layers, hidden, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(f"random:{name}")
    assert (config.num_hidden_layers, config.hidden_size) == (layers, hidden)
    assert parameters(f"random:{name}") / 1e9 == pytest.approx(billions, rel=1e-3)


def test_the_27b_shape_is_hybrid():
    config = load_config("random:qwen3.6-27b")
    assert config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 16
    linear = (config.linear_num_key_heads, config.linear_num_value_heads, config.linear_key_head_dim)
    assert linear == (16, 48, 128)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (24, 4, 256)
    assert (config.intermediate_size, config.vocab_size) == (17408, 248320)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5_moe", "qwen3_5_wrapped"])
def test_random_weights_are_seeded_and_run(shape, kind):
    name = shape(kind)
    a, b, c = (load_target(name, seed=seed, dtype="float32") for seed in (7, 7, 8))
    named = dict(a.body.named_parameters())
    assert all(torch.equal(v, named[k]) for k, v in b.body.named_parameters())
    assert not any(torch.equal(v, named[k]) for k, v in c.body.named_parameters() if v.ndim > 1)
    first, second = (dict(a.layers[i].named_parameters()) for i in (0, 1))
    assert not any(torch.equal(v, second[k]) for k, v in first.items() if v.ndim > 1)
    ids = torch.randint(0, 256, (2, 70), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        states = a.body(input_ids=ids, use_cache=False).last_hidden_state
        assert torch.isfinite(a.head.logits(states)).all()
        # Built on the meta device, a body has no rotary frequencies until they are computed again.
        reference = type(a.body)(a.config).eval()
        reference.load_state_dict(a.body.state_dict())
        assert torch.equal(reference(input_ids=ids, use_cache=False).last_hidden_state, states)


def test_scale_is_the_class_s_own(shape):
    target = load_target(shape("qwen3_5", initializer_range=0.02), dtype="float32")
    assert float(target.embedding.weight.std()) == pytest.approx(0.02, rel=0.05)
    assert float(target.final_norm.weight.abs().max()) == 0  # (1 + w)
    assert torch.isfinite(target.layers[0].linear_attn.A_log).all()
    assert (load_target(shape("llama"), dtype="float32").final_norm.weight == 1).all()


@pytest.mark.parametrize("kind", ["llama", "qwen3_5_wrapped"])
def test_the_head_alone_and_a_cut_target_have_the_same_weights(shape, kind):
    name = shape(kind)
    whole = load_target(name, seed=3)
    assert_same(load_head(name, seed=3), whole.head)
    cut = load_target(name, seed=3, last_layer=2, with_head=False)
    expected = dict(whole.body.named_parameters())
    assert all(torch.equal(v, expected[k]) for k, v in cut.body.named_parameters())
    assert not torch.equal(load_head(name, seed=4).weight, whole.head_weight)


def test_global_random_state_is_left_alone(shape):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_target(shape("llama"))
    assert torch.equal(torch.rand(3), expected)


def test_dtype_needs_no_fp32_copy(shape):
    target = load_target(shape("qwen3_moe"), dtype="bfloat16")
    assert {p.dtype for p in target.body.parameters()} == {torch.bfloat16}
    assert all(b.dtype == torch.float32 for b in target.body.buffers())  # rotary frequencies stay exact
    assert load_target("random:qwen3.6-27b", device="meta").dtype == torch.bfloat16


@pytest.mark.parametrize("text", ["{", "{}", '{"model_type": "no_such_thing"}'])
def test_a_config_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with refused(InputError):
        load_config(f"random:{tmp_path}")


@pytest.mark.parametrize(("load", "name"), [(load_config, "qwen36-27b"), (load_tokenizer, "qwen3-8b")])
def test_unknown_shapes_and_tokenizers_of_shapes_are_refused(load, name):
    with refused(InputError):
        load(f"random:{name}")


def test_computed_buffers_are_refused_rather_than_left_empty(tmp_path):
    gemma = tiny_config("llama").to_dict() | {"model_type": "gemma3_text"}
    gemma.pop("rope_parameters")
    path = tmp_path / "gemma.json"
    path.write_text(json.dumps(gemma))
    with refused(UnsupportedTarget):
        load_target(f"random:{path}")


def test_an_installed_package_looks_beside_its_prefix(monkeypatch, tmp_path):
    monkeypatch.setattr(source, "__file__", str(tmp_path / "site-packages/dflash_lab/models/source.py"))
    monkeypatch.setattr(source.sysconfig, "get_path", lambda name: str(tmp_path))
    installed = tmp_path / "share" / "dflash-lab" / "targets"
    installed.mkdir(parents=True)
    (installed / "mine.json").write_text(json.dumps(tiny_config("llama").to_dict()))
    assert source.shape_names() == ["mine"]
    assert load_config("random:mine").num_hidden_layers == 8
