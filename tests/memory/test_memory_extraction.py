"""The analytic account of extraction against counted fake runs, and the incidents it has to get right."""

import time
from dataclasses import replace

import pytest
from support.fake_memory.extraction import count_extraction, representative_layers
from support.tiny_targets import tiny_config
from support.wording import refused
from transformers import AutoConfig

from dflash_lab.errors import InputError
from dflash_lab.memory.account import predict_extraction
from dflash_lab.memory.shapes import GIB, ExtractionSetup, target_shape
from dflash_lab.models.hooks import default_tap_ids
from dflash_lab.models.source import shape_config

CARD_GIB = 94.97
TAPS_27B = (1, 16, 31, 46, 61)


@pytest.fixture(scope="module")
def config_27b():
    return shape_config("qwen3.6-27b")


def live(account):
    """Bytes the batch brings, without the allocator's part."""
    return account.moving - account.terms.get("fragmentation", 0)


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


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "plain")
@pytest.mark.parametrize("name", ["qwen3.6-27b", "qwen3-8b", "smollm2-135m"])
@pytest.mark.parametrize("batch, length", [(4, 1000), (64, 65)])
def test_formulas_agree_with_the_counted_fake_run(name, options, batch, length):
    config = shape_config(name)
    taps = tuple(default_tap_ids(config.num_hidden_layers))
    counted, _ = count_extraction(
        config, ExtractionSetup(batch=batch, length=length, tap_ids=taps, **options)
    )
    account = predict_extraction(
        config, ExtractionSetup(batch=batch, length=length, tap_ids=taps, **options), cuda=False
    )
    assert live(account) == pytest.approx(live(counted), rel=0.04)
    assert account.terms["target weights"] == counted.terms["target weights"]


@pytest.mark.parametrize("kind, own", [("mistral", {}), ("qwen3", {"use_sliding_window": True})])
@pytest.mark.parametrize("length, mask", [(299, False), (300, False), (2000, False), (2000, True)])
def test_formulas_of_windows_agree_with_the_counted_fake_run(kind, own, length, mask):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}
    own = own | {"max_window_layers": 3} if own else own
    config = AutoConfig.for_model(
        kind, num_hidden_layers=8, num_key_value_heads=2, vocab_size=500, sliding_window=300, **sizes, **own
    )
    setup = {"batch": 2, "length": length, "tap_ids": (1, 6), "mask": mask}
    counted, _ = count_extraction(config, ExtractionSetup(**setup))
    account = predict_extraction(config, ExtractionSetup(**setup), cuda=False)
    assert live(account) == pytest.approx(live(counted), rel=0.02)
    assert account.terms.get("mask", 0) == pytest.approx(counted.terms.get("mask", 0), rel=0.01)


@pytest.mark.parametrize("name", ["qwen3.6-27b", "qwen3-8b", "smollm2-135m"])
@pytest.mark.parametrize("batch, length", [(4, 1000), (64, 65), (512, 8), (1, 64)])
def test_formulas_of_fused_layers_agree_with_the_counted_fake_run(name, batch, length):
    config = shape_config(name)
    taps = tuple(default_tap_ids(config.num_hidden_layers))
    setup = ExtractionSetup(batch=batch, length=length, tap_ids=taps, fused=True, in_flight=3)
    counted, _ = count_extraction(config, setup)
    account = predict_extraction(target_shape(config), setup, cuda=False)
    assert live(account) == pytest.approx(live(counted), rel=0.002)
    assert account.terms["packed states in flight"] == 3 * len(taps) * batch * length * config.hidden_size * 2
    plain, _ = count_extraction(config, replace(setup, fused=False))
    assert live(counted) <= live(plain)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_5", "qwen3_moe", "qwen3_5_moe"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_formulas_hold_for_tiny_targets_of_every_kind(kind, dtype):
    config, taps = tiny_config(kind), (1, 3, 5)
    setup = ExtractionSetup(batch=4, length=200, tap_ids=taps, dtype=dtype)
    counted, _ = count_extraction(config, setup)
    account = predict_extraction(
        config, ExtractionSetup(batch=4, length=200, tap_ids=taps, dtype=dtype), cuda=False
    )
    assert live(account) == pytest.approx(live(counted), rel=0.07)


@pytest.mark.parametrize("options", [{}, {"use_cache": True}, {"capture": "output_hidden_states"}])
@pytest.mark.parametrize(
    "kind, taps", [("qwen3_5", (1, 6, 9)), ("llama", (1, 6, 9)), ("llama", (8, 9)), ("llama", (9,))]
)
def test_few_layers_count_the_same_as_all(monkeypatch, options, kind, taps):
    config = tiny_config(kind, num_hidden_layers=16)
    setup = ExtractionSetup(batch=3, length=70, tap_ids=taps, dtype="float32", **options)
    few, _ = count_extraction(config, setup)
    every = "support.fake_memory.extraction.representative_layers"
    monkeypatch.setattr(every, lambda shape, taps, last: list(range(last + 1)))
    whole, _ = count_extraction(config, setup)
    assert live(few) == pytest.approx(live(whole), rel=1e-6)
    assert few.terms["target weights"] == whole.terms["target weights"]


def test_the_kept_layers_are_the_tapped_and_the_last_of_each_kind(config_27b):
    kept = representative_layers(target_shape(config_27b), TAPS_27B, 61)
    assert kept == [1, 16, 31, 46, 58, 59, 60, 61]  # 59 is the last full-attention layer before the end


def test_a_count_of_the_27b_shape_is_quick(config_27b):
    start = time.monotonic()
    count_extraction(config_27b, ExtractionSetup(batch=16, length=4096, tap_ids=TAPS_27B))
    assert time.monotonic() - start < 20


