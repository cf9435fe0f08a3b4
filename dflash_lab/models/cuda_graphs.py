"""A function over fixed tensors as one launch: the one place that records CUDA graphs.

A small forward is bound by launching kernels, not by running them; a graph launches them all at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], None]


def new_pool(device: torch.device) -> Any:
    """Return a memory pool that graphs replayed one after the other may share; None where there are none."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def captured(
    call: Call, device: torch.device, *, pool: Any = None, generator: torch.Generator | None = None
) -> Call:
    """Return `call` as a CUDA graph on a CUDA device, itself elsewhere, so that it is tested without a GPU.

    `call` takes and returns nothing: it reads and writes tensors that outlive it, and never looks at one from
    the host. It runs three times here, on whatever these hold. generator: the one that `call` draws from.
    """
    if device.type != "cuda":
        return call
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # kernels choose tiles and allocate workspaces first, which a capture forbids
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if generator is not None:
            graph.register_generator_state(generator)
        # A prefetch thread may pin memory meanwhile, which a recording of all threads would not survive.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            call()
    return graph.replay
