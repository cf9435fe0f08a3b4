"""Checkpoints out and in: z-lab's layout, the speculators layout, older spellings, damaged files."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from support.tiny_drafters import SECOND, tiny_config, tiny_drafter
from support.wording import check_wording, refused
from transformers import AutoConfig, Qwen3Config

from dflash_lab.drafter.checkpoint import load_checkpoint, read_config, save_checkpoint
from dflash_lab.drafter.config import FULL, SLIDING, DrafterConfig, LayerMask, resolve_mask_token_id
from dflash_lab.drafter.formats import (
    export_speculators,
    import_speculators,
    read_speculators_json,
    serving_notes,
    write_serving_notes,
)
from dflash_lab.drafter.model import Drafter
from dflash_lab.errors import InputError, StoreError, UnsupportedTarget

RELEASED = {  # the released Qwen3.6-27B drafter, newer spelling: block_size inside dflash_config only
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 17408,
    "vocab_size": 248320,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
    "layer_types": [SLIDING] * 4 + [FULL],
    "sliding_window": 2048,
    "num_target_layers": 64,
    "eos_token_id": 248044,
    "dflash_config": {"block_size": 16, "mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes", [{}, SECOND, dict(is_causal=False, output_multiplier=0.5, final_logit_softcapping=30.0)]
)
def test_zlab_layout_there_and_back(tmp_path, dtype, changes):
    drafter = tiny_drafter(tiny_config(**changes)).to(dtype)
    save_checkpoint(tmp_path, drafter)
    loaded = load_checkpoint(tmp_path)
    assert loaded.config == drafter.config
    assert loaded.config.parameter_count == sum(p.numel() for p in drafter.parameters())
    assert all(torch.equal(a, loaded.state_dict()[n]) for n, a in drafter.state_dict().items())
    assert load_checkpoint(tmp_path, dtype="float32").fc.weight.dtype == torch.float32
    assert sorted(load_file(tmp_path / "model.safetensors")) == sorted(drafter.state_dict())
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["block_size"] == values["dflash_config"]["block_size"] == 4
    assert values["rope_theta"] == values["rope_parameters"]["rope_theta"] == 1e4
    assert isinstance(AutoConfig.from_pretrained(tmp_path), Qwen3Config)


def test_a_released_configuration_is_understood_and_kept():
    config = DrafterConfig.from_json(RELEASED)
    assert (config.block_size, config.mask_token_id, config.rope_theta) == (16, 248070, 1e7)
    assert config.tap_ids == (1, 16, 31, 46, 61)
    assert config.layer_mask(0) == LayerMask(causal=True, window=2048)
    assert config.layer_mask(4) == LayerMask(causal=False, window=None)
    with torch.device("meta"):
        count = sum(p.numel() for p in Drafter(config).parameters())
    assert count == config.parameter_count == pytest.approx(1.730e9, rel=1e-3)
    written = config.to_json()
    assert written["eos_token_id"] == 248044 and written["block_size"] == 16
    assert DrafterConfig.from_json(written) == config


def test_older_spelling_and_default_taps():
    older = {
        k: v for k, v in RELEASED.items() if k not in ("rope_parameters", "dflash_config", "layer_types")
    }
    older |= {
        "rope_theta": 5e5,
        "rope_scaling": None,
        "block_size": 10,
        "dflash_config": {"mask_token_id": 3},
    }
    config = DrafterConfig.from_json(older)
    assert (config.rope_theta, config.block_size, config.tap_ids) == (5e5, 10, (1, 16, 31, 46, 61))
    assert config.layer_types == (FULL,) * 5
    assert DrafterConfig.from_json({**older, "is_causal": True}).layer_mask(0) == LayerMask(True, None)


@pytest.mark.parametrize(
    "changes",
    [
        dict(block_size=1),
        dict(tap_ids=(6,)),
        dict(mask_token_id=97),
        dict(sliding_window=None),
        dict(num_kv_heads=3),
        dict(conv_kernel_size=2),
        dict(layer_types=("linear",) * 3),
    ],
    ids=lambda changes: "".join(changes),
)
def test_a_shape_that_cannot_be_is_refused_by_name(changes):
    with refused(InputError):
        tiny_config(**changes)


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        ("outer", "partial_rotary_factor", 0.25),
        ("rope_parameters", "partial_rotary_factor", 0.25),
        ("rope_parameters", "rope_type", "yarn"),
        ("outer", "mlp_bias", True),
        ("outer", "attention_bias", True),
        ("dflash_config", "sample_from_anchor", True),
        ("outer", "attn_logit_softcapping", 50.0),
    ],
)
def test_a_field_that_changes_the_computation_is_refused_by_name(place, name, value):
    values = tiny_config().to_json()
    (values if place == "outer" else values[place])[name] = value
    with refused(UnsupportedTarget):
        DrafterConfig.from_json(values)
    neutral = {"partial_rotary_factor": 1, "mlp_bias": False, "attn_logit_softcapping": None}
    assert DrafterConfig.from_json({**tiny_config().to_json(), **neutral}).extra.keys() == neutral.keys()


def with_tensors(change):
    def damage(folder):
        path = folder / "model.safetensors"
        save_file(change(load(path.read_bytes())), path)

    return damage


def with_text(change):
    def damage(folder):
        path = folder / "config.json"
        path.write_text(change(json.loads(path.read_text())))

    return damage


NAN = {"fc.weight": torch.full((48, 96), float("nan"))}
DAMAGES = {
    "nowhere": (InputError, shutil.rmtree),
    "renamed": (InputError, with_tensors(lambda of: {n.replace("fc.", "fc_"): t for n, t in of.items()})),
    "other shape": (
        InputError,
        with_tensors(lambda of: {**of, "norm.weight": of["norm.weight"][:-1].clone()}),
    ),
    "not finite": (InputError, with_tensors(lambda of: of | NAN)),
    "cut": (StoreError, lambda at: (at / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")),
    "no object": (InputError, with_text(lambda of: "[]")),
    "too long a number": (StoreError, with_text(lambda of: '{"block_size": ' + "1" * 5000 + "}")),
    "changed by hand": (StoreError, with_text(lambda of: json.dumps({**of, "rope_theta": 2.0}))),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_that_are_not_right_are_named(tmp_path, damage):
    save_checkpoint(tmp_path / "drafter", tiny_drafter())
    with_text(lambda values: json.dumps(dict(reversed(values.items()))))(tmp_path / "drafter")
    load_checkpoint(tmp_path / "drafter")  # however it is laid out
    kind, do = DAMAGES[damage]
    do(tmp_path / "drafter")
    with refused(kind):
        load_checkpoint(tmp_path / "drafter")


def test_a_flipped_bit_of_our_weights_is_found_and_files_of_others_still_load(tmp_path):
    drafter, path = tiny_drafter(), tmp_path / "model.safetensors"
    save_checkpoint(tmp_path, drafter)
    whole = path.read_bytes()
    for at in range(len(whole) - 2001, len(whole), 400):
        flipped = bytearray(whole)
        flipped[at] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(StoreError):
            load_checkpoint(tmp_path)
    save_file(load(whole), path, metadata={"format": "pt"})  # as another program would
    loaded = load_checkpoint(tmp_path).state_dict()
    assert all(torch.equal(a, loaded[n]) for n, a in drafter.state_dict().items())


ALL_FULL, ALL_SLIDING = dict(layer_types=(FULL,) * 3), dict(layer_types=(SLIDING,) * 3)


@pytest.mark.parametrize(
    "changes, flag",
    [(ALL_FULL, True), (ALL_SLIDING, False), (dict(is_causal=False), True)],
    ids=["full", "sliding", "bidirectional"],
)
def test_speculators_layout_there_and_back(tmp_path, changes, flag):
    drafter = tiny_drafter(tiny_config(**changes)).to(torch.bfloat16)
    export_speculators(drafter, tmp_path, target="some/target", target_architecture="LlamaForCausalLM")
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["sliding_window_non_causal"] is flag
    assert values["aux_hidden_state_layer_ids"] == [tap + 1 for tap in drafter.config.tap_ids]
    assert values["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert not {"architectures", "dflash_config", "block_size"} & values["transformer_layer_config"].keys()
    back = import_speculators(tmp_path)
    assert back.config == drafter.config
    assert all(torch.equal(a, back.state_dict()[n]) for n, a in drafter.state_dict().items())


@pytest.mark.parametrize(
    "changes",
    [{}, dict(is_causal=True), dict(**ALL_FULL, is_causal=True), SECOND],
    ids=["mixed", "causal", "causal and full", "second"],
)
def test_what_the_speculators_layout_cannot_say_is_not_exported(tmp_path, changes):
    with refused(UnsupportedTarget):
        export_speculators(tiny_drafter(tiny_config(**changes)), tmp_path / "out", target="t")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def exported(tmp_path):
    """A drafter of full layers in the speculators layout: it, its config.json and that file's values."""
    drafter = tiny_drafter(tiny_config(**ALL_FULL))
    export_speculators(drafter, tmp_path, target="t")
    path = tmp_path / "config.json"
    return drafter, path, json.loads(path.read_text())


