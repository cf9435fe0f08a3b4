"""Extraction and training ask before they start: refused with advice, forced, not understood, and cleared."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.wording import check_wording, refused

from dflash_lab import machine
from dflash_lab.data.samples import Sample, write_samples
from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.drafter.workers import WorkerFailed
from dflash_lab.errors import InputError, StoreError
from dflash_lab.extraction import fused_layers
from dflash_lab.files import read_json, write_json
from dflash_lab.memory import crash, gate, planner
from dflash_lab.memory.gate import DoesNotFit, NotPredicted
from dflash_lab.memory.shapes import target_shape
from dflash_lab.models.source import load_config
from dflash_lab.stage_run import execute
from dflash_lab.stages import clearance, train_processes
from dflash_lab.stages.clearance import (
    PLANNED,
    ask_extraction,
    ask_training,
    clear_processes,
    extraction_budgets,
    memory_figures,
    with_anchors,
)
from dflash_lab.stages.extract import ExtractParams
from dflash_lab.stages.train_drafter import TrainDrafterParams
from dflash_lab.stages.training_inputs import TrainingInputs, resolve_inputs

CPU = torch.device("cpu")


@pytest.fixture
def extraction(tiny_target, tmp_path):
    """Return a function: changes -> parameters of an extraction of four samples."""
    samples = [Sample(f"s{n}", np.arange(n), np.ones(n, np.uint8), "test") for n in (5, 20, 33, 40)]
    write_samples(tmp_path / "samples.parquet", samples, heldout_fraction=0.2, provenance={})

    def make(**changes):
        base = dict(run_dir=str(tmp_path), target=str(tiny_target("qwen3")), device="cpu", num_taps=2)
        return ExtractParams(**{**base, "token_budget": 128, "interactive": False, **changes})

    return make


def training(target, *, device=CPU, dtype=torch.float32, num_layers=2, **changes) -> TrainingInputs:
    """Inputs of a training; the store, if that is its source, is not there."""
    sizes = dict(anchors=16, context_tokens=64, block_size=4)
    params = TrainDrafterParams(target=str(target), **(sizes | changes))
    config = load_config(params.target)
    drafter = DrafterConfig.from_target(
        config, mask_token_id=0, num_layers=num_layers, block_size=params.block_size
    )
    store = SimpleNamespace(has_final=False) if params.source == "store" else None
    return TrainingInputs(params, device, dtype, config, drafter, store)  # type: ignore[arg-type]


def test_an_extraction_that_does_not_fit_is_refused_or_forced(extraction, monkeypatch):
    params = extraction()
    with monkeypatch.context() as patch:
        patch.setattr(machine, "device_budget_gib", lambda device: 1e-5)  # less than the weights take
        with refused(DoesNotFit):
            execute(params)
        record = read_json(params.folder / "failure.json")
        assert record["details"]["predicted_peak_gib"] > record["details"]["budget_gib"] and record["advice"]
        assert not params.store_path.exists(), "refused before the target is loaded"
        figures = execute(extraction(ignore_memory=True)).figures
    assert figures["memory_forced"] == 1 and figures["samples_stored"] == 4
    figures = execute(extraction(force=True)).figures
    assert figures["memory_forced"] == 0 and figures["predicted_peak_gib"] > 0


def test_a_training_step_is_refused_forced_or_cleared(tiny_target, monkeypatch):
    inputs = training(tiny_target("llama"))
    cleared = ask_training(inputs)
    assert not cleared.forced and memory_figures(cleared, CPU)["predicted_peak_gib"] > 0
    monkeypatch.setattr(machine, "device_budget_gib", lambda device: 1e-5)
    with refused(DoesNotFit):
        ask_training(inputs)
    assert ask_training(training(tiny_target("llama"), ignore_memory=True)).forced


def test_unknown_structures_start_without_an_answer_and_say_why(extraction, caplog):
    strange = SimpleNamespace(model_type="mystery", torch_dtype=torch.float32)
    with caplog.at_level(logging.WARNING):
        found = ask_extraction(extraction(dtype="float32"), strange, CPU, tap_ids=[0], longest=8)
    assert isinstance(found, NotPredicted) and "'mystery'" in caplog.text
    assert "'mystery'" in memory_figures(found, CPU)["memory_not_predicted"]


def test_what_holds_less_is_predicted_to(tiny_target):
    def asked(**changes):
        return ask_training(training(tiny_target("llama"), **changes)).account

    whole, share, copy = asked(), asked(gpus=2, parallel="fsdp"), asked(gpus=2)
    assert asked(offload=True).live < asked(moments="int8").live < whole.live
    for term in ("drafter weights", "optimizer moments"):
        assert share.terms[term] == -(-whole.terms[term] // 2)
    assert copy.terms["drafter weights"] == whole.terms["drafter weights"]
    assert copy.terms["gradients"] == whole.terms["drafter weights"]  # DDP's buckets, at any moment


def test_a_live_target_is_asked_for_with_its_weights_and_its_forward(tiny_target):
    stored, live = (
        ask_training(training(tiny_target("llama"), source=source)).account for source in ("store", "live")
    )
    config = load_config(str(tiny_target("llama")))
    layers = target_shape(config).body_parameters() - config.vocab_size * config.hidden_size
    assert live.terms["target weights"] == 4 * (layers - config.hidden_size)
    assert "target weights" not in stored.terms and "rows ahead" in stored.terms
    assert "rows ahead" not in live.terms  # they come bare
    longer = training(tiny_target("llama"), source="live", context_tokens=4096)
    assert "forward of a row" in ask_training(longer).account.moment


def test_on_cuda_layers_are_taken_as_compiled_and_a_packed_row_as_recorded(monkeypatch):
    monkeypatch.setattr(machine, "device_budget_gib", lambda device: 140.0)
    sizes = dict(context_tokens=4096, anchors=512, block_size=16, num_layers=5)
    found = {}
    for name, changes in {"compiled": {}, "plain": {"compile": False}, "live": {"source": "live"}}.items():
        inputs = training(
            "random:qwen3-8b", device=torch.device("cuda"), dtype=torch.bfloat16, **sizes, **changes
        )
        found[name] = ask_training(inputs).account
    assert found["compiled"].live < 0.9 * found["plain"].live
    pool = found["live"].terms["recorded forward's pool"]
    assert found["live"].live <= found["live"].peak - pool
    again = ask_training(inputs, rows="padded").account
    assert "recorded forward's pool" not in again.terms


def training_run(tiny_target, tmp_path, **changes):
    """Parameters of a short live training run on a CPU."""
    samples = [Sample(f"s{n}", np.arange(n), np.ones(n, np.uint8), "test") for n in (40, 33, 20, 38)]
    write_samples(tmp_path / "samples.parquet", samples, heldout_fraction=0.0, provenance={})
    base = dict(
        run_dir=str(tmp_path), target=str(tiny_target("llama")), device="cpu", source="live", max_steps=2,
        context_tokens=64, anchors=8, block_size=4, num_layers=1, tau_samples=0, eval_rows=0,
    )  # fmt: skip
    return TrainDrafterParams(**{**base, "interactive": False, **changes})


LACKING = """
import sys, torch
import dflash_lab.drafter.train as room

