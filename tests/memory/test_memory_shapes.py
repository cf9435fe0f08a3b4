"""Parameter counts from a config against real modules, and refusal by name."""

import pytest
import torch
from support.tiny_targets import tiny_config
from support.wording import refused
from transformers import AutoConfig, AutoModelForCausalLM

from dflash_lab.errors import InputError, UnsupportedTarget
from dflash_lab.memory.shapes import LINEAR, dtype_bytes, target_shape
from dflash_lab.models.source import shape_config

BIG = {"num_hidden_layers": 2}


@pytest.mark.parametrize(
    "config",
    [tiny_config(kind) for kind in ("llama", "qwen3", "qwen3_5", "qwen3_moe", "qwen3_5_moe")]
    + [AutoConfig.for_model(kind, **BIG) for kind in ("mistral", "qwen2", "mixtral")]
    + [
        AutoConfig.for_model("llama", attention_bias=True, **BIG),
        AutoConfig.for_model("qwen3_next", num_hidden_layers=4),
    ]
    + [tiny_config("qwen3_moe", mlp_only_layers=[1], decoder_sparse_step=2)],
    ids=lambda config: config.model_type,
)
def test_parameters_equal_the_real_modules(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = target_shape(config)
    assert shape.body_parameters() + shape.head_parameters() == sum(p.numel() for p in model.parameters())


def test_the_27b_shape_has_its_published_size():
    shape = target_shape(shape_config("qwen3.6-27b"))
    assert shape.layers == 64 and shape.layer_types.count(LINEAR) == 48
    assert (shape.body_parameters() + shape.head_parameters()) / 1e9 == pytest.approx(26.90, abs=0.01)
    # Stopping after layer 61 spares two layers' work of 64.
    assert 1 - shape.flops_per_token(62) / shape.flops_per_token() == pytest.approx(2 / 64, abs=0.005)


def test_a_wrapper_is_read_through_its_text_config():
    assert target_shape(tiny_config("qwen3_5_wrapped")) == target_shape(tiny_config("qwen3_5"))


def test_unknown_structures_are_refused_by_name():
    with refused(UnsupportedTarget):
        target_shape(AutoConfig.for_model("gemma3_text"))
    config = tiny_config("qwen3")
    config.layer_types = ["full_attention"] * 7 + ["chunked_attention"]
    with refused(UnsupportedTarget):
        target_shape(config)
    for options, name in (
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ):
        with refused(UnsupportedTarget):
            target_shape(AutoConfig.for_model("llama", **options))
    with refused(InputError):
        dtype_bytes("float8")
