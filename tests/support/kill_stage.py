"""Stages under the knife: `kill_stage.py FOLDER TARGET` replaces finished results of real stages, is killed
before file operations spread over the whole of each, and holds what is left against the old and the new
result. Prints the number of kills by stage.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)  # no thread pool may exist before a fork
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "notebooks"))

import polars as pl  # noqa: E402
import transformers  # noqa: E402
from support.killing import count_operations, ended_well, forked, killed_everywhere  # noqa: E402
from test_notebooks_headless import TINY, conversations  # noqa: E402

from dflash_lab.data.samples import read_provenance, read_samples  # noqa: E402
from dflash_lab.drafter.checkpoint import load_checkpoint  # noqa: E402
from dflash_lab.extraction.checks import verify  # noqa: E402
from dflash_lab.extraction.store import open_store  # noqa: E402
from dflash_lab.files import read_json, settle  # noqa: E402
from dflash_lab.params import StageParams  # noqa: E402
from dflash_lab.stage_run import execute  # noqa: E402
from dflash_lab.stages import params_class, result_class  # noqa: E402

_ = (transformers.LlamaModel, transformers.PreTrainedTokenizerFast)  # read once, not in every child
for heavy in (
    "extraction.loop",
    "extraction.fused_layers",
    "drafter.train",
    "models.template",
):
    importlib.import_module(f"dflash_lab.{heavy}")
gc.freeze()  # the stage collects garbage first, which would walk all of that in every child
ROOT, TARGET = Path(sys.argv[1]), sys.argv[2]
FEW = {"log_every": 1, "eval_every": 1, "checkpoint_every": 1, "tau_samples": 0, "max_steps": 2}

# stage -> what it was made with, what replaces it, in how many places at least it is killed: a file, tables
# alone, a store that two shards make together, a folder
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "prepare": ({}, {"limit": 10}, 8),
    "dataset_stats": ({}, {"max_length": 64}, 5),
    "extract": ({"num_taps": 3}, {"num_taps": 2}, 10),
    "train_drafter": (FEW, {**FEW, "num_layers": 1}, 10),
}


def made(stage: str, run: Path, **values: Any) -> StageParams:
    own = {"input": str(ROOT / "chats.jsonl")} if stage == "prepare" else {}
    given = {"run_dir": str(run), "target": TARGET, "device": "cpu", "dtype": "float32", "interactive": False}
    return params_class(stage)(**{**TINY[stage], **own, **given, **values})


def each_shard(stage: str, run: Path, **values: Any) -> list[StageParams]:
    first = made(stage, run, **values)
    return [
        first.changed(shard=n) if stage == "extract" else first
        for n in range(getattr(first, "num_shards", 1))
    ]


def sound(run: Path, stage: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    """All results are the old ones or all are the new ones, and what they left agrees with them."""
    records = [read_json(path) for path in sorted(run.glob(f"{stage}*/result.json"))]
    assert records and len(records) == len(each_shard(stage, run, **old)), "a result is gone"
    which = [
        name
        for name, values in (("old", old), ("new", new))
        if all(record["parameters"][key] == made(stage, run, **values).as_dict()[key]
               for record in records for key in {*old, *new})
    ]  # fmt: skip
    assert which, "some results are old and some are new"
    for params in each_shard(stage, run, **(old if which[0] == "old" else new)):
        result_class(stage).load(params.folder)
    figures, parameters = records[0]["figures"], records[0]["parameters"]
    if stage == "prepare":
        frame = read_samples(run / "samples.parquet")
        assert (
            frame.height
            == figures["samples_stored"]
            == read_provenance(run / "samples.parquet")["counts"]["stored"]
        )
    if stage == "extract":
        store = open_store(run / "store")
        assert len(store.tap_ids) == parameters["num_taps"] and not verify(run / "store")
        assert store.num_samples == pl.read_parquet(run / "samples.parquet").height
    if stage == "train_drafter":
        assert load_checkpoint(run / "drafter").config.num_layers == parameters["num_layers"]
        assert (run / "drafter" / "serve.md").exists()


def build(folder: Path) -> None:
    for stage, (old, _, _) in CASES.items():
        for params in each_shard(stage, ROOT / "base", **old):
            execute(params)


def kill(stage: str) -> int:
    old, new, places = CASES[stage]
    base, goal = ROOT / "base", ROOT / "try" / "run"

    def prepare(folder: Path) -> None:
        shutil.copytree(base, goal)

    def act(folder: Path) -> None:
        for params in each_shard(stage, goal, **new):
            execute(params.changed(force=True))

    def check(folder: Path) -> None:
        results = [f"{path.parent.name}/result.json" for path in base.glob("*/result.json")]
        for name in (*results, "samples.parquet", "store/store.json", "drafter/config.json"):
            assert (goal / name).exists(), f"{name} is gone"
        settle(goal)
        sound(goal, stage, old, new)
        act(folder)
        sound(goal, stage, new, new)

    operations = counted(prepare, act)
    assert operations >= places
    return killed_everywhere(ROOT, prepare, act, check, operations // places)


def counted(prepare: Callable[[Path], None], act: Callable[[Path], None]) -> int:
    folder = ROOT / "try"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    ended_well(forked(prepare, folder), "prepare")
    return count_operations(act, folder)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    conversations(ROOT / "chats.jsonl", 14)
    ended_well(forked(build, ROOT), "the finished runs")
    print({stage: kill(stage) for stage in CASES})
