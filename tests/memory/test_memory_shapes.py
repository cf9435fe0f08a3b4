"""Parameter counts from a config against real modules, and refusal by name."""

import pytest
import torch
from cases import SHAPE
from support.tiny_targets import tiny_config
from support.wording import refused
from transformers import AutoConfig, AutoModelForCausalLM

from dflash_lab.errors import InputError, UnsupportedTarget
from dflash_lab.memory.shapes import LINEAR, dtype_bytes, target_shape

BIG = {"num_hidden_layers": 2}


@pytest.mark.parametrize(
    "config",
    [tiny_config(kind) for kind in ("llama", "qwen3", "qwen3_5", "qwen3_moe", "qwen3_5_moe")]
    + [AutoConfig.for_model(kind, **BIG) for kind in ("mistral", "qwen2", "mixtral")]
    + [
        AutoConfig.for_model("llama", attention_bias=True, **BIG),
        AutoConfig.for_model("qwen3_next", num_hidden_layers=4),
        tiny_config("qwen3_moe", mlp_only_layers=[1], decoder_sparse_step=2),
    ],
    ids=lambda config: config.model_type,
)
def test_parameters_equal_the_real_modules(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = target_shape(config)
    assert shape.body_parameters() + shape.head_parameters() == sum(p.numel() for p in model.parameters())


def test_the_27b_shape_has_its_published_size():
    assert SHAPE.layers == 64 and SHAPE.layer_types.count(LINEAR) == 48
    assert (SHAPE.body_parameters() + SHAPE.head_parameters()) / 1e9 == pytest.approx(26.90, abs=0.01)
    # Stopping after layer 61 spares two layers' work of 64.
    assert 1 - SHAPE.flops_per_token(62) / SHAPE.flops_per_token() == pytest.approx(2 / 64, abs=0.005)
    assert target_shape(tiny_config("qwen3_5_wrapped")) == target_shape(tiny_config("qwen3_5"))


def test_unknown_structures_are_refused_by_name():
    chunked = tiny_config("qwen3")
    chunked.layer_types = ["full_attention"] * 7 + ["chunked_attention"]
    configs = [AutoConfig.for_model("gemma3_text"), chunked]
    for options in (
        {"hidden_act": "gelu"},
        {"mlp_bias": True},
        {"quantization_config": {"quant_method": "fp8"}},
    ):
        configs.append(AutoConfig.for_model("llama", **options))
    for config in configs:
        with refused(UnsupportedTarget):
            target_shape(config)
    with refused(InputError):
        dtype_bytes("float8")
