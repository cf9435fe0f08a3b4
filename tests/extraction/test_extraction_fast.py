"""The fused forward on the CPU, with plain-torch operations: its wiring equals the plain layers of
every kind of target.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.wording import check_wording, refused
from torch import nn

from dflash_lab.errors import InputError
from dflash_lab.extraction.checks import rel_l2
from dflash_lab.extraction.fused_layers import FusedLayer, NotUnderstood, read_norm, reference_ops, speed_up
from dflash_lab.extraction.store import open_store
from dflash_lab.models.hooks import Taps
from dflash_lab.models.load import Target, load_target
from dflash_lab.models.spans import SLIDING, Span

KINDS = ("llama", "qwen3", "qwen3_5", "qwen3_moe", "qwen3_5_moe", "qwen3_5_wrapped")
LAYERS = [0, 3, 7]


@pytest.fixture
def fresh(tiny_target) -> Callable[[str], Target]:
    """A function: kind -> a target of the test's own, as its layers are changed."""
    return lambda kind: load_target(str(tiny_target(kind)), with_head=False)


def draw(rows: int, length: int, seed: int) -> torch.Tensor:
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(seed))


def states(target: Target, ids: torch.Tensor) -> list[torch.Tensor]:
    with torch.inference_mode(), Taps(target, LAYERS) as taps:
        target.body(input_ids=ids, use_cache=False)
        return [state.clone() for state in taps.take()]


def wrong_by(factor: float):
    """Operations whose MLP is wrong by a factor."""
    ops = reference_ops()
    return type(ops)(**{**vars(ops), "swiglu": lambda gate_up: factor * ops.swiglu(gate_up)})


@pytest.mark.parametrize("kind", KINDS)
def test_fused_layers_equal_plain_ones(kind: str, fresh) -> None:
    target, ids = fresh(kind), draw(3, 130, 0)
    plain = states(target, ids)
    path = speed_up(target, "on", reference_ops())
    assert len(path.errors) == target.num_layers and max(path.errors.values()) <= 1e-5
    for one, other in zip(states(target, ids), plain):
        assert rel_l2(one, other) <= 5e-4  # the step-by-step delta rule rounds otherwise than the chunked one
    with path.off():
        for one, other in zip(states(target, ids), plain):
            assert torch.equal(one, other)
    assert all(isinstance(layer.forward, FusedLayer) for layer in target.layers)


def test_a_fused_layer_leaves_masks_and_caches_to_the_plain_forward_and_stores_weights_once(fresh) -> None:
    target, ids = fresh("qwen3"), draw(2, 20, 1)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0

    def last(**given) -> torch.Tensor:
        with torch.inference_mode():
            return target.body(input_ids=ids, **{"use_cache": False, **given}).last_hidden_state

    plain = last(attention_mask=mask)
    speed_up(target, "on", reference_ops())
    assert torch.equal(last(attention_mask=mask), plain)
    assert rel_l2(last(use_cache=True), last()) <= 1e-5
    merged = [getattr(target.layers[0].self_attn, name).weight for name in ("q_proj", "k_proj", "v_proj")]
    assert len({weight.untyped_storage().data_ptr() for weight in merged}) == 1


def test_a_layer_that_is_not_equal_stays_plain(fresh) -> None:
    target, ids = fresh("llama"), draw(2, 20, 2)
    plain = states(target, ids)
    path = speed_up(target, "auto", wrong_by(1.01))
    assert not path.errors and len(path.plain) == target.num_layers
    for one, other in zip(states(target, ids), plain):
        assert torch.equal(one, other)
    with refused(InputError):
        speed_up(target, "on", wrong_by(1.01))
    target.embedding.weight.data *= 1000  # what a layer adds is weighed, not the stream
    assert len(speed_up(target, "auto", wrong_by(1.03)).plain) == target.num_layers


def test_a_layer_with_an_unknown_part_stays_plain_and_says_why(fresh) -> None:
    target = fresh("qwen3")
    target.layers[2].extra = nn.Identity()
    target.spans = (*target.spans[:3], Span(SLIDING, 64), *target.spans[4:])
    target.layers[4].input_layernorm = nn.LayerNorm(48)
    path = speed_up(target, "auto", reference_ops())
    check_wording("\n".join(f"{index}: {why}" for index, why in sorted(path.plain.items())))


def test_a_norm_is_read_by_what_it_computes(tiny) -> None:
    assert read_norm(tiny("qwen3").layers[0].input_layernorm, "norm").offset == 0.0
    assert read_norm(tiny("qwen3_5").layers[0].input_layernorm, "norm").offset == 1.0

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    with refused(NotUnderstood):
        read_norm(Odd(), "norm")


def test_without_a_gpu_auto_does_nothing_and_on_says_why(tiny) -> None:
    assert speed_up(tiny("llama"), "auto").summary()["fused_layers"] == 0
    with refused(InputError):
        speed_up(tiny("llama"), "on")


def test_a_fused_target_extracts_what_the_plain_one_does(job, fresh, tmp_path) -> None:
    plain = job("qwen3_5", [1, 63, 64, 65, 20, 30], token_budget=200, max_batch=4)
    plain.run()
    fused = fresh("qwen3_5")
    speed_up(fused, "on", reference_ops())
    plain.run(target=fused, store=tmp_path / "fused")
    other = open_store(tmp_path / "fused")
    for item in plain.opened():
        assert rel_l2(other[other.find(item.hash)].taps, item.taps) <= 3e-3
