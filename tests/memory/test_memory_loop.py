"""What the training loop holds beside a step: a live target, rows ahead, gradients that stay, shards."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.fake_memory.tracker import LabelledTensors

from dflash_lab.data.samples import Sample, write_samples
from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.drafter.live import LiveItems
from dflash_lab.drafter.rows import PackedRows
from dflash_lab.memory.account import predict_extraction
from dflash_lab.memory.shapes import GIB, ExtractionSetup, TrainingSetup, target_shape
from dflash_lab.memory.training import (
    drafter_parameters,
    head_process,
    predict_training,
    resident_target_bytes,
    target_process,
)
from dflash_lab.models.load import load_target
from dflash_lab.models.source import shape_config

PIPELINE = Path(__file__).parents[2] / "benchmarks/results/h200-x2/pipeline.json"
CONFIG = shape_config("qwen3-8b")
SHAPE = target_shape(CONFIG)
DRAFTER = DrafterConfig.from_target(CONFIG, mask_token_id=0, num_layers=5, block_size=16)
PARAMETERS, _ = drafter_parameters(DRAFTER)
STEP = TrainingSetup(anchors=512, context=8192, block_size=16, compiled=True)


def account(**changes):
    """The account of the step with some fields changed."""
    return predict_training(SHAPE, DRAFTER, replace(STEP, **changes))


def tensors(found):
    """What an allocator would count of it."""
    return found.live - found.terms["outside torch"]


def test_a_live_target_beside_compiled_training_takes_what_an_h200_measured():
    """At its worst the whole target lies beside a step, with ends of its own beside the loss's."""
    measured = json.loads(PIPELINE.read_text())
    work, alone = measured["work"], measured["one_device"]
    assert (work["shape"], alone["whole_layers"]) == ("qwen3-8b", SHAPE.layers)
    assert (work["anchors"], work["context_tokens"], work["draft_layers"]) == (512, 8192, 5)
    ends = 2 * (SHAPE.vocab * SHAPE.hidden + SHAPE.hidden + SHAPE.head_parameters())
    predicted = tensors(account(placement="same device", recorded=True)) + ends
    assert predicted / GIB == pytest.approx(alone["peak_gib"], rel=0.01)


def test_a_live_target_brings_its_layers_and_a_forward_of_the_row():
    stored, live = account(), account(placement="same device")
    here = replace(STEP, placement="same device")
    assert tensors(live) - tensors(stored) == resident_target_bytes(SHAPE, here)
    wide = resident_target_bytes(SHAPE, replace(here, target_dtype="float32"))
    assert wide > 2 * live.terms["target weights"]
    few = account(placement="same device", anchors=8, context=65536, optimizer="adamw8bit")
    assert few.moment == "the target's forward of a row"
    forward = predict_extraction(
        CONFIG, ExtractionSetup(batch=1, length=65536, tap_ids=DRAFTER.tap_ids, store_final=True), cuda=False
    )
    assert few.terms["target's forward of a row"] == forward.live - forward.terms["target weights"]


def test_the_pool_of_a_recorded_forward_is_reserved_and_not_live():
    plain, recorded = (account(placement="same device", recorded=way) for way in (False, True))
    outputs = 8192 * 6 * 4096 * 2
    assert recorded.live - plain.live == outputs == recorded.terms["recorded forward's states"]
    assert recorded.peak - plain.peak > recorded.terms["recorded forward's pool"]
    assert recorded.terms["recorded forward's pool"] == pytest.approx(1.13 * GIB, rel=0.01)


def test_rows_on_their_way_lie_on_the_device_too():
    row = 8192 * 6 * 4096 * 2  # five taps and the final states
    assert account(rows_ahead=3).live - account().live == 3 * row
    assert account(noise=True).live - account().live == 8192 * 5 * 4096 * 2
    hard = account(soft_targets=False, rows_ahead=1).live - account(soft_targets=False).live
    assert hard == 8192 * 5 * 4096 * 2


