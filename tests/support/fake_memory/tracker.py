"""Live tensors by what they are, operation by operation, for real tensors and fake ones alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dflash_lab.memory.measure import LiveTensors


@dataclass(frozen=True)
class Block:
    """One storage: bytes, shape and dtype of the tensor that first showed it, a label."""

    size: int
    shape: tuple[int, ...]
    dtype: str
    label: str


class LabelledTensors(LiveTensors):
    """Live tensors with what each is: made inside a `scope`, or named by `relabel` afterwards.

    `trace` holds ``(block number, +1 | -1)`` in order, so that an allocator can be replayed.
    """

    def __init__(self, *, device: str = "") -> None:
        """Count tensors on `device` only (``"cuda"``, ``"meta"``), or everywhere when it is empty."""
        super().__init__()
        self.device = device
        self.blocks: list[Block] = []
        self.trace: list[tuple[int, int]] = []
        self.peak_event = 0
        self._numbers: dict[int, int] = {}
        self._labels: list[str] = ["activations"]
        self._renamed: dict[int, str] = {}

    def add(self, tensors: Iterable[torch.Tensor], label: str = "activations") -> None:
        """Count tensors that existed before."""
        with self.scope(label):
            super().add(tensor for tensor in tensors if self.device in ("", tensor.device.type))

    def made(self, key: int, tensor: torch.Tensor, size: int) -> None:
        """Count a storage, unless it is on another device."""
        if self.device not in ("", tensor.device.type):
            return
        number = self._numbers[key] = len(self.blocks)
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.blocks.append(Block(size, tuple(tensor.shape), dtype, self._labels[-1]))
        self.trace.append((number, 1))
        before = self.peak
        super().made(key, tensor, size)
        if self.peak > before:
            self.peak_event = len(self.trace)

    def gone(self, key: int, size: int) -> None:
        """Count a storage that was given back."""
        if key in self._numbers:
            super().gone(key, size)
            self.trace.append((self._numbers.pop(key), -1))

    def relabel(self, tensor: torch.Tensor, label: str) -> None:
        """Name the storage of a tensor that was counted already."""
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        if number is not None:
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
        block = self.blocks[number]
        mask = block.dtype == "bool" and len(block.shape) == 4
        return "mask" if mask else self._renamed.get(number, block.label)

    def start_peak_here(self) -> None:
        """Forget the peak so far: the next one is looked for from now on."""
        super().start_peak_here()
        self.peak_event = len(self.trace)

    def by_label(self) -> dict[str, int]:
        """Return bytes by label at the peak."""
        live: dict[int, bool] = {}
        for number, sign in self.trace[: self.peak_event]:
            live[number] = sign > 0
        sums: dict[str, int] = {}
        for number in (number for number, there in live.items() if there):
            sums[self.label(number)] = sums.get(self.label(number), 0) + self.blocks[number].size
        return sums

    def moment(self) -> str:
        """Name what was made last before the peak."""
        return self.label(self.trace[self.peak_event - 1][0])


@contextlib.contextmanager
def module_scopes(tracker: LabelledTensors, names: dict[torch.nn.Module, str]) -> Iterator[None]:
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
