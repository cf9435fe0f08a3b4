"""Rows on their way to the device: read, packed, pinned and copied by a thread, on a stream of its own.

The copy of a row of a 27B target (half a gigabyte) takes as long as a hundredth of its step; on the step's
own stream the device would stand still for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dflash_lab.drafter.rows import Row


@dataclass(frozen=True)
class Fed:
    """A row at its place in the data: on the host, and on the device once `copied` (an event) has passed."""

    epoch: int
    index: int
    host: Row
    row: Row
    copied: Any = None

    def arrived(self) -> Row:
        """The device's row, safe to use on the current stream."""
        if self.copied is not None:
            stream = torch.cuda.current_stream(self.row.taps.device)
            stream.wait_event(self.copied)
            for tensor in self.row.tensors():
                if tensor.is_cuda:
                    tensor.record_stream(stream)
        return self.row


def feed(rows: Iterable[tuple[int, int, Row]], device: torch.device) -> Iterator[Fed]:
    """Send rows to `device`; to be run in a thread (`rows.prefetch`)."""
    if device.type != "cuda":
        yield from (Fed(epoch, index, row, row.to(device)) for epoch, index, row in rows)
        return
    torch.cuda.set_device(device)  # each thread has its own
    stream = torch.cuda.Stream(device)
    for epoch, index, row in rows:
        host = row.pinned()
        with torch.cuda.stream(stream):
            sent = host.to(device)
            copied = torch.cuda.Event()
            copied.record(stream)
        yield Fed(epoch, index, host, sent, copied)
