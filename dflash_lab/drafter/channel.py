"""From one target process to one drafter process: a few slots for row states, and words about them.

The drafter's side makes the slots, on its own device, and the target's side writes right into them (CUDA IPC:
over NVLink between two GPUs; shared memory on CPUs). Memory is shared once, at the start, and belongs to the
one who outlives the other. The words (a slot is full, a slot is free) go through a pipe, each after the copy
it speaks of has ended, so neither side ever reads what the other still writes; with all slots full the target
waits: that is the back-pressure.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from dflash_lab.drafter.crew import PeerGone, receive, send

GOODBYE_S = 10.0  # for the target to let go of the slots


@dataclass(frozen=True)
class Place:
    """Row `turn` of this run: row `index` of `epoch`."""

    turn: int
    epoch: int
    index: int


@dataclass(frozen=True)
class Asked:
    """What a drafter wants before it begins: a held-out row or a sample (`kind` heldout | item)."""

    kind: str
    number: int


@dataclass(frozen=True)
class Begin:
    """Where the drafter's run starts."""

    epoch: int
    index: int


class Taker:
    """The drafter's end."""

    def __init__(
        self,
        connection: Connection,
        peer: str,
        *,
        slots: int,
        row_tokens: int,
        tap_width: int,
        hidden: int,
        device: torch.device,
    ) -> None:
        self._connection, self.peer = connection, peer
        shape: dict[str, Any] = dict(dtype=torch.bfloat16, device=device)
        self.taps = torch.zeros(slots, row_tokens, tap_width, **shape)  # [slots, S, K*H]
        self.final = torch.zeros(slots, row_tokens, hidden, **shape)
        if device.type == "cpu":
            self.taps.share_memory_()
            self.final.share_memory_()
        else:
            torch.cuda.synchronize(device)
        self._full: deque[tuple[Any, int, int]] = deque()  # what for, slot, tokens
        self._reading: list[tuple[int, Any]] = []  # slots being copied from, with the copy's event
        send(connection, peer, ("slots", self.taps, self.final))

    def waiting(self) -> int:
        """Rows that lie ready."""
        while self._connection.poll(0):
            self._full.append(receive(self._connection, self.peer))
        return len(self._full)

    def ask(self, wanted: Asked) -> tuple[Tensor, Tensor]:
        """States of a held-out row or a sample."""
        send(self._connection, self.peer, wanted)
        return self.read(*self.full(wanted))

    def begin(self, start: Begin) -> None:
        """Let the target run ahead from `start`."""
        self.release()
        send(self._connection, self.peer, start)

    def full(self, wanted: Asked | Place) -> tuple[int, int]:
        """Wait until a slot holds the states of `wanted`: (slot, tokens)."""
        self.release()
        if not self._full:
            self._full.append(receive(self._connection, self.peer))
        given, slot, tokens = self._full.popleft()
        if given != wanted:
            raise RuntimeError(f"{self.peer} gave {given}, not {wanted}: the two count rows differently")
        return slot, tokens

    def read(self, slot: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Own copies of a slot's taps [S, K*H] and final [S, H]; the slot is free once they have ended."""
        taps, final = self.taps[slot, :tokens].clone(), self.final[slot, :tokens].clone()
        event = None
        if taps.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self._reading.append((slot, event))
        return taps, final

    def release(self) -> None:
        """Give back slots whose copies have ended, waiting for them."""
        for slot, event in self._reading:
            if event is not None:
                event.synchronize()
            send(self._connection, self.peer, ("free", slot))
        self._reading.clear()

    def close(self) -> None:
        """End the run for the target, and wait until it has let go of the slots."""
        try:
            send(self._connection, self.peer, ("end",))
            until = time.monotonic() + GOODBYE_S
            while (left := until - time.monotonic()) > 0:
                receive(self._connection, self.peer, left)
        except PeerGone:
            return


class Giver:
    """The target's end."""

    def __init__(self, connection: Connection, peer: str) -> None:
        self.connection, self.peer = connection, peer
        _, self._taps, self._final = receive(connection, peer)
        self._free = deque(range(len(self._taps)))
        self.asked: deque[Asked] = deque()
        self.begun: Begin | None = None
        self.ended = False

    def listen(self, timeout_s: float | None = None) -> None:
        """Take in one message, if one comes within `timeout_s`."""
        message = receive(self.connection, self.peer, timeout_s)
        if isinstance(message, Asked):
            self.asked.append(message)
        elif isinstance(message, Begin):
            self.begun = message
        elif message is not None and message[0] == "free":
            self._free.append(message[1])
        elif message is not None:
            self.ended = True

    def free(self) -> bool:
        """Whether a slot is free; takes in what has been said."""
        while not self.ended and self.connection.poll(0):
            self.listen()
        return bool(self._free)

    def wait_free(self) -> bool:
        """Wait for a free slot; False when the drafter wants no more."""
        while not self.ended and not self._free:
            self.listen()
        return not self.ended

    def write(self, taps: Tensor, final: Tensor) -> tuple[int, int]:
        """Start copying states into a free slot; (slot, tokens) for `tell`, once the copy has ended."""
        slot = self._free.popleft()
        self._taps[slot, : len(taps)].copy_(taps, non_blocking=True)
        self._final[slot, : len(final)].copy_(final, non_blocking=True)
        return slot, len(taps)

    def settle(self) -> None:
        """Wait for every copy, whichever device runs it."""
        if self._taps.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.synchronize(self._taps.device)

    def tell(self, what: Asked | Place, slot: int, tokens: int) -> None:
        """Say that a slot is full."""
        send(self.connection, self.peer, (what, slot, tokens))