def test_the_flag_of_a_speculators_file_says_nothing_of_full_layers(exported):
    """Also what was exported with it false while nothing slides is bidirectional, as it was trained."""
    *_, values = exported
    inner = values["transformer_layer_config"] | {"sliding_window": 7}
    for types in ([FULL] * 3, [SLIDING, FULL, SLIDING]):
        for flag in (False, True):
            changes = {"sliding_window_non_causal": flag}
            changes |= {"transformer_layer_config": {**inner, "layer_types": types}}
            config = read_speculators_json({**values, **changes})
            causal = [config.layer_mask(layer).causal for layer in range(3)]
            assert causal == [kind == SLIDING and not flag for kind in types]


def test_speculators_files_of_others(tmp_path, exported):
    drafter, path, values = exported
    del values["num_target_layers"]
    path.write_text(json.dumps(values))
    with refused(InputError):
        import_speculators(tmp_path)
    borrowed = {"lm_head.weight": torch.zeros(97, 48), "embed_tokens.weight": torch.zeros(97, 48)}
    save_file({**drafter.state_dict(), **borrowed}, tmp_path / "model.safetensors")
    assert import_speculators(tmp_path, num_target_layers=6).config == drafter.config
    for change in (
        {"draft_vocab_size": 50},
        {"sample_from_anchor": True},
        {"speculators_model_type": "eagle3"},
    ):
        with refused(UnsupportedTarget):
            read_speculators_json({**values, **change}, 6)


