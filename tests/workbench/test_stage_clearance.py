"""Extraction and training ask before they start: refused with advice, forced, not understood, and cleared."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dflash_lab.data.samples import Sample, write_samples
from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.errors import InputError
from dflash_lab.extraction.fast import apply
from dflash_lab.files import read_json
from dflash_lab.memory import planner
from dflash_lab.memory.gate import DoesNotFit
from dflash_lab.target.sources import load_config
from dflash_lab.workbench.stage import execute
from dflash_lab.workbench.stages import clearance
from dflash_lab.workbench.stages.clearance import (
    ask_extraction,
    ask_training,
    extraction_budgets,
    memory_figures,
)
from dflash_lab.workbench.stages.extract import ExtractParams
from dflash_lab.workbench.stages.train_drafter import TrainDrafterParams

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


@pytest.fixture
def small_budget(monkeypatch):
    """Leave less memory than the weights of a tiny target take."""
    monkeypatch.setattr(planner, "device_budget_gib", lambda device: 1e-5)


def training(target, **changes) -> tuple[TrainDrafterParams, object, DrafterConfig]:
    params = TrainDrafterParams(target=str(target), anchors=16, context_tokens=64, block_size=4, **changes)
    config = load_config(params.target)
    return params, config, DrafterConfig.from_target(config, mask_token_id=0, num_layers=2, block_size=4)


def test_an_extraction_that_does_not_fit_is_refused_before_the_target_is_loaded(extraction, small_budget):
    params = extraction()
    with pytest.raises(DoesNotFit, match="token_budget"):
        execute(params)
    record = read_json(params.folder / "failure.json")
    assert record["details"]["predicted_peak_gib"] > record["details"]["budget_gib"] and record["advice"]
    assert not params.store_path.exists()


def test_force_starts_it_all_the_same_and_the_result_says_so(extraction, small_budget):
    figures = execute(extraction(force=True)).figures
    assert figures["memory_forced"] == 1 and figures["samples_stored"] == 4


def test_a_cleared_extraction_says_what_was_predicted(extraction):
    figures = execute(extraction()).figures
    assert figures["memory_forced"] == 0 and figures["predicted_peak_gib"] > 0


def test_a_training_step_is_refused_forced_or_cleared(tiny_target, monkeypatch):
    params, config, drafter = training(tiny_target("llama"))
    cleared = ask_training(params, config, drafter, CPU, torch.float32)
    assert not cleared.forced and memory_figures(cleared, CPU)["predicted_peak_gib"] > 0
    monkeypatch.setattr(planner, "device_budget_gib", lambda device: 1e-5)
    with pytest.raises(DoesNotFit, match="anchors"):
        ask_training(params, config, drafter, CPU, torch.float32)
    params, *rest = training(tiny_target("llama"), force=True)
    assert ask_training(params, *rest, CPU, torch.float32).forced


def test_settings_that_hold_less_are_predicted_to(tiny_target):
    peaks = {}
    for name, changes in {"plain": {}, "int8": {"moments": "int8"}, "offload": {"offload": True}}.items():
        cleared = ask_training(*training(tiny_target("llama"), **changes), CPU, torch.float32)
        peaks[name] = cleared.account.live
    assert peaks["offload"] < peaks["int8"] < peaks["plain"]


def test_sharded_training_and_unknown_structures_start_without_an_answer(extraction, tiny_target, caplog):
    params, *rest = training(tiny_target("llama"), processes=2, parallel="fsdp")
    assert ask_training(params, *rest, CPU, torch.float32) is None
    strange = SimpleNamespace(model_type="mystery", torch_dtype=torch.float32)
    with caplog.at_level(logging.WARNING):
        assert ask_extraction(extraction(dtype="float32"), strange, CPU, tap_ids=[0], longest=8) is None
    assert "'mystery'" in caplog.text and memory_figures(None, CPU) == {}


def test_the_planner_gives_the_budget_where_none_is_given(extraction):
    figures = execute(extraction(token_budget=0)).figures
    assert figures["token_budget"] == planner.CPU_KNEE_TOKENS and figures["samples_stored"] == 4
    assert execute(extraction(token_budget=64, force=True)).figures["token_budget"] == 64
    with pytest.raises(InputError, match="token_budget=0"):
        extraction_budgets(extraction(token_budget=0), None)


def test_layers_that_stay_plain_are_asked_for_again_with_the_memory_there_was(extraction, monkeypatch):
    asked = []

    def ask(*args, **options):
        asked.append(options)
        return ask_extraction(*args, **options)

    monkeypatch.setattr(clearance, "ask_extraction", ask)
    monkeypatch.setattr(apply, "speed_up", lambda *_: apply.FastPath("triton", plain={0: "not understood"}))
    execute(extraction())
    assert [options.get("fused") for options in asked] == [None, False]
    assert asked[1]["budget_gib"] > 0
    params, config = extraction(), load_config("random:qwen3.6-27b")
    fused, plain = (
        ask_extraction(
            params, config, torch.device("cuda"), tap_ids=[1, 61], longest=4096, fused=fused, budget_gib=90
        )
        for fused in (True, False)
    )
    assert fused.account.moving < plain.account.moving and plain.budget_gib == 90
