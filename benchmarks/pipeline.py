"""Online training on GPUs of its own for each side, against both sides on one GPU: the same rows, the same
drafter.

    python benchmarks/pipeline.py --json FILE                      two GPUs, a setting balanced first
    python benchmarks/pipeline.py --json FILE --splits 5+1 --layers 64    five targets feed one drafter
    python benchmarks/pipeline.py --json FILE --splits 7+1 6+2 5+3 4+4    which split of eight is best

Weights are random, documents have lengths as measured in chats. Balanced means: the number of target layers
is chosen so that a row through the target takes `--share` of what the drafter's step takes (both measured on
one GPU before, unless `--layers` is given), for only then can two GPUs be twice as fast as one. Every process
compiles before its clock starts; the first `WARM` steps of each run are left out. `pipeline_drafter_busy_pct`
is the share of the rest in which the drafter's GPU did not stand still for want of a row, by events on that
GPU; the side that waits less for the other is the limit.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from result_file import told

from dflash_lab import files, provenance
from dflash_lab.data.lengths import synthetic_lengths
from dflash_lab.data.samples import Sample, write_samples
from dflash_lab.drafter.live import SampleItems
from dflash_lab.drafter.pipeline import summary
from dflash_lab.drafter.workers import Job, run_workers
from dflash_lab.stages.train_drafter import TrainDrafterParams
from dflash_lab.stages.train_processes import TIMINGS, train_pipeline

REAL = Path(__file__).resolve().parent.parent / "tests" / "data" / "lengths_public_chat.parquet"
SHAPES = Path(__file__).resolve().parent.parent / "params" / "targets"
WARM = 8  # first steps, left out: the queue fills, caches and clocks settle
log = logging.getLogger("pipeline")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What is trained: a target's shape, rows, and the drafter's step."""

    shape: str = "qwen3-8b"  # params/targets, or a path to a config
    layers: int = 0  # of the target; 0: those that balance it with the drafter
    share: float = 0.96  # target time / drafter time when balanced
    context_tokens: int = 8192
    anchors: int = 512
    block_size: int = 16
    draft_layers: int = 5
    steps: int = 48
    queue_rows: int = 3
    device: str = "auto"
    compile: bool = True
    soft_weight: float = 0.15

    def config(self) -> dict[str, Any]:
        """The target's config."""
        path = Path(self.shape) if self.shape.endswith(".json") else SHAPES / f"{self.shape}.json"
        return files.read_json(path)


