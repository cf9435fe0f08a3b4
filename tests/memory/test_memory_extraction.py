"""The analytic account of extraction against counted fake runs, and the incidents it has to get right."""

from dataclasses import replace

import pytest
from cases import CARD_GIB, CONFIG, SHAPE, batch
from support.fake_memory.allocator import replay
from support.fake_memory.extraction import count_extraction
from support.tiny_targets import tiny_config
from support.wording import check_wording, refused
from transformers import AutoConfig

from dflash_lab.errors import InputError
from dflash_lab.memory.account import FRAGMENTS, predict_extraction
from dflash_lab.memory.shapes import GIB, ExtractionSetup
from dflash_lab.models.hooks import default_tap_ids
from dflash_lab.models.source import shape_config


def account(rows, length, **options):
    return predict_extraction(SHAPE, batch(rows, length, **options))


def counted_and_predicted(config, rows, length, taps=(), **options):
    taps = tuple(taps or default_tap_ids(config.num_hidden_layers))
    setup = ExtractionSetup(batch=rows, length=length, tap_ids=taps, **options)
    counted, tracker = count_extraction(config, setup)
    return counted, predict_extraction(config, setup, cuda=False), tracker


OPTIONS = [
    {},
    {"kernels": "torch"},
    {"use_cache": True},
    {"mask": True},
    {"capture": "output_hidden_states"},
    {"logits": True},
    {"store_final": True},
    {"packed": False},
]
RUNS = [
    *(("qwen3.6-27b", (4, 1000), options) for options in OPTIONS),
    *(("qwen3.6-27b", (64, 65), options) for options in OPTIONS[:4]),
    *(("qwen3-8b", (64, 65), options) for options in OPTIONS if "kernels" not in options),
    *(("smollm2-135m", (4, 1000), options) for options in ({}, {"logits": True})),
]


@pytest.mark.parametrize(
    "name, sizes, options", RUNS, ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x)) or "plain"
)
def test_formulas_agree_with_the_counted_fake_run(name, sizes, options):
    counted, predicted, _ = counted_and_predicted(shape_config(name), *sizes, **options)
    assert predicted.moving == pytest.approx(counted.moving, rel=0.04)
    assert predicted.terms["target weights"] == counted.terms["target weights"]


@pytest.mark.parametrize(
    "kind, length, mask",
    [("mistral", 299, False), ("mistral", 2000, True), ("qwen3", 300, False), ("qwen3", 2000, False)],
)
def test_formulas_of_windows_agree_with_the_counted_fake_run(kind, length, mask):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}
    sizes |= {"num_hidden_layers": 8, "num_key_value_heads": 2, "vocab_size": 500, "sliding_window": 300}
    own = {"use_sliding_window": True, "max_window_layers": 3} if kind == "qwen3" else {}
    config = AutoConfig.for_model(kind, **sizes, **own)
    counted, predicted, _ = counted_and_predicted(config, 2, length, (1, 6), mask=mask)
    assert predicted.moving == pytest.approx(counted.moving, rel=0.02)
    assert predicted.terms.get("mask", 0) == pytest.approx(counted.terms.get("mask", 0), rel=0.01)


@pytest.mark.parametrize(
    "name, rows, length",
    [
        ("qwen3.6-27b", 4, 1000),
        ("qwen3.6-27b", 64, 65),
        ("qwen3.6-27b", 512, 8),
        ("qwen3-8b", 1, 64),
        ("smollm2-135m", 64, 65),
    ],
)
def test_formulas_of_fused_layers_agree_with_the_counted_fake_run(name, rows, length):
    config = shape_config(name)
    counted, predicted, _ = counted_and_predicted(config, rows, length, fused=True, in_flight=3)
    assert predicted.moving == pytest.approx(counted.moving, rel=0.002)
    states = len(default_tap_ids(config.num_hidden_layers)) * rows * length * config.hidden_size * 2
    assert predicted.terms["packed states in flight"] == 3 * states
    plain, _, _ = counted_and_predicted(config, rows, length, in_flight=3)
    assert counted.moving <= plain.moving


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_5", "qwen3_moe", "qwen3_5_moe"])
def test_formulas_hold_for_tiny_targets_of_every_kind(kind):
    dtype = "float32" if kind in ("qwen3_5", "qwen3_moe") else "bfloat16"
    counted, predicted, _ = counted_and_predicted(tiny_config(kind), 4, 200, (1, 3, 5), dtype=dtype)
    assert predicted.moving == pytest.approx(counted.moving, rel=0.07)


@pytest.mark.parametrize(
    "kind, taps, options",
    [
        ("qwen3_5", (1, 6, 9), {"use_cache": True}),
        ("llama", (8, 9), {}),
        ("llama", (9,), {"capture": "output_hidden_states"}),
    ],
)
def test_few_layers_count_the_same_as_all(monkeypatch, kind, taps, options):
    config = tiny_config(kind, num_hidden_layers=16)
    few, _, _ = counted_and_predicted(config, 3, 70, taps, dtype="float32", **options)
    every = "support.fake_memory.extraction.representative_layers"
    monkeypatch.setattr(every, lambda shape, taps, last: list(range(last + 1)))
    whole, _, _ = counted_and_predicted(config, 3, 70, taps, dtype="float32", **options)
    assert few.moving == pytest.approx(whole.moving, rel=1e-6)
    assert few.terms["target weights"] == whole.terms["target weights"]


