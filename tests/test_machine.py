"""What the process may use of a machine: affinity, control groups of both versions, the GPUs it was left."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
import torch
from support.wording import refused

import dflash_lab
from dflash_lab.errors import InputError
from dflash_lab.machine import available_memory, device_budget_gib, gpus_apart, usable_cpus, visible_gpus

GIB = 2**30
V2 = "30 23 0:26 {top} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 {top} /sys/fs/cgroup/memory rw shared:1 - cgroup cgroup rw,memory\n"
)
OTHER = "22 1 8:1 / / rw,relatime - ext4 /dev/vda rw\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Write the kernel's files below a folder; 64 processors, 100 GiB available."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))

    def write(own: str, mounts: str, files: dict[str, object]) -> Path:
        texts = {
            "proc/meminfo": f"MemTotal: {200 * 2**20} kB\nMemAvailable:   {100 * 2**20} kB\n",
            "proc/self/cgroup": own,
            "proc/self/mountinfo": OTHER + mounts,
            **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
        }
        for name, text in texts.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return tmp_path

    return write


def version_2(folder: str, limit: object, used: int = 0, idle: int = 0, cpus: str = "max 100000"):
    at = f"{folder}/" if folder else ""
    stat = f"anon 1\ninactive_file {idle}\nactive_file 77"
    values = {"memory.max": limit, "memory.current": used, "memory.stat": stat, "cpu.max": cpus}
    return {at + name: value for name, value in values.items()}


def version_1(folder: str, limit: int, used: int = 0, idle: int = 0, quota: int = -1):
    at = f"{folder}/" if folder else ""
    return {
        f"memory/{at}memory.limit_in_bytes": limit,
        f"memory/{at}memory.usage_in_bytes": used,
        f"memory/{at}memory.stat": f"inactive_file 5\ntotal_inactive_file {idle}",
        f"cpu,cpuacct/{at}cpu.cfs_quota_us": quota,
        f"cpu,cpuacct/{at}cpu.cfs_period_us": 100000,
    }


def test_without_a_limit_the_machines_own_numbers_hold(machine):
    root = machine("0::/user\n", V2.format(top="/"), version_2("user", "max"))
    assert (usable_cpus(root), available_memory(root)) == (64, 100 * GIB)
    root = machine("4:memory:/\n3:cpu,cpuacct:/\n", V1.format(top="/"), version_1("", 9223372036854771712))
    assert (usable_cpus(root), available_memory(root)) == (64, 100 * GIB)


def test_a_group_of_version_2_and_those_above_it_bound_the_process(machine):
    own = version_2("job/step", 40 * GIB, used=10 * GIB, idle=3 * GIB, cpus="800000 100000")
    root = machine("0::/job/step\n", V2.format(top="/"), own | version_2("job", "max"))
    assert (usable_cpus(root), available_memory(root)) == (8, 33 * GIB)
    above = version_2("job", 20 * GIB, used=12 * GIB, cpus="350000 100000")
    root = machine("0::/job/step\n", V2.format(top="/"), own | above)
    assert (usable_cpus(root), available_memory(root)) == (3, 8 * GIB)


def test_a_group_of_version_1_and_those_above_it_bound_the_process(machine):
    own = "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n"
    inside = version_1("docker/abc", 6 * GIB, used=2 * GIB, idle=GIB, quota=150000)
    root = machine(own, V1.format(top="/"), inside | version_1("docker", 90 * GIB))
    assert (usable_cpus(root), available_memory(root)) == (1, 5 * GIB)
    above = version_1("docker", 3 * GIB, used=GIB, quota=50000)
    root = machine(own, V1.format(top="/"), version_1("docker/abc", 6 * GIB) | above)
    assert (usable_cpus(root), available_memory(root)) == (1, 2 * GIB)  # half a processor is still one


@pytest.mark.parametrize(
    "own, top",
    [("/", "/"), ("/docker/abc", "/docker/abc"), ("/docker/abc", "/"), ("/../other", "/")],
    ids=["own namespace", "mounted from its group", "path of the host", "outside of the namespace"],
)
@pytest.mark.parametrize("version", [1, 2])
def test_inside_a_container_the_mount_itself_is_the_group(machine, own, top, version):
    """Whatever /proc says of the path: the container sees its own group's files at the mount."""
    if version == 2:
        here = version_2("", 4 * GIB, used=GIB, cpus="200000 100000")
        root = machine(f"0::{own}\n", V2.format(top=top), here)
    else:
        here = version_1("", 4 * GIB, used=GIB, quota=200000)
        root = machine(f"4:memory:{own}\n3:cpu,cpuacct:{own}\n", V1.format(top=top), here)
    assert (usable_cpus(root), available_memory(root)) == (2, 3 * GIB)


def test_a_group_beyond_its_limit_leaves_nothing(machine):
    root = machine("0::/a\n", V2.format(top="/"), version_2("a", GIB, used=2 * GIB))
    assert available_memory(root) == 0


def test_the_affinity_counts_where_it_is_the_smaller(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 7})
    root = machine("0::/a\n", V2.format(top="/"), version_2("a", "max", cpus="800000 100000"))
    assert usable_cpus(root) == 2


def test_a_system_without_these_files_gives_its_own_counts(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cpus(tmp_path) == 6
    assert available_memory(tmp_path) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_the_budget_of_a_cpu_and_the_chunks_of_the_loss_are_what_a_container_leaves(monkeypatch):
    from dflash_lab import machine
    from dflash_lab.drafter import loss

    for module in (loss, machine):
        monkeypatch.setattr(module, "available_memory", lambda: 3 * GIB)
    assert device_budget_gib("cpu") == 3.0 and loss.free_bytes(torch.device("cpu")) == 3 * GIB


def test_no_other_place_asks_the_machine():
    words = ("cpu_count(", "sched_getaffinity", "MemAvailable", "_PHYS_PAGES", "AVPHYS", "virtual_memory(")
    home = Path(dflash_lab.__file__).parent
    places = [*home.rglob("*.py"), *(home.parent / "benchmarks").glob("*.py")]
    asking = {path.name for path in places if any(word in path.read_text() for word in words)}
    assert asking == {"machine.py"}
    setting = {
        path.name
        for path in places
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value == "CUDA_VISIBLE_DEVICES"
    }
    # the benchmark sets it for processes that get a GPU each, by these names
    assert setting == {"machine.py", "many_gpus.py"}


@pytest.mark.parametrize(
    "given, count, names",
    [
        (None, 3, ["0", "1", "2"]),
        ("2,5", 2, ["2", "5"]),
        (" 5 , 2 ", 2, ["5", "2"]),
        ("2,-1,5", 1, ["2"]),
        ("GPU-8932f937,GPU-11aa", 2, ["GPU-8932f937", "GPU-11aa"]),
        ("MIG-1234,MIG-5678", 1, ["MIG-1234", "MIG-5678"]),
        ("", 0, []),
        ("0,1", 0, []),
    ],
)
def test_gpus_are_named_as_the_caller_may_see_them(monkeypatch, given, count, names):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert visible_gpus() == names
    wanted = [{"CUDA_VISIBLE_DEVICES": name} for name in names] or [{}]
    assert gpus_apart(len(wanted)) == wanted
    if names:
        with refused(InputError):
            gpus_apart(len(names) + 1)