def lack(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

room.train = lack
from dflash_lab.stages.train_processes import main

main(sys.argv[1])
"""


def test_a_lack_of_memory_in_a_process_reaches_the_launcher_with_its_advice(
    tiny_target, tmp_path, monkeypatch
):
    """The word of the process that knows why is what `failure.json` of the run says."""
    params = training_run(tiny_target, tmp_path, gpus=2, parallel="ddp")
    script = tmp_path / "lacking.py"
    script.write_text(LACKING)

    def start(command, *, env, **options):  # as torchrun would start the first
        return subprocess.Popen(
            [sys.executable, str(script), command[-1]], env={**env, "RANK": "0"}, **options
        )

    kept = dict(STDOUT=subprocess.STDOUT, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(train_processes, "subprocess", SimpleNamespace(Popen=start, **kept))
    with refused(WorkerFailed):
        execute(params)
    check_wording(read_json(params.folder / "failure.json")["advice"])


def test_anchors_are_the_planners_where_none_are_given_and_stay_the_same(tiny_target, tmp_path, monkeypatch):
    params = training_run(tiny_target, tmp_path, anchors=0)
    figures = execute(params).figures
    assert figures["anchors"] == 56  # of 63 that a row of 64 tokens has room for, in eights
    monkeypatch.setattr(machine, "device_budget_gib", lambda device: 0.0016)

    def planned() -> TrainingInputs:
        return with_anchors(resolve_inputs(params))

    assert planned().params.anchors == 56  # a run that goes on keeps its own
    plan = read_json(params.folder / PLANNED)
    for name in ("target_logits_elsewhere", "vocabulary_shards"):  # which earlier versions did not ask
        del plan["asked"][name]
    write_json(params.folder / PLANNED, plan)
    assert planned().params.anchors == 56
    for text in ("[]", "{}", '{"anchors": "56"}', '{"anchors": -5}', '{"anchors": true}'):
        (params.folder / PLANNED).write_text(text)
        with refused(StoreError):
            planned()
    (params.folder / PLANNED).unlink()
    fewer = planned().params.anchors
    assert 0 < fewer < 56 and fewer % 8 == 0
    assert not ask_training(planned()).forced
    with pytest.raises(DoesNotFit):
        ask_training(resolve_inputs(params.changed(anchors=fewer + 8)))
    monkeypatch.setattr(machine, "device_budget_gib", lambda device: 1e-5)
    (params.folder / PLANNED).unlink()
    with refused(DoesNotFit):
        planned()


def test_what_was_live_when_memory_lacked_lies_beside_the_failure(extraction, monkeypatch):
    """An allocator that refuses, as torch's would tell it: a snapshot, and what it says, in failure.json."""
    blocks = [{"size": 64 * 2**20, "state": "active_allocated", "frames": []} for _ in range(20)]
    blocks += [{"size": 2**20, "state": "inactive", "frames": []}]
    monkeypatch.setattr(crash, "_attach", lambda: None)
    monkeypatch.setattr(
        torch.cuda.memory, "_snapshot", lambda: {"segments": [{"device": 0, "blocks": blocks}]}
    )
    params = extraction(max_batch=1024)

    def lacking(*_args, **_options):
        crash.observe(0, 3 * 2**30, 80 * 2**30, 2**30)
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has 1.00 GiB is free"
        )

    monkeypatch.setattr("dflash_lab.extraction.loop.extract", lacking)
    plain = gate.explained
    monkeypatch.setattr(
        gate, "explained", lambda *told, **options: plain(*told, **{**options, "device": "cuda"})
    )
    with pytest.raises(torch.OutOfMemoryError):
        execute(params)
    record = read_json(params.folder / "failure.json")
    left = params.folder / clearance.SNAPSHOT
    assert record["details"]["snapshot"] == str(left) and record["details"]["requested_gib"] == 3.0
    assert sum(record["details"]["held_gib"].values()) == pytest.approx(1.25)
    check_wording(record["advice"])
    assert read_json(left)["refused"]["size"] == 3 * 2**30
    monkeypatch.undo()
    assert execute(extraction()).figures["samples_stored"] == 4
    assert not left.exists()


