"""The head read alone equals the head of the whole target, whatever the checkpoint looks like."""

from __future__ import annotations

import pytest
import torch
from support.tiny_targets import KINDS, build_tiny
from transformers import AutoModelForCausalLM

from dflash_lab.models.load import load_head, load_target


def assert_same(head, whole):
    assert torch.equal(head.embedding_weight, whole.embedding_weight)
    assert torch.equal(head.weight, whole.weight)
    hidden = torch.randn(3, 5, head.weight.shape[1], generator=torch.Generator().manual_seed(0))
    hidden = 3 * hidden.to(head.weight.dtype)
    assert torch.equal(head.normed(hidden), whole.normed(hidden))
    assert torch.equal(head.logits(head.normed(hidden)), whole.logits(whole.normed(hidden)))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, "float32") for kind in KINDS), ("llama", "bfloat16"), ("qwen3_5", "bfloat16")],
)
def test_head_alone_equals_the_target_s(tiny_target, kind, dtype):
    folder = str(tiny_target(kind))
    head = load_head(folder, dtype=dtype)
    assert_same(head, load_target(folder, dtype=dtype).head)
    tied = head.weight.data_ptr() == head.embedding_weight.data_ptr()
    assert tied == (kind == "llama")


def test_the_norm_is_the_model_s_own_kind(tiny_target):
    """Qwen3.5 multiplies by (1 + w), Llama by w."""
    hidden = torch.randn(4, 48, generator=torch.Generator().manual_seed(0))
    unit = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
    for kind, offset in (("qwen3_5", 1.0), ("qwen3_5_moe", 1.0), ("qwen3", 0.0), ("llama", 0.0)):
        head = load_head(str(tiny_target(kind)))
        assert torch.allclose(head.normed(hidden), unit * (head.norm.weight + offset), rtol=1e-4, atol=1e-5)


def test_head_of_a_checkpoint_in_many_files(tiny_target, tmp_path):
    AutoModelForCausalLM.from_pretrained(tiny_target("qwen3_moe")).save_pretrained(
        tmp_path, max_shard_size="50KB"
    )
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert_same(load_head(str(tmp_path)), load_head(str(tiny_target("qwen3_moe"))))


def test_embed_and_target_logits(tiny_target):
    target = load_target(str(tiny_target("qwen3_5")))
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(target.head.embed(ids), target.embedding(ids))
    hidden = torch.randn(2, 3, 48)
    assert torch.equal(target.logits(hidden), target.head.logits(target.head.normed(hidden)))


def test_a_tied_qwen(tmp_path):
    folder = str(build_tiny("qwen3", tmp_path, tie_word_embeddings=True))
    head = load_head(folder)
    assert head.weight.data_ptr() == head.embedding_weight.data_ptr()
    assert_same(head, load_target(folder).head)
