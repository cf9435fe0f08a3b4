"""Where things are in a causal language model: layers, embedding, final norm, head; and which models are
refused.

A target is seen as `body` (token ids -> output of the final norm) plus a head matrix. Only public accessors
and the module tree are used, never a list of model names, so that a new architecture works on the day
transformers has it. What cannot be found for sure is refused by name: a wrong norm or layer would cost
acceptance silently.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import MODEL_MAPPING, AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from dflash_lab.errors import InputError, UnsupportedTarget

# Config fields by which models scale or cap their logits after the head matrix. The losses and the decoder
# compute hidden @ weight.T and no more.
_LOGIT_FIELD = re.compile(
    r"(final_|output_)?(logits?|lm_head)_(scale|scaling|soft_?cap(ping)?|multiplier)|output_multiplier"
)
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_CAUSAL_ENDINGS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ForImageTextToText")


@dataclass(frozen=True)
class Parts:
    """The pieces of a body, found once: modules, and the names of their weights inside the body."""

    layers: nn.ModuleList
    embedding: nn.Embedding
    norm: nn.Module
    embedding_name: str
    norm_name: str


def check_causal(config: PretrainedConfig, name: str) -> None:
    """Refuse what is not a causal language model whose logits are hidden @ head.T. `config`: as read, wrapper
    included.
    """
    text = config.get_text_config()
    architectures = getattr(config, "architectures", None) or []
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "is_encoder_decoder", False):
        raise UnsupportedTarget(
            f"{name}: {config.model_type} is an encoder-decoder; a target must be a causal decoder."
        )
    if architectures and not any(a.endswith(_CAUSAL_ENDINGS) for a in architectures):
        raise UnsupportedTarget(
            f"{name}: {architectures[0]} is not a causal language model (expected a class that ends in "
            f"{', '.join(_CAUSAL_ENDINGS)}). Give a checkpoint that was saved with its language-model head."
        )
    if getattr(text, "is_causal", True) is False or getattr(text, "use_bidirectional_attention", None) in (
        True,
        "all",
    ):
        raise UnsupportedTarget(
            f"{name}: {text.model_type} attends to later tokens; a target must be causal."
        )
    for field, value in text.to_dict().items():
        if _LOGIT_FIELD.fullmatch(field) and value not in (None, 0, 1):
            raise UnsupportedTarget(
                f"{name}: {text.model_type} has {field}={value}, which changes its logits after the head. "
                "It would need that step in TargetHead, the fused loss and the decoder."
            )


def cut_config(config: PretrainedConfig, last_layer: int | None) -> PretrainedConfig:
    """Return a copy of a text config that stops after `last_layer` (0-based; None keeps all)."""
    config = copy.deepcopy(config)
    if last_layer is None:
        return config
    if not 0 <= last_layer < config.num_hidden_layers:
        raise InputError(f"last_layer={last_layer}: the target has layers 0..{config.num_hidden_layers - 1}.")
    whole, config.num_hidden_layers = config.num_hidden_layers, last_layer + 1
    if len(getattr(config, "layer_types", None) or ()) > last_layer + 1:
        config.layer_types = config.layer_types[: last_layer + 1]
    if shared := getattr(config, "num_kv_shared_layers", 0):  # the last ones; they are counted from the end
        config.num_kv_shared_layers = max(0, shared - (whole - config.num_hidden_layers))
    return config


def skeleton(
    config: PretrainedConfig, *, name: str, dtype: torch.dtype, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Build the body of a text config on the meta device: names and shapes without memory."""
    try:
        with torch.device("meta"):
            return AutoModel.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if type(config) in MODEL_MAPPING:  # there is such a model, but it does not take these settings
            raise InputError(
                f"{name}: {error} Another attention can be asked for, such as attn='eager'."
            ) from error
        raise UnsupportedTarget(
            f"{name}: transformers has no text model for model_type {config.model_type!r} ({error}). "
            "It would need one, or trust_remote_code=True if it brings code of its own that you trust."
        ) from error


def find_parts(body: PreTrainedModel, config: PretrainedConfig, name: str) -> Parts:
    """Find decoder layers, embedding and final norm of a body, or raise `UnsupportedTarget` saying what is
    missing.
    """

    def missing(what: str) -> UnsupportedTarget:
        return UnsupportedTarget(f"{name}: {type(body).__name__} is not understood: {what}.")

    decoder = body.get_decoder()
    names = {id(module): child for child, module in body.named_modules()}
    lists = [
        m for m in decoder.children() if isinstance(m, nn.ModuleList) and len(m) == config.num_hidden_layers
    ]
    if len(lists) != 1:
        raise missing(
            f"expected one list of {config.num_hidden_layers} decoder layers in it, found {len(lists)}"
        )
    embedding = body.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding) or embedding.weight.shape[1] != config.hidden_size:
        raise missing(
            f"expected an input embedding of width {config.hidden_size} (the drafter works on that width), "
            f"found {type(embedding).__name__}"
        )
    norms = [
        module
        for module in decoder.children()
        if "norm" in type(module).__name__.lower()
        and getattr(module, "weight", None) is not None
        and module.weight.shape == (config.hidden_size,)
    ]
    if len(norms) > 1:  # a norm of the embeddings beside the final one
        norms = [module for module in norms if "embed" not in names[id(module)]]
    if len(norms) != 1:
        raise missing(
            f"expected one final norm of width {config.hidden_size} beside the layers, found {len(norms)}"
        )
    return Parts(lists[0], embedding, norms[0], names[id(embedding)], names[id(norms[0])])


def head_of(config: PretrainedConfig, *, name: str, trust_remote_code: bool = False) -> str:
    """Return the name of the head module in the causal model of a text config, usually ``lm_head``."""
    try:
        with torch.device("meta"):
            causal: Any = AutoModelForCausalLM.from_config(
                cut_config(config, 0), trust_remote_code=trust_remote_code
            )
    except ValueError:
        return "lm_head"  # a text model that exists only inside a multimodal wrapper (qwen3_vl_text)
    head = causal.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise UnsupportedTarget(
            f"{name}: the head of {type(causal).__name__} is {head!r}. It would need to be one matrix "
            "without bias: the losses compute hidden @ weight.T and no more."
        )
    return next(child for child, module in causal.named_modules() if module is head)


def has_experts(config: PretrainedConfig) -> bool:
    """Tell whether layers route tokens to experts, so that shapes inside them follow the data."""
    return any(getattr(config, name, 0) for name in _EXPERT_COUNTS)
