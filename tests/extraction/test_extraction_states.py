"""The stored states are the target's own: batched equals single, taps are the layers they name, and
the self-test sees when not.
"""

from __future__ import annotations

import contextlib
import shutil

import numpy as np
import polars as pl
import pytest
import torch
from support.sample_files import make_samples
from support.tiny_targets import build_tiny
from support.wording import refused

from dflash_lab.data.samples import Sample, write_samples
from dflash_lab.errors import InputError, StoreError
from dflash_lab.extraction import checks, writer
from dflash_lab.extraction.checks import Comparison, SelfTestError, rel_l2
from dflash_lab.extraction.store import CODECS, Layout, open_store
from dflash_lab.extraction.writer import Capture, HostBuffers, pad
from dflash_lab.models.hooks import default_tap_ids
from dflash_lab.models.load import Target, load_target

KINDS = ("llama", "qwen3", "qwen3_5", "qwen3_moe", "qwen3_5_moe", "qwen3_5_wrapped")
LENGTHS = [200, 1, 63, 64, 65, 2, 128, 129]  # around the chunk of 64, one token, the longest
LAYERS = [0, 3, 6]


def capturing(target: Target, final: bool = True) -> Capture:
    layout = Layout(tuple(LAYERS), target.hidden_size, final, CODECS["bf16"])
    return Capture(target, layout, HostBuffers(1, 64, pinned=False))


def captured(target: Target, rows: list[np.ndarray], final: bool = True) -> list[torch.Tensor]:
    with capturing(target, final) as capture:
        return [state.clone() for state in capture.states(pad(rows, target.device))]


def drawn(lengths: list[int], seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, length).astype(np.int32) for length in lengths]


@pytest.mark.parametrize("kind", KINDS)
def test_batched_states_equal_single_ones_and_the_layers_they_name_and_final_is_before_the_norm(kind, tiny):
    target, rows = tiny(kind), drawn(LENGTHS, 0)
    together = captured(target, rows)
    for number, row in enumerate(rows):
        for layer, one, many in zip([*LAYERS, "final"], captured(target, [row]), together):
            assert rel_l2(many[number, : len(row)], one[0]) <= 1e-5, f"layer {layer}, length {len(row)}"
    ids, states = torch.from_numpy(rows[2]).long()[None], captured(target, [rows[2]])
    with torch.inference_mode():
        out = target.body(input_ids=ids, use_cache=False, output_hidden_states=True)
    for layer, state in zip(LAYERS, states):
        assert rel_l2(state, out.hidden_states[layer + 1]) <= 1e-6
        assert rel_l2(state, out.hidden_states[layer]) > 0.1
    assert rel_l2(target.final_norm(states[-1]), out.last_hidden_state) <= 1e-6
    assert rel_l2(states[-1], out.last_hidden_state) > 0.1


def test_a_target_cut_after_the_last_tap_gives_the_same_states(tiny, tiny_target) -> None:
    row = np.arange(3, 90).astype(np.int32)
    cut = load_target(str(tiny_target("qwen3_5")), last_layer=LAYERS[-1], with_head=False)
    for one, whole in zip(captured(cut, [row], final=False), captured(tiny("qwen3_5"), [row], final=False)):
        assert torch.equal(one, whole)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_the_store_holds_every_token_and_state_of_every_sample(kind: str, job) -> None:
    made = job(kind, LENGTHS, tap_ids=LAYERS, token_budget=500, max_batch=4, store_final=True)
    made.run()
    store = made.opened()
    assert sorted(store.lengths.tolist()) == sorted(LENGTHS) and store.num_tokens == sum(LENGTHS)
    for row in pl.read_parquet(made.samples).iter_rows(named=True):
        item = store[store.find(row["content_hash"])]
        assert item.hash == row["content_hash"]
        assert item.input_ids.tolist() == row["input_ids"]
        assert item.loss_mask.tolist() == row["loss_mask"]
        assert item.heldout == (row["split"] == "heldout")
        alone = captured(made.target, [np.asarray(row["input_ids"], np.int32)])
        wanted = torch.cat([state[0] for state in alone[:-1]], dim=-1)
        assert item.taps.dtype == torch.bfloat16 and item.final.dtype == torch.bfloat16
        # one rounding to bf16
        assert rel_l2(item.taps, wanted) <= 3e-3 and rel_l2(item.final, alone[-1][0]) <= 3e-3
    (line,) = made.lines("selftest")
    assert line["lengths"] and max(line["batched_error"]) <= 1e-5 and max(line["layer_error"]) <= 1e-6


def test_eight_bit_storage_halves_the_bytes_at_a_bounded_error(job, tmp_path) -> None:
    made = job("qwen3", LENGTHS, tap_ids=LAYERS, token_budget=500, max_batch=4, store_final=True)
    sizes, stores = {}, {}
    for storage in ("bf16", "fp8", "int8"):
        made.run(store=tmp_path / storage, storage=storage)
        stores[storage] = open_store(tmp_path / storage)
        sizes[storage] = sum(path.stat().st_size for path in (tmp_path / storage).rglob("*.safetensors"))
    for storage, limit in (("fp8", 0.04), ("int8", 0.02)):
        small = stores[storage]
        for exact in stores["bf16"]:
            item = small[small.find(exact.hash)]
            assert item.taps.dtype == torch.bfloat16
            assert rel_l2(item.taps, exact.taps) <= limit and torch.equal(item.final, exact.final)
        assert sizes[storage] < 0.7 * sizes["bf16"]  # three taps halved, the final state not


