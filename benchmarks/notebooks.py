"""The demo's six notebooks, run by papermill on a device: seconds and headline figures of each stage.

    python benchmarks/notebooks.py --device cuda --json benchmarks/results/<device>/notebooks.json

Parameters are those of `params/demo` but for the device, its own dtype, and what keeps the whole within five
minutes. A notebook that fails is recorded with its error, and the next one is tried.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import papermill
import yaml

from dflash_lab import files, provenance

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = (
    ("prepare", "prepare", {}),
    ("dataset_stats", "dataset_stats", {}),
    ("extract", "extract-0", {"shard": 0, "token_budget": 16384}),
    ("extract", "extract-1", {"shard": 1, "token_budget": 16384}),
    ("memory_sweep", "memory_sweep", {"batches": [1, 16], "lengths": [64, 65, 512], "measure_s": 20.0}),
    ("train_drafter", "train_drafter", {"time_limit_s": 30.0}),
    ("acceptance", "acceptance", {"num_prompts": 2, "max_new_tokens": 32, "cost_repeats": 1}),
)
log = logging.getLogger("notebooks")


def parameters(stage: str, run: Path, device: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The demo's parameters of a stage with a run folder, a device and `changes`."""
    demo = ROOT / "params" / "demo"
    texts = [(demo / f"{name}.yaml").read_text(encoding="utf-8") for name in ("common", stage)]
    given = {name: value for text in texts for name, value in (yaml.safe_load(text) or {}).items()}
    dtype = "float32" if device == "cpu" else "bfloat16"
    own = {"run_dir": str(run), "device": device, "dtype": dtype, "interactive": False}
    return {**given, **own, **changes}


def execute(stage: str, name: str, run: Path, device: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Run one notebook; return its result's figures and the seconds papermill took, or the error."""
    began, found = time.perf_counter(), {}
    try:
        papermill.execute_notebook(
            str(ROOT / "notebooks" / f"{stage}.ipynb"),
            str(run / f"{name}.ipynb"),
            parameters=parameters(stage, run, device, changes),
            kernel_name="python3",
            cwd=str(ROOT),
            progress_bar=False,
            execution_timeout=300,
        )
        result = files.read_json(run / name / "result.json")
        found = {"figures": result["figures"], "stage_seconds": round(result["seconds"], 2)}
    except papermill.PapermillExecutionError as error:
        found = {"error": f"{error.ename}: {error.evalue}"[:1000]}
    found["seconds"] = round(time.perf_counter() - began, 1)
    log.info("%s: %s", name, found)
    return found


def main() -> None:
    """Run all notebooks, writing what there is after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--run", type=Path, help="run folder to leave; a temporary one by default")
    arguments = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )
    stages: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        run = arguments.run or Path(folder)
        run.mkdir(parents=True, exist_ok=True)
        for stage, name, changes in NOTEBOOKS:
            stages[name] = execute(stage, name, run, arguments.device, changes)
            figures = {f"{key}_seconds": found["seconds"] for key, found in stages.items()}
            figures["finished"] = sum("figures" in found for found in stages.values())
            figures["failed"] = sum("error" in found for found in stages.values())
            files.write_json(
                arguments.json, {"figures": figures, "stages": stages, **provenance.provenance()}
            )


if __name__ == "__main__":
    main()
