"""Sealed parts, manifests and their verification."""

from __future__ import annotations

import json
import pickle

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file
from support.wording import refused

from dflash_lab import files
from dflash_lab.data.samples import content_hash
from dflash_lab.errors import InputError, StoreError
from dflash_lab.extraction import manifest
from dflash_lab.extraction.checks import discard, verify
from dflash_lab.extraction.store import write_part
from dflash_lab.extraction.writer import HostBuffers

ALL = 10  # samples of `made`


def times(paths) -> dict:
    return {path: path.stat().st_mtime_ns for path in paths}


def flip(path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_a_part_is_a_plain_safetensors_file_of_flat_tensors_and_the_manifest_tells_what_made_it(made) -> None:
    path = made.parts()[0]
    tensors = load_file(path)
    tokens, samples = int(tensors["offsets"][-1]), len(tensors["offsets"]) - 1
    assert {name: (tuple(one.shape), one.dtype) for name, one in tensors.items()} == {
        "taps": ((tokens, 3 * 48), torch.bfloat16),
        "input_ids": ((tokens,), torch.int32),
        "loss_mask": ((tokens,), torch.uint8),
        "offsets": ((samples + 1,), torch.int64),
        "hashes": ((samples, 16), torch.uint8),
        "heldout": ((samples,), torch.uint8),
    }
    (run,), part, (end,) = made.lines("run"), made.lines("part")[0], made.lines("end")
    assert {"versions", "commit", "plan", "device"} <= set(run)
    assert run["versions"]["torch"] in (torch.__version__, torch.__version__.split("+")[0])
    assert part["bytes"] == path.stat().st_size and part["checksum"] == files.checksum(path)
    assert end["samples_in"] == end["samples_stored"] == ALL
    identity = made.opened().manifest
    assert identity["tap_ids"] == [1, 3, 5] and identity["tap_ids_plus_one"] == [2, 4, 6]
    assert identity["target"]["weights"] and identity["compute_dtype"] == "float32"


def test_a_finished_shard_does_nothing_again(made) -> None:
    before = times(made.parts())
    report = made.run()
    assert report.samples_stored == 0 and report.stored_before == ALL
    assert before == times(made.parts())


@pytest.mark.parametrize("place", ["header", "taps", "end"])
def test_a_flipped_byte_is_found_and_exactly_its_part_redone(place: str, made) -> None:
    victim = made.parts()[1]
    lost, size = len(load_file(victim)["hashes"]), victim.stat().st_size
    flip(victim, {"header": 12, "taps": size // 2, "end": size - 1}[place])
    (fault,) = verify(made.store)
    assert fault.file.endswith(victim.name) and "checksum" in fault.what
    if place == "end":
        assert discard(made.store, [fault]) == 1 and not victim.exists() and verify(made.store) == []
    assert made.run(recheck=place != "end").samples_stored == lost
    assert verify(made.store) == [] and len(made.opened()) == ALL


@pytest.mark.parametrize("damage", ["missing", "truncated", "empty", "longer"])
def test_a_damaged_part_is_found_named_and_redone_under_another_name(damage: str, made) -> None:
    before, victim = set(made.parts()), made.parts()[2]
    lost, data = len(load_file(victim)["hashes"]), victim.read_bytes()
    if damage == "missing":
        victim.unlink()
    else:
        victim.write_bytes({"truncated": data[:-7], "empty": b"", "longer": data + b"x"}[damage])
    (fault,) = verify(made.store)
    assert victim.name in fault.file and fault.part
    with refused(StoreError):
        made.opened()
    report = made.run()
    assert report.samples_stored == lost and report.stored_before == ALL - lost
    assert not victim.exists() and set(made.parts()) - before
    assert verify(made.store) == [] and len(made.opened()) == ALL


def test_a_torn_last_line_is_ignored_and_cut_off(made) -> None:
    whole = made.manifest.read_bytes()
    made.manifest.write_bytes(whole + b'{"kind": "part", "file": "part-0000')
    assert len(made.opened()) == ALL and verify(made.store) == []
    made.run()
    assert made.manifest.read_bytes().startswith(whole)
    for line in made.manifest.read_text().splitlines():
        json.loads(line)


def test_a_part_without_its_line_is_a_stray_and_goes(made) -> None:
    stray = made.shard / "part-000099.safetensors"
    stray.write_bytes(made.parts()[0].read_bytes())
    (fault,) = verify(made.store)
    assert stray.name in fault.file and not fault.part
    assert len(made.opened()) == ALL
    made.run()
    assert not stray.exists()


PART = {
    "kind": "part",
    "file": "part-000007.safetensors",
    "bytes": 1,
    "checksum": "",
    "samples": 1,
    "tokens": 1,
}
BROKEN = {
    "a list": b"[1]",
    "no kind": b'{"no": "kind"}',
    "no JSON": b"nonsense",
    "torn": b'{"kind": "par',
    "empty": b"",
    "no text": b"\xff\xfe\x00",
    "nested": b"[" * 100_000,
    "a path": json.dumps({**PART, "file": "../../../etc/passwd"}).encode(),
    "a short name": json.dumps({**PART, "file": "part-1"}).encode(),
    "no file": json.dumps({**PART, "file": 3}).encode(),
    "no size": json.dumps({**PART, "bytes": "many"}).encode(),
    "no count": json.dumps({**PART, "samples": None}).encode(),
    "no discard": json.dumps({"kind": "discard", "file": None}).encode(),
}


@pytest.mark.parametrize("line", BROKEN.values(), ids=BROKEN)
def test_a_manifest_line_that_cannot_be_trusted_is_refused_by_number(line: bytes, tmp_path) -> None:
    (tmp_path / "manifest.jsonl").write_bytes(b'{"kind": "end"}\n' + line + b"\n")
    with refused(StoreError):
        manifest.read_lines(tmp_path)


@pytest.mark.parametrize(
    ("kind", "broken"), [("run", "no text"), ("selftest", "nested"), ("part", "torn"), ("end", "empty")]
)
def test_one_broken_line_costs_what_it_named_and_is_told_in_a_line(kind, broken, made, caplog) -> None:
    broken = BROKEN[broken]
    lines, others = made.manifest.read_bytes().splitlines(), times(made.parts())
    number = next(n for n, line in enumerate(lines) if json.loads(line)["kind"] == kind)
    lost = json.loads(lines[number])["samples"] if kind == "part" else 0
    made.manifest.write_bytes(b"\n".join([*lines[:number], broken, *lines[number + 1 :], b'{"torn']))
    with refused(StoreError):
        made.opened()
    (told,) = [fault for fault in verify(made.store) if not fault.file.endswith("safetensors")]
    assert f":{number + 1}: not a manifest line" in told.what and not told.part
    assert made.run().samples_stored == lost
    assert len([text for text in caplog.messages if f"jsonl:{number + 1}: not a manifest line" in text]) == 1
    kept = [one for one, time in others.items() if one.exists() and one.stat().st_mtime_ns == time]
    assert len(kept) == len(others) - (kind == "part")
    (mended,) = made.lines("mend")
    assert mended["line"] == number + 1 and mended["text"] == broken[:400].decode("utf-8", "replace")
    names = [line["file"] for line in made.lines("part")]
    assert len(set(names)) == len(names)
    assert verify(made.store) == [] and len(made.opened()) == ALL


def test_damage_of_another_shard_or_count_stops_nobody_and_is_redone(made, tmp_path, caplog) -> None:
    made.store = tmp_path / "two"
    for shard in (0, 1):
        made.run(shard=shard, num_shards=2)
    path = made.store / "shard-00000-of-00002" / "manifest.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    number = next(n for n, line in enumerate(lines) if b'"part"' in line)
    lost = json.loads(lines[number])["samples"]
    path.write_bytes(b"".join([*lines[:number], b"nonsense\n", *lines[number + 1 :]]))
    assert made.run(shard=1, num_shards=2).samples_stored == 0
    assert f"manifest.jsonl:{number + 1}: not a manifest line" in caplog.text
    victim = made.parts()[-1]
    lost += len(load_file(victim)["hashes"])
    victim.write_bytes(b"")
    assert made.run().samples_stored == lost  # another count
    assert verify(made.store) == [] and len(made.opened()) == ALL


def test_a_lost_store_file_is_written_again_for_the_same_setup_only(made) -> None:
    path = made.store / "store.json"
    before = path.read_bytes()
    path.unlink()
    with refused(StoreError):
        made.run(tap_ids=[2])
    assert not path.exists()
    assert made.run().samples_stored == 0 and path.read_bytes() == before
    lines = [json.loads(line) for line in made.manifest.read_text().splitlines()]
    old = [{name: value for name, value in line.items() if name != "store"} for line in lines]
    made.manifest.write_text("".join(json.dumps(line) + "\n" for line in old))  # as earlier versions wrote it
    path.unlink()
    with refused(StoreError):
        made.run()


@pytest.mark.parametrize(
    "change",
    [None, "lost", {"schema": 99}, {"tap_ids": None}, {"hidden": "x"}, {"has_final": 1}, {"target": 1}],
    ids=str,
)
def test_a_store_file_that_says_no_store_is_refused_by_name(change, made) -> None:
    path = made.store / "store.json"
    files.write_json(path, {**files.read_json(path), **change} if isinstance(change, dict) else [])
    if change == "lost":
        path.unlink()
    with refused(InputError if change == "lost" else StoreError):
        made.opened()


@pytest.mark.parametrize("changes", [{}, {"shard": 0, "num_shards": 3}], ids=["same count", "another"])
def test_a_shard_being_written_is_told_with_who_has_it(changes, made) -> None:
    with manifest.shard_lock(made.shard), refused(InputError):
        made.run(**changes)


def test_shards_divide_the_samples_and_their_cost(job) -> None:
    lengths = np.random.default_rng(0).lognormal(3.5, 0.7, 120).clip(2, 200).astype(int).tolist()
    made = job("llama", lengths, tap_ids=[1], token_budget=800, max_batch=16, num_shards=3)
    tokens = [made.run(shard=shard).tokens_stored for shard in range(3)]
    assert sum(tokens) == sum(lengths)
    assert max(tokens) <= 1.02 * min(tokens)
    assert len(made.opened()) == len(lengths)


@pytest.mark.parametrize(("shard", "count"), [(2, 2), (-1, 2), (0, 0)])
def test_a_shard_outside_the_count_is_refused(shard: int, count: int) -> None:
    with refused(InputError):
        manifest.shard_name(shard, count)


def test_a_store_travels_to_worker_processes(made) -> None:
    store = made.opened()
    first = store[0]
    again = pickle.loads(pickle.dumps(store))[0]
    assert torch.equal(first.taps, again.taps) and first.hash == again.hash
    assert torch.equal(store[-1].taps, store[len(store) - 1].taps)
    with pytest.raises(IndexError):
        store[len(store)]
    with pytest.raises(KeyError):
        store.find("00" * 16)


def test_duplicate_rows_are_stored_once_and_counted(job) -> None:
    made = job("llama", [10, 12])
    table = pl.read_parquet(made.samples)
    pl.concat([table, table[:1].with_columns(id=pl.lit("copy"))]).write_parquet(made.samples)
    report = made.run()
    assert report.duplicates == 1 and report.samples_in == report.samples_stored == 2


def test_a_failed_write_leaves_nothing(tmp_path) -> None:
    with refused(ValueError):
        write_part(tmp_path / "part-000000.safetensors", {"taps": torch.zeros(4, 4).t()[:2]})
    assert list(tmp_path.iterdir()) == []


def test_the_same_plan_twice_gives_the_same_bytes(made, tmp_path) -> None:
    made.run(store=tmp_path / "again")
    again = sorted((tmp_path / "again").rglob("part-*.safetensors"))
    assert [files.checksum(part) for part in made.parts()] == [files.checksum(part) for part in again]


def test_a_buffer_is_waited_for_only_while_one_can_come() -> None:
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
    ("column", "change"),
    [
        ("loss_mask", lambda rows: [rows[0], rows[1][:-1], rows[2]]),
        ("loss_mask", lambda rows: [rows[0], [], rows[2]]),
        ("input_ids", lambda rows: [rows[0], rows[1] * 2, rows[2]]),
        ("input_ids", lambda rows: [rows[0], [-1, *rows[1][1:]], rows[2]]),
        ("input_ids", lambda rows: [rows[0], [9999, *rows[1][1:]], rows[2]]),
        ("loss_mask", lambda rows: [[*rows[0], 1], rows[1][:-1], rows[2]]),
    ],
    ids=["mask short", "no mask", "ids twice", "negative", "too large", "lengths that add up by chance"],
)
def test_samples_that_contradict_themselves_are_refused_by_name(column, change, job) -> None:
    made = job("llama", [9, 12, 7])
    frame = pl.read_parquet(made.samples)
    frame = frame.with_columns(pl.Series(column, change(frame[column].to_list()), dtype=frame.schema[column]))
    hashes = [content_hash(ids, mask) for ids, mask in frame.select("input_ids", "loss_mask").iter_rows()]
    frame.with_columns(content_hash=pl.Series(hashes)).write_parquet(made.samples)
    with refused(InputError):
        made.run()
