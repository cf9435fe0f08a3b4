"""What this machine is: CPUs, memory and GPUs that this process may use, and the memory that it took."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from dflash_lab.errors import InputError

# --- What this process may use
#
# A container, a batch job or a caller may have left it less than the machine has. Linux says so in the
# affinity of the process, in the limits of its control groups (its own and every one above, version 1 and
# 2) and in `CUDA_VISIBLE_DEVICES`; elsewhere the machine's own counts hold.


GIB = 1 << 30
_ROOT = Path("/")


def usable_cpus(root: Path = _ROOT) -> int:
    """Threads that can run at once: processors of the affinity, or a group's quota rounded down; at least 1.

    `root` is where /proc and /sys are looked for.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    counts = [float(len(affinity(0)) if affinity else os.cpu_count() or 1)]
    for group in _groups("cpu", root):
        quota, period = _read(group, "cpu.cfs_quota_us"), _read(group, "cpu.cfs_period_us")
        both = _read(group, "cpu.max").split() or [quota, period]  # version 2 has one file
        if both[0].isdecimal():  # "max" and -1 are no limit
            counts.append(int(both[0]) / int(both[1]))
    return max(1, int(min(counts)))


def available_memory(root: Path = _ROOT) -> int:
    """Bytes that this process may still take: what the machine has available, or what a group's limit leaves.

    Of a group's use, file pages that were not touched lately do not count: they are given up first.
    """
    told = (line.split() for line in _read(root / "proc", "meminfo").splitlines())
    left = [int(line[1]) * 1024 for line in told if line[0] == "MemAvailable:"]
    left = left or [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for group in _groups("memory", root):
        for limit, used, idle in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            if (most := _read(group, limit)).isdecimal():
                stat = dict(line.split() for line in _read(group, "memory.stat").splitlines())
                left.append(int(most) - int(_read(group, used)) + int(stat.get(idle, 0)))
    return max(0, min(left))


def device_budget_gib(device: Any) -> float:
    """Return the GiB a run may take on `device` now: free memory plus what this process's allocator holds
    unused.

    On a CPU it is what the machine, or the container or job that this runs in, has left.
    """
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        unused = torch.cuda.memory_reserved(device) - allocated
        index = torch.cuda.current_device() if device.index is None else device.index
        fraction = torch.cuda.get_per_process_memory_fraction(index)
        return min(free + unused, int(total * fraction) - allocated) / GIB
    return available_memory() / GIB


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them for a child: numbers, or
    "GPU-..." and "MIG-..." as they were given.
    """
    import torch

    count = torch.cuda.device_count()
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return [str(index) for index in range(count)]
    names = [name.strip() for name in given.split(",") if name.strip()]
    # A process sees one MIG slice however many are named; its children may have one each.
    slices = [name for name in names if name.startswith("MIG-")]
    return slices if count and slices else names[:count]  # what follows a bad name is not seen


def gpus_apart(count: int) -> list[dict[str, str]]:
    """Environment of `count` processes that get a GPU of this process's each; empty ones where it has none.

    Raises `InputError` when it has fewer.
    """
    names = visible_gpus()
    if not names:
        return [{} for _ in range(count)]
    if count > len(names):
        raise InputError(
            f"{count} processes with a GPU each, but this one may use {len(names)} "
            f"(CUDA_VISIBLE_DEVICES={','.join(names)}). Ask for at most {len(names)}, or let it see more."
        )
    return [{"CUDA_VISIBLE_DEVICES": name} for name in names[:count]]


def others_on(device: Any) -> str:
    """Name the other processes that hold memory of a CUDA device, most first: "process 4242 (python3) 71.30
    GiB, ...". Empty where the driver tells of none: on a CPU, or in a container that hides them.
    """
    import torch

    device = torch.device(device)
    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        return ""
    index = torch.cuda.current_device() if device.index is None else device.index
    uuid = torch.cuda.get_device_properties(index).uuid  # torch may count devices otherwise than the driver
    asked = ["--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(
            ["nvidia-smi", "-i", f"GPU-{uuid}", *asked],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ""
    return read_processes(told.stdout, os.getpid()) if told.returncode == 0 else ""


def read_processes(table: str, own: int) -> str:
    """`others_on` from lines of ``pid, name, MiB``, `own` left out."""
    found = []
    for line in table.splitlines():
        pid, _, rest = line.partition(", ")
        name, _, size = rest.rpartition(", ")
        if pid.isdecimal() and int(pid) != own:
            found.append((int(size) if size.isdecimal() else 0, f"process {pid} ({name.rsplit('/', 1)[-1]})"))
    return ", ".join(
        f"{who} {size / 1024:.2f} GiB" if size else who for size, who in sorted(found, reverse=True)
    )


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of the control groups that bound this process, its own first, then those above."""
    own: dict[str, str] = {}  # path in its hierarchy by controller; version 2's has no name
    for line in _read(root / "proc/self", "cgroup").splitlines():
        _, names, path = line.split(":", 2)
        own |= dict.fromkeys(names.split(","), path)
    for line in _read(root / "proc/self", "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        name = "" if kind == "cgroup2" else controller
        if not (kind == "cgroup2" or (kind == "cgroup" and controller in options.split(","))):
            continue
        top, point = before.split()[3:5]
        group = PurePosixPath(own.get(name, "/"))
        # A container sees its own group as the top, and a path from outside that does not exist here.
        inside = group.relative_to(top) if group.is_relative_to(top) else PurePosixPath()
        folder = root / point.lstrip("/")
        levels = [inside, *inside.parents] if ".." not in inside.parts else [PurePosixPath()]
        yield from (folder / level for level in dict.fromkeys(levels))


def _read(folder: Path, name: str) -> str:
    """The text of a file of the kernel's, empty where it does not exist (another system, another version)."""
    path = folder / name
    return path.read_text().strip() if path.is_file() else ""


# --- The memory that a failed attempt or cell keeps alive
#
# After an exception IPython holds the traceback, the traceback holds the frames, and the frames hold GPU
# tensors: in `sys.last_*`, in `InteractiveTB.tb` and in `last_execution_result`. All three must go before
# the cache can be emptied. `forget_locals` frees the tensors at once and keeps the traceback readable;
# `release` drops the rest.


def forget_locals(error: BaseException) -> None:
    """Clear the local variables of every finished frame that `error`, its causes and its contexts hold."""
    seen: set[int] = set()
    queue: list[BaseException | None] = [error]
    while queue:
        current = queue.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        queue += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            queue += current.exceptions


def release() -> None:
    """Drop what the last error holds, collect garbage, and give cached GPU blocks back to the driver.

    Call it after the `except` block. Slow (tens of ms): once a failure, never once a batch.
    """
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            setattr(sys, name, None)
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if traceback_printer := getattr(shell, "InteractiveTB", None):  # IPython's front ends have one
        traceback_printer.tb = None
    if result := getattr(shell, "last_execution_result", None):
        result.error_in_exec = result.error_before_exec = None
    collect()


def collect() -> None:
    """Collect garbage and empty the CUDA cache, if torch is in use at all."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


# --- The peak memory of a stage


_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def reset_peak() -> None:
    """Start a new measurement. Where this system cannot reset its counter, the peak is the process's own."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")  # the kernel sets VmHWM back to the present resident size


def peak_memory() -> dict[str, float]:
    """Return ``rss_gib`` and, where CUDA is in use, ``gpu_gib``: reserved, the largest device."""
    found = {"rss_gib": round(_resident_bytes() / 2**30, 3)}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        peaks = [torch.cuda.max_memory_reserved(index) for index in range(torch.cuda.device_count())]
        found["gpu_gib"] = round(max(peaks) / 2**30, 3)
    return found


def _resident_bytes() -> int:
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
