"""Progress: sparse log lines headless, and a stop that takes effect at the next report."""

from __future__ import annotations

import logging

import pytest
from support.wording import refused

from dflash_lab.progress import Progress, StopFlag, Stopped, duration


def test_headless_logs_the_first_and_the_last_only_within_a_minute(caplog):
    caplog.set_level(logging.INFO, logger="dflash_lab.progress")
    progress = Progress(interactive=False)
    for done in range(101):
        progress("extract", done, 100, tokens_per_s=1234.567)
    lines = caplog.messages
    assert lines[0].startswith("extract: 0/100 (0 %)") and lines[1].startswith("extract: 100/100 (100 %)")
    assert len(lines) == 2 and "tokens_per_s=1235" in lines[1]


def test_a_line_between_announces_no_later_end_than_the_stage_allows_itself(caplog):
    caplog.set_level(logging.INFO, logger="dflash_lab.progress")
    progress = Progress(interactive=False, every_s=0.0)
    progress("extract", 0, 100)
    progress("extract", 50, 100)
    assert "eta=" in caplog.messages[-1]
    progress("sweep", 0, 10**9, left_s=7)
    progress("sweep", 1, 10**9, left_s=5)
    assert "eta=5.0 s" in caplog.messages[-1]


def test_stop_is_raised_at_the_next_report():
    stop = StopFlag()
    progress = Progress(stop=stop)
    progress("extract", 1, 2)
    stop.set("SIGTERM")
    with refused(Stopped):
        progress("extract", 2, 2)


def test_bars_follow_the_counts(monkeypatch):
    progress = Progress(interactive=True)
    progress("a", 3, 10)
    progress("b", 1, 0)
    assert progress._bars["a"].n == 3 and progress._bars["b"].total is None
    progress.close()
    assert progress._bars == {}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.25, "1.2 s"), (59.6, "1 min 00 s"), (42, "42 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")],
)
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text
