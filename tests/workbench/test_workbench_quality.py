"""The quality study's recipes are parameters of the stage, and its data is what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dflash_lab.stages.train_drafter import TrainDrafterParams

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from quality_recipes import ROWS, recipe

BENCHMARKS = sys.path.pop(0)  # its scripts are named like folders of tests


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    """The scripts' folder is on the path while a test here runs."""
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.mark.parametrize("row", sorted(ROWS))
def test_every_row_is_a_setting_of_the_stage_and_differs_from_the_base(row):
    values = recipe(row, {"max_steps": 3})
    values.pop("start_layers", None)
    params = TrainDrafterParams(run_dir="r", target="smollm2", **values)
    assert params.max_steps == 3 and params.source == "live" and not params.time_limit_s
    assert (recipe(row, {}) == recipe("base", {})) == (row == "base")


def test_data_is_the_targets_own_and_what_is_measured_is_apart(tiny_target, tmp_path, monkeypatch):
    import quality_data

    from dflash_lab.data.samples import read_samples
    from dflash_lab.models.generate import generate
    from dflash_lab.models.load import load_target

    target = load_target(str(tiny_target("llama")))
    problems = tmp_path / "problems.jsonl"
    given = (
        {"task_id": f"HumanEval/{i}", "prompt": f"def f{i}():", "entry_point": f"f{i}"} for i in range(3)
    )
    problems.write_text("".join(json.dumps(one) + "\n" for one in given))
    monkeypatch.setattr(quality_data, "humaneval_file", lambda: problems)
    monkeypatch.setattr(quality_data, "MEASURED_TOKENS", 9)
    sizes = dict(tokens=700, answer_tokens=8, temperature=2.0, heldout=3, problems=2, small_tokens=200)
    small = tmp_path / "small"
    facts = quality_data.write_data(target, tmp_path / "out", whole=True, small=small, **sizes)
    taught, whole, kept_out, code = (
        read_samples(tmp_path / "out" / f"{name}.parquet")
        for name in ("samples", "whole", "heldout", "humaneval")
    )
    assert facts["tokens"] == taught["length"].sum() <= 700 and facts["tokens"] > 400
    assert set(taught["source"]) == {"self", "code"} and facts["samples"] == len(taught)
    assert len(kept_out) <= 3 and len(code) == 2 and set(kept_out["split"]) == {"heldout"}

    def prompts(frame):
        return [ids[:start] for ids, start in zip(frame["input_ids"].to_list(), frame["response_start"])]

    asked = prompts(taught)
    assert not {tuple(ids) for ids in asked} & {tuple(ids) for ids in prompts(kept_out)}
    answers = [ids[len(prompt) :] for ids, prompt in zip(taught["input_ids"].to_list(), asked)]
    assert answers == generate(target, asked, max_new_tokens=8)
    assert whole["length"].sum() == taught["length"].sum()
    assert sum(map(sum, whole["loss_mask"].to_list())) > sum(map(sum, taught["loss_mask"].to_list()))
    few = read_samples(small / "samples.parquet")
    assert few["input_ids"].to_list() == taught["input_ids"].to_list()[: len(few)]
    assert 100 < few["length"].sum() <= 200 and (small / "humaneval.parquet").is_file()
    assert np.all(whole["response_start"].to_numpy() == whole["response_start"][0])


def test_a_study_whose_rows_fail_says_so(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    import quality
    import quality_study

    class Fails:
        returncode = 1

        def __init__(self, command, stdout, stderr):
            stdout.write("the compiler refused the kernel")

        def poll(self):
            return 1

    fake = SimpleNamespace(Popen=Fails, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(quality_study, "subprocess", fake)
    monkeypatch.setattr(quality_study, "POLL_S", 0.0)
    words = ["quality.py", "study", "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--steps", "1"]
    monkeypatch.setattr(sys, "argv", [*words, "--rows", "base", "kl", "--json", str(tmp_path / "study.json")])
    assert quality.main() == 1
    found = json.loads((tmp_path / "study.json").read_text())
    assert found["rows"] == {} and found["missing"] == ["base", "kl"]
    assert "base failed (1):\nthe compiler refused the kernel" in caplog.text