def test_the_planner_gives_the_budget_where_none_is_given(extraction):
    figures = execute(extraction(token_budget=0)).figures
    assert figures["token_budget"] == planner.CPU_KNEE_TOKENS and figures["samples_stored"] == 4
    assert execute(extraction(token_budget=64, force=True)).figures["token_budget"] == 64
    with refused(InputError):
        extraction_budgets(extraction(token_budget=0), NotPredicted("It is not understood."))


def test_layers_that_stay_plain_are_asked_for_again_with_the_memory_there_was(extraction, monkeypatch):
    asked = []

    def ask(*args, **options):
        asked.append(options)
        return ask_extraction(*args, **options)

    monkeypatch.setattr(clearance, "ask_extraction", ask)
    monkeypatch.setattr(
        fused_layers, "speed_up", lambda *_: fused_layers.FastPath("triton", plain={0: "not understood"})
    )
    execute(extraction())
    assert [options.get("plain_layers") for options in asked] == [None, [0]]
    assert asked[1]["budget_gib"] > 0
    params, config = extraction(token_budget=16384), load_config("random:qwen3.6-27b")
    cuda = dict(tap_ids=[1, 61], longest=4096, budget_gib=90)
    fused, part, plain = (
        ask_extraction(params, config, torch.device("cuda"), plain_layers=layers, **cuda)
        for layers in ((), (0,), range(64))
    )
    assert fused.account.moving <= part.account.moving < plain.account.moving and plain.budget_gib == 90


def test_the_gpu_of_a_head_is_asked_for_too(monkeypatch):
    free = {"cuda:0": 140.0, "cuda:1": 1.0}
    monkeypatch.setattr(machine, "device_budget_gib", lambda device: free[str(device)])
    inputs = training(
        "random:qwen3-8b", device=torch.device("cuda"), source="live", context_tokens=4096, head_gpu=1
    )
    with refused(DoesNotFit):
        clear_processes(inputs)
    clear_processes(dataclasses.replace(inputs, params=inputs.params.changed(ignore_memory=True)))
    free["cuda:1"] = 10.0
    clear_processes(inputs)
