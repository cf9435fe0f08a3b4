"""The z-lab `config.json`: a flat Qwen3 configuration plus `dflash_config`, read by z-lab, vLLM, SGLang and
SpecForge.

Readers disagree on two spots, so both are written: `block_size` stands at the top level and inside
`dflash_config` (the inner one wins when read), the rotary base as `rope_theta` and inside `rope_parameters`.
Keys that mean nothing here are carried along in `extra`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from dflash_lab.drafter.config import FULL, SLIDING, DrafterConfig, released_tap_ids
from dflash_lab.drafter.fields import MOST_LAYERS, REMEDY, Fields, shown
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

_SPELLED = {  # our names -> the file's
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "tap_ids": "target_layer_ids",
}
_PLAIN = {  # fields that change what is computed, with the only value that is computed here
    "partial_rotary_factor": 1.0,
    "mlp_bias": False,
    "sample_from_anchor": False,
    "attn_logit_softcapping": None,
}
LARGEST_BLOCK = 1024  # slots; a drafter that was trained has tens


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


def from_json(values: Mapping[str, Any], where: str = "drafter config.json") -> DrafterConfig:
    """Read a z-lab `config.json`. `InputError` begins with `where` and names the field that is missing or
    damaged; an unsupported feature is `UnsupportedTarget`.
    """
    outer = Fields(where, values)
    inner = outer.part("dflash_config")
    fields = Fields(where, inner, values)
    if outer.flag("attention_bias", False):
        raise UnsupportedTarget(f"{where}: attention_bias is true; DFlash projections have no bias.")
    if (act := values.get("hidden_act", "silu")) != "silu":
        raise UnsupportedTarget(f"{where}: hidden_act is {shown(act)}; only 'silu' is known.")
    tables = outer.part("rope_parameters")
    own = Fields(where, tables).part(FULL) or tables  # some files have a table a kind of layer
    rope = {**outer.part("rope_scaling"), **own}
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise UnsupportedTarget(f"{where}: rope type is {shown(kind)}; only 'default' is known.")
    for name, plain in _PLAIN.items():
        found = next((one[name] for one in (inner, rope, values) if one.get(name) is not None), plain)
        if found != plain:
            raise UnsupportedTarget(f"{where}: {name} is {shown(found)}; only {shown(plain)} is known.")
    layers = fields.whole("num_hidden_layers", high=MOST_LAYERS)
    depth = fields.whole("num_target_layers", high=MOST_LAYERS)
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    taps = fields.wholes("target_layer_ids", low=0, high=depth - 1, optional=True)
    try:
        config = DrafterConfig(
            vocab_size=fields.whole("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.whole("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=fields.whole("num_key_value_heads", heads),
            head_dim=fields.whole("head_dim", hidden // heads),
            block_size=fields.whole("block_size", 16, low=2, high=LARGEST_BLOCK),
            mask_token_id=fields.whole("mask_token_id", low=0),
            tap_ids=tuple(taps or released_tap_ids(depth, layers)),
            num_target_layers=depth,
            layer_types=tuple(outer.words("layer_types")),
            sliding_window=outer.whole_or_none("sliding_window"),
            is_causal=outer.flag("is_causal", None),
            rope_theta=Fields(where, rope, values).number("rope_theta", 1e6),
            rms_norm_eps=outer.number("rms_norm_eps", 1e-6),
            max_position_embeddings=outer.whole("max_position_embeddings", 32768),
            initializer_range=outer.number("initializer_range", 0.02, positive=False),
            input_embedding_scale=fields.number("input_embedding_scale", 1.0),
            output_multiplier=fields.number("output_multiplier", 1.0),
            final_logit_softcapping=fields.number("final_logit_softcapping", 0.0, positive=False),
            conv_kernel_size=fields.whole("conv_kernel_size", 0, low=0),
            conv_group_size=fields.whole("conv_group_size", 0, low=0),
            selector_rank=fields.whole("selector_rank", 0, low=0),
            selector_top_k=fields.whole("selector_top_k", 0, low=0),
        )
    except InputError as error:
        if str(error).startswith(where):
            raise
        raise InputError(f"{where}: {_spelled(str(error))} {REMEDY}") from error
    try:
        json.dumps(values, allow_nan=False)  # Python reads what it could not write back
    except ValueError as error:
        raise InputError(f"{where}: holds NaN or Infinity, which JSON cannot. {REMEDY}") from error
    known = {*to_json(config), *_READ_ONLY}
    return dataclasses.replace(config, extra={n: value for n, value in values.items() if n not in known})


def _spelled(message: str) -> str:
    """What `DrafterConfig` says of its fields, with the names that the file has for them."""
    told = message.removeprefix("drafter config: ")
    return re.sub("|".join(_SPELLED), lambda found: _SPELLED[found[0]], told)