def wrong_side(ids: list[np.ndarray], device: torch.device) -> writer.Padded:
    """Pad on the left: the one way in which padding can hurt."""
    right = pad(ids, device)
    width = right.input_ids.shape[1]
    batch = torch.stack([torch.roll(row, width - len(one)) for row, one in zip(right.input_ids, ids)])
    return writer.Padded(batch, right.valid, right.owner)


@contextlib.contextmanager
def hooked(target: Target, **hooks):
    handles = [target.layers[int(name[1:])].register_forward_hook(hook) for name, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def near_ties(target: Target):
    """A sound target that rounding moves far: a batch's states differ by a rounding in layer 0, and layer 2
    takes a choice by digits that rounding decides, as a router does near a tie.
    """

    def rounding(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
        return output * (1 + 3e-7 * noise) if len(output) > 1 else output

    def choice(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        return output * (1 + 0.01 * torch.sin(output[..., :1] * 3e6).sign())

    return hooked(target, _0=rounding, _2=choice)


def test_a_target_that_rounding_alone_moves_far_is_no_fault(job, tmp_path, monkeypatch) -> None:
    made = job("llama", LENGTHS, tap_ids=[1, 4], token_budget=500, max_batch=4)
    with near_ties(made.target):
        test = made.run().selftest
        fixed = [2e-5 * (layer + 1) ** 0.5 for layer in (1, 4)]
        assert test["batched_error"][0] < fixed[0] == test["tolerance"][0]
        assert 5 * fixed[1] < test["batched_error"][1] < test["tolerance"][1] < 0.2
        monkeypatch.setattr(checks, "pad", wrong_side)
        with refused(SelfTestError):
            made.run(store=tmp_path / "wrong")


def test_a_sound_mixture_of_sixteen_experts_is_taken(tmp_path) -> None:
    """Where this was written, a batch turns a routing choice over, 2e-3 of the states."""
    target = load_target(str(build_tiny("qwen3_moe", tmp_path / "m", seed=20, num_experts=16)))
    rows = drawn([200, 190, 130, 129, 64, 63], 20)
    with capturing(target, final=False) as capture:
        compare, together = Comparison(target, capture, LAYERS), capture.states(pad(rows, target.device))
        for number, row in enumerate(rows):
            found = compare.of(row, [state[number, : len(row)] for state in together])
            assert found.problems == []
            other = compare.of(row, [state[number - 1, : len(row)] for state in together])
            assert len(other.problems) == len(LAYERS)


def shifted(by: int):
    real = writer.Taps
    return lambda layers, ids: real(layers, [layer + by for layer in ids])


def spoilt(value: float):
    """A hook that writes a value into the first row of each sample."""
    return lambda _m, _a, output: torch.cat((torch.full_like(output[:, :1], value), output[:, 1:]), dim=1)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        pytest.param("qwen3_5", (checks, "pad", wrong_side), id="padding on the wrong side"),
        pytest.param("llama", (writer, "Taps", shifted(-1)), id="a tap of the layer before"),
        pytest.param("llama", (writer, "Taps", shifted(1)), id="a tap of the layer after"),
        pytest.param("llama", float("nan"), id="NaN"),
        pytest.param("llama", 0.0, id="all zero"),
        pytest.param("llama", 1.0, id="constant"),
    ],
)
def test_the_self_test_stops_a_run_before_anything_is_stored(kind, fault, job, monkeypatch) -> None:
    made, hooks = job(kind, LENGTHS, tap_ids=[2, 4], token_budget=500, max_batch=4), {}
    if isinstance(fault, float):
        hooks["_4"] = spoilt(fault)
    else:
        monkeypatch.setattr(*fault)
    with hooked(made.target, **hooks), refused(SelfTestError):
        made.run()
    assert not made.parts()


def test_a_target_and_samples_are_enough(job, tiny_target, tmp_path) -> None:
    """The DFlash rule counts the layers that the model has, however many of them were loaded."""
    made, stores = job("llama", LENGTHS, tap_ids=None, token_budget=16384), []
    cut = load_target(str(tiny_target("llama")), last_layer=5, with_head=False)
    for name, target in (("whole", made.target), ("cut", cut)):
        assert made.run(target=target, store=tmp_path / name).samples_stored == len(LENGTHS)
        stores.append(open_store(tmp_path / name))
    assert stores[0].tap_ids == stores[1].tap_ids == default_tap_ids(8) == [1, 2, 3, 4, 5]
    assert torch.equal(stores[0][0].taps, stores[1][0].taps)


def test_tokens_of_another_vocabulary_are_refused_before_the_device_sees_them(job) -> None:
    made = job("llama", [5])
    write_samples(
        made.samples, [Sample("big", [1, 400], [0, 1], "test")], heldout_fraction=0.0, provenance={}
    )
    with refused(InputError):
        made.run()


def test_taps_outside_the_target_are_refused(job) -> None:
    with refused(InputError):
        job("llama", [5], tap_ids=[8]).run()


def test_another_model_layer_set_or_storage_is_refused_by_name_and_a_moved_one_goes_on(
    job, tiny, tiny_target, tmp_path
) -> None:
    made = job("llama", [5, 6, 7])
    made.run()
    before = [(path, path.stat().st_mtime_ns) for path in made.parts()]
    for change in (
        {"target": tiny("qwen3")},
        {"tap_ids": [1, 4]},
        {"store_final": True},
        {"storage": "fp8"},
        {"samples": make_samples(tmp_path / "other.parquet", [9], seed=5)},
    ):
        with refused(StoreError):
            made.run(**change)
    moved = load_target(str(shutil.copytree(tiny_target("llama"), tmp_path / "moved")))
    assert made.run(target=moved).stored_before == 3
    assert before == [(path, path.stat().st_mtime_ns) for path in made.parts()]