@pytest.mark.parametrize("name, rows, length", [("qwen3.6-27b", 16, 4096), ("qwen3-8b", 64, 335)])
def test_a_replayed_allocator_has_the_fragments_that_the_account_assumes(name, rows, length):
    counted, _, tracker = counted_and_predicted(shape_config(name), rows, length)
    shares = {}
    for expandable in (False, True):
        found = replay(tracker, "target weights", expandable=expandable)
        assert found.allocated <= found.needed <= found.reserved
        shares[expandable] = found.needed / counted.moving - 1
    assert 0.05 < shares[False] < 0.35 and shares[True] < shares[False] + 0.02
    assert shares[False] == pytest.approx(FRAGMENTS[False], abs=0.15)
    assert shares[True] == pytest.approx(FRAGMENTS[True], abs=0.1)


def test_expandable_segments_are_predicted_to_need_less():
    plain, expandable = (account(64, 335, expandable=on) for on in (False, True))
    assert plain.live == expandable.live
    assert plain.terms["fragmentation"] == int(FRAGMENTS[False] * (plain.live - plain.static))
    assert expandable.peak < plain.peak


# Peaks above the weights on one H200, GiB: hooks, all 64 layers of the body, flash-linear-attention,
# transformers 5.17 (whose layers copy queries and keys to every value head).
MEASURED = {(8, 335): 0.65, (64, 335): 5.21, (8, 4096): 7.85, (16, 4096): 15.71}


@pytest.mark.parametrize("rows, length", MEASURED)
def test_the_account_meets_what_an_h200_measured(monkeypatch, rows, length):
    monkeypatch.setattr("dflash_lab.memory.account.repeats_keys", lambda model_type: True)
    found = predict_extraction(CONFIG, batch(rows, length, stop_early=False), cuda=False)
    assert found.moving / GIB == pytest.approx(MEASURED[rows, length], rel=0.05)


def test_stored_states_and_logits_meet_what_an_h200_measured():
    setup = batch(16, 335, capture="output_hidden_states", logits=True, stop_early=False)
    assert predict_extraction(SHAPE, setup, cuda=False).moving / GIB == pytest.approx(5.80, rel=0.02)


def test_incident_output_hidden_states_stores_65_tensors():
    stored = account(128, 3316, capture="output_hidden_states")
    check_wording(stored.explain())
    assert stored.terms["stored hidden states"] > 260e9 and stored.peak_gib > 3 * CARD_GIB
    hooked = account(128, 3316).terms["captured states"]
    assert hooked == 4 * 128 * 3316 * 5120 * 2  # the fifth is still the stream


@pytest.mark.parametrize("rows, length", [(128, 4042), (256, 3316), (128, 3316)])
def test_incident_hooks_do_not_help_when_activations_are_the_cause(rows, length):
    found = account(rows, length)
    captured = found.terms.get("captured states", 0) + found.terms.get("packed states", 0)
    # What the layers hold is more than what is captured.
    assert found.peak_gib > CARD_GIB and found.moving - captured > captured


@pytest.mark.parametrize("rows, length", [(200, 335), (256, 335), (2, 4042), (10, 4042)])
def test_incident_short_wide_and_long_narrow_batches_fit(rows, length):
    assert account(rows, length).peak_gib < CARD_GIB


def test_short_rows_cost_whole_chunks_of_64():
    # The same 4,096 tokens, in rows that are padded to 64 inside the delta rule.
    assert account(512, 8, kernels="torch").moving > 6 * account(8, 512, kernels="torch").moving
    chunked = account(64, 65).terms["gated delta net chunk states"]
    assert chunked == 2 * account(64, 64).terms["gated delta net chunk states"]
    assert chunked == 64 * 2 * 48 * 128 * 128 * 2  # 1.5 MiB a row and chunk


def test_the_cache_costs_144_mib_a_row():
    recurrent = 512 * 48 * 48 * 128 * 128 * 4
    assert recurrent / GIB == pytest.approx(72)
    assert account(512, 8, use_cache=True, store_final=True).terms["cache"] > recurrent


@pytest.mark.parametrize("wrong", [{"tap_ids": (64,)}, {"rows": 0}, {"tap_ids": ()}, {"dtype": "int3"}])
def test_setups_that_make_no_sense_are_refused(wrong):
    with refused(InputError):
        account(**({"rows": 1, "length": 8} | wrong))


@pytest.mark.parametrize("plain", [(0, 4), (61,), (1, 60)])
def test_layers_fused_in_part_lie_between_all_and_none(plain):
    """A few layers that kept the plain forward cost what the worst of them takes, not what all would."""
    fused = batch(8, 335, fused=True)
    part = replace(fused, plain_layers=plain)
    none, some, every = (
        predict_extraction(SHAPE, setup, cuda=False).live
        for setup in (fused, part, replace(fused, fused=False))
    )
    assert none <= some <= every
    assert (some == every) == (plain in ((61,), (1, 60)))  # late plain delta nets hold what all plain ones do
    counted, _ = count_extraction(CONFIG, part)
    assert some == pytest.approx(counted.live, rel=0.01)
