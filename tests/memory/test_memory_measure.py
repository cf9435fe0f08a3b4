"""Counts of real runs against the predictions; the CUDA measurement where there is a device."""

import pytest
import torch
from support.fake_memory.allocator import replay
from support.fake_memory.extraction import count_extraction
from support.fake_memory.training import count_training

from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.extraction.fused_layers import speed_up
from dflash_lab.memory import measure
from dflash_lab.memory.account import predict_extraction
from dflash_lab.memory.crash import requested_bytes
from dflash_lab.memory.measure import (
    Measurement,
    count_forward,
    measure_cuda,
    measure_extraction,
    measure_training,
)
from dflash_lab.memory.shapes import MIB, ExtractionSetup, TrainingSetup, target_shape
from dflash_lab.models.load import load_target
from dflash_lab.models.source import load_config, shape_config


@pytest.mark.parametrize("kind, batch, length", [("llama", 1, 300), ("qwen3_5", 7, 65), ("qwen3_5", 16, 20)])
def test_a_real_run_counts_what_the_fake_one_did(tiny_target, kind, batch, length):
    folder = str(tiny_target(kind))
    target = load_target(folder, dtype="float32", last_layer=5, with_head=False)
    setup = ExtractionSetup(batch=batch, length=length, tap_ids=(1, 3, 5), dtype="float32", kernels="torch")
    measured = count_forward(target, setup)
    counted, _ = count_extraction(load_config(folder), setup)
    assert counted.moving == pytest.approx(measured.moving, rel=0.005)
    analytic = predict_extraction(target_shape(load_config(folder)), setup, cuda=False)
    assert analytic.moving == pytest.approx(measured.moving, rel=0.06)
    assert analytic.terms["target weights"] == pytest.approx(measured.static, rel=0.001)


def test_a_row_has_what_the_table_needs(tiny_target):
    target = load_target(str(tiny_target("llama")), dtype="float32", last_layer=3, with_head=False)
    row = measure_extraction(target, ExtractionSetup(batch=2, length=30, tap_ids=(1, 3), dtype="float32"))
    assert row["measured_moving"] > 0 and not row["out_of_memory"] and row["seconds"] > 0
    assert row["measured_gib"] * 2**30 > row["measured_moving"]


def test_a_drafter_whose_parts_do_not_fit_is_a_result(monkeypatch):
    """Weights, masters and moments are made before a step runs; their lack is no crash of the sweep."""

    def lacking(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")

    def read(_device, static, seconds, message):
        return Measurement(0, 0, static, 0, requested_bytes(message), True, seconds)

    monkeypatch.setattr(measure, "training_parts", lacking)
    monkeypatch.setattr(measure, "_read", read)
    config = shape_config("smollm2-135m")
    drafter = DrafterConfig.from_target(config, mask_token_id=0, num_layers=2, block_size=16)
    row = measure_training(config, drafter, TrainingSetup(anchors=8, context=64, block_size=16), "cpu")
    assert row["out_of_memory"] and row["failed_gib"] == 3.0
    monkeypatch.setattr(measure, "training_parts", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measure_training(config, drafter, TrainingSetup(anchors=8, context=64, block_size=16), "cpu")


@pytest.mark.gpu
def test_peaks_on_a_device_are_what_was_allocated():
    def run():
        held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        held.fill_(1)

    found = measure_cuda(run, torch.device("cuda"))
    assert found.moving == 64 * MIB and found.reserved >= 64 * MIB and not found.out_of_memory
    assert found.outside > 100 * MIB


@pytest.mark.gpu
@pytest.mark.parametrize("batch, length", [(16, 335), (256, 16)])
def test_a_fused_batch_takes_what_was_counted(batch, length):
    config = shape_config("smollm2-135m")
    setup = ExtractionSetup(batch=batch, length=length, tap_ids=(1, 8, 14), fused=True)
    target = load_target(
        "random:smollm2-135m", device="cuda", dtype="bfloat16", last_layer=14, with_head=False
    )
    assert not speed_up(target, "on").plain
    row = measure_extraction(target, setup)
    _, tracker = count_extraction(config, setup)
    assert replay(tracker, "target weights").allocated == pytest.approx(row["measured_moving"], rel=0.03)


@pytest.mark.gpu
def test_a_training_step_takes_what_was_counted():
    config = shape_config("smollm2-135m")
    drafter = DrafterConfig.from_target(config, mask_token_id=0, num_layers=2, block_size=16)
    setup = TrainingSetup(anchors=128, context=1024, block_size=16)
    row = measure_training(config, drafter, setup, "cuda")
    counted = count_training(config, drafter, setup)
    assert counted.live - counted.static == pytest.approx(row["measured_moving"], rel=0.1)


@pytest.mark.gpu
def test_a_lack_of_memory_is_a_result_and_leaves_nothing():
    before = torch.cuda.memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    found = measure_cuda(
        lambda: torch.empty(2 * total, dtype=torch.uint8, device="cuda"), torch.device("cuda")
    )
    assert found.out_of_memory and found.failed == pytest.approx(2 * total, rel=0.01)
    assert torch.cuda.memory_allocated() == before
