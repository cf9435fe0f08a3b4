"""The z-lab `config.json`: a flat Qwen3 configuration plus `dflash_config`, read by z-lab, vLLM, SGLang and
SpecForge.

Readers disagree on two spots, so both are written: `block_size` stands at the top level and inside
`dflash_config` (the inner one wins when read), the rotary base as `rope_theta` and inside `rope_parameters`.
Keys that mean nothing here are carried along in `extra`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dflash_lab.drafter.config import SLIDING, DrafterConfig, released_tap_ids, rope_theta
from dflash_lab.errors import InputError, UnsupportedTarget

ARCHITECTURE, ARCHITECTURE_2 = "DFlashDraftModel", "DFlash2DraftModel"
_SECOND = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_READ_ONLY: tuple[str, ...] = (
    "torch_dtype",
    "transformers_version",
    "mask_token_id",
    "target_layer_ids",
    "input_embedding_scale",
)
_READ_ONLY += ("output_multiplier", "final_logit_softcapping", "is_causal", *_SECOND)


def to_json(config: DrafterConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """Return the z-lab `config.json` as plain values. `dtype` is the weights' type by torch name."""
    inner: dict[str, Any] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.tap_ids),
    }
    if config.input_embedding_scale != 1.0:
        inner["input_embedding_scale"] = config.input_embedding_scale
    if config.output_multiplier != 1.0:
        inner["output_multiplier"] = config.output_multiplier
    if config.final_logit_softcapping > 0:
        inner["final_logit_softcapping"] = config.final_logit_softcapping
    if config.is_second:
        inner |= {name: getattr(config, name) for name in _SECOND}
    architecture = ARCHITECTURE_2 if config.is_second else ARCHITECTURE
    values: dict[str, Any] = {
        "architectures": [architecture],
        "auto_map": {"AutoModel": f"dflash.{architecture}"},
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "use_sliding_window": SLIDING in config.layer_types,
        "max_window_layers": config.num_layers,
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": dtype,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "dflash_config": inner,
    }
    if config.is_causal is not None:
        values["is_causal"] = config.is_causal
    return {**config.extra, **values}


def from_json(values: Mapping[str, Any]) -> DrafterConfig:
    """Read a z-lab `config.json`. `InputError` names a missing key; an unsupported feature is
    `UnsupportedTarget`.
    """
    inner = values.get("dflash_config") or {}

    def read(name: str, default: Any = None) -> Any:
        return inner.get(name, values.get(name, default))

    def must(name: str) -> Any:
        value = read(name)
        if value is None:
            raise InputError(f"drafter config.json: {name!r} is missing; is this a DFlash checkpoint?")
        return value

    if values.get("attention_bias"):
        raise UnsupportedTarget(
            "drafter config.json: attention_bias is true; DFlash projections have no bias."
        )
    if values.get("hidden_act", "silu") != "silu":
        raise UnsupportedTarget(
            f"drafter config.json: hidden_act {values['hidden_act']!r}; only 'silu' is known."
        )
    scaling = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    if (kind := scaling.get("rope_type", scaling.get("type", "default"))) != "default":
        raise UnsupportedTarget(f"drafter config.json: rope type {kind!r}; only 'default' is known.")
    layers = must("num_hidden_layers")
    depth = must("num_target_layers")
    config = DrafterConfig(
        vocab_size=must("vocab_size"),
        hidden_size=must("hidden_size"),
        intermediate_size=must("intermediate_size"),
        num_layers=layers,
        num_heads=must("num_attention_heads"),
        num_kv_heads=read("num_key_value_heads") or must("num_attention_heads"),
        head_dim=read("head_dim") or must("hidden_size") // must("num_attention_heads"),
        block_size=int(read("block_size", 16)),
        mask_token_id=int(must("mask_token_id")),
        tap_ids=tuple(read("target_layer_ids") or released_tap_ids(depth, layers)),
        num_target_layers=depth,
        layer_types=tuple(values.get("layer_types") or ()),
        sliding_window=values.get("sliding_window"),
        is_causal=values.get("is_causal"),
        rope_theta=rope_theta(values),
        rms_norm_eps=values.get("rms_norm_eps", 1e-6),
        max_position_embeddings=values.get("max_position_embeddings", 32768),
        initializer_range=values.get("initializer_range", 0.02),
        input_embedding_scale=float(read("input_embedding_scale", 1.0)),
        output_multiplier=float(read("output_multiplier", 1.0)),
        final_logit_softcapping=float(read("final_logit_softcapping") or 0.0),
        conv_kernel_size=int(read("conv_kernel_size") or 0),
        conv_group_size=int(read("conv_group_size") or 0),
        selector_rank=int(read("selector_rank") or 0),
        selector_top_k=int(read("selector_top_k") or 0),
    )
    known = {*to_json(config), *_READ_ONLY}
    return dataclasses.replace(config, extra={n: value for n, value in values.items() if n not in known})
