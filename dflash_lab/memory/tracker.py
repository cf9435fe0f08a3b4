"""Count live tensor bytes, operation by operation, for real tensors and fake ones alike.

A dispatch mode sees every tensor an operation returns; a weak reference on its storage says when the bytes
are given back. What it cannot see is memory inside a kernel (cuBLAS, cuDNN, Triton scratch) and the
allocator's rounding: `allocator.py` adds the latter by replaying the trace kept here. Storages are counted
once, whatever views exist.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Block:
    """One storage: bytes, shape and dtype of the tensor that first showed it, the operation, a label."""

    size: int
    shape: tuple[int, ...]
    dtype: str
    operation: str
    label: str


class LiveTensors(TorchDispatchMode):
    """Count the bytes of tensors made while the mode is on; `peak` is the highest sum seen, in bytes.

    Tensors that exist already (weights, inputs) are counted once given to `add`. `scope` names what is made
    inside it; `relabel` names a tensor afterwards. `trace` holds ``(block number, +1 | -1)`` in order.
    """

    def __init__(self, *, device: str = "") -> None:
        """Count tensors on `device` only (``"cuda"``, ``"meta"``), or everywhere when it is empty."""
        super().__init__()
        self.device = device
        self.current = 0
        self.peak = 0
        self.blocks: list[Block] = []
        self.trace: list[tuple[int, int]] = []
        self.peak_event = 0
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._labels: list[str] = ["activations"]
        self._renamed: dict[int, str] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self._visit(result, str(function))
        return result

    def add(self, tensors: Iterable[torch.Tensor], label: str) -> None:
        """Count tensors that existed before."""
        for tensor in tensors:
            self._see(tensor, "given", label)

    def relabel(self, tensor: torch.Tensor, label: str) -> None:
        """Name the storage of a tensor that was counted already."""
        alive = self._alive.get(tensor.untyped_storage()._cdata)
        if alive is not None:
            self.rename(alive[0], label)

    def rename(self, number: int, label: str) -> None:
        """Name block `number`."""
        self._renamed[number] = label

    @contextlib.contextmanager
    def scope(self, label: str) -> Iterator[None]:
        """Label what is made inside the block."""
        self._labels.append(label)
        try:
            yield
        finally:
            self._labels.pop()

    def label(self, number: int) -> str:
        """Return the label of block `number`."""
        return self._renamed.get(number, self.blocks[number].label)

    def start_peak_here(self) -> None:
        """Forget the peak so far: the next one is looked for from now on."""
        self.peak, self.peak_event = self.current, len(self.trace)

    def live_at_peak(self) -> list[int]:
        """Return the numbers of the blocks that were live at the peak."""
        live: set[int] = set()
        for number, sign in self.trace[: self.peak_event]:
            if sign > 0:
                live.add(number)
            else:
                live.discard(number)
        return sorted(live)

    def by_label(self) -> dict[str, int]:
        """Return bytes by label at the peak."""
        sums: dict[str, int] = {}
        for number in self.live_at_peak():
            label = self.label(number)
            sums[label] = sums.get(label, 0) + self.blocks[number].size
        return sums

    def _visit(self, value: Any, operation: str) -> None:
        if isinstance(value, torch.Tensor):
            self._see(value, operation, self._labels[-1])
        elif isinstance(value, (tuple, list)):
            for item in value:
                self._visit(item, operation)

    def _see(self, tensor: torch.Tensor, operation: str, label: str) -> None:
        if self.device and tensor.device.type != self.device:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        size = storage.nbytes()
        if not size:
            return
        number = len(self.blocks)
        self.blocks.append(
            Block(size, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), operation, label)
        )
        self._alive[key] = (number, weakref.ref(storage, partial(self._gone, key, number)))
        self.trace.append((number, 1))
        self.current += size
        if self.current > self.peak:
            self.peak, self.peak_event = self.current, len(self.trace)

    def _gone(self, key: int, number: int, _reference: Any) -> None:
        self.current -= self.blocks[number].size
        self.trace.append((number, -1))
        alive = self._alive.get(key)
        if alive is not None and alive[0] == number:
            del self._alive[key]


@contextlib.contextmanager
def module_scopes(tracker: LiveTensors, names: dict[torch.nn.Module, str]) -> Iterator[None]:
    """Label what each of the modules in `names` makes in its forward, until the block ends."""
    handles = []

    def enter(label: str, *_: Any) -> None:
        tracker._labels.append(label)

    def leave(*_: Any) -> None:
        tracker._labels.pop()

    try:
        for module, label in names.items():
            handles.append(module.register_forward_pre_hook(partial(enter, label)))
            handles.append(module.register_forward_hook(leave, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