def test_gradients_that_stay_are_there_at_every_moment():
    assert account(gradients_kept=True).live - account().live == 2 * PARAMETERS
    small = dict(anchors=8, context=64)
    assert account(**small).moment == "the update"
    kept = account(gradients_kept=True, **small)
    assert kept.moment == "the loss" and kept.terms["gradients"] == 2 * PARAMETERS


def test_a_sharded_drafter_holds_its_share_and_what_it_gathers():
    whole, share = account(), account(shards=4)
    for term in ("drafter weights", "fp32 masters", "optimizer moments"):
        assert share.terms[term] == -(-whole.terms[term] // 4)
    fc = 5 * 4096**2
    layer = (PARAMETERS - fc) // 5
    backward = account(shards=4, anchors=4096)
    assert backward.moment == "the backward of the last layer"
    assert backward.terms["gathered weights"] == 2 * (fc + 2 * layer)
    assert backward.terms["gathered gradients"] == 4 * layer


def test_a_head_on_another_device_takes_the_loss_with_it():
    here, there = account(), account(head_elsewhere=True)
    assert "head and embedding" not in there.terms and "logits of one chunk" not in there.terms
    assert here.live - there.live >= here.terms["head and embedding"]


def test_a_process_that_makes_rows_holds_what_was_counted(tiny_target, tmp_path):
    """A live target fills a row while the row before is still on its way; live tensors counted."""
    target = load_target(str(tiny_target("llama")), dtype="float32")
    drafter = DrafterConfig.from_target(target.config, mask_token_id=0, num_layers=2, block_size=4)
    path, tokens = tmp_path / "samples.parquet", np.arange(2000)
    samples = [Sample(f"s{n}", (tokens + n) % 200, np.ones(2000, np.uint8), "test") for n in range(4)]
    write_samples(path, samples, heldout_fraction=0.0, provenance={})
    items = LiveItems(path, target, tap_ids=list(drafter.tap_ids), context_tokens=2000)
    rows = PackedRows(items, np.arange(4), drafter, context_tokens=2000, anchors=8, seed=0)
    with torch.no_grad(), LabelledTensors() as live:
        live.add([*target.body.parameters(), target.head.weight], "target weights")
        before = items.fill(rows.row(0, 0), 0, 0)
        live.start_peak_here()
        items.fill(rows.row(0, 1), 0, 1)
        del before
    setup = TrainingSetup(anchors=1, context=2000, block_size=4, dtype="float32", target_dtype="float32")
    found = target_process(target_shape(target.config), drafter, setup, cuda=False)
    assert found.terms["target weights"] == pytest.approx(live.by_label()["target weights"], rel=0.01)
    assert found.peak == pytest.approx(live.peak, rel=0.05)


def test_a_recorded_forward_of_a_process_keeps_its_pool_and_its_outputs_beside_two_rows():
    row = 8192 * 6 * 4096 * 2
    plain, recorded = (
        target_process(SHAPE, DRAFTER, replace(STEP, target_dtype="bfloat16", recorded=way))
        for way in (False, True)
    )
    assert plain.terms["rows on their way"] == row and recorded.terms["rows on their way"] == 2 * row
    assert recorded.terms["recorded forward's states"] == row
    assert recorded.terms["recorded forward's pool"] == plain.terms["target's forward of a row"]
    there = head_process(SHAPE, DRAFTER, STEP)
    here, away = account(), account(head_elsewhere=True)
    assert there.terms["head and embedding"] == here.terms["head and embedding"]
    assert there.live >= here.live - away.live


def test_the_gpu_of_a_head_holds_a_tied_matrix_once_and_final_states_for_soft_targets_only():
    def terms(tied: bool, soft: bool) -> dict[str, int]:
        return head_process(replace(SHAPE, tied=tied), DRAFTER, replace(STEP, soft_targets=soft)).terms

    apart, tied = terms(False, True), terms(True, True)
    assert apart["head and embedding"] == 2 * tied["head and embedding"] > 0
    assert apart["target final states"] > 0 and not terms(False, False).get("target final states", 0)
