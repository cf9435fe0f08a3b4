"""A function over fixed tensors as one launch.

Decoding a small batch is bound by launching kernels, not by running them: a round of a 30-layer target and a
5-layer drafter is a thousand launches of a few microseconds each. A CUDA graph launches them all at once. On
other devices the function is called as it is, so that the same code is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], None]


def new_pool(device: torch.device) -> Any:
    """Return a memory pool that graphs replayed one after the other may share; None where there are none."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def captured(call: Call, device: torch.device, pool: Any) -> Call:
    """Return `call` as a CUDA graph on a CUDA device, itself elsewhere.

    `call` takes and returns nothing: it reads and writes tensors that outlive it, and never looks at one from
    the host. It runs three times here, on whatever these hold.
    """
    if device.type != "cuda":
        return call
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(2):  # libraries allocate their workspaces on first use, which a capture forbids
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        call()
    return graph.replay
