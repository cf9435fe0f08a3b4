"""One batch through the target: pad right, no mask, catch the taps, drop the padding, one copy to the host.

Right padding without a mask is exact for causal attention and for recurrent layers: a position sees only what
stands before it. The rows of all taps are gathered into one buffer on the device, which leaves in one copy on
a stream of its own while the next forward runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dflash_lab.extraction.health import check_rows
from dflash_lab.extraction.layout import FLAGS, Layout
from dflash_lab.extraction.writer import HostBatch, HostBuffers
from dflash_lab.models.hooks import Taps
from dflash_lab.models.load import Target


@dataclass(frozen=True)
class Padded:
    """A batch on the device. `valid` [T] are the flat positions of real tokens, `owner` [T] the row each
    belongs to.
    """

    input_ids: Tensor  # [B, L] int64, zeros after each sample
    valid: Tensor
    owner: Tensor


def pad(ids: list[np.ndarray], device: torch.device) -> Padded:
    """Pad samples on the right with token 0 and say where their tokens are."""
    lengths = np.asarray([len(row) for row in ids])
    batch = np.zeros((len(ids), int(lengths.max())), np.int64)
    for number, row in enumerate(ids):
        batch[number, : len(row)] = row
    owner = np.repeat(np.arange(len(ids)), lengths)
    valid = np.flatnonzero(np.arange(batch.shape[1])[None, :] < lengths[:, None])
    return Padded(*(_to(array, device) for array in (batch, valid, owner)))


def _to(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@contextlib.contextmanager
def without_final_norm(target: Target) -> Iterator[None]:
    """Let the target's body end after its last layer; the norm returns to its place whatever happens."""
    name = next(name for name, module in target.body.named_modules() if module is target.final_norm)
    norm = target.final_norm
    target.body.set_submodule(name, nn.Identity())
    try:
        yield
    finally:
        target.body.set_submodule(name, norm)


class Capture:
    """Runs batches through a target and hands over `HostBatch`es. Enter it; leaving removes every hook."""

    def __init__(self, target: Target, layout: Layout, buffers: HostBuffers) -> None:
        self._target, self._layout, self._buffers = target, layout, buffers
        last = target.num_layers - 1
        self._ids = sorted({*layout.tap_ids, *([last] if layout.has_final else [])})
        wanted = [*layout.tap_ids, *([last] if layout.has_final else [])]
        self._order = [self._ids.index(layer) for layer in wanted]  # caught state of each stored one
        self._taps = Taps(target.layers, self._ids)
        self._stack = contextlib.ExitStack()
        self._cuda = target.device.type == "cuda"
        self._stream = torch.cuda.Stream(target.device) if self._cuda else None
        # Begin and end of each forward, CUDA only.
        self.spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> Capture:
        self._stack.enter_context(without_final_norm(self._target))
        self._stack.enter_context(self._taps)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @torch.inference_mode()
    def states(self, padded: Padded) -> list[Tensor]:
        """Return the stored states of a batch on the device, [B, L, H] each: the taps in order, then the
        final one.
        """
        try:
            self._target.body(input_ids=padded.input_ids, use_cache=False)
            caught = self._taps.take()
        finally:
            self._taps.clear()
        return [caught[at] for at in self._order]

    def forget(self) -> None:
        """Drop what a forward outside `states` left in the hooks."""
        self._taps.clear()

    @torch.inference_mode()
    def run(
        self,
        rows: np.ndarray,
        ids: list[np.ndarray],
        masks: list[np.ndarray],
        still_working: Callable[[], None],
        examine: Callable[[list[Tensor]], None],
    ) -> HostBatch:
        """Forward one batch, let `examine` look at its states [B, L, H], and start its copy. Any error leaves
        no hook's catch and no buffer behind.
        """
        began = self._mark()
        padded = pad(ids, self._target.device)
        states = self.states(padded)
        examine(states)
        tokens, samples = len(padded.valid), len(ids)
        size = self._layout.buffer_bytes(tokens, samples)
        packed = torch.empty(size, dtype=torch.uint8, device=self._target.device) if self._cuda else None
        if packed is not None:
            self._pack(states, padded, packed, tokens, samples)
            states.clear()
        self.spans += [(began, ended)] if began is not None and (ended := self._mark()) is not None else []
        host = self._buffers.acquire(still_working)
        try:
            if packed is None:
                self._pack(states, padded, host, tokens, samples)
            return HostBatch(
                host, rows, ids, masks, self._copy(packed, host[:size]) if packed is not None else None
            )
        except BaseException:
            self._buffers.give_back(host)
            raise

    def _pack(self, states: list[Tensor], padded: Padded, buffer: Tensor, tokens: int, samples: int) -> None:
        """Gather the valid rows of every state into its columns of `buffer`, with the samples'
        health flags.
        """
        views = self._layout.views(buffer, tokens, samples)
        for index, state in enumerate(states):
            valid = state.flatten(0, 1).index_select(0, padded.valid)  # [T, H]
            self._layout.write_state(views, index, valid)
            # As stored: a sum that float32 holds may be infinite in bf16.
            stored = self._layout.read_state(views, index)
            views[FLAGS][:, index] = check_rows(stored, padded.owner, samples)

    def _copy(self, packed: Tensor, host: Tensor) -> torch.cuda.Event:
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._target.device))
        with torch.cuda.stream(self._stream):
            host.copy_(packed, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        packed.record_stream(self._stream)  # its memory is not reused before the copy has read it
        return event

    def _mark(self) -> torch.cuda.Event | None:
        if not self._cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def busy(spans: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> tuple[float, float]:
    """Return the seconds from the first forward's begin to the last one's end, and the percent of
    it without a forward.
    """
    if not spans:
        return 0.0, 0.0
    torch.cuda.synchronize()
    total = spans[0][0].elapsed_time(spans[-1][1])
    return total / 1e3, 100 * (1 - sum(begin.elapsed_time(end) for begin, end in spans) / total)
