"""Fragments: the allocator's model gives them, the account assumes a share, expandable ones have fewer."""

import pytest
from support.fake_memory.allocator import replay
from support.fake_memory.extraction import count_extraction

from dflash_lab.memory.account import FRAGMENTS, predict_extraction
from dflash_lab.memory.planner import expandable_segments
from dflash_lab.memory.shapes import ExtractionSetup
from dflash_lab.models.hooks import default_tap_ids
from dflash_lab.models.source import shape_config


@pytest.mark.parametrize("name", ["qwen3.6-27b", "qwen3-8b"])
@pytest.mark.parametrize("batch, length", [(64, 335), (16, 4096)])
def test_replays_lie_where_the_account_puts_them(name, batch, length):
    config = shape_config(name)
    taps = tuple(default_tap_ids(config.num_hidden_layers))
    _, tracker = count_extraction(config, ExtractionSetup(batch=batch, length=length, tap_ids=taps))
    weights = sum(b.size for n, b in enumerate(tracker.blocks) if tracker.label(n) == "target weights")
    live = tracker.peak - weights
    shares = {}
    for expandable in (False, True):
        found = replay(tracker, static_labels=("target weights",), expandable=expandable)
        assert found.allocated <= found.needed <= found.reserved
        shares[expandable] = (found.needed - weights) / live - 1
    assert 0.05 < shares[False] < 0.35 and shares[True] < shares[False] + 0.02
    assert shares[False] == pytest.approx(FRAGMENTS[False], abs=0.15)
    assert shares[True] == pytest.approx(FRAGMENTS[True], abs=0.1)


@pytest.mark.parametrize("value, on", [("", False), ("max_split_size_mb:64,expandable_segments: True", True)])
def test_the_allocators_setting_is_read(monkeypatch, value, on):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", value)
    assert expandable_segments() == on


def test_expandable_segments_are_predicted_to_need_less():
    config = shape_config("qwen3.6-27b")
    options = {"batch": 64, "length": 335, "tap_ids": (1, 16, 31, 46, 61)}
    plain, expandable = (
        predict_extraction(config, ExtractionSetup(expandable=on, **options)) for on in (False, True)
    )
    assert plain.live == expandable.live
    assert plain.terms["fragmentation"] == int(FRAGMENTS[False] * (plain.live - plain.static))
    assert expandable.peak < plain.peak
