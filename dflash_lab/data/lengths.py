"""How long the samples are: one streaming pass over lengths, sources and masks to a table of counts, a few
thousand rows for any number of samples, from which every figure is an exact sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

from dflash_lab.errors import InputError, reading

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)


def length_counts(path: Path | str) -> pl.DataFrame:
    """Return `source`, `length`, `count` and `answer_tokens` (of all of those, null without a column
    `loss_mask`) of a Parquet file with a column `length` (and optionally `source`), sorted.

    Raises `InputError` for a file without whole, positive lengths.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(
            f"{path}: no such file. Give samples.parquet, or any Parquet file with a column 'length'."
        )
    with reading(path, "It is not a whole Parquet file: run prepare again, or give another."):
        frame = pl.scan_parquet(path, glob=False)
        schema = frame.collect_schema()
        if "length" not in schema or not schema["length"].is_integer():
            found = schema.get("length", "missing")
            raise InputError(f"{path}: column 'length' must hold whole numbers of tokens, it is {found}.")
        source = pl.col("source").cast(pl.String) if "source" in schema else pl.lit("all").alias("source")
        masked = isinstance(schema.get("loss_mask"), pl.List)
        answers = pl.col("loss_mask").list.sum() if masked else pl.lit(None)
        counts = (
            frame.select(
                source, pl.col("length").cast(pl.Int64), answers.cast(pl.Int64).alias("answer_tokens")
            )
            .group_by("source", "length")
            .agg(
                pl.len().cast(pl.Int64).alias("count"),
                pl.col("answer_tokens").sum() if masked else pl.col("answer_tokens").first(),
            )
            .collect(engine="streaming")
            .sort("source", "length")  # group_by keeps no order
        )
    least = counts["length"].min()
    if counts["length"].null_count() or (isinstance(least, int) and least < 1):
        raise InputError(
            f"{path}: column 'length' holds null or values below 1; every sample has at least one token."
        )
    return counts


def ecdf(counts: pl.DataFrame) -> pl.DataFrame:
    """Return per distinct `length`: shares of samples and of tokens that are at most so long, 0..1."""
    merged = counts.group_by("length").agg(pl.col("count").sum()).sort("length")
    tokens = pl.col("length") * pl.col("count")
    return merged.select(
        "length",
        "count",
        (pl.col("count").cum_sum() / pl.col("count").sum()).alias("samples_share"),
        (tokens.cum_sum() / tokens.sum()).alias("tokens_share"),
    )


def percentiles(counts: pl.DataFrame, percents: Sequence[float] = PERCENTILES) -> pl.DataFrame:
    """Return `percent` and `length`: the least that so many percent of the samples do not exceed."""
    table = ecdf(counts)
    if not table.height:
        return pl.DataFrame(schema={"percent": pl.Float64, "length": pl.Int64})
    cumulative = table["count"].cum_sum().to_numpy()
    ranks = np.maximum(np.ceil(np.asarray(percents) / 100 * cumulative[-1] - 1e-9), 1)
    where = np.searchsorted(cumulative, ranks, side="left")
    return pl.DataFrame(
        {"percent": [float(p) for p in percents], "length": table["length"].to_numpy()[where]}
    )


def by_source(counts: pl.DataFrame) -> pl.DataFrame:
    """Return one row a source, most tokens first: samples, tokens and answer tokens (null where nothing told
    them) with their shares in percent, mean, median, p99 and longest.
    """
    rows = []
    for (source,), part in counts.group_by("source"):
        middle, high = percentiles(part, (50, 99))["length"].to_list()
        rows.append(
            (
                source,
                part["count"].sum(),
                (part["length"] * part["count"]).sum(),
                middle,
                high,
                part["length"].max(),
                None if part["answer_tokens"].null_count() else part["answer_tokens"].sum(),
            )
        )
    names = ["source", "samples", "tokens", "median", "p99", "longest", "answer_tokens"]
    kinds = {name: pl.String if name == "source" else pl.Int64 for name in names}
    return (
        pl.DataFrame(rows, schema=kinds, orient="row")
        .with_columns(
            (pl.col("tokens") / pl.col("samples")).alias("mean"),
            *(
                (100 * pl.col(name) / pl.col(name).sum()).alias(f"{name}_pct")
                for name in ("samples", "tokens", "answer_tokens")
            ),
        )
        .sort(["tokens", "source"], descending=[True, False])
    )


def histogram(counts: pl.DataFrame, bins: int = 80) -> pl.DataFrame:
    """Return `low`, `high` (excluded), `samples`, `tokens` over at most `bins` logarithmic bins of length."""
    schema = {"low": pl.Int64, "high": pl.Int64, "samples": pl.Int64, "tokens": pl.Int64}
    if not counts.height:
        return pl.DataFrame(schema=schema)
    lengths, weights = counts["length"].to_numpy(), counts["count"].to_numpy()
    edges = np.unique(np.geomspace(lengths.min(), lengths.max() + 1, bins + 1).round().astype(np.int64))
    samples = np.histogram(lengths, edges, weights=weights)[0].astype(np.int64)
    tokens = np.histogram(lengths, edges, weights=weights * lengths)[0].astype(np.int64)
    return pl.DataFrame(
        {"low": edges[:-1], "high": edges[1:], "samples": samples, "tokens": tokens}, schema=schema
    )


def tail(
    counts: pl.DataFrame, limits: Sequence[int] = (512, 1024, 2048, 4096, 8192, 16384, 32768)
) -> pl.DataFrame:
    """Return, for each limit in tokens, the samples above it and what share of samples and tokens they are,
    in percent.

    `cut_tokens_pct` is the share of all tokens beyond the limit itself: what truncating, not dropping, would
    lose.
    """
    lengths, weights = counts["length"].to_numpy(), counts["count"].to_numpy()
    samples, tokens = max(int(weights.sum()), 1), max(int((lengths * weights).sum()), 1)
    rows = []
    for limit in limits:
        over = lengths > limit
        above, held = int(weights[over].sum()), int((lengths * weights)[over].sum())
        rows.append(
            (limit, above, 100 * above / samples, 100 * held / tokens, 100 * (held - above * limit) / tokens)
        )
    names = ["limit", "samples", "samples_pct", "tokens_pct", "cut_tokens_pct"]
    return pl.DataFrame(rows, schema=names, orient="row")


def synthetic_lengths(
    real: np.ndarray, count: int, *, mean: float, longest: int, seed: int = 0
) -> np.ndarray:
    """Draw `count` lengths [count] i32 shaped like `real`, stretched to `mean` tokens and cut at `longest`.

    Sampling with replacement from measured lengths keeps their tail, which a fitted distribution would
    smooth; each draw is moved by up to half a step of the stretched grid so that lengths are not more alike
    than in life. The factor is found by bisection on the mean after cutting. Raises `InputError` if no factor
    gives that mean.
    """
    real = np.asarray(real, dtype=np.float64)
    if not 1 < mean < longest or not real.size or real.min() < 1:
        raise InputError(
            f"mean={mean}, longest={longest}: the mean must lie between 1 and the longest; lengths from 1 up."
        )

    def stretched(values: np.ndarray, factor: float) -> np.ndarray:
        return np.clip(np.round(values * factor), 1, longest)

    low, high = 0.0, longest / real.min()
    for _ in range(60):
        factor = (low + high) / 2
        low, high = (factor, high) if stretched(real, factor).mean() < mean else (low, factor)
    generator = np.random.default_rng(seed)
    drawn = generator.choice(real, count) + generator.uniform(-0.5, 0.5, count)
    return stretched(drawn, factor).astype(np.int32)
