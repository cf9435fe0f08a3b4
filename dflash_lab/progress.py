"""One way to report progress: a live bar for a person, a log line now and then for a log file.

A report is also where a requested stop (SIGTERM, a Stop button) takes effect: a stage can go on from there.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from dflash_lab.errors import LabError

logger = logging.getLogger("dflash_lab.progress")


class Stopped(LabError):
    """The stage was asked to stop and did, at a point from which the same command goes on."""


@contextlib.contextmanager
def handling(handlers: Mapping[signal.Signals, Callable[[int, Any], None]]) -> Iterator[None]:
    """Let `handlers` answer signals within the block; only the main thread can, others run without."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class ProgressCallback(Protocol):
    """What a stage is given. `total` is 0 when unknown; `fields` are short facts, ``tokens_per_s=1200``.

    ``left_s`` among them says when the stage will end by itself: no later time is announced.
    """

    def __call__(self, description: str, done: int, total: int, **fields: Any) -> None: ...


class StopFlag:
    """Set by a signal or a button, seen by the next progress report."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.reason = ""

    def set(self, reason: str) -> None:
        """Ask for a stop; the first reason is kept."""
        self.reason = self.reason or reason
        self._event.set()

    def check(self) -> None:
        """Raise `Stopped` if a stop was asked for."""
        if self._event.is_set():
            raise Stopped(
                f"stopped ({self.reason}); what is finished is kept, run the same command again to go on"
            )


class Progress:
    """A `ProgressCallback`: tqdm bars when `interactive`, else a log line each `every_s` seconds."""

    def __init__(
        self, *, interactive: bool = False, every_s: float = 60.0, stop: StopFlag | None = None
    ) -> None:
        self.interactive = interactive
        self.every_s = every_s
        self.stop = stop or StopFlag()
        self._bars: dict[str, Any] = {}
        self._started: dict[str, tuple[float, int]] = {}
        self._logged: dict[str, float] = {}

    def __call__(self, description: str, done: int, total: int, **fields: Any) -> None:
        """Show `done` of `total`; raise `Stopped` when a stop was asked for."""
        self.stop.check()
        if self.interactive:
            self._draw(description, done, total, fields)
        else:
            self._log(description, done, total, fields)

    def close(self) -> None:
        """End open bars."""
        for bar in self._bars.values():
            bar.close()
        self._bars.clear()

    def _draw(self, description: str, done: int, total: int, fields: dict[str, Any]) -> None:
        from tqdm.auto import tqdm

        bar = self._bars.get(description)
        if bar is None:
            bar = self._bars[description] = tqdm(
                total=total or None, desc=description, mininterval=0.2, leave=True
            )
        bar.set_postfix({name: _short(value) for name, value in fields.items()}, refresh=False)
        bar.update(done - bar.n)
        if total and done >= total:
            bar.refresh()

    def _log(self, description: str, done: int, total: int, fields: dict[str, Any]) -> None:
        now = time.monotonic()
        start, first = self._started.setdefault(description, (now, done))
        last = self._logged.get(description)
        finished = bool(total) and done >= total
        if last is not None and now - last < self.every_s and not finished:
            return
        self._logged[description] = now
        facts = [f"{name}={_short(value)}" for name, value in fields.items()]
        if total and done > first and not finished:
            rest = (now - start) / (done - first) * (total - done)
            facts.append(f"eta={duration(min(rest, fields.get('left_s', rest)))}")
        count = f"{done}/{total} ({100 * done / total:.0f} %)" if total else str(done)
        logger.info("%s: %s %s", description, count, " ".join(facts))


def duration(seconds: float) -> str:
    """Return seconds as a person reads them: ``42 s``, ``3 min 05 s``, ``2 h 10 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
