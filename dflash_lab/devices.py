"""What a device has left for this process, and who else holds memory of it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

GIB = 1 << 30


def device_budget_gib(device: Any) -> float:
    """Return the GiB a run may take on `device` now: free memory plus what this process's allocator holds
    unused.

    On a CPU it is the memory available on the machine.
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
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 / GIB
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB


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
