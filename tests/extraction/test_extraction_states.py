"""The stored states are the target's own: batched equals single, taps are the layers they name, and
the self-test sees when not.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from support.sample_files import make_samples
from support.tiny_targets import build_tiny
from support.wording import refused

from dflash_lab.errors import InputError, StoreError
from dflash_lab.extraction import checks, writer
from dflash_lab.extraction.checks import Comparison, SelfTestError, rel_l2
from dflash_lab.extraction.loop import extract
from dflash_lab.extraction.manifest import read_lines
from dflash_lab.extraction.store import CODECS, Layout, open_store
from dflash_lab.extraction.writer import Capture, HostBuffers, pad
from dflash_lab.models.hooks import default_tap_ids
from dflash_lab.models.load import Target, load_target

KINDS = ("llama", "qwen3", "qwen3_5", "qwen3_moe", "qwen3_5_moe", "qwen3_5_wrapped")
LONGEST = 200
LENGTHS = [LONGEST, 1, 63, 64, 65, 2, 128, 129]
LAYERS = [0, 3, 6]


def captured(target: Target, rows: list[np.ndarray], final: bool = True) -> list[torch.Tensor]:
    layout = Layout(tuple(LAYERS), target.hidden_size, final, CODECS["bf16"])
    with Capture(target, layout, HostBuffers(1, 64, pinned=False)) as capture:
        return [state.clone() for state in capture.states(pad(rows, target.device))]


@pytest.mark.parametrize("kind", KINDS)
def test_batched_states_equal_single_ones_in_every_layer(kind: str, tiny) -> None:
    """fp32: rel-L2 at most 1e-5 a layer for lengths around the chunk of 64, for one token and for
    the longest.
    """
    target = tiny(kind)
    generator = np.random.default_rng(0)
    rows = [generator.integers(0, 256, length).astype(np.int32) for length in LENGTHS]
    together = captured(target, rows)
    for number, row in enumerate(rows):
        for layer, one, many in zip([*LAYERS, "final"], captured(target, [row]), together):
            assert rel_l2(many[number, : len(row)], one[0]) <= 1e-5, f"layer {layer}, length {len(row)}"


@pytest.mark.parametrize("kind", KINDS)
def test_taps_are_the_layers_they_name_and_final_is_before_the_norm(kind: str, tiny) -> None:
    target = tiny(kind)
    row = np.arange(3, 60).astype(np.int32)
    states = captured(target, [row])
    with torch.inference_mode():
        out = target.body(
            input_ids=torch.from_numpy(row).long()[None], use_cache=False, output_hidden_states=True
        )
    for layer, state in zip(LAYERS, states):
        assert rel_l2(state, out.hidden_states[layer + 1]) <= 1e-6
        assert rel_l2(state, out.hidden_states[layer]) > 0.1
    assert rel_l2(target.final_norm(states[-1]), out.last_hidden_state) <= 1e-6
    assert rel_l2(states[-1], out.last_hidden_state) > 0.1


def test_a_target_cut_after_the_last_tap_gives_the_same_states(tiny, tiny_folder) -> None:
    row = np.arange(3, 90).astype(np.int32)
    whole = captured(tiny("qwen3_5"), [row], final=False)
    cut = captured(
        load_target(str(tiny_folder("qwen3_5")), last_layer=LAYERS[-1], with_head=False), [row], final=False
    )
    for one, other in zip(cut, whole):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_the_store_holds_every_token_and_state_of_every_sample(kind: str, tiny, tmp_path: Path) -> None:
    target, samples = tiny(kind), make_samples(tmp_path / "s.parquet", LENGTHS)
    extract(
        target, samples, tmp_path / "store", tap_ids=LAYERS, token_budget=500, max_batch=4, store_final=True
    )
    store, table = open_store(tmp_path / "store"), pl.read_parquet(samples)
    assert sorted(store.lengths.tolist()) == sorted(LENGTHS) and store.num_tokens == sum(LENGTHS)
    for row in table.iter_rows(named=True):
        item = store[store.find(row["content_hash"])]
        assert item.hash == row["content_hash"]
        assert item.input_ids.tolist() == row["input_ids"]
        assert item.loss_mask.tolist() == row["loss_mask"]
        assert item.heldout == (row["split"] == "heldout")
        alone = captured(target, [np.asarray(row["input_ids"], np.int32)])
        wanted = torch.cat([state[0] for state in alone[:-1]], dim=-1)
        assert item.taps.dtype == torch.bfloat16 and item.final.dtype == torch.bfloat16
        assert (
            rel_l2(item.taps, wanted) <= 3e-3 and rel_l2(item.final, alone[-1][0]) <= 3e-3
        )  # one rounding to bf16


@pytest.mark.parametrize(("storage", "limit"), [("fp8", 0.04), ("int8", 0.02)])
def test_eight_bit_storage_halves_the_bytes_at_a_bounded_error(
    storage: str, limit: float, tiny, tmp_path: Path
) -> None:
    target, samples = tiny("qwen3"), make_samples(tmp_path / "s.parquet", LENGTHS)
    for name in ("bf16", storage):
        plan = {"token_budget": 500, "max_batch": 4, "store_final": True, "storage": name}
        extract(target, samples, tmp_path / name, tap_ids=LAYERS, **plan)
    exact, small = open_store(tmp_path / "bf16"), open_store(tmp_path / storage)
    for index in range(len(exact)):
        one, other = exact[index], small[small.find(exact[index].hash)]
        assert other.taps.dtype == torch.bfloat16
        assert rel_l2(other.taps, one.taps) <= limit and torch.equal(other.final, one.final)
    sizes = {
        name: sum(path.stat().st_size for path in (tmp_path / name).rglob("*.safetensors"))
        for name in ("bf16", storage)
    }
    assert sizes[storage] < 0.7 * sizes["bf16"]  # three taps halved, the final state not


def test_both_layer_id_conventions_stand_in_the_manifest(tiny, tmp_path: Path) -> None:
    samples = make_samples(tmp_path / "s.parquet", [5, 6])
    extract(tiny("llama"), samples, tmp_path / "store", tap_ids=[1, 4], token_budget=500, max_batch=4)
    manifest = open_store(tmp_path / "store").manifest
    assert manifest["tap_ids"] == [1, 4] and manifest["tap_ids_plus_one"] == [2, 5]
    assert manifest["target"]["weights"] and manifest["compute_dtype"] == "float32"


def test_the_self_test_goes_into_the_manifest(tiny, tmp_path: Path) -> None:
    samples = make_samples(tmp_path / "s.parquet", LENGTHS)
    extract(tiny("qwen3_5"), samples, tmp_path / "store", tap_ids=LAYERS, token_budget=500, max_batch=4)
    (line,) = [
        line for line in read_lines(tmp_path / "store" / "shard-00000-of-00001") if line["kind"] == "selftest"
    ]
    assert line["lengths"] and max(line["batched_error"]) <= 1e-5 and max(line["layer_error"]) <= 1e-6


def wrong_side(ids: list[np.ndarray], device: torch.device) -> writer.Padded:
    """Pad on the left: the one way in which padding can hurt."""
    right = pad(ids, device)
    width = right.input_ids.shape[1]
    batch = torch.stack([torch.roll(row, width - len(one)) for row, one in zip(right.input_ids, ids)])
    return writer.Padded(batch, right.valid, right.owner)


def test_the_self_test_stops_a_run_with_wrong_padding(tiny, tmp_path: Path, monkeypatch) -> None:
    samples = make_samples(tmp_path / "s.parquet", LENGTHS)
    monkeypatch.setattr(checks, "pad", wrong_side)
    with refused(SelfTestError):
        extract(tiny("qwen3_5"), samples, tmp_path / "store", tap_ids=LAYERS, token_budget=500, max_batch=4)
    with refused(InputError):
        open_store(tmp_path / "store")


@contextlib.contextmanager
def near_ties(target: Target):
    """A sound target that rounding moves far: a batch's states differ by a rounding in layer 0, and layer 2
    takes a choice by digits that rounding decides, as a router does near a tie.
    """

    def rounding(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
        return output * (1 + 3e-7 * noise) if len(output) > 1 else output

    def choice(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        return output * (1 + 0.01 * torch.sin(output[..., :1] * 3e6).sign())

    hooks = {0: rounding, 2: choice}
    handles = [target.layers[layer].register_forward_hook(hook) for layer, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def test_a_target_that_rounding_alone_moves_far_is_no_fault(tiny, tmp_path: Path, monkeypatch) -> None:
    samples = make_samples(tmp_path / "s.parquet", LENGTHS)
    plan = dict(tap_ids=[1, 4], token_budget=500, max_batch=4)
    with near_ties(tiny("llama")):
        report = extract(tiny("llama"), samples, tmp_path / "store", **plan)
        test = report.selftest
        fixed = [2e-5 * (layer + 1) ** 0.5 for layer in (1, 4)]
        assert test["batched_error"][0] < fixed[0] == test["tolerance"][0]
        assert 5 * fixed[1] < test["batched_error"][1] < test["tolerance"][1] < 0.2
        monkeypatch.setattr(checks, "pad", wrong_side)
        with refused(SelfTestError):
            extract(tiny("llama"), samples, tmp_path / "wrong", **plan)


@pytest.mark.parametrize("seed", [20, 21])
def test_a_sound_mixture_of_sixteen_experts_is_taken(seed: int, tmp_path: Path) -> None:
    """Where this was written, a batch turns a routing choice of seed 20 over, 2e-3 of the states."""
    target = load_target(str(build_tiny("qwen3_moe", tmp_path / "m", seed=seed, num_experts=16)))
    generator = np.random.default_rng(seed)
    rows = [generator.integers(0, 256, n).astype(np.int32) for n in (200, 190, 130, 129, 128, 65, 64, 63)]
    layout = Layout(tuple(LAYERS), target.hidden_size, False, CODECS["bf16"])
    with Capture(target, layout, HostBuffers(1, 64, pinned=False)) as capture:
        compare, together = Comparison(target, capture, LAYERS), capture.states(pad(rows, target.device))
        for number, row in enumerate(rows):
            found = compare.of(row, [state[number, : len(row)] for state in together])
            assert found.problems == []
            other = compare.of(row, [state[number - 1, : len(row)] for state in together])
            assert len(other.problems) == len(LAYERS)


@pytest.mark.parametrize("shift", [-1, 1])
def test_the_self_test_stops_a_run_that_taps_the_neighbouring_layer(
    shift: int, tiny, tmp_path: Path, monkeypatch
) -> None:
    samples = make_samples(tmp_path / "s.parquet", LENGTHS)
    real = writer.Taps
    monkeypatch.setattr(writer, "Taps", lambda layers, ids: real(layers, [layer + shift for layer in ids]))
    with refused(SelfTestError):
        extract(tiny("llama"), samples, tmp_path / "store", tap_ids=[2, 4], token_budget=500, max_batch=4)


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (0.0, "all zero"), (1.0, "constant")])
def test_the_self_test_stops_a_run_on_unsound_states(value: float, word: str, tiny, tmp_path: Path) -> None:
    target, samples = tiny("llama"), make_samples(tmp_path / "s.parquet", LENGTHS)

    def spoil(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        return torch.cat((torch.full_like(output[:, :1], value), output[:, 1:]), dim=1)

    handle = target.layers[4].register_forward_hook(spoil)
    with contextlib.ExitStack() as stack:
        stack.callback(handle.remove)
        with refused(SelfTestError):
            extract(target, samples, tmp_path / "store", tap_ids=[2, 4], token_budget=500, max_batch=4)


def test_a_target_and_samples_are_enough(tiny, tiny_folder, tmp_path: Path) -> None:
    """The DFlash rule counts the layers that the model has, however many of them were loaded."""
    samples, stores = make_samples(tmp_path / "s.parquet", LENGTHS), []
    for name, target in (
        ("whole", tiny("llama")),
        ("cut", load_target(str(tiny_folder("llama")), last_layer=5, with_head=False)),
    ):
        assert extract(target, samples, tmp_path / name).samples_stored == len(LENGTHS)
        stores.append(open_store(tmp_path / name))
    assert stores[0].tap_ids == stores[1].tap_ids == default_tap_ids(8) == [1, 2, 3, 4, 5]
    assert torch.equal(stores[0][0].taps, stores[1][0].taps)


def test_tokens_of_another_vocabulary_are_refused_before_the_device_sees_them(tiny, tmp_path: Path) -> None:
    from dflash_lab.data.samples import Sample, write_samples

    path = tmp_path / "s.parquet"
    write_samples(path, [Sample("big", [1, 400], [0, 1], "test")], heldout_fraction=0.0, provenance={})
    with refused(InputError):
        extract(tiny("llama"), path, tmp_path / "store", tap_ids=[1], token_budget=500, max_batch=4)


def test_taps_outside_the_target_are_refused(tiny, tmp_path: Path) -> None:
    samples = make_samples(tmp_path / "s.parquet", [5])
    with refused(InputError):
        extract(tiny("llama"), samples, tmp_path / "store", tap_ids=[8], token_budget=500, max_batch=4)


def test_another_model_layer_set_or_storage_is_refused_by_name(tiny, tmp_path: Path) -> None:
    samples, store = make_samples(tmp_path / "s.parquet", [5, 6, 7]), tmp_path / "store"
    plan = {"token_budget": 500, "max_batch": 4}
    extract(tiny("llama"), samples, store, tap_ids=[1, 3], **plan)
    before = sorted((path, path.stat().st_mtime_ns) for path in store.rglob("*.safetensors"))
    for change, said in (
        ({"target": tiny("qwen3")}, r"target\.config: the store has"),
        ({"tap_ids": [1, 4]}, r"tap_ids: the store has \[1, 3\], this run \[1, 4\]"),
        ({"store_final": True}, "has_final: the store has False, this run True"),
        ({"storage": "fp8"}, "storage: the store has 'bf16', this run 'fp8'"),
        ({"samples": make_samples(tmp_path / "other.parquet", [9], seed=5)}, "samples: the store has"),
    ):
        arguments = {
            "target": tiny("llama"),
            "samples": samples,
            "store": store,
            "tap_ids": [1, 3],
            **plan,
            **change,
        }
        with refused(StoreError):
            extract(**arguments)
    assert before == sorted((path, path.stat().st_mtime_ns) for path in store.rglob("*.safetensors"))


def test_the_same_weights_in_another_folder_may_go_on(tiny_folder, tmp_path: Path) -> None:
    import shutil

    samples = make_samples(tmp_path / "s.parquet", [5, 6, 7])
    moved = shutil.copytree(tiny_folder("llama"), tmp_path / "moved")
    for folder in (tiny_folder("llama"), moved):
        report = extract(
            load_target(str(folder)), samples, tmp_path / "store", tap_ids=[1], token_budget=500, max_batch=4
        )
    assert report.stored_before == 3
