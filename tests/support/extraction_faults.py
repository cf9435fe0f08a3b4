"""Errors as the libraries word them, and hooks that raise them inside a target's forward."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dflash_lab.models.load import Target

MEMORY_ERRORS = {
    "cuda": "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 94.97 GiB "
    "of which",
    "outside the allocator": "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "cublas alloc": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cublas not initialized": "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "driver": "CUDA driver error: out of memory",
    "cudnn": "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cudnn 9": "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "flash grid": "CUDA error: invalid argument\nSearch for `cudaErrorInvalidValue' in https://docs.nvidia.com",
    "cuda grid": "CUDA error: invalid configuration argument\nSearch for `cudaErrorInvalidConfiguration' in",
    "triton": "Triton Error [CUDA]: out of memory",
    "triton grid": "Triton Error [CUDA]: invalid argument",
    "cpu allocator": "[enforce fail at alloc_cpu.cpp:115] err == 0. DefaultCPUAllocator: can't "
    "allocate memory: "
    "you tried to allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)",
    "python": "",
    "mps": "MPS backend out of memory (MPS allocated: 17.00 GB, other allocations: 1.00 GB)",
    "nccl": "NCCL error in: ProcessGroupNCCL.cpp:77, unhandled cuda error\nLast error:\nCuda failure "
    "2 'out of memory'",
    "wrapped": "layer 7 failed",
}


def memory_error(name: str) -> BaseException:
    """Return an error of one form; `wrapped` has the real one as its cause."""
    text = MEMORY_ERRORS[name]
    if name == "cuda":
        return torch.OutOfMemoryError(text)
    if name == "python":
        return MemoryError()
    error = RuntimeError(text)
    if name == "wrapped":
        error.__cause__ = torch.OutOfMemoryError(MEMORY_ERRORS["cuda"])
    return error


class Saboteur:
    """Raises in the forward of one layer whenever `decide(input_ids)` gives an error; counts what it raised.

    `decide` sees the ids of the batch, so that it can pick on one sample.
    """

    def __init__(
        self, target: Target, decide: Callable[[torch.Tensor], BaseException | None], layer: int = 3
    ) -> None:
        self.raised = 0
        self._decide, self._ids = decide, torch.empty(0)
        self._handles = [
            target.body.register_forward_pre_hook(self._see, with_kwargs=True),
            target.layers[layer].register_forward_pre_hook(self._act),
        ]

    def _see(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        self._ids = kwargs["input_ids"]

    def _act(self, module: torch.nn.Module, args: tuple) -> None:
        error = self._decide(self._ids)
        if error is not None:
            self.raised += 1
            raise error

    def __enter__(self) -> Saboteur:
        return self

    def __exit__(self, *_error: object) -> None:
        for handle in self._handles:
            handle.remove()
