"""Sealed parts, manifests and their verification."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file
from support.sample_files import TAP_IDS, make_samples
from support.wording import refused

from dflash_lab import files
from dflash_lab.data.samples import content_hash
from dflash_lab.errors import InputError, StoreError
from dflash_lab.extraction import manifest
from dflash_lab.extraction.checks import discard, verify
from dflash_lab.extraction.loop import extract
from dflash_lab.extraction.manifest import shard_lock
from dflash_lab.extraction.store import open_store, write_part

LENGTHS = [60, 50, 40, 30, 20, 10, 55, 45, 35, 25]
PLAN = {"tap_ids": TAP_IDS, "token_budget": 120, "max_batch": 8, "part_gib": 0.00004}


@pytest.fixture
def made(tiny, tmp_path: Path):
    """A store of several parts, and the function that extracts into it again."""
    samples, store = make_samples(tmp_path / "s.parquet", LENGTHS), tmp_path / "store"

    def run(**changes: object):
        return extract(tiny("llama"), samples, store, **{**PLAN, **changes})

    run()
    assert len(parts(store)) >= 4
    return store, run


def parts(store: Path) -> list[Path]:
    return sorted(store.rglob("part-*.safetensors"))


def test_a_part_is_a_plain_safetensors_file_of_flat_tensors(made) -> None:
    store, _ = made
    tensors = load_file(parts(store)[0])
    tokens = int(tensors["offsets"][-1])
    assert tensors["taps"].shape == (tokens, 3 * 48) and tensors["taps"].dtype == torch.bfloat16
    assert tensors["input_ids"].dtype == torch.int32 and tensors["loss_mask"].dtype == torch.uint8
    assert tensors["offsets"].dtype == torch.int64 and tensors["hashes"].shape == (
        len(tensors["offsets"]) - 1,
        16,
    )
    assert tensors["heldout"].dtype == torch.uint8


def test_the_manifest_tells_what_made_the_shard(made) -> None:
    store, _ = made
    lines = manifest.read_lines(manifest.shard_folders(store)[0])
    run = next(line for line in lines if line["kind"] == "run")
    assert {"versions", "commit", "plan", "device"} <= set(run)
    assert (
        run["versions"]["torch"] == torch.__version__.split("+")[0]
        or run["versions"]["torch"] == torch.__version__
    )
    part = next(line for line in lines if line["kind"] == "part")
    path = parts(store)[0]
    assert part["bytes"] == path.stat().st_size and part["checksum"] == files.checksum(path)
    end = lines[-1]
    assert end["kind"] == "end" and end["samples_in"] == end["samples_stored"] == len(LENGTHS)


def test_a_finished_shard_does_nothing_again(made) -> None:
    store, run = made
    before = [(path, path.stat().st_mtime_ns) for path in parts(store)]
    report = run()
    assert report.samples_stored == 0 and report.stored_before == len(LENGTHS)
    assert before == [(path, path.stat().st_mtime_ns) for path in parts(store)]


@pytest.mark.parametrize("place", ["header", "taps", "end"])
def test_a_flipped_byte_is_found_and_exactly_its_part_redone(place: str, made) -> None:
    store, run = made
    victim = parts(store)[1]
    lost = len(load_file(victim)["hashes"])
    data = bytearray(victim.read_bytes())
    at = {"header": 12, "taps": len(data) // 2, "end": len(data) - 1}[place]
    data[at] ^= 0x10
    victim.write_bytes(data)
    (fault,) = verify(store)
    assert fault.file.endswith(victim.name) and "checksum" in fault.what
    report = run(recheck=True)
    assert report.samples_stored == lost
    assert verify(store) == [] and len(open_store(store)) == len(LENGTHS)


@pytest.mark.parametrize("damage", ["missing", "truncated", "empty", "longer"])
def test_a_damaged_part_is_found_named_and_redone(damage: str, made) -> None:
    store, run = made
    victim = parts(store)[2]
    lost = len(load_file(victim)["hashes"])
    data = victim.read_bytes()
    if damage == "missing":
        victim.unlink()
    else:
        victim.write_bytes({"truncated": data[:-7], "empty": b"", "longer": data + b"x"}[damage])
    (fault,) = verify(store)
    assert victim.name in fault.file and fault.part
    assert ("missing" in fault.what) == (damage == "missing")
    with refused(StoreError):
        open_store(store)
    report = run()
    assert report.samples_stored == lost and report.stored_before == len(LENGTHS) - lost
    assert verify(store) == [] and len(open_store(store)) == len(LENGTHS)


def test_a_damaged_part_of_an_earlier_shard_count_is_redone_too(tiny, tmp_path: Path) -> None:
    samples, store = make_samples(tmp_path / "s.parquet", LENGTHS), tmp_path / "store"
    for shard in (0, 1):
        extract(tiny("llama"), samples, store, shard=shard, num_shards=2, **PLAN)
    parts(store)[0].write_bytes(b"")
    lost = extract(tiny("llama"), samples, store, **PLAN).samples_stored
    assert 0 < lost < len(LENGTHS)
    assert verify(store) == [] and len(open_store(store)) == len(LENGTHS)


def test_discard_gives_up_what_verify_named(made) -> None:
    store, run = made
    victim = parts(store)[0]
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    assert discard(store, verify(store)) == 1
    assert verify(store) == [] and not victim.exists()
    assert run().samples_stored > 0
    assert len(open_store(store)) == len(LENGTHS)


def test_a_discarded_name_is_never_used_again(made) -> None:
    store, run = made
    names = {path.name for path in parts(store)}
    victim = parts(store)[-1]
    victim.unlink()
    run()
    assert not victim.exists()
    assert {path.name for path in parts(store)} - names


def test_a_torn_last_line_is_ignored_and_cut_off(made) -> None:
    store, run = made
    path = manifest.shard_folders(store)[0] / manifest.MANIFEST_FILE
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind": "part", "file": "part-0000')
    assert len(open_store(store)) == len(LENGTHS) and verify(store) == []
    run()
    assert path.read_bytes().startswith(whole)
    for line in path.read_text().splitlines():
        json.loads(line)


def test_a_part_without_its_line_is_a_stray_and_goes(made) -> None:
    store, run = made
    folder = manifest.shard_folders(store)[0]
    stray = folder / "part-000099.safetensors"
    stray.write_bytes(parts(store)[0].read_bytes())
    (fault,) = verify(store)
    assert stray.name in fault.file and not fault.part
    assert len(open_store(store)) == len(LENGTHS)
    run()
    assert not stray.exists()


PART = {"file": "part-000007.safetensors", "bytes": 1, "checksum": "", "samples": 1, "tokens": 1}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[1]", "no object with a kind"),
        ('{"no": "kind"}', "no object with a kind"),
        ("nonsense", "Expecting value"),
        (json.dumps({"kind": "part", **PART, "file": "../../../etc/passwd"}), "no part's name"),
        (json.dumps({"kind": "part", **PART, "file": 3}), "file of a part is 3"),
        (json.dumps({"kind": "part", **PART, "bytes": "many"}), "bytes of a part is 'many'"),
        (json.dumps({"kind": "part", **PART, "samples": None}), "samples of a part is None"),
        (json.dumps({"kind": "discard", "file": None}), "file of a discard is None"),
    ],
)
def test_a_manifest_line_that_cannot_be_trusted_is_refused_by_number(line: str, why: str, made) -> None:
    store, _ = made
    path = manifest.shard_folders(store)[0] / manifest.MANIFEST_FILE
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, line]) + "\n")
    with refused(StoreError):
        open_store(store)


@pytest.mark.parametrize(
    "broken", [b'{"kind": "par', b"", b"\xff\xfe\x00", b"[" * 100_000, b'{"kind": "part", "file": "part-1"}']
)
@pytest.mark.parametrize("kind", ["run", "selftest", "part", "end"])
def test_one_broken_line_costs_what_it_named_and_is_told_in_a_line(kind: str, broken: bytes, made, caplog):
    store, run = made
    path = manifest.shard_folders(store)[0] / manifest.MANIFEST_FILE
    lines = path.read_bytes().splitlines()
    number = next(n for n, line in enumerate(lines) if json.loads(line)["kind"] == kind)
    lost = json.loads(lines[number])
    others = {name: time for name, time in ((one, one.stat().st_mtime_ns) for one in parts(store))}
    path.write_bytes(b"\n".join([*lines[:number], broken, *lines[number + 1 :], b'{"torn']))
    with refused(StoreError):
        open_store(store)
    told = [fault for fault in verify(store) if not fault.file.endswith("safetensors")]
    assert len(told) == 1 and f":{number + 1}: not a manifest line" in told[0].what and not told[0].part
    report = run()
    assert report.samples_stored == (lost["samples"] if kind == "part" else 0)
    found = [text for text in caplog.messages if "not a manifest line" in text]
    assert len(found) == 1 and f"manifest.jsonl:{number + 1}:" in found[0]
    kept = [one for one, time in others.items() if one.exists() and one.stat().st_mtime_ns == time]
    assert len(kept) == len(others) - (kind == "part")
    assert verify(store) == [] and len(open_store(store)) == len(LENGTHS)
    (mended,) = [line for line in manifest.read_lines(path.parent) if line["kind"] == "mend"]
    assert mended["line"] == number + 1 and mended["text"] == broken[:400].decode("utf-8", "replace")
    names = [line["file"] for line in manifest.read_lines(path.parent) if line["kind"] == "part"]
    assert len(set(names)) == len(names)


def test_a_broken_line_of_another_shard_or_count_stops_nobody(tiny, tmp_path: Path, caplog) -> None:
    samples, store = make_samples(tmp_path / "s.parquet", LENGTHS), tmp_path / "store"
    for shard in (0, 1):
        extract(tiny("llama"), samples, store, shard=shard, num_shards=2, **PLAN)
    path = store / "shard-00000-of-00002" / manifest.MANIFEST_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    number = next(n for n, line in enumerate(lines) if b'"part"' in line)
    lost = json.loads(lines[number])["samples"]
    path.write_bytes(b"".join([*lines[:number], b"nonsense\n", *lines[number + 1 :]]))
    assert extract(tiny("llama"), samples, store, shard=1, num_shards=2, **PLAN).samples_stored == 0
    assert f"manifest.jsonl:{number + 1}: not a manifest line" in caplog.text
    assert extract(tiny("llama"), samples, store, **PLAN).samples_stored == lost  # another count
    assert verify(store) == [] and len(open_store(store)) == len(LENGTHS)


def test_a_lost_store_file_is_written_again_for_the_same_setup_only(tiny, tmp_path):
    samples, store = make_samples(tmp_path / "s.parquet", [9, 12, 30]), tmp_path / "store"
    given = dict(token_budget=64, max_batch=4)
    extract(tiny("llama"), samples, store, tap_ids=[1], **given)
    before = (store / "store.json").read_bytes()
    (store / "store.json").unlink()
    with refused(StoreError):
        extract(tiny("llama"), samples, store, tap_ids=[2], **given)
    assert not (store / "store.json").exists()
    report = extract(tiny("llama"), samples, store, tap_ids=[1], **given)
    assert report.samples_stored == 0 and (store / "store.json").read_bytes() == before
    path = next(store.glob("shard-*/manifest.jsonl"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    old = [{name: value for name, value in line.items() if name != "store"} for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in old))  # as earlier versions wrote it
    (store / "store.json").unlink()
    with refused(StoreError):
        extract(tiny("llama"), samples, store, tap_ids=[1], **given)


def test_what_is_no_store_is_said(tmp_path: Path) -> None:
    with refused(InputError):
        open_store(tmp_path)
    (tmp_path / "store.json").write_text('{"schema": 99}')
    with refused(StoreError):
        open_store(tmp_path)


def test_a_second_process_on_a_shard_is_told_who_has_it(made) -> None:
    store, run = made
    with (
        shard_lock(manifest.shard_folders(store)[0]),
        refused(InputError),
    ):
        run()


def test_another_shard_count_waits_for_a_live_writer(made) -> None:
    store, run = made
    with (
        shard_lock(manifest.shard_folders(store)[0]),
        refused(InputError),
    ):
        run(shard=0, num_shards=3)


def test_shards_divide_the_samples_and_their_cost(tiny, tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).lognormal(3.5, 0.7, 120).clip(2, 200).astype(int).tolist()
    samples, store = make_samples(tmp_path / "s.parquet", lengths), tmp_path / "store"
    tokens = [
        extract(
            tiny("llama"),
            samples,
            store,
            tap_ids=[1],
            shard=shard,
            num_shards=3,
            token_budget=800,
            max_batch=16,
        ).tokens_stored
        for shard in range(3)
    ]
    assert sum(tokens) == sum(lengths)
    assert max(tokens) <= 1.02 * min(tokens)
    assert len(open_store(store)) == len(lengths)


@pytest.mark.parametrize(("shard", "count"), [(2, 2), (-1, 2), (0, 0)])
def test_a_shard_outside_the_count_is_refused(shard: int, count: int, made) -> None:
    _, run = made
    with refused(InputError):
        run(shard=shard, num_shards=count)


def test_a_store_travels_to_worker_processes(made) -> None:
    store = open_store(made[0])
    first = store[0]
    again = pickle.loads(pickle.dumps(store))[0]
    assert torch.equal(first.taps, again.taps) and first.hash == again.hash
    assert torch.equal(store[-1].taps, store[len(store) - 1].taps)
    with pytest.raises(IndexError):
        store[len(store)]
    with pytest.raises(KeyError):
        store.find("00" * 16)


def test_duplicate_rows_are_stored_once_and_counted(tiny, tmp_path: Path) -> None:
    import polars as pl

    samples = make_samples(tmp_path / "s.parquet", [10, 12])
    table = pl.read_parquet(samples)
    pl.concat([table, table[:1].with_columns(id=pl.lit("copy"))]).write_parquet(samples)
    report = extract(tiny("llama"), samples, tmp_path / "store", tap_ids=[1], token_budget=99, max_batch=4)
    assert report.duplicates == 1 and report.samples_in == report.samples_stored == 2


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        write_part(tmp_path / "part-000000.safetensors", {"taps": torch.zeros(4, 4).t()[:2]})
    assert list(tmp_path.iterdir()) == []


def test_the_same_plan_twice_gives_the_same_bytes(tiny, tmp_path: Path) -> None:
    samples = make_samples(tmp_path / "s.parquet", LENGTHS)
    for name in ("one", "two"):
        extract(tiny("qwen3_5"), samples, tmp_path / name, store_final=True, **PLAN)
    sums = [[files.checksum(part) for part in parts(tmp_path / name)] for name in ("one", "two")]
    assert sums[0] == sums[1] and len(sums[0]) >= 4


def test_a_buffer_is_waited_for_only_while_one_can_come() -> None:
    from dflash_lab.extraction.writer import HostBuffers

    buffers, asked = HostBuffers(1, 8, pinned=False), []
    buffer = buffers.acquire(lambda: None)

    def writer_died() -> None:
        asked.append(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        buffers.acquire(writer_died)
    buffers.give_back(buffer)
    assert buffers.acquire(writer_died) is buffer and asked == [1]


@pytest.mark.parametrize(
    ("column", "change", "words"),
    [
        ("loss_mask", lambda values: values[:-1], "loss_mask has another length"),
        ("loss_mask", lambda values: [], "loss_mask has another length"),
        ("input_ids", lambda values: values * 2, "input_ids has another length"),
        ("input_ids", lambda values: [-1, *values[1:]], "token id -1"),
        ("input_ids", lambda values: [9999, *values[1:]], "token id 9999"),
    ],
)
def test_samples_that_contradict_themselves_are_refused_by_name(tiny, tmp_path, column, change, words):
    path = make_samples(tmp_path / "samples.parquet", [9, 12, 7])
    frame = pl.read_parquet(path)
    values = frame[column].to_list()
    values[1] = change(values[1])
    frame = frame.with_columns(pl.Series(column, values, dtype=frame.schema[column]))
    hashes = [content_hash(ids, mask) for ids, mask in frame.select("input_ids", "loss_mask").iter_rows()]
    frame.with_columns(content_hash=pl.Series(hashes)).write_parquet(path)
    with refused(InputError):
        extract(tiny("llama"), path, tmp_path / "store", tap_ids=[1], token_budget=64, max_batch=4)


def test_lengths_that_add_up_by_chance_do_not_shift_the_masks(tiny, tmp_path):
    path = make_samples(tmp_path / "samples.parquet", [9, 12, 7])
    frame = pl.read_parquet(path)
    masks = frame["loss_mask"].to_list()
    masks[0], masks[1] = [*masks[0], 1], masks[1][:-1]
    frame.with_columns(pl.Series("loss_mask", masks, dtype=frame.schema["loss_mask"])).write_parquet(path)
    with refused(InputError):
        extract(tiny("llama"), path, tmp_path / "store", tap_ids=[1], token_budget=64, max_batch=4)


@pytest.mark.parametrize("change", [[], {"tap_ids": None}, {"hidden": "x"}, {"has_final": 1}, {"target": 1}])
def test_a_store_file_of_nonsense_is_refused_by_name(tiny, tmp_path, change):
    store = tmp_path / "store"
    extract(tiny("llama"), make_samples(tmp_path / "s.parquet", [9, 12]), store, tap_ids=[1],
            token_budget=64, max_batch=4)  # fmt: skip
    identity = files.read_json(store / "store.json")
    files.write_json(store / "store.json", {**identity, **change} if change else [])
    with refused(StoreError):
        open_store(store)
