"""The peak memory of a stage: resident memory of this process, and reserved memory of each GPU, in GiB."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def reset_peak() -> bool:
    """Start a new measurement.

    False when this system cannot reset its counter: then the peak is the process's own.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)
    try:
        _CLEAR.write_text("5")  # the kernel sets VmHWM back to the present resident size
    except OSError:
        return False
    return True


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
