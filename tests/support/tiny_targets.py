"""Tiny targets on disk: a model of each supported kind with random weights, a byte tokenizer and a ChatML
template.

Weights use `initializer_range=0.3`: with the usual 0.02 the layer outputs are so small that a wrong mask or a
wrong layer still passes an absolute tolerance. Judge by relative L2 error, never by an absolute one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers import AutoModelForMultimodalLM as AutoModelForWrapped

KINDS = ("llama", "qwen3", "qwen3_5", "qwen3_moe", "qwen3_5_moe", "qwen3_5_wrapped")
VOCAB_SIZE = 288  # 256 bytes + 4 special tokens + unused rows, one of which can be a drafter's mask token
NUM_LAYERS = 8

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The same with a mode without thinking, which opens answers otherwise.
THINKING = CHATML.removesuffix("{% endif %}") + (
    "{% if not enable_thinking %}{{ '[no thoughts]\n' }}{% endif %}{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,
    "max_position_embeddings": 4096,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": 256,
    "tie_word_embeddings": False,
}
_HYBRID: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_KIND: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 16}),
    "qwen3": ("qwen3", {}),
    "qwen3_5": ("qwen3_5_text", _HYBRID),
    "qwen3_moe": ("qwen3_moe", {**_MOE, "mlp_only_layers": [], "decoder_sparse_step": 1}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**_HYBRID, **_MOE, "shared_expert_intermediate_size": 32}),
}
_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 48,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "initializer_range": 0.3,
}


def tiny_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Build a byte tokenizer: 256 ids for the bytes (not in byte order), <|pad|> 256, <|im_start|> 257,
    <|im_end|> 258 (eos).
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text in ("<|pad|>", "<|im_start|>", "<|im_end|>")
        ]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|pad|>", eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = template
    return tokenizer


def tiny_config(kind: str, **overrides: Any) -> Any:
    """Return the config of a tiny target; `overrides` replace text-config fields."""
    if kind == "qwen3_5_wrapped":
        text = tiny_config("qwen3_5", **overrides)
        # Token ids of pictures lie inside the tiny vocabulary, as the real ones do.
        return AutoConfig.for_model(
            "qwen3_5",
            text_config=text.to_dict(),
            vision_config=_VISION,
            image_token_id=270,
            video_token_id=271,
            vision_start_token_id=272,
            vision_end_token_id=273,
            tie_word_embeddings=text.tie_word_embeddings,
        )
    model_type, extra = _KIND[kind]
    return AutoConfig.for_model(model_type, **{**_COMMON, **extra, **overrides})


def build_tiny(
    kind: str, folder: Path | str, *, seed: int = 0, template: str = CHATML, **overrides: Any
) -> Path:
    """Write a tiny target of `kind` (see KINDS) with its tokenizer into `folder` as fp32 safetensors; return
    the folder.

    Norm weights are made random too (a target whose norms are all one hides a norm that is applied wrongly).
    """
    folder = Path(folder)
    config = tiny_config(kind, **overrides)
    auto = AutoModelForWrapped if kind.endswith("_wrapped") else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.ndim == 1:
                parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tiny_tokenizer(template).save_pretrained(folder)
    return folder