def test_a_field_of_the_inner_object_that_nothing_reads_is_told_by_name(caplog):
    values = tiny_config().to_json()
    values["dflash_config"] |= {"is_causal": True, "target_layer_idz": [1], "mlp_bias": False}
    assert DrafterConfig.from_json(values, "x.json") == tiny_config()
    check_wording("\n".join(caplog.messages))
    caplog.clear()
    DrafterConfig.from_json(config_values())
    DrafterConfig.from_json(RELEASED)
    assert not caplog.text


def test_two_shapes_differ_in_what_computes_otherwise():
    full = tiny_config(**ALL_FULL, sliding_window=None)
    for changes in (dict(sliding_window=2048), dict(is_causal=False), dict(extra={"bos_token_id": 1})):
        assert full.differences(dataclasses.replace(full, **changes)) == []
    wider = dataclasses.replace(full, head_dim=32, is_causal=True)
    assert full.differences(wider) == ["head_dim: 16, 32", "is_causal: None, True"]


def test_shape_from_a_target():
    target = Qwen3Config(
        num_hidden_layers=36, hidden_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=16
    )
    config = DrafterConfig.from_target(target, mask_token_id=5, sliding_layers=4, sliding_window=128)
    assert config.tap_ids == (1, 9, 17, 25, 33) and config.layer_types == (SLIDING,) * 4 + (FULL,)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 2, 16)
    assert config.rope_theta == target.rope_parameters["rope_theta"]
    with refused(InputError):
        DrafterConfig.from_target(target, mask_token_id=5, sliding_layers=(5,), sliding_window=8)
    with refused(InputError):
        DrafterConfig.from_target(target, mask_token_id=5, num_head=3)


def test_partial_rotary_of_a_target_does_not_leak(tiny_target):
    from dflash_lab.models.source import load_config

    target = load_config(str(tiny_target("qwen3_5")))
    config = DrafterConfig.from_target(target, mask_token_id=280, num_layers=2, tap_ids=(1, 3))
    assert config.to_json()["rope_parameters"] == {"rope_type": "default", "rope_theta": config.rope_theta}
    assert Drafter(config).angles(torch.arange(3), torch.float32)[0].shape == (3, config.head_dim)


