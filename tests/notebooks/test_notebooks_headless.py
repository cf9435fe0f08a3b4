"""Every notebook by papermill, in order, with tiny parameters, on a llama-like and on a hybrid target; assert
on the files.

The chain runs once a kind of target; each test then looks at what one stage left.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import nbformat
import papermill
import polars as pl
import pytest
import yaml

from dflash_lab.files import read_json
from dflash_lab.report import write_report
from dflash_lab.results import is_finished
from dflash_lab.run_params import resolve
from dflash_lab.runs import ROWS, closing_figures
from dflash_lab.stages import STAGES, params_class, result_class
from dflash_lab.views.style import browser_path

REPO = Path(__file__).resolve().parents[2]
KINDS = (
    ("llama", "cpu"),
    ("qwen3_5", "cpu"),
    pytest.param(("llama", "cuda"), marks=pytest.mark.gpu),
    pytest.param(("qwen3_5", "cuda"), marks=pytest.mark.gpu),
)
ONE_KIND = pytest.mark.parametrize(
    "run", KINDS[:1], indirect=True, ids="-".join
)  # where it is the same for all
PICTURED = "prepare"  # the notebook whose figures get pictures beside them
TINY: dict[str, dict[str, Any]] = {
    "prepare": {"max_length": 256, "heldout_fraction": 0.3},
    "dataset_stats": {"max_length": 128, "token_budget": 512},
    "extract": {
        "num_shards": 2,
        "num_taps": 3,
        "token_budget": 512,
        "max_batch": 4,
        "store_final": True,
        "part_gib": 0.01,
    },
    "memory_sweep": {
        "budget_gib": 1.0,
        "batches": [1, 2],
        "lengths": [32, 64],
        "num_taps": 3,
        "measure_s": 5.0,
        "num_layers": 2,
        "anchors": 8,
        "block_size": 4,
        "step_anchors": [4, 8],
        "step_blocks": [4],
        "context_tokens": 256,
    },
    "train_drafter": {
        "num_layers": 2,
        "block_size": 4,
        "context_tokens": 256,
        "anchors": 8,
        "max_steps": 6,
        "eval_every": 3,
        "eval_rows": 1,
        "tau_samples": 2,
        "checkpoint_every": 3,
        "log_every": 1,
        "soft_weight": 0.5,
        "hard_weight": 0.5,
    },
    "acceptance": {
        "num_prompts": 2,
        "max_new_tokens": 8,
        "untrained_tokens": 8,
        "budgets": [4, 8],
        "offline_samples": 4,
        "cost_repeats": 1,
    },
}


def conversations(path: Path, count: int = 24) -> Path:
    """A small file of chats, all different, so that a part is held out."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            ask = {"role": "user", "content": f"Say number {number} {'please ' * (number % 5)}"}
            answer = {"role": "assistant", "content": f"The number is {number}. " * (1 + number % 4)}
            file.write(json.dumps({"messages": [ask, answer]}) + "\n")
    return path


class Run:
    """One finished chain in a workspace of its own, where `params/tiny` has the values of every stage: a
    notebook is given the run by name, and what a person would type beside it.
    """

    def __init__(self, workspace: Path, target: Path, device: str, environment: dict[str, str]) -> None:
        self.environment, self.pictured = environment, False
        self.workspace, self.folder = workspace, workspace / "runs" / "tiny"
        self.folder.mkdir(parents=True)
        (workspace / "notebooks").symlink_to(REPO / "notebooks")
        conversations(workspace / "chats.jsonl")
        common = {
            "target": str(target),
            "device": device,
            "dtype": "float32" if device == "cpu" else "bfloat16",
        }
        texts = {"common": common, **TINY, "prepare": {**TINY["prepare"], "input": "chats.jsonl"}}
        for name, values in texts.items():
            path = workspace / "params" / "tiny" / f"{name}.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(yaml.safe_dump(values))
        self.typed: dict[str, dict[str, Any]] = {}

    def notebook(self, stage: str, name: str = "", **values: Any) -> None:
        """Run a notebook as `papermill` does with `-p run tiny` and a `-p` for each of `values`."""
        name = name or stage
        self.typed[name] = {"run": "tiny", **values}
        with pytest.MonkeyPatch.context() as patch:
            for key, value in {**self.environment, "OMP_NUM_THREADS": "1"}.items():
                patch.setenv(key, value)
            if stage != PICTURED or not self.pictured:  # a browser start a notebook is half a minute a chain
                patch.setenv("BROWSER_PATH", "/nowhere/chromium")
            papermill.execute_notebook(
                str(REPO / "notebooks" / f"{stage}.ipynb"),
                str(self.folder / f"{name}.ipynb"),
                parameters={**self.typed[name], "interactive": False},  # here, no papermill is the parent
                kernel_name="python3",
                cwd=str(self.workspace),
                progress_bar=False,
                execution_timeout=240,
            )

    def result(self, name: str) -> dict[str, Any]:
        return read_json(self.folder / name / "result.json")