# Peaks above the weights on one H200, GiB: hooks, all 64 layers of the body, flash-linear-attention,
# transformers 5.17 (whose layers copy queries and keys to every value head).
MEASURED = {(8, 335): 0.65, (32, 335): 2.61, (64, 335): 5.21, (8, 4096): 7.85, (16, 4096): 15.71}


@pytest.mark.parametrize("batch, length", MEASURED)
def test_the_account_meets_what_an_h200_measured(config_27b, monkeypatch, batch, length):
    monkeypatch.setattr("dflash_lab.memory.account.repeats_keys", lambda model_type: True)
    account = predict_extraction(
        config_27b,
        ExtractionSetup(batch=batch, length=length, tap_ids=TAPS_27B, stop_early=False),
        cuda=False,
    )
    assert account.moving / GIB == pytest.approx(MEASURED[batch, length], rel=0.05)


def test_stored_states_and_logits_meet_what_an_h200_measured(config_27b):
    options = {"capture": "output_hidden_states", "logits": True, "stop_early": False}
    account = predict_extraction(
        config_27b, ExtractionSetup(batch=16, length=335, tap_ids=TAPS_27B, **options), cuda=False
    )
    assert account.moving / GIB == pytest.approx(5.80, rel=0.02)


def test_analytic_accounts_take_milliseconds(config_27b):
    shape = target_shape(config_27b)
    predict_extraction(shape, ExtractionSetup(batch=1, length=1, tap_ids=TAPS_27B))
    start = time.perf_counter()
    for batch in range(1, 21):
        predict_extraction(shape, ExtractionSetup(batch=batch, length=335, tap_ids=TAPS_27B))
    assert (time.perf_counter() - start) / 20 < 0.005


def test_incident_output_hidden_states_stores_65_tensors(config_27b):
    account = predict_extraction(
        config_27b, ExtractionSetup(batch=128, length=3316, tap_ids=TAPS_27B, capture="output_hidden_states")
    )
    assert (
        "65 tensors of 282.5 GB" in account.notes[0]
        and "5 hooked layers would be 21.7 GB" in account.notes[0]
    )
    assert account.terms["stored hidden states"] > 260e9 and account.peak_gib > 3 * CARD_GIB
    hooked = predict_extraction(config_27b, ExtractionSetup(batch=128, length=3316, tap_ids=TAPS_27B))
    assert hooked.terms["captured states"] == 4 * 128 * 3316 * 5120 * 2  # the fifth is still the stream


@pytest.mark.parametrize("batch, length, fits", [(128, 4042, False), (256, 3316, False), (128, 3316, False)])
def test_incident_hooks_do_not_help_when_activations_are_the_cause(config_27b, batch, length, fits):
    account = predict_extraction(config_27b, ExtractionSetup(batch=batch, length=length, tap_ids=TAPS_27B))
    assert (account.peak_gib <= CARD_GIB) == fits
    captured = account.terms.get("captured states", 0) + account.terms.get("packed states", 0)
    assert account.moving - captured > captured  # what the layers hold is more than what is captured


@pytest.mark.parametrize("batch, length", [(200, 335), (256, 335), (2, 4042), (10, 4042)])
def test_incident_short_wide_and_long_narrow_batches_fit(config_27b, batch, length):
    assert (
        predict_extraction(config_27b, ExtractionSetup(batch=batch, length=length, tap_ids=TAPS_27B)).peak_gib
        < CARD_GIB
    )


def test_short_rows_cost_whole_chunks_of_64(config_27b):
    def at(batch, length, **options):
        return predict_extraction(
            config_27b, ExtractionSetup(batch=batch, length=length, tap_ids=TAPS_27B, **options)
        )

    # The same 4,096 tokens, in rows that are padded to 64 inside the delta rule.
    assert at(512, 8, kernels="torch").moving > 6 * at(8, 512, kernels="torch").moving
    chunked = at(64, 65).terms["gated delta net chunk states"]
    assert chunked == 2 * at(64, 64).terms["gated delta net chunk states"]
    assert chunked == 64 * 2 * 48 * 128 * 128 * 2  # 1.5 MiB a row and chunk


def test_the_cache_costs_144_mib_a_row(config_27b):
    with_cache = predict_extraction(
        config_27b, ExtractionSetup(batch=512, length=8, tap_ids=TAPS_27B, use_cache=True, store_final=True)
    )
    recurrent = 512 * 48 * 48 * 128 * 128 * 4
    assert recurrent / GIB == pytest.approx(72)
    assert with_cache.terms["cache"] > recurrent


def test_setups_that_make_no_sense_are_refused(config_27b):
    with refused(InputError):
        predict_extraction(config_27b, ExtractionSetup(batch=1, length=8, tap_ids=(64,)))
    with refused(InputError):
        predict_extraction(config_27b, ExtractionSetup(batch=0, length=8, tap_ids=(1,)))


@pytest.mark.parametrize("plain", [(0, 4), (61,), (1, 60)])
def test_layers_fused_in_part_lie_between_all_and_none(config_27b, plain):
    """A few layers that kept the plain forward cost what the worst of them takes, not what all would."""
    shape = target_shape(config_27b)
    fused = ExtractionSetup(batch=8, length=335, tap_ids=TAPS_27B, fused=True)
    part = replace(fused, plain_layers=plain)
    none, some, every = (
        predict_extraction(shape, setup, cuda=False).live
        for setup in (fused, part, replace(fused, fused=False))
    )
    assert none <= some <= every
    assert (some == every) == (plain in ((61,), (1, 60)))  # late plain delta nets hold what all plain ones do
    counted, _ = count_extraction(config_27b, part)
    assert some == pytest.approx(counted.live, rel=0.01)
