"""Stage `dataset_stats`: how long the samples are and what batching them would waste; reads no tokens.

Everything is exact over all samples, but for the comparison of policies, which plans at most a million.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import polars as pl

from dflash_lab import files
from dflash_lab.data.batching import Limits, policy_waste
from dflash_lab.data.lengths import by_source, ecdf, histogram, length_counts, percentiles, tail
from dflash_lab.errors import InputError
from dflash_lab.params import StageParams, param
from dflash_lab.progress import ProgressCallback

PLANNED = 1_000_000  # samples that the policies are compared on


class DatasetStatsParams(StageParams):
    """What to measure, and the batching limits to compare policies at."""

    stage: ClassVar[str] = "dataset_stats"

    samples: str = param(
        "", "samples file, or any Parquet with a column `length`; empty: the run's", group="data"
    )
    max_length: int = param(4096, "length limit to mark in the figures; 0: none", unit="tokens", low=0)
    tail_limits: list[int] = param(
        [512, 1024, 2048, 4096, 8192, 16384, 32768], "lengths to count beyond", unit="tokens", low=1
    )
    token_budget: int = param(32768, "padded tokens a batch may hold", unit="tokens", low=1, group="batching")
    max_batch: int = param(512, "samples a batch may hold", low=1)
    fixed_batch: int = param(32, "samples a batch in the policies that count samples", low=1)
    chunk: int = param(
        1, "round rows up to this in the budget; 64 for gated delta nets", unit="tokens", low=1
    )
    tokens_per_s: float = param(9000.0, "extraction rate to predict hours from", unit="tokens/s", low=1.0)

    @property
    def samples_path(self) -> Path:
        """The file that is measured."""
        return self.path_or(self.samples, "samples.parquet")

    @property
    def limits(self) -> Limits:
        """What policies are compared at."""
        return Limits(self.token_budget, self.max_batch, self.fixed_batch, self.chunk, self.seed)

    def inputs(self) -> list[Path]:
        return [self.samples_path]

    def needs(self) -> list[tuple[Path, str]]:
        return [(self.samples_path, "" if self.samples else "prepare")]


def run_dataset_stats(
    params: DatasetStatsParams, progress: ProgressCallback | None = None
) -> DatasetStatsResult:
    """Measure `params.samples_path`. `InputError` if it is empty."""
    report = progress or (lambda *args, **fields: None)
    path = params.samples_path
    report("lengths", 0, 3)
    counts = length_counts(path)
    if not counts.height:
        raise InputError(
            f"{path}: no samples in it. See problems.parquet of the prepare stage for the reasons."
        )
    report("lengths", 1, 3, samples=int(counts["count"].sum()))
    lengths = _planned_lengths(path, params.seed)
    policies = policy_waste(lengths["length"].to_numpy(), params.limits)
    report("lengths", 2, 3)
    tables = {
        "counts": counts,
        "ecdf": ecdf(counts),
        "percentiles": percentiles(counts),
        "sources": by_source(counts),
        "histogram": histogram(counts),
        "tail": tail(counts, sorted(set(params.tail_limits))),
        "policies": policies,
        "lengths": lengths,
    }
    tables["summary"] = _summary(tables, params)
    report("lengths", 3, 3)
    return DatasetStatsResult(**tables)


def _planned_lengths(path: Path, seed: int) -> pl.DataFrame:
    """Read lengths in file order; of more than a million, a random million in file order."""
    lengths = pl.scan_parquet(path, glob=False).select(pl.col("length").cast(pl.Int32)).collect()
    if lengths.height <= PLANNED:
        return lengths
    chosen = np.random.default_rng(seed).choice(lengths.height, PLANNED, replace=False)
    return lengths[np.sort(chosen).tolist()]


def _summary(tables: dict[str, pl.DataFrame], params: DatasetStatsParams) -> pl.DataFrame:
    counts = tables["counts"]
    samples = int(counts["count"].sum())
    tokens = int((counts["count"] * counts["length"]).sum())
    at = dict(tables["percentiles"].select("percent", "length").iter_rows())
    waste = dict(tables["policies"].select("policy", "waste_pct").iter_rows())
    beyond = counts.filter(pl.col("length") > params.max_length) if params.max_length else counts.clear()
    ours = waste["sort in 32,768 windows"]
    figures: dict[str, Any] = {
        "samples": samples,
        "tokens": tokens,
        "mean_tokens": tokens / samples,
        "median_tokens": at[50],
        "p99_tokens": at[99],
        "longest_tokens": at[100],
        "sources": tables["sources"].height,
        "over_max_length_samples": int(beyond["count"].sum()),
        "over_max_length_tokens_pct": 100 * int((beyond["count"] * beyond["length"]).sum()) / tokens,
        "waste_shuffled_pct": waste["shuffled, fixed batch"],
        "waste_8k_windows_pct": waste["sort in 8,192 windows"],
        "waste_32k_windows_pct": ours,
        "policy_samples": tables["lengths"].height,
        "predicted_hours": tokens / (1 - ours / 100) / params.tokens_per_s / 3600,
    }
    return pl.DataFrame([figures])


@dataclass(frozen=True)
class DatasetStatsResult:
    """Tables behind the figures; `data.lengths` and `data.batching` say their columns."""

    counts: pl.DataFrame
    ecdf: pl.DataFrame
    percentiles: pl.DataFrame
    sources: pl.DataFrame
    histogram: pl.DataFrame
    tail: pl.DataFrame
    policies: pl.DataFrame
    lengths: pl.DataFrame  # one column `length`: the samples that policies were compared on
    summary: pl.DataFrame  # one row: the headline figures

    @property
    def figures(self) -> dict[str, Any]:
        """The headline figures."""
        return self.summary.row(0, named=True)

    @property
    def length_array(self) -> np.ndarray:
        """Lengths [N] for the explorer."""
        return self.lengths["length"].to_numpy()

    def save(self, folder: Path) -> None:
        """Leave the tables in a folder."""
        for name, table in vars(self).items():
            with files.atomic_path(folder / f"{name}.parquet") as temporary:
                table.write_parquet(temporary)

    @classmethod
    def load(cls, folder: Path | str) -> DatasetStatsResult:
        """Read a finished stage's tables."""
        return cls(
            **{name: pl.read_parquet(Path(folder) / f"{name}.parquet") for name in cls.__dataclass_fields__}
        )
