"""Length statistics: exact against numpy on the plain list, one column read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.wording import refused

from dflash_lab.data.lengths import (
    by_source,
    ecdf,
    histogram,
    length_counts,
    percentiles,
    synthetic_lengths,
    tail,
)
from dflash_lab.data.samples import Sample, write_samples
from dflash_lab.errors import InputError, StoreError

REAL = Path(__file__).parent / "lengths_public_chat.parquet"


def counts_of(lengths, sources=None):
    table = {"length": lengths, "source": sources or ["all"] * len(lengths)}
    frame = pl.DataFrame(table, schema={"length": pl.Int64, "source": pl.String})
    return (
        frame.group_by("source", "length")
        .agg(pl.len().cast(pl.Int64).alias("count"), (pl.col("length") // 2).sum().alias("answer_tokens"))
        .sort("source", "length")
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 2000), st.sampled_from("ab")), min_size=1, max_size=200))
def test_all_figures_equal_the_plain_count(pairs):
    lengths = np.array([length for length, _ in pairs])
    counts = counts_of(lengths.tolist(), [source for _, source in pairs])
    found = percentiles(counts, (1, 50, 99, 100))["length"].to_list()
    assert found == np.percentile(lengths, (1, 50, 99, 100), method="inverted_cdf").tolist()
    table = ecdf(counts)
    assert table["samples_share"][-1] == pytest.approx(1) and table["tokens_share"][-1] == pytest.approx(1)
    for length, share, tokens in table.select("length", "samples_share", "tokens_share").iter_rows():
        assert share == pytest.approx((lengths <= length).mean())
        assert tokens == pytest.approx(lengths[lengths <= length].sum() / lengths.sum())
    bars = histogram(counts, 13)
    assert bars["samples"].sum() == len(lengths) and bars["tokens"].sum() == lengths.sum()
    for low, high, samples, tokens in bars.iter_rows():
        inside = lengths[(lengths >= low) & (lengths < high)]
        assert (samples, tokens) == (len(inside), inside.sum())
    for limit, samples, samples_pct, tokens_pct, cut_pct in tail(counts, (100, 1000)).iter_rows():
        over = lengths[lengths > limit]
        assert samples == len(over) and samples_pct == pytest.approx(100 * len(over) / len(lengths))
        assert tokens_pct == pytest.approx(100 * over.sum() / lengths.sum())
        assert cut_pct == pytest.approx(100 * (over - limit).sum() / lengths.sum())
    sources = by_source(counts)
    assert sources["samples"].sum() == len(lengths) and sources["tokens"].sum() == lengths.sum()
    for row in sources.iter_rows(named=True):
        mine = np.array([length for length, source in pairs if source == row["source"]])
        assert (row["samples"], row["longest"]) == (len(mine), mine.max())
        assert row["mean"] == pytest.approx(mine.mean())
        assert row["median"] == np.percentile(mine, 50, method="inverted_cdf")
        assert row["answer_tokens"] == (mine // 2).sum()
        assert row["samples_pct"] == pytest.approx(100 * len(mine) / len(lengths))
    if (lengths > 1).any():
        assert sources["answer_tokens_pct"].sum() == pytest.approx(100)


def test_answer_tokens_are_those_of_the_masks_and_null_without_any(tmp_path):
    samples = [
        Sample("1", [1, 2, 3, 4], [0, 0, 1, 1], "a"),
        Sample("2", [1, 2, 3], [0, 1, 0], "a"),
        Sample("3", [1, 2, 3, 4, 5, 6], [0, 1, 1, 1, 1, 1], "b"),
    ]
    write_samples(tmp_path / "s.parquet", samples, heldout_fraction=0, provenance={})
    columns = ("source", "samples", "tokens", "answer_tokens", "answer_tokens_pct")
    found = by_source(length_counts(tmp_path / "s.parquet")).select(columns).sort("source").rows()
    assert found == [("a", 2, 7, 3, 37.5), ("b", 1, 6, 5, 62.5)]
    assert set(by_source(length_counts(REAL))["answer_tokens"]) == {None}


def test_no_samples_gives_empty_tables(tmp_path):
    write_samples(tmp_path / "s.parquet", [], heldout_fraction=0, provenance={})
    counts = length_counts(tmp_path / "s.parquet")
    assert [table(counts).height for table in (ecdf, percentiles, histogram, by_source)] == [0, 0, 0, 0]
    assert tail(counts, (5,)).row(0)[1:] == (0, 0, 0, 0)


def test_real_lengths():
    counts = length_counts(REAL)
    assert counts["count"].sum() == 31_189
    sources = by_source(counts)
    assert sources["source"].to_list() == ["conversation", "exchange"]
    assert {name: round(mean) for name, mean in sources.select("source", "mean").iter_rows()} == {
        "conversation": 1774,
        "exchange": 590,
    }
    assert percentiles(counts, (100,))["length"].to_list() == [230_971]


def test_token_lists_are_not_read(tmp_path):
    """Damage every page of the token columns: the statistics must not notice."""
    path = tmp_path / "s.parquet"
    generator = np.random.default_rng(0)
    samples = (
        Sample(str(i), generator.integers(0, 1 << 30, 500), np.ones(500, np.uint8), "x") for i in range(200)
    )
    write_samples(path, samples, heldout_fraction=0, provenance={})
    data = bytearray(path.read_bytes())
    data[200_000:300_000] = bytes(100_000)  # 400 kB of random ids come first in the file
    path.write_bytes(data)
    assert length_counts(path).rows() == [("x", 500, 200, 100_000)]
    with pytest.raises(pl.exceptions.PolarsError):
        pl.read_parquet(path)


@pytest.mark.parametrize(
    "columns",
    [
        {"len": [1]},
        {"length": ["x"]},
        {"length": [1.5]},
        {"length": [1, None]},
        {"length": [0]},
        None,
        "none",
    ],
    ids=str,
)
def test_wrong_files_are_named(tmp_path, columns):
    path = tmp_path / "d.parquet"
    if columns == "damaged":
        path.write_bytes(b"nothing")
    elif columns != "absent":
        pl.DataFrame(columns).write_parquet(path)
    with refused(StoreError if columns == "damaged" else InputError):
        length_counts(path)


def test_synthetic_lengths_have_the_mean_the_cut_and_the_tail():
    real = pl.read_parquet(REAL)["length"].to_numpy()
    lengths = synthetic_lengths(real, 100_000, mean=335, longest=4096, seed=1)
    assert abs(lengths.mean() - 335) < 4
    assert lengths.min() >= 1 and lengths.max() == 4096
    assert np.median(lengths) < 0.8 * lengths.mean()  # heavy tail
    assert np.array_equal(lengths, synthetic_lengths(real, 100_000, mean=335, longest=4096, seed=1))
    for mean, longest in ((0, 10), (10, 10), (11, 10)):
        with refused(InputError):
            synthetic_lengths(real, 5, mean=mean, longest=longest)
