"""Samples on disk: the schema, identity by content, duplicates, the held-out split, merging, and damaged
files."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from support.wording import check_wording, refused

from dflash_lab import data, files
from dflash_lab.data.records import BadRecord
from dflash_lab.data.samples import (
    MASK_RULES,
    SCHEMA,
    FeatureItem,
    Sample,
    content_hash,
    fitted,
    is_heldout,
    merge_samples,
    old_rules,
    read_lengths,
    read_provenance,
    read_samples,
    scan_samples,
    write_samples,
)
from dflash_lab.errors import InputError, StoreError

MADE = {"tokenizer_hash": "t", "template_hash": "c", "thinking": False}


def sample(name, ids, mask=None, source="s"):
    return Sample(
        name, np.array(ids), np.array(mask if mask is not None else [0] + [1] * (len(ids) - 1)), source
    )


def test_schema_is_the_documented_one(tmp_path):
    report = write_samples(
        tmp_path / "s.parquet", [sample("f:1", [5, 6, 7])], heldout_fraction=0, provenance=MADE
    )
    frame = pl.read_parquet(tmp_path / "s.parquet")
    assert dict(frame.schema) == SCHEMA
    row = frame.row(0, named=True)
    assert row["input_ids"] == [5, 6, 7] and row["loss_mask"] == [0, 1, 1]
    assert (row["length"], row["response_start"], row["split"]) == (3, 1, "train")
    assert (report.given, report.stored, report.tokens, report.answer_tokens) == (1, 1, 3, 2)


def test_content_hash_is_the_documented_one():
    raw = struct.pack("<3i", 5, -1, 1 << 30) + bytes([0, 1, 1])
    assert content_hash([5, -1, 1 << 30], [0, 1, 1]) == xxhash.xxh3_128_hexdigest(raw)
    assert content_hash([5, 6], [0, 1]) != content_hash([5, 6], [1, 1])


def test_no_answer_starts_past_the_end(tmp_path):
    write_samples(tmp_path / "s.parquet", [sample("a", [1, 2], [0, 0])], heldout_fraction=0, provenance=MADE)
    assert read_samples(tmp_path / "s.parquet")["response_start"].to_list() == [2]


def test_samples_refuse_a_mask_that_does_not_fit():
    for wrong in ([1], [0, 2]):
        with refused(ValueError):
            sample("a", [1, 2], wrong)


@pytest.mark.parametrize("name", ["loss_mask", "taps", "final"])
def test_a_feature_item_has_a_row_for_each_token(name):
    fields = {
        "input_ids": torch.zeros(3, dtype=torch.int32),
        "loss_mask": torch.ones(3, dtype=torch.uint8),
        "taps": torch.zeros(3, 10),
        "final": torch.zeros(3, 5),
    }
    assert len(FeatureItem(hash="0" * 32, heldout=False, **fields)) == 3
    with refused(ValueError):
        FeatureItem(hash="0" * 32, heldout=False, **{**fields, name: torch.zeros(2, 5)})


def test_the_room_imports_without_torch():
    modules = [path.stem for path in Path(data.__file__).parent.glob("*.py")]
    code = ";".join(f"import dflash_lab.data.{name}" for name in modules)
    code += ";import sys;assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=40), st.floats(0, 0.99))
def test_duplicates_are_stored_once_and_counted(tmp_path_factory, rows, fraction):
    path = tmp_path_factory.mktemp("s") / "s.parquet"
    samples = [sample(f"f:{number}", ids) for number, ids in enumerate(rows)]
    report = write_samples(path, samples, heldout_fraction=fraction, provenance=MADE)
    frame = read_samples(path)
    distinct = list(dict.fromkeys(map(tuple, rows)))
    assert [tuple(ids) for ids in frame["input_ids"]] == distinct  # first of each, in order
    assert report.given == len(rows) == report.stored + report.duplicates
    assert frame.height == report.stored == frame["content_hash"].n_unique()
    assert report.heldout == (frame["split"] == "heldout").sum()
    assert read_lengths(path).tolist() == [len(ids) for ids in distinct]


def test_heldout_share_is_near_the_fraction_and_grows_by_adding():
    hashes = [content_hash([number], [1]) for number in range(4000)]
    small = {name for name in hashes if is_heldout(name, 0.1)}
    large = {name for name in hashes if is_heldout(name, 0.2)}
    assert small < large
    assert 300 < len(small) < 500 and 680 < len(large) < 920
    assert not any(is_heldout(name, 0.0) for name in hashes)


def test_rows_are_read_in_the_order_asked_across_batches_and_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_lab.data.samples._BATCH_TOKENS", 10)
    monkeypatch.setattr("dflash_lab.data.samples._ROW_GROUP", 8)
    path, rows = tmp_path / "s.parquet", [[number, number] for number in range(50)]
    samples = (sample(str(i), ids) for i, ids in enumerate(rows))
    write_samples(path, samples, heldout_fraction=0.1, provenance=MADE)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["s.json", "s.parquet"]
    assert read_samples(path)["input_ids"].to_list() == rows
    for asked in ([49, 0, 7, 8, 9, 40, 16, 15], [3, 3], []):
        assert read_samples(path, asked)["id"].to_list() == list(map(str, asked))
    for wrong in ([1, 50], [-1]):
        with refused(InputError):
            read_samples(path, wrong)


def test_provenance_lies_beside_and_versions_are_checked(tmp_path):
    path = tmp_path / "samples.parquet"
    write_samples(path, [sample("a", [1, 2])], heldout_fraction=0.25, provenance={**MADE, "x": 1})
    made = read_provenance(path)
    assert made["x"] == 1 and made["heldout_fraction"] == 0.25 and made["counts"]["stored"] == 1
    beside = tmp_path / "samples.json"
    beside.write_text(json.dumps({**made, "format": 99}))
    with refused(StoreError):
        read_provenance(path)
    beside.write_text("[]")
    with refused(StoreError):
        read_provenance(path)
    beside.unlink()
    with refused(StoreError):
        read_provenance(path)


def test_merging_stores_shared_samples_once(tmp_path):
    first, second, out = (tmp_path / f"{name}.parquet" for name in ("a", "b", "out"))
    write_samples(first, [sample("a:1", [1, 2]), sample("a:2", [3, 4])], heldout_fraction=0, provenance=MADE)
    write_samples(second, [sample("b:1", [3, 4]), sample("b:2", [5, 6])], heldout_fraction=0, provenance=MADE)
    report = merge_samples([first, second], out, heldout_fraction=0.5)
    assert (report.given, report.stored, report.duplicates) == (4, 3, 1)
    assert read_samples(out)["id"].to_list() == ["a:1", "a:2", "b:2"]
    assert report.duplicate_ids == ["b:1"]
    write_samples(
        second, [sample("b:1", [3, 4])], heldout_fraction=0, provenance={**MADE, "template_hash": "other"}
    )
    with refused(InputError):
        merge_samples([first, second], out, heldout_fraction=0)


def test_samples_merged_are_of_the_mask_rules_that_made_them(tmp_path):
    first, second, out = (tmp_path / f"{name}.parquet" for name in ("a", "b", "out"))
    made = {"tokenizer_hash": "t", "template_hash": "c"}  # as the first version wrote it
    for rules, told in (({}, 1), ({"mask_rules": MASK_RULES}, None)):
        for path in (first, second):
            write_samples(path, [sample("a:1", [1, 2])], heldout_fraction=0, provenance=made | rules)
        merge_samples([first, second], out, heldout_fraction=0)
        assert old_rules(first) == old_rules(out) == told


def test_wrong_files_are_named(tmp_path):
    with refused(InputError):
        scan_samples(tmp_path / "none.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    with refused(StoreError):
        scan_samples(tmp_path / "bad.parquet")
    pl.DataFrame({"input_ids": [[1]], "length": ["x"]}).write_parquet(tmp_path / "other.parquet")
    with refused(StoreError):
        scan_samples(tmp_path / "other.parquet")


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_fraction_is_checked(tmp_path, fraction):
    with refused(InputError):
        write_samples(tmp_path / "s.parquet", [], heldout_fraction=fraction, provenance={})


def test_a_failure_leaves_the_old_file_whole(tmp_path):
    path = tmp_path / "s.parquet"
    write_samples(path, [sample("a", [1, 2])], heldout_fraction=0, provenance=MADE)
    before = path.read_bytes()

    def failing():
        yield sample("b", [3, 4])
        raise OSError(28, "No space left on device")

    with refused(OSError):
        write_samples(path, failing(), heldout_fraction=0, provenance=MADE)
    assert path.read_bytes() == before
    assert sorted(item.name for item in tmp_path.iterdir()) == ["s.json", "s.parquet"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A samples file of 4,000 rows, half of them held out."""
    path, mask = tmp_path_factory.mktemp("stored") / "s.parquet", np.asarray([0, 0, 0, 1, 1, 1], np.uint8)
    ids = [np.arange(6) + first for first in range(1, 4001)]
    write_samples(path, [Sample(f"f:{i[0]}", i, mask, "f") for i in ids], heldout_fraction=0.5, provenance={})
    return path


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("split", "test"),
        ("split", None),
        ("id", None),
        ("length", None),
        ("length", -1),
        ("length", 7),
        ("content_hash", "zz"),
        ("content_hash", "0" * 32),
        ("input_ids", [1, None, 3, 4, 5, 6]),
        ("input_ids", [1, 2, 3, 4, 5, 7]),
        ("input_ids", []),
        ("loss_mask", [0, 0, 0, 1, 1, 2]),
        ("loss_mask", []),
    ],
)
def test_a_row_that_cannot_be_is_refused_by_every_reader_with_its_place(stored, tmp_path, column, value):
    from dflash_lab.acceptance.prompts import heldout_prompts
    from dflash_lab.drafter.live import SampleItems
    from dflash_lab.extraction.shard import Tokens, read_index

    frame, path = pl.read_parquet(stored), tmp_path / "s.parquet"
    values = frame[column].to_list()
    values[frame["split"].to_list().index("heldout", 2500)] = value
    frame.with_columns(pl.Series(column, values, dtype=frame.schema[column])).write_parquet(path)
    files.write_json(tmp_path / "s.json", {**read_provenance(stored), "checksum": files.checksum(path)})

    def extraction():
        index = read_index(path)
        Tokens(index, np.arange(len(index.ids)))

    def merging():
        merge_samples([path], tmp_path / "merged.parquet", heldout_fraction=0)

    readers = [extraction, lambda: SampleItems(path, 8, [0]), merging]
    if column != "split":  # what has another split is no held-out prompt, but is refused all the same
        readers.append(lambda: heldout_prompts(path))
    told = set()
    for reader in readers:
        with pytest.raises(InputError) as refusal:
            reader()
        told.add(str(refusal.value))
    (words,) = told
    check_wording(words)


