"""Checkpoints out and in: z-lab's layout, the speculators layout, older spellings, and files that are not
right.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_drafters import SECOND, tiny_config, tiny_drafter
from support.wording import refused
from transformers import AutoConfig, Qwen3Config

from dflash_lab.drafter.checkpoint import load_checkpoint, read_config, save_checkpoint
from dflash_lab.drafter.config import FULL, SLIDING, DrafterConfig, Fields, LayerMask, resolve_mask_token_id
from dflash_lab.drafter.formats import (
    export_speculators,
    import_speculators,
    read_speculators_json,
    serving_notes,
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
    assert all(torch.equal(a, loaded.state_dict()[n]) for n, a in drafter.state_dict().items())
    assert load_checkpoint(tmp_path, dtype="float32").fc.weight.dtype == torch.float32
    assert sorted(load_file(tmp_path / "model.safetensors")) == sorted(drafter.state_dict())
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["block_size"] == values["dflash_config"]["block_size"] == 4
    assert values["rope_theta"] == values["rope_parameters"]["rope_theta"] == 1e4
    assert isinstance(AutoConfig.from_pretrained(tmp_path), Qwen3Config)


def test_five_layers_are_58_tensors(tmp_path):
    save_checkpoint(tmp_path, tiny_drafter(tiny_config(num_layers=5)))
    assert len(load_file(tmp_path / "model.safetensors")) == 58


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


@pytest.mark.parametrize("changes", [{}, SECOND])
def test_parameter_count_is_exact(changes):
    config = tiny_config(**changes)
    assert config.parameter_count == sum(p.numel() for p in Drafter(config).parameters())


def test_what_cannot_be_is_refused_by_name():
    with refused(InputError):
        DrafterConfig.from_json({k: v for k, v in RELEASED.items() if k != "num_target_layers"})
    with refused(UnsupportedTarget):
        DrafterConfig.from_json(
            {**RELEASED, "rope_scaling": {"rope_type": "yarn", "factor": 4}, "rope_parameters": None}
        )
    with refused(UnsupportedTarget):
        DrafterConfig.from_json({**RELEASED, "attention_bias": True})
    for changes, word in (
        (dict(block_size=1), "block_size 1"),
        (dict(tap_ids=(6,)), r"0\.\.5"),
        (dict(mask_token_id=97), "outside the vocabulary"),
        (dict(sliding_window=None), "sliding_window >= 1"),
        (dict(num_kv_heads=3), "no multiple"),
        (dict(conv_kernel_size=2), "DFlash 2 needs"),
        (dict(layer_types=("linear",) * 3), "linear"),
    ):
        with refused(InputError):
            tiny_config(**changes)


def test_files_that_are_not_right_are_named(tmp_path):
    with refused(InputError):
        load_checkpoint(tmp_path / "nowhere")
    drafter = tiny_drafter()
    save_checkpoint(tmp_path, drafter)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {("fc_weight" if n == "fc.weight" else n): t for n, t in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    with refused(InputError):
        load_checkpoint(tmp_path)
    save_file({**tensors, "norm.weight": tensors["norm.weight"][:-1].clone()}, tmp_path / "model.safetensors")
    with refused(InputError):
        load_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with refused(StoreError):
        load_checkpoint(tmp_path)


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
    "changes, words",
    [
        ({}, "full layers beside causal sliding ones"),
        (dict(is_causal=True), "causal full layers"),
        (dict(**ALL_FULL, is_causal=True), "causal full layers"),
    ],
)
def test_a_mask_that_one_flag_cannot_say_is_not_exported(tmp_path, changes, words):
    with refused(UnsupportedTarget):
        export_speculators(tiny_drafter(tiny_config(**changes)), tmp_path / "out", target="t")
    assert not (tmp_path / "out").exists()


def test_the_flag_of_a_speculators_file_says_nothing_of_full_layers(tmp_path):
    """Also what was exported with it false while nothing slides is bidirectional, as it was trained."""
    export_speculators(tiny_drafter(tiny_config(**ALL_FULL)), tmp_path, target="t")
    values = json.loads((tmp_path / "config.json").read_text())
    masks = {
        flag: [
            read_speculators_json(
                {
                    **values,
                    "sliding_window_non_causal": flag,
                    "transformer_layer_config": {
                        **values["transformer_layer_config"],
                        "layer_types": types,
                        "sliding_window": 7,
                    },
                }
            )
            .layer_mask(layer)
            .causal
            for types in ([FULL] * 3, [SLIDING, FULL, SLIDING])
            for layer in range(3)
        ]
        for flag in (False, True)
    }
    assert masks == {False: [False] * 3 + [True, False, True], True: [False] * 6}


def test_speculators_files_of_others(tmp_path):
    drafter = tiny_drafter(tiny_config(**ALL_FULL))
    export_speculators(drafter, tmp_path, target="t")
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    del values["num_target_layers"]
    path.write_text(json.dumps(values))
    with refused(InputError):
        import_speculators(tmp_path)
    borrowed = {"lm_head.weight": torch.zeros(97, 48), "embed_tokens.weight": torch.zeros(97, 48)}
    save_file({**drafter.state_dict(), **borrowed}, tmp_path / "model.safetensors")
    assert import_speculators(tmp_path, num_target_layers=6).config == drafter.config
    for change, word in (
        ({"draft_vocab_size": 50}, "draft_vocab_size 50"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"speculators_model_type": "eagle3"}, "eagle3"),
    ):
        with refused(UnsupportedTarget):
            read_speculators_json({**values, **change}, 6)
    with refused(UnsupportedTarget):
        export_speculators(tiny_drafter(tiny_config(**SECOND)), tmp_path, target="t")


@pytest.mark.parametrize(
    "place, name, value",
    [
        ("outer", "partial_rotary_factor", 0.25),
        ("rope_parameters", "partial_rotary_factor", 0.25),
        ("outer", "mlp_bias", True),
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


def test_a_field_of_the_inner_object_that_nothing_reads_is_told_by_name(caplog):
    values = tiny_config().to_json()
    values["dflash_config"] |= {"is_causal": True, "target_layer_idz": [1], "mlp_bias": False}
    assert DrafterConfig.from_json(values, "x.json") == tiny_config()
    assert "x.json: dflash_config has is_causal, target_layer_idz, which" in caplog.text
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


def test_serving_notes_hold_the_commands():
    notes = serving_notes(DrafterConfig.from_json(RELEASED), "runs/x/drafter", "Qwen/Qwen3.6-27B")
    assert '{"method": "dflash", "model": "runs/x/drafter", "num_speculative_tokens": 15}' in notes
    assert "--speculative-num-draft-tokens 16" in notes and "[2, 17, 32, 47, 62]" in notes and "V2" in notes


def test_serving_commands_hold_paths_as_a_shell_needs_them():
    notes = serving_notes(DrafterConfig.from_json(RELEASED), "my runs/it's", "a target")
    for block in re.findall(r"```bash\n(.*?)```", notes, re.S):
        words = shlex.split(block.replace("\\\n", " "))
        assert "a target" in words
        if words[0] == "vllm":
            assert json.loads(words[words.index("--speculative-config") + 1])["model"] == "my runs/it's"
        else:
            assert words[words.index("--speculative-draft-model-path") + 1] == "my runs/it's"


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path):
    drafter = tiny_drafter()
    with torch.no_grad():
        drafter.fc.weight[0, 0] = float("nan")
    save_checkpoint(tmp_path, drafter)
    with refused(InputError):
        load_checkpoint(tmp_path)


def test_a_config_that_is_no_object_is_refused(tmp_path):
    save_checkpoint(tmp_path, tiny_drafter())
    (tmp_path / "config.json").write_text("[]")
    with refused(InputError):
        load_checkpoint(tmp_path)


JUNK = (0, -1, 1, 2, 3, 10**12, 10**400, 0.5, float("nan"), float("inf"), "", "a word", "16", True, False)
JUNK += ([], [0], ["x"], [[1]], [5, 1], [99999], {}, {"a": 1}, {"rope_type": []}, {"rope_theta": "x"})
JUNK += ({"full_attention": "x"}, {"block_size": 0}, {"target_layer_ids": "x"})


def config_values() -> dict:
    inner = dict(input_embedding_scale=2.0, output_multiplier=0.5, final_logit_softcapping=30.0)
    return tiny_config(**SECOND, **inner, is_causal=False).to_json()


@pytest.mark.parametrize(
    "name", [*config_values(), *(f"dflash_config.{n}" for n in config_values()["dflash_config"])]
)
def test_whatever_a_field_of_a_checkpoint_holds_is_taken_or_told_with_the_file(tmp_path, name):
    """Files of others, without digests: nothing but the reading of the fields stands before the model."""
    tensors = {
        name: tensor.clone() for name, tensor in tiny_drafter(tiny_config(**SECOND)).state_dict().items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    path, refused = tmp_path / "config.json", 0
    part, _, inner = name.rpartition(".")
    for junk in JUNK:
        values = config_values()
        (values[part] if part else values)[inner] = junk
        path.write_text(json.dumps(values))
        try:
            written = load_checkpoint(tmp_path).config.to_json()
        except (InputError, StoreError) as error:
            refused += 1
            words = str(error)
            assert str(tmp_path) in words and len(words) < 600 + len(str(tmp_path))
        else:
            json.dumps(written, allow_nan=False)
            if inner in (values.keys() & _READ) or part:
                held = written["dflash_config"].get(inner, 1) if part else written[inner]
                assert held == junk or not junk, "a value was read as another one"
    assert refused >= 2  # NaN and infinity, wherever they stand


_READ = {"hidden_size", "num_hidden_layers", "sliding_window", "rms_norm_eps", "layer_types", "is_causal"}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("block_size", 0, "'block_size' is 0; it must be a whole number between 2 and 1024"),
        ("block_size", "sixteen", "'block_size' is \"sixteen\"; it must be a whole number"),
        ("block_size", True, "'block_size' is true; it must be a whole number"),
        ("mask_token_id", 97.5, "'mask_token_id' is 97.5; it must be a whole number"),
        ("mask_token_id", 97, "mask_token_id 97 is outside the vocabulary of 97"),
        (
            "target_layer_ids",
            [1, "2"],
            "'target_layer_ids[1]' is \"2\"; it must be a whole number between 0 and 5",
        ),
        ("target_layer_ids", [3, 1], "target_layer_ids [3, 1]: each layer once"),
        ("num_attention_heads", 5, "num_attention_heads 5 is no multiple of num_key_value_heads 2"),
        ("num_hidden_layers", 10**9, "'num_hidden_layers' is 1000000000; it must be a whole number between"),
        ("hidden_size", None, "'hidden_size' is missing"),
        ("is_causal", "false", "'is_causal' is \"false\"; it must be true or false"),
        ("rope_parameters", {"rope_theta": 0}, "'rope_theta' is 0; it must be a number above 0"),
        ("dflash_config", [], "'dflash_config' is []; it must be an object"),
        ("layer_types", "full_attention", "'layer_types' is \"full_attention\"; it must be a list"),
        ("eos_token_id", float("nan"), "holds NaN or Infinity"),
    ],
)
def test_a_damaged_field_is_told_with_file_field_value_and_remedy(tmp_path, name, value, words):
    values = tiny_config().to_json()
    (values["dflash_config"] if name in values["dflash_config"] else values)[name] = value
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(InputError) as refused:
        read_config(tmp_path)
    told = str(refused.value)
    assert told.startswith(f"{tmp_path / 'config.json'}: ") and words in told
    assert told.endswith(
        "Copy it again from where it came, or remove it and run the stage that wrote it again."
    )


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("block_size", 0, "'block_size' is 0; it must be a whole number"),
        ("aux_hidden_state_layer_ids", None, "'aux_hidden_state_layer_ids' is missing"),
        (
            "aux_hidden_state_layer_ids",
            [2, 9],
            "'aux_hidden_state_layer_ids[1]' is 9; it must be a whole number",
        ),
        ("transformer_layer_config", "x", "'transformer_layer_config' is \"x\"; it must be an object"),
        ("transformer_layer_config", None, "'vocab_size' is missing"),
        ("sample_from_anchor", 1, "'sample_from_anchor' is 1; it must be true or false"),
        ("num_target_layers", "six", "'num_target_layers' is \"six\"; it must be a whole number"),
        ("draft_vocab_size", [], "'draft_vocab_size' is []; it must be a whole number"),
    ],
)
def test_a_damaged_field_of_the_speculators_layout_is_told_alike(tmp_path, name, value, words):
    export_speculators(tiny_drafter(tiny_config(**ALL_FULL)), tmp_path, target="t")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(InputError) as refused:
        import_speculators(tmp_path)
    assert str(refused.value).startswith(f"{path}: ") and words in str(refused.value)


def test_a_number_too_long_for_python_is_told_with_the_file(tmp_path):
    save_checkpoint(tmp_path, tiny_drafter())
    (tmp_path / "config.json").write_text('{"block_size": ' + "1" * 5000 + "}")
    with refused(StoreError):
        load_checkpoint(tmp_path)


def test_a_config_changed_by_hand_is_refused_however_it_is_laid_out(tmp_path):
    save_checkpoint(tmp_path, tiny_drafter())
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(values.items()))))
    load_checkpoint(tmp_path)
    path.write_text(json.dumps({**values, "rope_theta": 2 * values["rope_theta"]}))
    with refused(StoreError):
        load_checkpoint(tmp_path)


def test_a_flipped_bit_of_our_weights_is_found_and_files_of_others_still_load(tmp_path):
    drafter, path = tiny_drafter(), tmp_path / "model.safetensors"
    save_checkpoint(tmp_path, drafter)
    whole = path.read_bytes()
    for at in range(len(whole) - 4001, len(whole), 400):
        flipped = bytearray(whole)
        flipped[at] ^= 1
        path.write_bytes(flipped)
        with refused(StoreError):
            load_checkpoint(tmp_path)
    save_file(load_file_of(whole, tmp_path), path, metadata={"format": "pt"})  # as another program would
    assert all(
        torch.equal(a, b)
        for a, b in zip(load_checkpoint(tmp_path).parameters(), drafter.parameters(), strict=True)
    )


def load_file_of(data, folder):
    (folder / "copy.safetensors").write_bytes(data)
    return load_file(folder / "copy.safetensors")


def test_lists_of_a_config_are_read_with_their_kinds():
    fields = Fields("x.json", {"names": ["a", 1], "none": []})
    with refused(InputError):
        fields.words("names")
    for optional in (False, True):
        with refused(InputError):
            fields.wholes("none", low=0, high=9, optional=optional)
    assert fields.wholes("absent", low=0, high=9, optional=True) == [] and fields.words("absent") == []
