"""What eight-bit taps cost a drafter: the same training from a bf16 store and from an fp8 one, tau of both.

    python benchmarks/storage.py --device cuda --json benchmarks/results/<device>/storage_fp8.json

SmolLM2's states of the demo's conversations (or of `--samples FILE`) are extracted twice, only `storage`
differs; each store trains the same drafter with the same seeds, order and steps. Both are judged on the bf16
store's held-out answers, which is what a drafter meets when it decodes.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from dflash_lab import files, provenance
from dflash_lab.acceptance.offline import offline
from dflash_lab.drafter.checkpoint import load_checkpoint
from dflash_lab.extraction.store import open_store
from dflash_lab.models.load import choose_device, load_head
from dflash_lab.stage_run import execute
from dflash_lab.stages.extract import ExtractParams
from dflash_lab.stages.prepare import PrepareParams
from dflash_lab.stages.train_drafter import TrainDrafterParams

DEMO = Path(__file__).resolve().parent.parent / "params" / "demo"
STORAGES = ("bf16", "fp8")
ANSWERS = 32
log = logging.getLogger("storage")


def demo(stage: str) -> dict[str, Any]:
    """The demo's parameters of a stage."""
    return yaml.safe_load((DEMO / f"{stage}.yaml").read_text(encoding="utf-8"))


def tau(store: Path, drafter: Path, device: torch.device, dtype: torch.dtype) -> float:
    """Chained tau of a drafter on the held-out answers of a store."""
    items = open_store(store)
    heldout = [items[index] for index in range(len(items)) if items.heldout[index]][:ANSWERS]
    head = load_head("smollm2", device=device, dtype=dtype)
    loaded = load_checkpoint(drafter, device, dtype).eval().requires_grad_(False)
    return float(offline(heldout, head, loaded, budgets=(), top_k=()).tau().mean)


def main() -> None:
    """Prepare, extract and train with each storage, and write both taus."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--samples", type=Path, help="a samples file instead of the demo's conversations")
    parser.add_argument("--limit", type=int, default=0, help="of the demo's conversations; 0: all")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    device = choose_device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    common = {
        "target": "smollm2",
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "interactive": False,
    }
    runs: dict[str, list[dict[str, float]]] = {storage: [] for storage in STORAGES}
    figures: dict[str, Any] = {"steps": arguments.steps}
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        samples = arguments.samples or run / "samples.parquet"
        if not arguments.samples:
            execute(PrepareParams(run_dir=folder, **common, **{**demo("prepare"), "limit": arguments.limit}))
        for storage in STORAGES:
            given = {**demo("extract"), "num_shards": 1, "token_budget": 8192, "storage": storage}
            own = dict(run_dir=str(run / f"extract-{storage}"), store=str(run / storage))
            report = execute(ExtractParams(samples=str(samples), **own, **common, **given))
            figures |= {
                "samples": report.figures["samples_stored"],
                f"{storage}_bytes": report.figures["bytes_written"],
            }
        for seed in range(arguments.seeds):
            for storage in STORAGES:
                began = time.perf_counter()
                given = {**demo("train_drafter"), "max_steps": arguments.steps, "time_limit_s": 0.0}
                given |= {"eval_every": arguments.steps, "seed": seed, "tau_samples": 0}
                here = run / f"{storage}-{seed}"
                params = TrainDrafterParams(
                    run_dir=str(here), store=str(run / storage), samples=str(samples), **common, **given
                )
                trained = execute(params)
                found = {
                    "tau": tau(run / "bf16", here / "drafter", device, dtype),
                    "seconds": round(time.perf_counter() - began, 1),
                    **{name: value for name, value in trained.figures.items() if isinstance(value, float)},
                }
                runs[storage].append(found)
                log.info("%s seed %d: %s", storage, seed, found)
            for name, found_runs in runs.items():
                figures[f"{name}_tau"] = round(statistics.mean(one["tau"] for one in found_runs), 4)
            figures["tau_change"] = round(figures["fp8_tau"] - figures["bf16_tau"], 4)
            files.write_json(arguments.json, {"figures": figures, "runs": runs, **provenance.provenance()})


if __name__ == "__main__":
    main()
