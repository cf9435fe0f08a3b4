"""Crash explanations from real messages and a snapshot."""

import json

import pytest
import torch
from support.wording import check_wording, refused

from dflash_lab.errors import InputError
from dflash_lab.machine import read_processes
from dflash_lab.memory import crash as crashes
from dflash_lab.memory.crash import condensed, explain_crash, read_shapes, requested_bytes
from dflash_lab.memory.shapes import GIB, MIB

MESSAGE = (
    "CUDA out of memory. Tried to allocate 11.37 GiB. GPU 0 has a total capacity of 94.97 GiB of which 3.21 "
    "GiB is free. Process 4711 has 91.75 GiB memory in use. Of the allocated memory 76.12 GiB is allocated "
    "by PyTorch, and 14.60 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is "
    "large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
OTHERS = (
    "CUDA out of memory. Tried to allocate 80.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which "
    "38.69 GiB is free. Process 463 has 100.51 GiB memory in use. Including non-PyTorch memory, this "
    "process has 610.00 MiB memory in use. Of the allocated memory 0 bytes is allocated by PyTorch"
)
SIZES = {"anchors": 1024, "block": 24, "vocabulary": 248320, "hidden": 5120}


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        (MESSAGE, int(11.37 * GIB)),
        ("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 23.69 GiB total)", 20 * MIB),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.", 4096),
        ("CUDA error: out of memory", 0),
    ],
    ids=["GiB", "MiB", "bytes", "not said"],
)
def test_the_request_is_read_from_every_form(message, wanted):
    assert requested_bytes(message) == pytest.approx(wanted, rel=1e-6)


def test_other_processes_on_the_device_are_named():
    check_wording(explain_crash(OTHERS).explain())
    table = "463, /usr/bin/python3, 102918\n443, python3, 612\n17, [Not Found], [N/A]\n\n"
    named = "process 463 (python3) 100.51 GiB, process 17 ([Not Found])"
    assert read_processes(table, own=443) == named
    assert read_processes("", own=443) == read_processes("No devices were found\n", own=1) == ""


def test_the_tensor_is_named_and_a_setting_is_offered_where_fragments_are_seen():
    crash = explain_crash(MESSAGE, dimensions=SIZES)
    assert crash.shapes[0] == "[anchors 1,024 x block 24 x vocabulary 248,320] in bfloat16 or float16"
    whole = explain_crash(MESSAGE.replace("14.60 GiB is reserved", "120.00 MiB is reserved"))
    assert crash.fragmented and not whole.fragmented
    check_wording(crash.explain())  # not the process itself, 4711, seen from a container
    check_wording(whole.explain())


def test_shapes_prefer_few_factors_and_both_element_sizes():
    found = read_shapes(4 * 128 * 3316, {"batch": 128, "length": 3316})
    assert found == ["[batch 128 x length 3,316] in float32"]
    assert read_shapes(12345, {"batch": 128}) == []


def test_a_snapshot_says_who_held_the_memory(tmp_path):
    def block(size, state, filename, line):
        frames = [{"filename": "/x/torch/nn/functional.py", "line": 1, "name": "linear"}]
        frames.append({"filename": filename, "line": line, "name": "forward"})
        return {"size": size * GIB, "state": state, "frames": frames}

    blocks = [
        block(6, "active_allocated", "/p/models/modeling_qwen3_5.py", 700),
        block(5, "active_allocated", "/p/models/modeling_qwen3_5.py", 700),
        block(1, "active_allocated", "/p/drafter/model.py", 90),
        block(9, "inactive", "/p/drafter/model.py", 90),
    ]
    traces = [[{"action": "alloc", "size": 1}, {"action": "oom", "size": 3 * GIB}]]
    path = tmp_path / "snapshot.json"
    path.write_text(json.dumps({"segments": [{"blocks": blocks}], "device_traces": traces}))
    crash = explain_crash(snapshot=path)
    assert crash.requested == 3 * GIB
    assert [(h.size // GIB, h.blocks) for h in crash.holders] == [(11, 2), (1, 1)]
    check_wording(crash.explain())


def test_what_tells_nothing_is_refused(tmp_path):
    bad = tmp_path / "snapshot.pickle"
    bad.write_bytes(b"\x80\x04")
    for given in ({"message": "CUDA error: out of memory"}, {"snapshot": bad}):
        with refused(InputError):
            explain_crash(**given)
    if not torch.cuda.is_available():
        with refused(InputError), crashes.on_failure(print):
            pass


def test_without_frames_blocks_of_one_size_are_read_as_tensors():
    """A run that recorded no frames still says which tensors held the memory."""
    size = 1024 * 24 * 5120 * 2
    live = [{"size": size, "state": "active_allocated"} for _ in range(5)]
    data = {"segments": [{"blocks": live}], "refused": {"size": 2 * size, "total": 80 * GIB, "free": GIB}}
    crash = explain_crash(snapshot=data, dimensions={"anchors": 1024, "block_size": 24, "hidden": 5120})
    (holder,) = crash.holders
    assert (holder.size, holder.blocks, holder.known) == (5 * size, 5, False)
    check_wording(crash.explain())


def test_a_snapshot_is_kept_small_and_whole_in_its_sums():
    frames = [{"filename": f"/p/{n}.py", "line": n, "name": "forward"} for n in range(40)]
    blocks = [
        {"size": 512 * (1 + n % 900), "state": "active_allocated", "frames": frames} for n in range(60_000)
    ]
    live = sum(block["size"] for block in blocks)
    blocks += [{"size": GIB, "state": "inactive"}]
    other = {"device": 1, "blocks": [{"size": GIB, "state": "active_allocated"}]}
    kept = condensed(
        {"segments": [{"device": 0, "blocks": blocks}, other], "device_traces": [[{"action": "alloc"}] * 9]},
        {"device": 0, "size": 5, "total": 10, "free": 1},
    )
    assert len(json.dumps(kept)) < 1_500_000
    assert kept["live_bytes"] == live and kept["live_blocks"] == 60_000
    held = live - kept["bytes_left_out"]
    assert sum(block["size"] for block in kept["segments"][0]["blocks"]) == held
    crash = explain_crash(snapshot=kept)
    assert crash.requested == 5 and sum(holder.size for holder in crash.holders) == held


def test_what_goes_wrong_in_the_observer_does_not_hide_the_failure(monkeypatch, caplog):
    """torch raises what its observer raises in place of the lack of memory."""
    monkeypatch.setattr(crashes, "_attach", lambda: None)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": 7})
    found = []
    crashes.observe(0, 1, 2, 0)  # nobody listens
    with crashes.on_failure(found.append):
        crashes.observe(0, 1, 2, 0)
    assert not found and "no snapshot of the memory could be taken" in caplog.text


@pytest.mark.gpu
def test_a_refused_request_on_a_device_leaves_its_snapshot(tmp_path):
    from dflash_lab.memory.gate import explained

    held = torch.ones(1 << 26, device="cuda")
    path = tmp_path / "memory_snapshot.json"
    total = torch.cuda.get_device_properties(0).total_memory
    with (
        pytest.raises(torch.OutOfMemoryError) as caught,
        explained(None, {"elements": held.numel()}, device="cuda", snapshot=path),
    ):
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")
    assert json.loads(path.read_text())["refused"]["size"] >= 2 * total
    assert "[elements 67,108,864] in float32" in caught.value.advice
