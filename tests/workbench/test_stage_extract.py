"""The stage on a tiny target: shards, what is lost redone, trials, quarantine, preflight, figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest
import torch
from support.live_cells import live_cell
from support.wording import check_wording, refused

from dflash_lab.data.samples import Sample, write_samples
from dflash_lab.errors import InputError
from dflash_lab.extraction import checks, writer
from dflash_lab.extraction.checks import discard, verify
from dflash_lab.extraction.manifest import trial_of
from dflash_lab.extraction.report import QuarantineError
from dflash_lab.extraction.shard import drawn, read_index
from dflash_lab.extraction.store import open_store
from dflash_lab.files import read_json
from dflash_lab.models.source import load_config
from dflash_lab.results import WouldReplace, differences
from dflash_lab.runs import closing_figures
from dflash_lab.stage_run import execute, is_finished
from dflash_lab.stages.extract import ExtractParams, ExtractResult
from dflash_lab.views import extract as figures
from dflash_lab.views.style import headline

LENGTHS = [3, 20, 31, 40, 64, 65, 70, 90]


@pytest.fixture
def params(tiny_target: Callable[[str], Path], tmp_path: Path) -> Callable[..., ExtractParams]:
    """A function: changes -> parameters of a run over eight samples."""
    generator = np.random.default_rng(0)
    samples = [
        Sample(f"s{number}", generator.integers(0, 256, length), np.ones(length, np.uint8), "test")
        for number, length in enumerate(LENGTHS)
    ]
    write_samples(tmp_path / "run" / "samples.parquet", samples, heldout_fraction=0.2, provenance={})

    def make(**changes: object) -> ExtractParams:
        base = {
            "run_dir": str(tmp_path / "run"), "target": str(tiny_target("qwen3")), "device": "cpu",
            "num_taps": 3, "token_budget": 200, "max_batch": 4, "interactive": False,
        }  # fmt: skip
        return ExtractParams(**{**base, **changes})

    return make


def test_two_shards_fill_one_store_and_a_finished_shard_is_loaded_not_run(params, tmp_path) -> None:
    results = [execute(params(shard=shard, num_shards=2, store_final=True)) for shard in (0, 1)]
    store = open_store(params().store_path)
    assert len(store) == len(LENGTHS) == sum(result.figures["samples_stored"] for result in results)
    assert store.tap_ids == [1, 3, 5] and store.has_final
    second = params(shard=1, num_shards=2, store_final=True)
    record = read_json(second.folder / "result.json")
    assert record["figures"]["samples_quarantined"] == 0 and record["figures"]["extract_tokens_per_s"] > 0
    assert {"preflight_store_gib", "padding_waste_pct", "fused_layers"} <= set(record["figures"])
    assert not {"forward_seconds", "gpu_idle_pct"} & set(record["figures"])  # no device's clock on a CPU
    assert is_finished(second)
    again = execute(second)
    assert again.figures == results[1].figures and again.selftest == results[1].selftest
    assert again.batches.equals(results[1].batches) and again.states.equals(results[1].states)
    replace(again, figures={**again.figures, "tokens_per_s": float("nan")}).save(tmp_path / "saved")
    assert ExtractResult.load(tmp_path / "saved").figures["tokens_per_s"] is None
    (store.path / "shard-00001-of-00002" / "manifest.jsonl").unlink()
    assert not is_finished(second)


def test_what_is_lost_of_a_finished_store_is_redone_by_the_same_command(params) -> None:
    whole = execute(params())
    store = params().store_path

    def redone(**changes: object) -> None:
        assert not is_finished(params(**changes))
        execute(params(**changes))
        assert [fault for fault in verify(store) if fault.part] == []
        assert open_store(store).num_tokens == whole.figures["tokens_stored"] and is_finished(params())

    (part,) = store.rglob("part-*.safetensors")
    data = bytearray(part.read_bytes())
    for path, damaged in ((part, data[:-100]), (store / "store.json", None)):
        before = path.read_bytes()
        path.unlink() if damaged is None else path.write_bytes(damaged)
        assert not is_finished(params())
        path.write_bytes(before)
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    assert is_finished(params()), "its size tells nothing"
    redone(recheck=True)
    (part,) = store.rglob("part-*.safetensors")
    part.write_bytes(b"")
    discard(store, verify(store))
    redone()
    (path,) = store.glob("shard-*/manifest.jsonl")
    path.write_text(path.read_text().replace('{"kind": "part"', '{"kind": "par\n'))
    redone()


def test_a_quarantined_sample_fails_the_stage_after_everything_is_sealed(params, monkeypatch) -> None:
    real = writer.check_rows

    def one_bad(states: torch.Tensor, owner: torch.Tensor, samples: int) -> torch.Tensor:
        found = real(states, owner, samples)
        lengths = torch.bincount(owner, minlength=samples)
        return torch.where(lengths == 31, torch.full_like(found, 4), found)

    monkeypatch.setattr(writer, "check_rows", one_bad)
    with refused(QuarantineError):
        execute(params())
    assert len(open_store(params().store_path)) == len(LENGTHS) - 1
    assert read_json(params().folder / "failure.json")["error"] == "QuarantineError"
    accepted = execute(params(max_quarantined=1))
    assert accepted.quarantined["id"].to_list() == ["s2"]
    assert accepted.figures["samples_quarantined"] == 1


def test_the_preflight_refuses_a_full_disk_before_loading(params, monkeypatch) -> None:
    usage = checks.shutil.disk_usage("/")
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with refused(InputError):
        execute(params())


def test_the_preflight_counts_a_large_target_on_paper(tmp_path: Path) -> None:
    """27B, five taps: 51,200 bytes a token; 306 M tokens take 15.7 TB and about 8 hours at 500 TFLOP/s."""
    config, lengths = load_config("random:qwen3.6-27b"), np.full(1000, 335)
    kept = dict(tap_ids=[1, 16, 31, 46, 61], store_final=False, storage="bf16")
    found = checks.preflight(config, lengths, tmp_path, **kept, device_type="cuda")
    assert found.token_bytes == 51_200
    assert found.bytes_needed == pytest.approx(335_000 * 51_205, rel=1e-4)
    assert found.body_parameters == pytest.approx(23.6e9, rel=0.01)
    assert found.hours * 913 == pytest.approx(8.0, rel=0.05)


@pytest.mark.parametrize(
    "change",
    [
        {"shard": 2, "num_shards": 2},
        {"tap_ids": [3, 1]},
        {"storage": "fp16"},
        {"tap_ids": [1, 99]},
        {"samples": "nowhere.parquet"},
        {"fast": "on"},
        *({"max_samples": value} for value in ("many", -1, 1.5, True, float("nan"), 10**13, None)),
    ],
    ids=str,
)
def test_wrong_parameters_are_named(change: dict, params) -> None:
    with refused(InputError):
        execute(params(**change))


def test_figures_say_what_they_show(params) -> None:
    result = execute(params())
    speed = figures.speed(result.batches)
    assert [trace.name for trace in speed.data] == ["padded tokens", "real tokens"]
    assert max(speed.data[1].x) == sum(LENGTHS)
    shapes = figures.batch_shapes(result.batches, 200)
    assert sum(shapes.data[0].y) == len(LENGTHS)
    names = result.states["state"].to_list()
    assert names == ["tap 1", "tap 3", "tap 5"]
    test = figures.self_test(result.selftest, names)
    assert all(one < limit for one, limit in zip(test.data[0].y, test.data[2].y))
    assert all(value > 0 for value in figures.state_sizes(result.states).data[1].y)
    empty = result.batches.clear()
    for fig in (figures.speed(empty), figures.batch_shapes(empty, 200), figures.self_test({}, names)):
        assert isinstance(fig, go.Figure)


def test_a_budget_that_padding_would_eat_is_lowered_and_the_result_says_so(params, caplog) -> None:
    """The chats of a first try, under the budget of a GPU: not one batch, half of it padding."""
    lengths = np.random.default_rng(0).integers(10, 90, 57)
    samples = [
        Sample(f"s{number}", np.arange(length) % 250 + number % 5, np.ones(length, np.uint8), "test")
        for number, length in enumerate(lengths)
    ]
    write_samples(params().samples_path, samples, heldout_fraction=0.2, provenance={})
    with caplog.at_level("INFO"):
        result = execute(params(token_budget=16384, max_batch=512))
    told = result.figures["token_budget_lowered"]
    check_wording(told)
    assert result.figures["token_budget"] < 4096 and f"to {result.figures['token_budget']:,}" in told
    assert result.figures["batches"] > 1 and f"{result.figures['batches']} batches" in told
    assert result.figures["padding_waste_pct"] < 20
    assert told in caplog.text and repr(headline(result.figures)).count(told) == 1
    figure = figures.batch_shapes(result.batches, result.figures["token_budget"])
    assert figure.data[1].x[0] * figure.data[1].y[0] == pytest.approx(result.figures["token_budget"])
    assert "token_budget_lowered" not in execute(params(token_budget=200, force=True)).figures


def test_the_notebooks_live_cells_halve_a_batch_and_catch_two_layers(capsys) -> None:
    names: dict[str, object] = {}
    exec(live_cell("extract"), names)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["8", "4", "4", "4", "4", "3"]
    assert "out of memory" in lines[0] and all(line.endswith(": stored") for line in lines[1:])
    exec(live_cell("extract", "toy-taps"), names)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all("(1, 10, 32)" in line and line.endswith("True") for line in lines)


def hashes(store: Path) -> set[bytes]:
    return {row.tobytes() for row in open_store(store).hashes}


def files_of(store: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in store.rglob("part-*.safetensors")}


def test_a_trial_grows_to_the_whole_without_anything_being_replaced(params, caplog) -> None:
    store = params().store_path
    first = execute(params(max_samples=3))
    assert (first.figures["samples_in"], first.figures["samples_of_set"]) == (3, len(LENGTHS))
    few, kept = hashes(store), files_of(store)
    assert len(few) == 3 and is_finished(params(max_samples=3)) and is_finished(params(max_samples=2))
    for count in (5, 0):
        more = params(max_samples=count)
        assert not is_finished(more) and differences(more) == []
        check_wording(more.lacks())
        result = execute(more)
        assert result.figures["samples_stored_before"] == len(few)
        told = closing_figures(params().run_folder)  # of the store, not of the last start
        assert told["samples_stored"] == (count or len(LENGTHS)) == len(open_store(store))
        assert told["tokens_stored"] == sum(len(one.input_ids) for one in open_store(store))
        assert few < hashes(store) and files_of(store).items() >= kept.items()
        assert is_finished(more) and not more.lacks()
        check_wording(more.remains())
        few, kept = hashes(store), files_of(store)
    assert len(few) == len(LENGTHS) and not [fault for fault in verify(store) if fault.part]
    caplog.clear()
    with caplog.at_level("INFO"):
        execute(params(max_samples=3))
    assert "max_samples was all, now 3: what is stored stays" in caplog.text
    assert files_of(store) == kept
    assert not (params().folder / "failure.json").exists()


def test_shards_draw_the_trial_together_and_one_that_gets_none_is_done(params, tmp_path) -> None:
    alone = dict(store=str(tmp_path / "one"), run_dir=str(tmp_path / "other"))
    execute(params(max_samples=2, samples=str(params().samples_path), **alone))
    shards = [params(max_samples=2, shard=shard, num_shards=3) for shard in range(3)]
    for shard in shards:
        execute(shard)
    assert hashes(params().store_path) == hashes(tmp_path / "one")
    assert trial_of(params().store_path) == len(LENGTHS)
    assert all(map(is_finished, shards))


def test_a_stopped_trial_goes_on_and_a_stopped_larger_one_is_not_finished(params) -> None:
    def stop(description: str, done: int, total: int, **fields: object) -> None:
        if done:
            raise KeyboardInterrupt

    def trial(count: int, **more: object) -> ExtractParams:
        return params(max_samples=count, max_batch=1, part_gib=0.001, **more)

    execute(trial(2))
    with pytest.raises(KeyboardInterrupt):
        execute(trial(7), stop)
    assert not is_finished(trial(7))
    execute(trial(2, recheck=True))  # the smaller one ends, not the larger that was begun
    assert is_finished(trial(2)) and not is_finished(trial(7))
    execute(trial(7))
    assert len(open_store(params().store_path)) == 7 and is_finished(trial(7))


def test_a_whole_store_with_parts_given_up_or_of_an_earlier_version_is_no_trial(params) -> None:
    execute(params(max_samples=99))  # more than there are is all of them
    store = params().store_path
    assert is_finished(params()) and trial_of(store) == 0
    path = next(store.rglob("manifest.jsonl"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line.pop("drawn", None)  # as earlier versions wrote it
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert is_finished(params()) and is_finished(params(max_samples=3)) and not trial_of(store)
    for part in store.rglob("part-*.safetensors"):
        part.write_bytes(b"")
    execute(params(max_samples=3))
    assert len(open_store(store)) == 3
    assert is_finished(params(max_samples=3)) and not is_finished(params())


def test_another_seed_draws_others_and_asks_first(params) -> None:
    execute(params(max_samples=5))
    before = hashes(params().store_path)
    with refused(WouldReplace):
        execute(params(max_samples=3, seed=4))
    execute(params(max_samples=3, seed=4, force=True))
    assert hashes(params().store_path) > before  # nothing is taken away
    assert is_finished(params(max_samples=3, seed=4)) and not is_finished(params(max_samples=4, seed=4))


def test_a_trial_has_both_splits_in_their_proportion_in_any_order(tmp_path: Path) -> None:
    samples = [
        Sample(f"{number}", [number % 250, number // 250, 7], [0, 1, 1], "test") for number in range(2000)
    ]
    write_samples(tmp_path / "s.parquet", samples, heldout_fraction=0.2, provenance={})
    write_samples(tmp_path / "r.parquet", samples[::-1], heldout_fraction=0.2, provenance={})
    index, other = read_index(tmp_path / "s.parquet"), read_index(tmp_path / "r.parquet")
    few, more = drawn(index, 500, 0), drawn(index, 1000, 0)
    assert few.sum() == 500 and more.sum() == 1000 and not (few & ~more).any()
    assert 0.15 < index.heldout[few].mean() < 0.25
    assert (drawn(index, 500, 1) & few).sum() < 220
    assert drawn(index, 0, 0).all() and drawn(index, 2001, 0).all()
    picked = {other.content_hashes[row] for row in np.flatnonzero(drawn(other, 500, 0))}
    assert picked == {index.content_hashes[row] for row in np.flatnonzero(few)}
