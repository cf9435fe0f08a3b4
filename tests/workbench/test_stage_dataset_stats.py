"""dataset_stats: tables equal plain counts, figures stay small at 913,000 samples, the explorer moves."""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from support.live_cells import live_cell
from support.wording import refused

from dflash_lab.data.batching import Limits, explore
from dflash_lab.data.lengths import synthetic_lengths
from dflash_lab.errors import InputError
from dflash_lab.progress import duration
from dflash_lab.stage_run import execute
from dflash_lab.stages import dataset_stats as stage
from dflash_lab.stages.dataset_stats import DatasetStatsParams, DatasetStatsResult, run_dataset_stats
from dflash_lab.views import dataset_stats as figures
from dflash_lab.views.dataset_stats import explorer, outcome_table

REAL = Path(__file__).parents[1] / "data" / "lengths_public_chat.parquet"


def params_for(tmp_path, samples=REAL, **options):
    return DatasetStatsParams(
        run_dir=str(tmp_path / "run"), samples=str(samples), interactive=False, **options
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    params = params_for(tmp_path_factory.mktemp("stats"))
    return params, execute(params)


def measure(tmp_path, lengths, sources):
    pl.DataFrame({"length": lengths, "source": sources}).write_parquet(tmp_path / "some.parquet")
    return run_dataset_stats(params_for(tmp_path, tmp_path / "some.parquet"))


def all_figures(result, limit=4096):
    return [
        figures.length_bars(result.histogram, max_length=limit),
        figures.length_bars(result.histogram, max_length=limit, unit="tokens"),
        figures.length_ecdf(result.ecdf, result.percentiles, max_length=limit),
        figures.tail_shares(result.tail),
        figures.source_shares(result.sources),
        figures.policy_padding(result.policies),
    ]


def test_figures_equal_the_plain_counts_and_load_again(measured):
    params, result = measured
    lengths = pl.read_parquet(REAL)["length"].to_numpy().astype(np.int64)
    found = result.figures
    assert (found["samples"], found["tokens"]) == (len(lengths), lengths.sum())
    assert found["mean_tokens"] == pytest.approx(lengths.mean())
    assert found["median_tokens"] == np.percentile(lengths, 50, method="inverted_cdf")
    assert found["over_max_length_samples"] == (lengths > 4096).sum()
    share = lengths[lengths > 4096].sum() / lengths.sum()
    assert found["over_max_length_tokens_pct"] == pytest.approx(100 * share)
    padded = lengths.sum() / (1 - found["waste_32k_windows_pct"] / 100)
    assert found["predicted_hours"] == pytest.approx(padded / 9000 / 3600)
    far = 2**20
    assert 2 * lengths.max() < far / 2
    for figure in (
        figures.length_bars(result.histogram, max_length=far),
        figures.length_ecdf(result.ecdf, result.percentiles, max_length=far),
    ):
        assert figure.layout.xaxis.tickvals[-1] >= far / 2  # the axis is labelled as far as the limit
    again = DatasetStatsResult.load(params.folder)
    assert again.figures == found and again.counts.equals(result.counts)
    assert np.array_equal(again.length_array, lengths)
    stamp = (params.folder / "counts.parquet").stat().st_mtime_ns
    assert execute(params).figures == found
    assert (params.folder / "counts.parquet").stat().st_mtime_ns == stamp


def test_913_000_samples_in_seconds_with_small_figures(tmp_path):
    real = pl.read_parquet(REAL)["length"].to_numpy()
    lengths = synthetic_lengths(real, 913_000, mean=335, longest=4096)
    start = time.process_time()
    result = measure(tmp_path, lengths, [f"s{i % 60}" for i in range(913_000)])
    assert time.process_time() - start < 10
    assert result.figures["waste_32k_windows_pct"] <= 1 and result.figures["waste_8k_windows_pct"] <= 3
    for figure in all_figures(result):
        assert len(figure.to_json()) < 200_000
        assert figure.layout.xaxis.title.text and figure.layout.title.text
    start = time.process_time()
    scaled = figures.explored(result, params_for(tmp_path, tmp_path / "some.parquet"))
    assert time.process_time() - start < 2
    exact = explore(lengths, max_length=4096)
    assert scaled.kept == exact.kept and scaled.batches == pytest.approx(exact.batches, rel=0.02)
    assert scaled.hours == pytest.approx(exact.hours, rel=0.02)


def test_of_more_than_planned_a_random_part_is_planned(tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "PLANNED", 1000)
    result = run_dataset_stats(params_for(tmp_path))
    assert result.figures["policy_samples"] == 1000 and result.figures["samples"] == 31_189
    assert result.policies["batches"][0] == 32


def test_empty_and_missing_files_are_named(tmp_path):
    path = tmp_path / "none.parquet"
    with refused(InputError):
        run_dataset_stats(params_for(tmp_path, path))
    pl.DataFrame({"length": []}, schema={"length": pl.Int32}).write_parquet(path)
    with refused(InputError):
        run_dataset_stats(params_for(tmp_path, path))


def test_one_sample_gives_all_figures_and_sources_are_escaped(tmp_path):
    drawn = all_figures(measure(tmp_path, [1], ["<b>x</b>"]))
    assert "<b>" not in drawn[4].data[0].y[0] and "&lt;b&gt;" in drawn[4].data[0].y[0]


def test_many_sources_are_joined_in_one_bar(tmp_path):
    bars = figures.source_shares(measure(tmp_path, list(range(1, 51)), [f"s{i}" for i in range(50)]).sources)
    assert len(bars.data[0].y) == 21 and bars.data[0].y[0] == "30 more"
    assert sum(bars.data[1].x) == pytest.approx(100)


def test_the_explorer_answers_when_a_slider_moves(measured):
    params, result = measured
    widget = explorer(result, params)
    (controls, table), figure = widget.children[0].children, widget.children[1]
    by_name = {control.description: control for control in controls.children}
    before = (table.value, figure.layout.title.text)
    limit = by_name["length limit"]
    limit.value = next(step for _, step in limit.options if step >= 512)
    by_name["policy"].value = "shuffled, fixed batch"
    lengths = pl.read_parquet(REAL)["length"].to_numpy()
    wanted = explore(lengths, max_length=limit.value, policy="shuffled, fixed batch", limits=Limits())
    assert (table.value, figure.layout.title.text) != before
    assert table.value == outcome_table(wanted)
    assert figure.layout.title.text == figures.exploration_text(wanted)
    assert duration(3600 * wanted.hours) in figure.layout.title.text and "0.00 h" not in table.value
    assert f"{limit.value:,}" in figure.layout.annotations[0].text
    by_name["longer ones"].value = "truncate"
    assert "0</b>" in table.value and f"{wanted.dropped:,} truncated" in figure.layout.title.text


def test_the_notebook_batches_ten_lengths_with_less_padding(capsys):
    exec(live_cell("dataset_stats"), {})
    before, after = (float(text) for text in re.findall(r"([\d.]+) % padding", capsys.readouterr().out))
    assert after < before / 3