def test_the_mask_token_means_nothing_else_and_the_embedding_is_not_resized():
    from support.tiny_targets import tiny_tokenizer

    words = tiny_tokenizer()  # 256 bytes, <|pad|>, <|im_start|>, <|im_end|>
    size = len(words)
    assert resolve_mask_token_id(100, explicit=5, tokenizer=words)[0] == 5
    assert resolve_mask_token_id(size + 9, tokenizer=words) == (size, "an embedding row without a token")
    with refused(InputError):
        resolve_mask_token_id(size, tokenizer=words)  # not the pad token, and not the one that ends turns
    extra = ["<|file_sep|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"]
    words.add_special_tokens({"additional_special_tokens": extra})
    token = dict(zip(extra, words.convert_tokens_to_ids(extra), strict=True))
    found, why = resolve_mask_token_id(len(words), tokenizer=words)
    assert found == token["<|reserved_special_token_0|>"] and "keeps free" in why
    in_data = {token["<|reserved_special_token_0|>"], token["<|reserved_special_token_1|>"]}
    found, why = resolve_mask_token_id(len(words), tokenizer=words, occurs=in_data.__contains__)
    assert found == token["<|file_sep|>"] and "template does not use" in why
    words.add_tokens(["<unused7>"])  # as Gemma has them: no special tokens, but no text either
    in_data |= {token["<|file_sep|>"]}
    found, why = resolve_mask_token_id(len(words), tokenizer=words, occurs=in_data.__contains__)
    assert words.convert_ids_to_tokens(found) == "<unused7>" and "keeps free" in why
    words.mask_token = "<|im_start|>"
    assert resolve_mask_token_id(len(words), tokenizer=words)[0] == 257
    words.add_special_tokens({"mask_token": "<mask>"})  # behind the last embedding row
    assert resolve_mask_token_id(len(words) - 1, tokenizer=words)[0] == token["<|reserved_special_token_0|>"]
    assert resolve_mask_token_id(64)[0] == 63
    with refused(InputError):
        resolve_mask_token_id(100, explicit=100)


def commands(notes: str) -> dict[str, list[str]]:
    """The words of both commands, without what sets an environment variable before them."""
    blocks = re.findall(r"```bash\n(.*?)```", notes, re.S)
    vllm, sglang = (shlex.split(block.replace("\\\n", " ")) for block in blocks)
    return {"vllm": vllm, "sglang": sglang}


def test_serving_notes_hold_commands_with_paths_as_a_shell_needs_them():
    notes = serving_notes(DrafterConfig.from_json(RELEASED), "my runs/it's", "a target", "bfloat16")
    check_wording(notes)
    found = commands(notes)
    vllm, sglang = found["vllm"], found["sglang"]
    assert vllm[:4] == ["VLLM_USE_V2_MODEL_RUNNER=1", "vllm", "serve", "a target"]
    assert sglang[:2] == ["python", "-m"]
    assert json.loads(vllm[vllm.index("--speculative-config") + 1])["model"] == "my runs/it's"
    assert sglang[sglang.index("--speculative-draft-model-path") + 1] == "my runs/it's"
    assert all(words[words.index("--dtype") + 1] == "bfloat16" for words in found.values())


@pytest.mark.parametrize("name", ["mixed", "second", "scaled", "scaled-second"])
def test_serving_notes_name_what_vllm_needs_and_what_it_ignores(name):
    scaled = dict(input_embedding_scale=2.0, final_logit_softcapping=30.0)
    changes = {
        "mixed": {},
        "second": dict(**SECOND, is_causal=False, num_layers=2),
        "scaled": dict(**scaled, num_layers=2),
        "scaled-second": dict(**SECOND, **scaled, num_layers=2),  # which vLLM reads
    }[name]
    notes = serving_notes(tiny_config(**changes), "/a/drafter", "owner/name", "float32")
    runner = commands(notes)["vllm"][0]
    assert (runner == "VLLM_USE_V2_MODEL_RUNNER=1") == (name != "scaled")
    assert ("ignores input_embedding_scale 2, final_logit_softcapping 30" in notes) == (name == "scaled")
    assert "above 3 without a word" in notes and "after a move" in notes