def make_samples(work: Work, path: Path) -> None:
    """Random tokens in documents as long as measured chats, enough for every row to be new."""
    lengths = pl.read_parquet(REAL)["length"].to_numpy()
    mean = min(335, work.context_tokens // 4)
    count = 2 * work.context_tokens * work.steps // mean
    drawn = synthetic_lengths(lengths, count, mean=mean, longest=work.context_tokens // 2, seed=0)
    generator = np.random.default_rng(0)
    vocabulary = int(work.config()["vocab_size"])
    samples = (
        Sample(
            f"s{i}", generator.integers(0, vocabulary, n), (np.arange(n) >= n // 4).astype(np.uint8), "random"
        )
        for i, n in enumerate(np.maximum(drawn, 4).tolist())
    )
    write_samples(path, samples, heldout_fraction=0.0, provenance={"lengths": REAL.name})


def parameters(work: Work, folder: Path, samples: Path, layers: int, **changes: Any) -> TrainDrafterParams:
    """A run of the stage in `folder` with a random target of `layers` layers."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**work.config(), "num_hidden_layers": layers}
    config.pop("layer_types", None)
    shape = folder / "target.json"
    files.write_json(shape, config)
    values: dict[str, Any] = dict(
        run_dir=str(folder),
        target=f"random:{shape}",
        source="live",
        samples=str(samples),
        num_layers=work.draft_layers,
        mask_token_id=int(config["vocab_size"]) - 1,
        drafter_dtype="bfloat16" if work.device != "cpu" else "float32",
        interactive=False,
        force=True,
        log_every=WARM,
        eval_every=10**9,
        eval_rows=0,
        tau_samples=0,
        checkpoint_every=10**9,
        max_steps=work.steps,
    )
    same = ("device", "context_tokens", "anchors", "block_size", "compile", "queue_rows", "soft_weight")
    return TrainDrafterParams(**{**values, **{name: getattr(work, name) for name in same}, **changes})


class Blank(SampleItems):
    """Samples with states of zeros, made by nobody: what the drafter's step takes by itself."""

    _states: tuple[Any, Any] | None = None

    def source(self) -> dict[str, Any]:
        return {"states": "zeros"}

    def begin(self, epoch: int, index: int) -> None:
        pass

    def fill(self, row: Any, epoch: int, index: int) -> Any:
        import torch

        size = len(row.taps)
        if self._states is None or len(self._states[0]) < size:
            shape = dict(dtype=torch.bfloat16, device=row.taps.device)
            taps = torch.zeros(size, len(self.tap_ids) * self.hidden_size, **shape)
            self._states = taps, taps[:, : self.hidden_size].contiguous()
        return dataclasses.replace(row, taps=self._states[0][:size], final=self._states[1][:size])

    def fill_heldout(self, row: Any, number: int) -> Any:
        return self.fill(row, 0, 0)

    def __getitem__(self, index: int) -> Any:
        return self.bare(index)


def train_alone(work: Work, folder: Path, samples: Path) -> dict[str, float]:
    """In a process of its own, both sides on one device: milliseconds of a row through the target and of the
    drafter's step on states of zeros; the target's layers, chosen from these if that is asked for;
    milliseconds of a step of both.
    """
    import torch

    from dflash_lab.stages.training_inputs import open_live, packed_rows, resolve_inputs

    began = time.perf_counter()
    layers = work.layers or int(work.config()["num_hidden_layers"])
    inputs = resolve_inputs(parameters(work, folder / "alone", samples, layers))
    device, cuda = inputs.device, inputs.device.type == "cuda"
    items: Any = open_live(inputs)
    found: dict[str, float] = {"forward_ms": row_ms(items, packed_rows(inputs, items)[0], device)}
    trainer = new_trainer(inputs, Blank(samples, items.hidden_size, list(inputs.drafter.tap_ids)))
    found["compile_s"] = trainer.warm_up()
    found["drafter_ms"] = steps_ms(trainer, WARM)
    if not work.layers:
        found |= {"whole_layers": layers, "whole_forward_ms": found["forward_ms"]}
        layers = max(8, round(work.share * found["drafter_ms"] / found["forward_ms"] * layers))
        del items
        if cuda:
            torch.cuda.empty_cache()
        inputs = resolve_inputs(parameters(work, folder / "balanced", samples, layers))
        items = open_live(inputs)
        found["forward_ms"] = row_ms(items, packed_rows(inputs, items)[0], device)
    log.info("%d layers of the target, %s", layers, found)
    trainer.live = items
    found |= {"layers": layers, "step_ms": steps_ms(trainer, 2 * WARM)}
    if cuda:
        found["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return found | {"seconds": time.perf_counter() - began}


def new_trainer(inputs: Any, items: Any) -> Any:
    """The training loop of a run, before its first step."""
    from dflash_lab.drafter.train import Trainer
    from dflash_lab.stages.train_processes import first_drafter
    from dflash_lab.stages.training_inputs import load_ends, train_settings

    head = load_ends(inputs)
    drafter, settings = first_drafter(inputs, head), train_settings(inputs, items)
    folder = inputs.params.folder / "run"
    return Trainer(items, head, drafter, settings, folder)


def steps_ms(trainer: Any, steps: int) -> float:
    """Milliseconds of a step, the mean of `steps` after `WARM` others."""
    from dflash_lab.drafter.rows import feed, prefetch

    with contextlib.closing(prefetch(feed(trainer.stream(), trainer.device))) as stream:
        for _ in range(WARM):
            trainer.train_step(stream)
        trainer.catch_up()
        began = time.perf_counter()
        for _ in range(steps):
            trainer.train_step(stream)
        trainer.catch_up()
        return 1e3 * (time.perf_counter() - began) / steps


def row_ms(items: Any, rows: Any, device: Any) -> float:
    """Milliseconds of a row through the live target, the median of four, each of which has run before: a row
    with a new number of documents is recorded as a graph first.
    """
    made = [rows.row(0, i).to(device) for i in range(4)]
    spans = []
    for row in (*made, *made):
        _wait(device)
        start = time.perf_counter()
        items.fill(row, 0, 0)
        _wait(device)
        spans.append(time.perf_counter() - start)
    return 1e3 * float(np.median(spans[len(made) :]))


def _wait(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def apart(
    work: Work, folder: Path, samples: Path, layers: int, split: tuple[list[int], list[int]]
) -> dict[str, Any]:
    """Train with targets and drafters on GPUs of their own."""
    params = parameters(work, folder, samples, layers, target_gpus=split[0], drafter_gpus=split[1])
    train_pipeline(params)
    frame = pl.read_parquet(params.folder / TIMINGS)
    count = len(split[1])
    steady = frame.filter(pl.col("turn") >= WARM * count)
    mine = steady.filter(pl.col("worker").str.starts_with("drafter"))
    spans = mine.group_by("worker").agg(
        (pl.col("time").max() - pl.col("time").min()).alias("seconds"), (pl.len() - 1).alias("steps")
    )
    # The wait for a drafter's first row here lies before the time noted beside it.
    within = steady.filter(pl.col("turn") >= (WARM + 1) * count)
    depths = frame.filter(pl.col("depth").is_not_null()).group_by("depth").len().sort("depth")
    return {
        **summary(within, dict(spans.select("worker", "seconds").iter_rows())),
        "step_ms": 1e3 * float((spans["seconds"] / spans["steps"]).max()),  # type: ignore[arg-type]
        "depths": dict(depths.iter_rows()),
        "targets": split[0],
        "drafters": split[1],
        "diary": frame.with_columns(pl.col(pl.Float64).exclude("time").round(3)).to_dict(as_series=False),
    }


def pipeline_figures(
    work: Work,
    splits: list[tuple[list[int], list[int]]],
    scratch: Path | str | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Measure; `figures` holds `pipeline_drafter_busy_pct` and `pipeline_speedup` of the first split. `keep`
    is given what there is after each run.
    """
    found: dict[str, Any] = {"figures": {}, "work": dataclasses.asdict(work), "splits": []}
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder = Path(name)
        samples = folder / "samples.parquet"
        make_samples(work, samples)
        job = Job("alone", train_alone, (work, folder, samples), True)
        one = found["one_device"] = run_workers([job], folder / "workers")["alone"]
        log.info("both on one device: %s", one)
        keep(found)
        for number, split in enumerate(splits):
            row = apart(work, folder / f"apart-{number}", samples, int(one["layers"]), split)
            # A step of the pipeline uses one row of each drafter, a step of one device one row.
            row["speedup"] = len(row["drafters"]) * one["step_ms"] / row["step_ms"]
            log.info("%s", {name: value for name, value in row.items() if name != "diary"})
            found["splits"].append(row)
            if number == 0:
                found["figures"] = {
                    "pipeline_drafter_busy_pct": row["drafter_busy_pct"],
                    "pipeline_speedup": row["speedup"],
                    "pipeline_target_busy_pct": row["target_busy_pct"],
                    "pipeline_limit": row["limit"],
                    "pipeline_target_share": one["forward_ms"] / one["drafter_ms"],
                    "pipeline_step_ms": row["step_ms"],
                    "pipeline_one_device_step_ms": one["step_ms"],
                }
            best = max(found["splits"], key=lambda row: len(row["drafters"]) / row["step_ms"])
            found["figures"] |= {
                "pipeline_best_split": f"{len(best['targets'])}+{len(best['drafters'])}",
                "pipeline_best_rows_per_s": len(best["drafters"]) * 1e3 / best["step_ms"],
            }
            keep(found)
    return found


def read_split(text: str) -> tuple[list[int], list[int]]:
    """GPUs of (targets, drafters). `5+1`: the drafter on GPU 0, where the run beside it on one GPU has
    compiled it already, targets on 1..5; `0,0+1`: GPUs named one by one.
    """
    left, right = text.split("+")
    if "," in text or left == "0":
        return [int(x) for x in left.split(",")], [int(x) for x in right.split(",")]
    targets, drafters = int(left), int(right)
    return list(range(drafters, drafters + targets)), list(range(drafters))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument(
        "--splits", nargs="+", default=["1+1"], help="targets+drafters, each on a GPU of its own"
    )
    parser.add_argument("--scratch", type=Path, help="folder for samples, checkpoints and logs while it runs")
    for field in dataclasses.fields(Work):
        name, default = field.name.replace("_", "-"), field.default
        if isinstance(default, bool):
            parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=default)
        else:
            parser.add_argument(f"--{name}", type=type(default), default=default)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    work = Work(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Work)})
    splits = [read_split(text) for text in options.splits]
    asked = [str(options.json), str(options.scratch)]  # folders of this machine say nothing elsewhere
    words = [Path(word).name if word in asked else word for word in sys.argv[1:]]
    command = " ".join(["python benchmarks/pipeline.py", *words])
    began = time.perf_counter()

    def keep(found: dict[str, Any]) -> None:
        seconds = time.perf_counter() - began
        record = {"command": command, "seconds": seconds, **provenance.provenance(), **found}
        files.write_json(options.json, record)

    found = pipeline_figures(work, splits, options.scratch, keep)
    print(json.dumps(found["figures"], indent=1))


if __name__ == "__main__":
    sys.exit(told(main))