@pytest.fixture(scope="session", params=KINDS, ids="-".join)
def run(request, tmp_path_factory, tiny_target, preloaded) -> Run:
    """Run the six notebooks once for a kind of target and a device (the extraction in two shards)."""
    kind, device = request.param
    path = os.pathsep.join(filter(None, [preloaded.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]))
    environment = {**preloaded, "PYTHONPATH": path}
    made = Run(tmp_path_factory.mktemp(f"run-{kind}-{device}"), tiny_target(kind), device, environment)
    made.pictured = kind == "llama"
    made.notebook("prepare")
    made.notebook("dataset_stats")
    for shard in range(2):
        made.notebook("extract", f"extract-{shard}", shard=shard)
    made.notebook("memory_sweep")
    made.notebook("train_drafter")
    made.notebook("acceptance")
    return made


pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_prepare_leaves_samples_with_a_held_out_part(run):
    samples = pl.read_parquet(run.folder / "samples.parquet")
    assert samples.height == 24 and set(samples["split"]) == {"train", "heldout"}
    assert (samples["length"] == samples["input_ids"].list.len()).all()
    assert run.result("prepare")["figures"]["samples_in"] == 24


def test_dataset_stats_counts_the_same_samples(run):
    figures = run.result("dataset_stats")["figures"]
    samples = pl.read_parquet(run.folder / "samples.parquet")
    assert figures["longest_tokens"] == samples["length"].max()


def test_both_shards_together_store_every_sample_once(run):
    from dflash_lab.extraction.checks import verify
    from dflash_lab.extraction.store import open_store

    store = open_store(run.folder / "store")
    samples = pl.read_parquet(run.folder / "samples.parquet")
    assert store.num_samples == samples.height and store.num_tokens == samples["length"].sum()
    assert verify(run.folder / "store") == []
    stored = [run.result(f"extract-{shard}")["figures"]["samples_stored"] for shard in range(2)]
    assert sum(stored) == 24 and min(stored) > 0


def test_memory_sweep_predicts_and_measures(run):
    figures = run.result("memory_sweep")["figures"]
    assert figures["predicted_peak_gib"] > 0 and figures["measured_peak_gib"] > 0


def test_training_leaves_a_drafter_in_the_public_layout(run):
    from safetensors import safe_open

    config = json.loads((run.folder / "drafter" / "config.json").read_text())
    assert config["block_size"] == 4 and config["num_hidden_layers"] == 2
    with safe_open(run.folder / "drafter" / "model.safetensors", framework="numpy") as tensors:
        assert {"fc.weight", "hidden_norm.weight", "norm.weight"} <= set(tensors.keys())
    assert run.result("train_drafter")["figures"]["steps"] == 6


def test_acceptance_is_measured_for_both_drafters(run):
    figures = run.result("acceptance")["figures"]
    assert figures["tau_trained"] >= 1.0 and figures["tau_untrained"] >= 1.0


@pytest.mark.parametrize("stage", STAGES)
def test_saved_notebook_is_small_plain_and_whole(run, stage):
    for path in run.folder.glob(f"{stage}*.ipynb"):
        assert path.stat().st_size < 2_000_000
        notebook = nbformat.read(path, as_version=4)
        kinds = {
            kind for cell in notebook.cells for out in cell.get("outputs", []) for kind in out.get("data", {})
        }
        assert "application/vnd.jupyter.widget-view+json" not in kinds and "widgets" not in notebook.metadata
        assert "application/vnd.plotly.v1+json" in kinds
        assert ("image/png" in kinds) == (stage == PICTURED and run.pictured and bool(browser_path()))
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert all(cell.execution_count for cell in code)


