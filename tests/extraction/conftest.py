"""Tiny targets, and a store in the making, for the extraction tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.sample_files import TAP_IDS, make_samples

from dflash_lab.extraction.checks import verify
from dflash_lab.extraction.loop import extract
from dflash_lab.extraction.manifest import read_lines, shard_folders
from dflash_lab.extraction.report import ExtractionReport
from dflash_lab.extraction.store import FeatureStore, open_store
from dflash_lab.models.load import Target, load_target


@dataclass
class Job:
    """A target, samples, and the store that they go to by `plan`."""

    target: Target
    samples: Path
    store: Path
    plan: dict[str, Any]

    def run(self, **changes: Any) -> ExtractionReport:
        given = {"target": self.target, "samples": self.samples, "store": self.store, **self.plan, **changes}
        return extract(**given)

    @property
    def shard(self) -> Path:
        return self.store / "shard-00000-of-00001"

    @property
    def manifest(self) -> Path:
        return self.shard / "manifest.jsonl"

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """The manifest's lines of a kind."""
        return [line for line in read_lines(self.shard) if line["kind"] == kind]

    def parts(self) -> list[Path]:
        return sorted(self.store.rglob("part-*.safetensors"))

    def opened(self) -> FeatureStore:
        return open_store(self.store)

    def check_stored_once(self, missing: str = "") -> None:
        """Every sample but that of the id `missing` is stored once over all parts, and the store is sound."""
        table = pl.read_parquet(self.samples).filter(pl.col("id") != missing)
        lines = [line for folder in shard_folders(self.store) for line in read_lines(folder)]
        assert {row.tobytes().hex() for row in self.opened().hashes} == set(table["content_hash"])
        assert sum(line["samples"] for line in lines if line["kind"] == "part") == table.height
        assert verify(self.store) == []


@pytest.fixture(scope="session")
def tiny(tiny_target: Callable[[str], Path]) -> Callable[[str], Target]:
    """A function: kind -> loaded tiny target on the CPU in float32, loaded once a session."""
    loaded: dict[str, Target] = {}

    def target(kind: str) -> Target:
        if kind not in loaded:
            loaded[kind] = load_target(str(tiny_target(kind)))
        return loaded[kind]

    return target


@pytest.fixture
def job(tiny: Callable[[str], Target], tmp_path: Path) -> Callable[..., Job]:
    """A function: kind of target, lengths, plan -> a job."""

    def make(kind: str, lengths: list[int], **plan: Any) -> Job:
        given = {"tap_ids": [1, 3], "token_budget": 400, "max_batch": 8, **plan}
        return Job(tiny(kind), make_samples(tmp_path / "s.parquet", lengths), tmp_path / "store", given)

    return make


@pytest.fixture(scope="session")
def _made(tiny: Callable[[str], Target], tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder, lengths = tmp_path_factory.mktemp("made"), [60, 50, 40, 30, 20, 10, 55, 45, 35, 25]
    plan = {"tap_ids": TAP_IDS, "token_budget": 120, "max_batch": 8, "part_gib": 0.00004}
    job = Job(tiny("llama"), make_samples(folder / "s.parquet", lengths), folder / "store", plan)
    job.run()
    assert len(job.parts()) >= 4
    return job


@pytest.fixture
def made(_made: Job, tmp_path: Path) -> Job:
    """A job of ten samples that is done: a copy of a store of several parts."""
    shutil.copytree(_made.store, tmp_path / "store")
    return Job(_made.target, _made.samples, tmp_path / "store", _made.plan)
