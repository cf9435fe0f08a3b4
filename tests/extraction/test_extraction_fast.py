"""The fused forward on the CPU, with plain-torch operations: its wiring equals the plain layers of
every kind of target.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.wording import refused
from torch import nn

from dflash_lab.errors import InputError
from dflash_lab.extraction import fused_layers as apply_module
from dflash_lab.extraction.checks import rel_l2
from dflash_lab.extraction.fused_layers import FusedLayer, NotUnderstood, read_norm, reference_ops, speed_up
from dflash_lab.models.hooks import Taps
from dflash_lab.models.load import Target, load_target
from dflash_lab.models.spans import SLIDING, Span

KINDS = ("llama", "qwen3", "qwen3_5", "qwen3_moe", "qwen3_5_moe", "qwen3_5_wrapped")
LAYERS = [0, 3, 7]


def states(target: Target, ids: torch.Tensor) -> list[torch.Tensor]:
    with torch.inference_mode(), Taps(target, LAYERS) as taps:
        target.body(input_ids=ids, use_cache=False)
        return [state.clone() for state in taps.take()]


@pytest.mark.parametrize("kind", KINDS)
def test_fused_layers_equal_plain_ones(kind: str, tiny_folder) -> None:
    target = load_target(str(tiny_folder(kind)), with_head=False)
    ids = torch.randint(256, (3, 130), generator=torch.Generator().manual_seed(0))
    plain = states(target, ids)
    path = speed_up(target, "on", reference_ops())
    assert len(path.errors) == target.num_layers and max(path.errors.values()) <= 1e-5
    for one, other in zip(states(target, ids), plain):
        assert rel_l2(one, other) <= 5e-4  # the step-by-step delta rule rounds otherwise than the chunked one
    with path.off():
        for one, other in zip(states(target, ids), plain):
            assert torch.equal(one, other)
    assert all(isinstance(layer.forward, FusedLayer) for layer in target.layers)


def test_merged_weights_are_stored_once(tiny_folder) -> None:
    target = load_target(str(tiny_folder("qwen3")), with_head=False)
    speed_up(target, "on", reference_ops())
    attention = target.layers[0].self_attn
    storages = {
        part.weight.untyped_storage().data_ptr()
        for part in (attention.q_proj, attention.k_proj, attention.v_proj)
    }
    assert len(storages) == 1


def test_a_fused_layer_leaves_masks_and_caches_to_the_plain_forward(tiny_folder) -> None:
    target = load_target(str(tiny_folder("qwen3")), with_head=False)
    ids = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    with torch.inference_mode():
        plain = target.body(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        speed_up(target, "on", reference_ops())
        assert torch.equal(
            target.body(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state, plain
        )
        cached = target.body(input_ids=ids, use_cache=True)
    assert (
        rel_l2(cached.last_hidden_state, target.body(input_ids=ids, use_cache=False).last_hidden_state)
        <= 1e-5
    )


def test_a_layer_that_is_not_equal_stays_plain(tiny_folder, monkeypatch) -> None:
    target = load_target(str(tiny_folder("llama")), with_head=False)
    ids = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(2))
    plain = states(target, ids)
    ops = reference_ops()
    wrong = type(ops)(**{**vars(ops), "swiglu": lambda gate_up: 1.01 * ops.swiglu(gate_up)})
    path = speed_up(target, "auto", wrong)
    assert not path.errors and len(path.plain) == target.num_layers
    assert "differs by rel-L2" in path.plain[0]
    for one, other in zip(states(target, ids), plain):
        assert torch.equal(one, other)
    with refused(InputError):
        speed_up(target, "on", wrong)


def test_a_layer_with_an_unknown_part_stays_plain_and_says_why(tiny_folder) -> None:
    target = load_target(str(tiny_folder("qwen3")), with_head=False)
    target.layers[2].extra = nn.Identity()
    target.spans = (*target.spans[:3], Span(SLIDING, 64), *target.spans[4:])
    target.layers[4].input_layernorm = nn.LayerNorm(48)
    path = speed_up(target, "auto", reference_ops())
    assert set(path.plain) == {2, 3, 4}
    assert (
        "extra" in path.plain[2]
        and "sliding_attention over 64" in path.plain[3]
        and "LayerNorm" in path.plain[4]
    )


def test_a_norm_is_read_by_what_it_computes(tiny) -> None:
    assert read_norm(tiny("qwen3").layers[0].input_layernorm, "norm").offset == 0.0
    assert read_norm(tiny("qwen3_5").layers[0].input_layernorm, "norm").offset == 1.0

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    with pytest.raises(NotUnderstood, match="Odd"):
        read_norm(Odd(), "norm")


def test_without_a_gpu_auto_does_nothing_and_on_says_why(tiny) -> None:
    assert speed_up(tiny("llama"), "auto").summary()["fused_layers"] == 0
    with refused(InputError):
        speed_up(tiny("llama"), "on")


def test_the_proof_weighs_what_a_layer_adds_not_the_stream(tiny_folder, monkeypatch) -> None:
    """An error of 3 % in the MLP is seen although the residual stream is a hundred times larger
    than what is added.
    """
    target = load_target(str(tiny_folder("llama")), with_head=False)
    target.embedding.weight.data *= 1000
    ops = reference_ops()
    wrong = type(ops)(**{**vars(ops), "swiglu": lambda gate_up: 1.03 * ops.swiglu(gate_up)})
    path = speed_up(target, "auto", wrong)
    assert apply_module.TOLERANCE[torch.float32] < 0.01
    assert len(path.plain) == target.num_layers


@pytest.mark.parametrize("kind", ["qwen3_5"])
def test_a_fused_target_extracts_what_the_plain_one_does(kind: str, tiny_folder, tmp_path: Path) -> None:
    from support.sample_files import make_samples

    from dflash_lab.extraction.loop import extract
    from dflash_lab.extraction.store import open_store

    samples = make_samples(tmp_path / "s.parquet", [1, 63, 64, 65, 20, 30])
    for name in ("plain", "fused"):
        target = load_target(str(tiny_folder(kind)), with_head=False)
        if name == "fused":
            speed_up(target, "on", reference_ops())
        extract(target, samples, tmp_path / name, tap_ids=[1, 5], token_budget=200, max_batch=4)
    one, other = open_store(tmp_path / "plain"), open_store(tmp_path / "fused")
    for index in range(len(one)):
        assert rel_l2(other[other.find(one[index].hash)].taps, one[index].taps) <= 3e-3