def test_serving_notes_beside_a_drafter_have_absolute_paths_and_tell_the_log(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a target").mkdir()
    save_checkpoint("fresh", tiny_drafter(tiny_config(num_layers=1, output_multiplier=0.5)))
    write_serving_notes(Path("fresh"), "a target", "float32", place=Path("runs/drafter"))
    vllm = commands((tmp_path / "fresh" / "serve.md").read_text())["vllm"]
    assert vllm[2] == str(tmp_path / "a target")
    speculative = json.loads(vllm[vllm.index("--speculative-config") + 1])
    assert speculative["model"] == str(tmp_path / "runs" / "drafter")
    assert "runs/drafter: vLLM ignores output_multiplier 0.5; it drafts other tokens" in caplog.text


JUNK = (0, -1, 1, 2, 3, 10**12, 10**400, 0.5, float("nan"), float("inf"), "", "a word", "16", True, False)
JUNK += ([], [0], ["x"], [[1]], [5, 1], [99999], {}, {"a": 1}, {"rope_type": []}, {"rope_theta": "x"})
JUNK += ({"full_attention": "x"}, {"block_size": 0}, {"target_layer_ids": "x"})


def config_values() -> dict:
    inner = dict(input_embedding_scale=2.0, output_multiplier=0.5, final_logit_softcapping=30.0)
    return tiny_config(**SECOND, **inner, num_layers=1, is_causal=False).to_json()


KEPT = {"hidden_size", "num_hidden_layers", "sliding_window", "rms_norm_eps", "layer_types", "is_causal"}


@pytest.mark.parametrize(
    "name", [*config_values(), *(f"dflash_config.{n}" for n in config_values()["dflash_config"])]
)
def test_whatever_a_field_of_a_checkpoint_holds_is_taken_or_told_with_the_file(tmp_path, name):
    """Files of others, without digests: nothing but the reading of the fields stands before the model."""
    save_file(Drafter(DrafterConfig.from_json(config_values())).state_dict(), tmp_path / "model.safetensors")
    path, told = tmp_path / "config.json", 0
    part, _, inner = name.rpartition(".")
    for junk in JUNK:
        values = config_values()
        (values[part] if part else values)[inner] = junk
        path.write_text(json.dumps(values))
        try:
            written = load_checkpoint(tmp_path).config.to_json()
        except (InputError, StoreError) as error:
            told += 1
            assert str(tmp_path) in str(error) and len(str(error)) < 600 + len(str(tmp_path))
        else:
            json.dumps(written, allow_nan=False)
            if inner in KEPT or part:
                held = written["dflash_config"].get(inner, 1) if part else written[inner]
                assert held == junk or not junk, "a value was read as another one"
    assert told >= 2  # NaN and infinity, wherever they stand


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 0),
        ("block_size", "sixteen"),
        ("block_size", True),
        ("mask_token_id", 97.5),
        ("mask_token_id", 97),
        ("target_layer_ids", [1, "2"]),
        ("target_layer_ids", [3, 1]),
        ("target_layer_ids", []),
        ("num_attention_heads", 5),
        ("num_hidden_layers", 10**9),
        ("hidden_size", None),
        ("is_causal", "false"),
        ("rope_parameters", {"rope_theta": 0}),
        ("dflash_config", []),
        ("layer_types", "full_attention"),
        ("layer_types", [FULL, 1]),
        ("eos_token_id", float("nan")),
    ],
    ids=str,
)
def test_a_damaged_field_is_told_with_file_field_value_and_remedy(tmp_path, name, value):
    values = tiny_config().to_json()
    (values["dflash_config"] if name in values["dflash_config"] else values)[name] = value
    (tmp_path / "config.json").write_text(json.dumps(values))
    with refused(InputError):
        read_config(tmp_path)


def test_a_config_that_is_no_json_is_not_told_to_be_removed(tmp_path):
    (tmp_path / "config.json").write_text('{"block_size": ')
    with refused(StoreError):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 0),
        ("aux_hidden_state_layer_ids", None),
        ("aux_hidden_state_layer_ids", [2, 9]),
        ("transformer_layer_config", "x"),
        ("transformer_layer_config", None),
        ("sample_from_anchor", 1),
        ("num_target_layers", "six"),
        ("draft_vocab_size", []),
    ],
    ids=str,
)
def test_a_damaged_field_of_the_speculators_layout_is_told_alike(tmp_path, exported, name, value):
    _, path, values = exported
    path.write_text(json.dumps({**values, name: value}))
    with refused(InputError):
        import_speculators(tmp_path)
