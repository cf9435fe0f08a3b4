"""Greedy decoding on fixed shapes: rounds launched ahead, their records read late.

The host's part of a round is to see what it decided, append it and look for a stop token. It does so while
the device is at work on the next round already, so the device never waits for it: one wait a round, for a
round that has long been launched after. The price is one round too many at a stop token.

Graphs are made once for each capacity (a power of two) and kept, so prompts of a set share them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

import torch

from dflash_lab.acceptance.clock import Clock
from dflash_lab.acceptance.decode import (
    Decoded,
    Sampling,
    Verdict,
    append,
    check_block_size,
    finish,
    prefill,
    stop_tokens,
)
from dflash_lab.acceptance.proposals import check_pair
from dflash_lab.acceptance.static_cache import StaticKeys, why_not
from dflash_lab.acceptance.static_context import StaticContext
from dflash_lab.acceptance.static_round import StaticRound
from dflash_lab.acceptance.target_run import TargetRun
from dflash_lab.drafter.model import Drafter
from dflash_lab.errors import UnsupportedTarget
from dflash_lab.target.model import Target

LEAST_CAPACITY = 512


class Workspace:
    """Keys, values and contexts by capacity, shared by decoders of one target that take turns."""

    def __init__(self, target: Target) -> None:
        if why := why_not(target):
            raise UnsupportedTarget(
                f"{target.name} ({target.config.model_type}) cannot be decoded at fixed shapes: {why}. Use "
                "the growing cache (acceptance.decode)."
            )
        self.target = target
        self._keys: dict[int, StaticKeys] = {}
        self._contexts: dict[tuple[Drafter, int], StaticContext] = {}

    def round(self, drafter: Drafter | None, capacity: int, block_size: int, budget: int) -> StaticRound:
        """Make a round; without a drafter it is a step of plain decoding."""
        if capacity not in self._keys:
            self._keys[capacity] = StaticKeys(self.target, capacity)
        if drafter is None:
            return StaticRound(self.target, self._keys[capacity])
        place = (drafter, capacity)
        if place not in self._contexts:
            self._contexts[place] = StaticContext(drafter, capacity)
        return StaticRound(
            self.target,
            self._keys[capacity],
            drafter,
            self._contexts[place],
            block_size=block_size,
            budget=budget,
        )


class StaticDecoder:
    """`decode`, or `plain_decode` where no drafter is given, for greedy choice at fixed shapes."""

    def __init__(
        self,
        workspace: Workspace,
        drafter: Drafter | None = None,
        *,
        block_size: int | None = None,
        budget: int = 0,
    ) -> None:
        self.workspace, self.drafter, self.budget = workspace, drafter, budget
        self.block_size = 1
        if drafter is not None:
            check_pair(workspace.target, drafter)
            self.block_size = drafter.config.block_size if block_size is None else block_size
            check_block_size(self.block_size)
        self._rounds: dict[int, StaticRound] = {}

    def prepared(self, tokens: int) -> StaticRound:
        """Return the round for sequences of up to `tokens`, made now if need be."""
        capacity = LEAST_CAPACITY
        while capacity < tokens + 3 * self.block_size + self.budget:
            capacity *= 2
        if capacity not in self._rounds:
            self._rounds[capacity] = self.workspace.round(
                self.drafter, capacity, self.block_size, self.budget
            )
        return self._rounds[capacity]

    @torch.no_grad()
    def __call__(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        stop_ids: Collection[int] | None = None,
        on_round: Callable[[int], None] | None = None,
    ) -> Decoded:
        """Decode `prompt_ids`; see `decode.decode` for the arguments."""
        target, drafter = self.workspace.target, self.drafter
        stops = stop_tokens(target, stop_ids)
        now = self.prepared(len(prompt_ids) + max_new_tokens)
        tap_ids = drafter.config.tap_ids if drafter is not None else ()
        with TargetRun(target, tap_ids) as run:
            answer, taps = prefill(run, target.head, prompt_ids, Sampling(), stops)
            now.load(run.cache, taps, answer.tokens[0], run.length)
        reader = _Reader(now.record)
        clock = Clock(target.device)
        start = time.perf_counter()
        while not answer.stopped and len(answer.tokens) < max_new_tokens:
            # Every round gives a token at least.
            while reader.free and len(answer.tokens) + reader.flying < max_new_tokens:
                clock.lap()
                for phase, launch in now.steps.items():
                    launch()
                    clock.lap(phase)
                reader.send()
            outcome = _outcome(reader.receive(), tree=self.budget > 0)
            append(answer, outcome, max_new_tokens - len(answer.tokens), stops)
            if on_round is not None:
                on_round(len(answer.tokens))
        finish(answer, start, target.device)
        if drafter is None:
            answer.rounds.clear()  # plain decoding has none
        answer.phase_seconds = clock.seconds()
        answer.waits = reader.waits
        return answer


class _Reader:
    """Copies of the device's record on their way to the host, at most two at a time."""

    def __init__(self, record: torch.Tensor) -> None:
        self._record, self._cuda = record, record.is_cuda
        ahead = 2 if self._cuda else 1  # rounds in flight
        self._slots = deque(
            torch.empty(record.shape, dtype=record.dtype, pin_memory=self._cuda) for _ in range(ahead)
        )
        self._sent: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()
        self.waits = 0

    @property
    def free(self) -> int:
        return len(self._slots)

    @property
    def flying(self) -> int:
        return len(self._sent)

    def send(self) -> None:
        slot = self._slots.popleft()
        slot.copy_(self._record, non_blocking=True)
        event = torch.cuda.Event() if self._cuda else None
        if event is not None:
            event.record()
        self._sent.append((slot, event))

    def receive(self) -> list[int]:
        """Wait for the oldest record and return it."""
        slot, event = self._sent.popleft()
        if event is not None:
            event.synchronize()
            self.waits += 1
        values = slot.tolist()
        self._slots.append(slot)
        return values


def _outcome(record: list[int], tree: bool) -> Verdict:
    accepted, drafted, bonus, *drafts = record
    rejected = drafts[accepted] if accepted < drafted and not tree else -1
    return Verdict(list(range(accepted + 1)), [*drafts[:accepted], bonus], drafted, rejected)
