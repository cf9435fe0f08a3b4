"""Every causal family that the installed transformers can build, tiny: its config shrunk by the names of its
fields, with a window (or chunk) of 16 tokens where it has one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dflash_lab.models.load import Target, load_target

WINDOW = 16
VOCAB_SIZE = 64
_MOST_PARAMETERS = 8_000_000
_SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size"), WINDOW),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 1024),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_head_dim"), 16),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_d_head"), 8),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "index_n_heads"), 2),
    **dict.fromkeys(("num_experts_per_tok", "laurel_rank"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "linear_num_value_heads": 4,
    "index_topk": 4,
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Looked at one by one, for transformers 5.24.
_LOOP = "its scan is a loop in Python, which takes most of a minute"
_LARGE = "more than 8 million parameters whatever its sizes"
_ALONE = "no text model of its own: transformers builds it inside a wrapper"
_SEQUENCE = "part of an encoder-decoder or no decoder by default, which loading refuses"
_RULES = "rules of its own for sizes that a generic small config breaks"
NOT_TINY = {
    **dict.fromkeys(("bamba", "granitemoehybrid", "kimi_linear", "mamba2", "nemotron_h"), _LOOP),
    **dict.fromkeys(("blt", "git", "longcat_flash", "phi4_multimodal", "roc_bert", "xlm"), _LARGE),
    **dict.fromkeys(("inkling2_text", "inkling2_loop_text"), _LARGE),
    **dict.fromkeys(("emu3", "mllama", "musicgen", "musicgen_melody"), _ALONE),
    **dict.fromkeys(("blenderbot", "plbart", "prophetnet", "reformer", "whisper", "xlnet"), _SEQUENCE),
    **dict.fromkeys(("cohere_compass_text", "dbrx", "dots1", "dots3_note", "dots3_note_text"), _RULES),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant", "qwen4_exp", "qwen4_exp_text"), _RULES),
    **dict.fromkeys(("zamba", "zamba2"), _RULES),
}
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_MIXED = [_SLIDING, _FULL, _SLIDING, _FULL]
_SHARING: dict[str, Any] = {"layer_types": _MIXED, "num_kv_shared_layers": 2}
_TOP_LAYERS: dict[str, Any] = {"use_sliding_window": True, "max_window_layers": 2}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_n_groups": 1}
# What a family needs beside its sizes, by model_type; None takes a field away. Logits that are scaled or
# capped would be refused at loading, for a reason that is not the layers'.
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "cohere2": {"logit_scale": 1.0},
    "falcon": {"head_dim": None},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "gemma2": {"final_logit_softcapping": 0.0},
    "gemma3_text": {"sliding_window_pattern": 2},
    "gemma3n_text": {
        **_SHARING,
        "final_logit_softcapping": 0.0,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {**_SHARING, "head_dim": None},
    "gemma4_unified_text": {**_SHARING, "head_dim": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {**_MAMBA, "layer_types": [_LINEAR, _FULL] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": [_LINEAR, _FULL] * 2},
    "lfm2": {"layer_types": ["conv", _FULL] * 2},
    "lfm2_moe": {"layer_types": ["conv", _FULL] * 2},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "ministral": {"layer_types": _MIXED},
    "qwen2": _TOP_LAYERS,
    "qwen2_moe": _TOP_LAYERS,
    "qwen3": _TOP_LAYERS,
    "qwen3_moe": {"use_sliding_window": True},
    "smollm3": {"use_sliding_window": True, "layer_types": _MIXED},
    "zaya": {"num_experts_per_tok": 1},
}


def families() -> list[str]:
    """Return the causal language models of transformers, one of those that share a text config."""
    found: dict[type, str] = {}
    for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, key=len, reverse=True):  # a wrapper's is shorter
        if name not in NOT_TINY:
            found.setdefault(type(AutoConfig.for_model(name).get_text_config()), name)
    return sorted(found.values())


def tiny_family(model_type: str, folder: Path | str, **overrides: Any) -> Target:
    """Write a tiny model of a family into `folder` and load it, in fp32; `overrides` replace config fields.

    Raises `ValueError` for one that stays large, and whatever a config or class raises that cannot be small.
    """
    text = AutoConfig.for_model(model_type).get_text_config()
    known = text.to_dict()
    fields = {name: value for name, value in _SMALL.items() if name in known}
    if "kv_lora_rank" in known:  # compressed keys: heads are not grouped, and their width is a sum
        fields = {**fields, "num_key_value_heads": 4, "head_dim": None}
    fields |= {**_OWN.get(text.model_type, {}), **overrides}
    absent = {name for name in ("head_dim", "num_key_value_heads") if fields.get(name, 0) is None}
    config = type(text)(**{name: value for name, value in fields.items() if name not in absent})
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"{size} parameters, however small its sizes")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.ndim == 1:
                parameter.data += 0.2 * torch.randn_like(parameter)
            elif parameter.ndim > 1 and float(parameter.detach().std()) < 0.1:
                parameter.data = 0.15 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return load_target(str(folder), dtype="float32")
