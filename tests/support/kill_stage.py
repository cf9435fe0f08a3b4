"""Stages under the knife: `kill_stage.py CASE FOLDER TARGET` replaces a finished result of a real stage, is
killed before file operations spread over the whole of it, and holds what is left against the old and the new
result. Prints the number of kills.
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
    "acceptance.evaluate",
    "models.template",
):
    importlib.import_module(f"dflash_lab.{heavy}")
gc.freeze()  # the stage collects garbage first, which would walk all of that in every child
KILLS = 24
ROOT, TARGET = Path(sys.argv[2]), sys.argv[3]
FEW = {"log_every": 1, "eval_every": 1, "checkpoint_every": 1, "tau_samples": 0, "max_steps": 2}

# case -> the stage, what it was made with, what replaces it
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "prepare": ("prepare", {}, {"limit": 10}),
    "dataset_stats": ("dataset_stats", {}, {"max_length": 64}),
    "extract": ("extract", {"num_shards": 1, "num_taps": 3}, {"num_shards": 1, "num_taps": 2}),
    "extract_shards": ("extract", {"num_shards": 2, "num_taps": 3}, {"num_shards": 2, "num_taps": 2}),
    "train_drafter": ("train_drafter", FEW, {**FEW, "num_layers": 1}),
    "acceptance": ("acceptance", {"decode_tree": False}, {"decode_tree": False, "num_prompts": 1}),
}
BEFORE = {"prepare": (), "dataset_stats": ("prepare",), "extract": ("prepare",)}
BEFORE |= {"train_drafter": ("prepare", "extract"), "acceptance": ("prepare", "extract", "train_drafter")}


def made(stage: str, run: Path, **values: Any) -> StageParams:
    few = FEW if stage == "train_drafter" else {}
    own = {"input": str(ROOT / "chats.jsonl")} if stage == "prepare" else {}
    one = {"num_shards": 1} if stage == "extract" else {}
    given = {"run_dir": str(run), "target": TARGET, "device": "cpu", "dtype": "float32", "interactive": False}
    return params_class(stage)(**{**TINY[stage], **few, **own, **one, **given, **values})


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


def main(case: str) -> None:
    stage, old, new = CASES[case]
    conversations(ROOT / "chats.jsonl", 14)
    base, goal = ROOT / "base", ROOT / "try" / "run"

    def build(folder: Path) -> None:
        for earlier in (*BEFORE[stage], ""):
            values = old if not earlier else {}
            for params in each_shard(earlier or stage, base, **values):
                execute(params)

    def prepare(folder: Path) -> None:
        shutil.copytree(base, goal)

    def act(folder: Path) -> None:
        for params in each_shard(stage, goal, **new):
            execute(params.changed(force=True))

    def check(folder: Path) -> None:
        for name in ("result.json",):
            assert all((goal / path.parent.name / name).exists() for path in base.glob(f"{stage}*/{name}"))
        for name in ("samples.parquet", "store/store.json", "drafter/config.json"):
            assert (goal / name).exists() == (base / name).exists(), f"{name} is gone"
        settle(goal)
        sound(goal, stage, old, new)
        act(folder)
        sound(goal, stage, new, new)

    ended_well(forked(build, ROOT), "the finished run")
    operations = counted(prepare, act)
    print(killed_everywhere(ROOT, prepare, act, check, max(1, operations // KILLS)))


def counted(prepare: Callable[[Path], None], act: Callable[[Path], None]) -> int:
    folder = ROOT / "try"
    folder.mkdir()
    ended_well(forked(prepare, folder), "prepare")
    return count_operations(act, folder)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main(sys.argv[1])