def test_provenance_of_another_file_is_refused(tmp_path):
    for name, first in (("a", 0), ("b", 9)):
        rows = [Sample(f"{name}:1", np.asarray([first, 2]), np.asarray([0, 1]), name)]
        write_samples(tmp_path / f"{name}.parquet", rows, heldout_fraction=0.0, provenance={})
    (tmp_path / "b.json").replace(tmp_path / "a.json")
    with refused(StoreError):
        read_provenance(tmp_path / "a.parquet")


def test_a_sample_as_long_as_the_limit_is_kept_whole_and_a_longer_one_dropped_or_cut():
    ids, mask = [5, 6, 7, 8], [0, 1, 1, 1]
    assert fitted(ids, mask, 4, "drop") == fitted(ids, mask, 0, "drop") == (ids, mask)
    assert fitted(ids, mask, 3, "truncate") == (ids[:3], mask[:3])
    with pytest.raises(BadRecord) as dropped:
        fitted(ids, mask, 3, "drop")
    with pytest.raises(BadRecord) as unanswered:
        fitted(ids, mask, 1, "truncate")
    with pytest.raises(BadRecord) as silent:
        fitted(ids, [0, 0, 0, 0], 0, "drop")
    assert [told.value.kind for told in (dropped, unanswered, silent)] == [
        "too long",
        "too long",
        "no answer",
    ]


def test_merging_names_a_file_that_is_not_there(tmp_path):
    with refused(InputError):
        merge_samples([tmp_path / "nosuch.parquet"], tmp_path / "out.parquet", heldout_fraction=0.1)