@pytest.mark.parametrize("stage", STAGES)
def test_figures_are_small_have_titles_and_axes_with_names(run, stage):
    folders = [path for path in run.folder.iterdir() if path.name.split("-")[0] == stage and path.is_dir()]
    paths = [path for folder in folders for path in (folder / "figures").glob("*.json")]
    assert paths
    for path in paths:
        assert path.stat().st_size < 1_000_000, path
        layout = read_json(path)["layout"]
        assert layout.get("title", {}).get("text"), path
        if any("x" in trace or "y" in trace for trace in read_json(path)["data"]):
            axes = [value for key, value in layout.items() if key.startswith(("xaxis", "yaxis"))]
            assert any(axis.get("title", {}).get("text") for axis in axes), path


@pytest.mark.parametrize("stage", STAGES)
def test_a_finished_stage_is_recognised_and_read_again(run, stage, monkeypatch):
    monkeypatch.chdir(run.workspace)
    for name, typed in run.typed.items():
        if name.split("-")[0] == stage:
            values = {key: (value, "typed") for key, value in typed.items()}
            params = resolve(params_class(stage), values)
            assert is_finished(params), name
            loaded = result_class(stage).load(params.folder)
            recorded = run.result(name)["figures"]
            assert set(loaded.figures) == set(recorded)


def test_a_notebook_s_values_are_those_of_the_runs_folder(run):
    for stage, values in TINY.items():
        name = "extract-1" if stage == "extract" else stage
        had = run.result(name)["parameters"]
        assert {key: had[key] for key in values} == values and had["run"] == "tiny"
    assert run.result("prepare")["parameters"]["input"] == "chats.jsonl"
    assert read_json(run.folder / "run.json") == {"run": "tiny", "parameters": "../../params/tiny"}


@ONE_KIND
def test_running_again_does_no_work_and_changing_a_parameter_does_when_asked(run):
    before = run.result("dataset_stats")
    run.notebook("dataset_stats")
    assert run.result("dataset_stats") == before
    with pytest.raises(papermill.PapermillExecutionError, match="max_length was 128, now 64"):
        run.notebook("dataset_stats", max_length=64)
    assert run.result("dataset_stats") == before
    run.notebook("dataset_stats", max_length=64, force=True)
    changed = run.result("dataset_stats")
    assert changed["time"] >= before["time"] and changed["parameters"]["max_length"] == 64


@ONE_KIND
def test_values_given_one_by_one_are_preferred_to_the_runs_folder(run, tmp_path):
    samples = str(run.folder / "samples.parquet")
    own = {**TINY["dataset_stats"], "run_dir": str(tmp_path / "own"), "samples": samples, "max_length": 77}
    before = run.result("dataset_stats")
    run.notebook("dataset_stats", **own)
    found = read_json(tmp_path / "own" / "dataset_stats" / "result.json")["parameters"]
    assert {key: found[key] for key in own} == own and found["run"] == "tiny"
    assert found["device"] == run.result("prepare")["parameters"]["device"]
    assert run.result("dataset_stats") == before


def test_the_closing_table_and_the_report_are_complete(run):
    assert set(closing_figures(run.folder)) >= set(ROWS) - {"tau_other", "speedup_other"}
    page = write_report(run.folder).read_text()
    assert page.count('<div class="figure"') > 15 and "tau_trained" in page


@ONE_KIND
def test_a_mistyped_parameter_stops_the_notebook(run, tmp_path):
    with pytest.raises(papermill.PapermillExecutionError, match="did you mean 'shard'"):
        papermill.execute_notebook(
            str(REPO / "notebooks" / "extract.ipynb"),
            str(tmp_path / "out.ipynb"),
            parameters={"run": "tiny", "shrad": 0, "interactive": False},
            kernel_name="python3",
            cwd=str(run.workspace),
            progress_bar=False,
            execution_timeout=120,
        )
