"""Identity: cheap, stable, and different whenever the states would be."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_targets import build_tiny

from dflash_lab.models.load import load_target
from dflash_lab.models.source import identify, resolve


@pytest.fixture
def folder(tiny_target, tmp_path):
    return shutil.copytree(tiny_target("qwen3_5"), tmp_path / "copy")


def of(folder):
    return {k: v for k, v in identify(resolve(str(folder))).items() if k != "name"}


def test_a_copy_is_the_same_and_json(tiny_target, folder):
    assert of(folder) == of(tiny_target("qwen3_5"))
    assert json.loads(json.dumps(of(folder))) == of(folder)
    assert load_target(str(folder), last_layer=3, with_head=False).identity == identify(resolve(str(folder)))


@pytest.mark.parametrize("part", ["config", "tokenizer", "template"])
def test_a_changed_part_shows_in_its_own_hash(folder, part):
    before = of(folder)
    if part == "config":
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 1e-3}))
    elif part == "template":
        path = folder / "chat_template.jinja"
        path.write_text(path.read_text() + " ")
    else:
        path = folder / "tokenizer.json"
        fields = json.loads(path.read_text())
        fields["pre_tokenizer"]["add_prefix_space"] = True
        path.write_text(json.dumps(fields))
    after = of(folder)
    assert {key for key in before if before[key] != after[key]} == {part}


def test_weights(folder, tmp_path):
    before = of(folder)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "more": torch.zeros(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    assert of(folder)["weights"] != before["weights"]
    other = build_tiny("qwen3_5", tmp_path / "other", num_hidden_layers=7)
    assert of(other)["weights"] != before["weights"] and of(other)["config"] != before["config"]


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.3.self_attn.q_proj.weight"])
def test_a_fine_tune_of_a_single_tensor_is_another_target(folder, name):
    before = of(folder)
    weights = load_file(folder / "model.safetensors")
    weights[name] *= 1.01
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert {key for key in before if before[key] != of(folder)[key]} == {"weights"}


def test_a_random_target_is_known_by_shape_and_seed():
    a, b = (load_target("random:qwen3-8b", device="meta", seed=seed).identity for seed in (0, 1))
    assert a["weights"] == "random, seed 0" and a["tokenizer"] == ""
    assert a["config"] == b["config"] and a["weights"] != b["weights"]
    assert load_target("random:qwen3-0.6b", device="meta").identity["config"] != a["config"]
