"""Loading every kind of checkpoint, only what was asked for; refusals that name what is wrong."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_targets import CHATML, KINDS, build_tiny, tiny_config, tiny_tokenizer
from support.wording import refused
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMultimodalLM

from dflash_lab.errors import InputError, UnsupportedTarget
from dflash_lab.models import load
from dflash_lab.models.load import choose_device, cut_config, load_head, load_target
from dflash_lab.models.source import Checkpoint, load_config, load_tokenizer
from dflash_lab.models.spans import layer_spans

TOKENS = torch.randint(0, 256, (2, 70), generator=torch.Generator().manual_seed(3))


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_the_causal_model_of_transformers(tiny_target, kind):
    folder = tiny_target(kind)
    auto = AutoModelForMultimodalLM if kind.endswith("_wrapped") else AutoModelForCausalLM
    whole = auto.from_pretrained(folder)
    target = load_target(str(folder))
    with torch.no_grad():
        expected = whole(TOKENS, use_cache=False).logits
        states = target.body(input_ids=TOKENS, use_cache=False).last_hidden_state
        assert torch.equal(target.head.logits(states), expected)
    assert target.num_layers == 8 and target.hidden_size == 48 and target.vocab_size == 288
    assert target.is_hybrid == ("qwen3_5" in kind)
    assert target.dtype == target.body.dtype == torch.float32
    assert not target.body.training and not any(p.requires_grad for p in target.body.parameters())
    assert target.stop_ids == [258]


def test_the_vision_tower_is_not_loaded(tiny_target):
    target = load_target(str(tiny_target("qwen3_5_wrapped")))
    assert not [name for name, _ in target.body.named_parameters() if "visual" in name or "vision" in name]
    assert type(target.body).__name__ == "Qwen3_5TextModel"


def test_a_wrapper_whose_text_model_has_no_causal_class(tmp_path):
    text = tiny_config("qwen3").to_dict() | {
        "model_type": "qwen3_vl_text",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    }
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 48, "intermediate_size": 32}
    kinds = ("image", "video", "vision_start", "vision_end")
    tokens = {f"{kind}_token_id": 270 + number for number, kind in enumerate(kinds)}
    vision |= {"patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config = AutoConfig.for_model("qwen3_vl", text_config=text, vision_config=vision, **tokens)
    whole = AutoModelForMultimodalLM.from_config(config)
    whole.save_pretrained(tmp_path)
    target = load_target(str(tmp_path))
    with torch.no_grad():
        states = target.body(input_ids=TOKENS, use_cache=False).last_hidden_state
        assert torch.equal(target.head.logits(states), whole(TOKENS, use_cache=False).logits)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "qwen3_5_wrapped"])
def test_last_layer_cuts_what_comes_after_it(tiny_target, kind, caplog):
    whole = load_target(str(tiny_target(kind)))
    caplog.set_level("INFO")
    cut = load_target(str(tiny_target(kind)), last_layer=4, with_head=False)
    assert "loaded 5 of 8 layers" in caplog.text
    assert cut.num_layers == cut.config.num_hidden_layers == 5
    with torch.no_grad():
        expected = whole.body(input_ids=TOKENS, use_cache=False, output_hidden_states=True).hidden_states
        caught = []
        cut.layers[4].register_forward_hook(lambda m, i, o: caught.append(o))
        cut.body(input_ids=TOKENS, use_cache=False)
    assert torch.equal(caught[0], expected[5])
    assert cut.head_weight is None
    with refused(InputError):
        cut.logits(caught[0])


def test_a_layer_that_is_not_there_is_refused(tiny_target):
    with refused(InputError):
        load_target(str(tiny_target("llama")), last_layer=8)


def test_only_asked_tensors_are_read(tiny_target, monkeypatch):
    folder, read = str(tiny_target("qwen3_5_wrapped")), []
    honest = Checkpoint.read

    def spy(self, name, **kwargs):
        read.append(name)
        return honest(self, name, **kwargs)

    monkeypatch.setattr(Checkpoint, "read", spy)
    cut = load_target(folder, last_layer=2, with_head=False)
    assert read == []
    assert {name.split(".")[1] for name, _ in cut.body.named_parameters() if "layers" in name} == set("012")
    load_head(folder)
    prefix = "model.language_model."
    assert read == [f"{prefix}embed_tokens.weight", f"{prefix}norm.weight", "lm_head.weight"]


def test_dtype_and_device_are_what_was_asked(tiny_target):
    target = load_target(str(tiny_target("qwen3_5")), dtype="bfloat16")
    assert {p.dtype for p in target.body.parameters()} == {torch.bfloat16}
    assert target.head_weight.dtype == target.dtype == torch.bfloat16
    shapes = load_target(str(tiny_target("qwen3_5")), device="meta")
    assert shapes.body.device.type == shapes.head_weight.device.type == "meta"
    size = f"{target.num_layers} layers, hidden size {target.hidden_size}"
    assert f"{target.name}: {size}, bfloat16 on cpu" in repr(target)
    assert len(repr(target)) < len(target.name) + 70  # in a notebook: no weights


@pytest.mark.parametrize("wrong", [{"dtype": "bfloat"}, {"device": "gpu"}], ids=str)
def test_an_unknown_dtype_or_device_is_refused(tiny_target, wrong):
    with refused(InputError):
        load_target(str(tiny_target("llama")), **wrong)


def test_a_gpu_that_is_not_there_is_refused_by_its_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    with refused(InputError):
        choose_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto").type == "cpu"
    with refused(InputError):
        choose_device("cuda")


def test_config_and_tokenizer_come_without_weights(tiny_target, tmp_path):
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_target("qwen3_5_wrapped") / file, tmp_path)
    config = load_config(str(tmp_path))
    assert config.num_hidden_layers == 8 and config.model_type == "qwen3_5_text"
    assert load_tokenizer(str(tmp_path)).chat_template == CHATML
    with refused(InputError):
        load_target(str(tmp_path))


@pytest.mark.parametrize("name", ["smolm2", "./not/here/at/all", "a" * 300])
def test_unknown_names_get_a_near_match(name):
    with refused(InputError):
        load_config(name)


UNDERSTOOD_NOT = {
    "no causal class": lambda: AutoConfig.for_model(
        "bert", hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=99
    ),
    "an encoder beside": lambda: AutoConfig.for_model("t5", d_model=32, num_layers=2),
    "both directions": lambda: AutoConfig.for_model(**tiny_config("llama").to_dict(), is_causal=False),
    "capped logits": lambda: AutoConfig.for_model(
        **tiny_config("llama").to_dict() | {"model_type": "gemma2", "final_logit_softcapping": 30.0}
    ),
}


@pytest.mark.parametrize("kind", UNDERSTOOD_NOT)
def test_what_is_not_causal_or_not_understood_is_refused(tmp_path, kind):
    config = UNDERSTOOD_NOT[kind]()
    if config.model_type == "bert":
        config.architectures = ["BertForMaskedLM"]
    config.save_pretrained(tmp_path)
    with refused(UnsupportedTarget):
        load_target(str(tmp_path))


WHOLE_NOT = {  # models whose tensors make other logits than head and body do
    "a head with bias": {"model_type": "phi", "num_key_value_heads": 4},
    "a projection": {
        **{"model_type": "opt", "hidden_size": 32, "word_embed_proj_dim": 16, "num_hidden_layers": 2},
        **{"ffn_dim": 32, "num_attention_heads": 2},
    },
}


@pytest.mark.parametrize("kind", WHOLE_NOT)
def test_a_causal_model_with_more_than_body_and_head_is_refused(tmp_path, kind):
    fields = WHOLE_NOT[kind]
    if fields["model_type"] == "phi":
        fields = {k: v for k, v in tiny_config("llama").to_dict().items() if k != "head_dim"} | fields
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).save_pretrained(tmp_path)
    with refused(UnsupportedTarget):
        load_target(str(tmp_path))


def test_a_checkpoint_that_lacks_tensors_is_refused(tiny_target, tmp_path):
    shutil.copytree(tiny_target("qwen3"), tmp_path, dirs_exist_ok=True)
    change_config(tmp_path, num_hidden_layers=9, layer_types=["full_attention"] * 9)
    with refused(UnsupportedTarget):
        load_target(str(tmp_path))


def test_an_untied_head_that_is_absent_is_refused(tiny_target, tmp_path):
    AutoModel.from_pretrained(tiny_target("qwen3")).save_pretrained(tmp_path)
    change_config(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert load_target(str(tmp_path), with_head=False).num_layers == 8  # names without the prefix "model."
    for read in (load_target, load_head):
        with refused(UnsupportedTarget):
            read(str(tmp_path))


def test_code_of_a_checkpoint_is_not_run_unless_trusted(tmp_path):
    build_tiny("llama", tmp_path)
    witness = tmp_path / "it-ran"
    (tmp_path / "own.py").write_text(
        "from pathlib import Path\n"
        f"Path({str(witness)!r}).touch()\n"
        "from transformers import LlamaConfig\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    )
    change_config(tmp_path, model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
    with refused(InputError):
        load_target(str(tmp_path))
    assert not witness.exists()
    load_config(str(tmp_path), trust_remote_code=True)
    assert witness.exists()


def test_a_hybrid_target_on_cuda_needs_fast_kernels(tiny_target, monkeypatch):
    monkeypatch.setattr(load, "choose_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: None)
    with refused(InputError):
        load_target(str(tiny_target("qwen3_5")), device="cuda")


def test_head_and_body_of_wrapped_tokenizer_agree(tiny_target):
    target = load_target(str(tiny_target("qwen3_5_wrapped")))
    ids = target.tokenizer("hello")["input_ids"]
    assert target.tokenizer.decode(ids) == "hello"
    assert tiny_tokenizer().decode(tiny_tokenizer()("hé!")["input_ids"]) == "hé!"


@pytest.fixture
def damaged(tiny_target, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_target("llama"), folder)
    return folder


NONSENSE = {
    "config.json": [
        *("null", "[]", "{"),
        '{"model_type": "llama", "hidden_size": "a"}',
        '{"model_type": "llama", "hidden_size": -1}',
    ],
    "tokenizer.json": [None, "{", "[]", '{"model": 3}'],
    "model.safetensors.index.json": ["{", "[]", "{}", '{"weight_map": {"a": 1}}'],
}
READERS = dict(zip(NONSENSE, (load_config, load_tokenizer, load_target), strict=True))


@pytest.mark.parametrize(("name", "text"), [(name, text) for name in NONSENSE for text in NONSENSE[name]])
def test_a_file_of_any_nonsense_is_refused_by_name(damaged, name, text):
    (damaged / name).unlink(missing_ok=True)
    if text is not None:
        (damaged / name).write_text(text)
    with refused(InputError):
        READERS[name](str(damaged))


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5])
def test_cut_weights_are_refused_by_file(damaged, kept):
    path = damaged / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    for read in (load_head, load_target):
        with refused(InputError):
            read(str(damaged))


def test_a_tensor_of_another_shape_is_refused_by_name(damaged):
    tensors = load_file(damaged / "model.safetensors")
    name = "model.layers.2.input_layernorm.weight"
    tensors[name] = tensors[name][:3].contiguous()
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    with refused(UnsupportedTarget):
        load_target(str(damaged))


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_a_cut_target_shares_keys_where_the_whole_one_does(model_type):
    kinds = ["sliding_attention", "full_attention"] * 3
    options = {"num_hidden_layers": 6, "layer_types": kinds, "num_kv_shared_layers": 3}
    whole = AutoConfig.for_model(model_type, **options)
    spans = layer_spans(whole)
    assert [span.shared for span in spans] == [False] * 3 + [True] * 3
    for last in range(6):
        assert layer_spans(cut_config(whole, last)) == spans[: last + 1]
