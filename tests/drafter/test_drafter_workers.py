"""Processes that end together: whose fault it was, results, stops, and a parent that is gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest
from support.wording import refused

from dflash_lab.drafter.workers import Job, PeerGone, WorkerFailed, receive, run_workers, send


def send_one(connection, value):
    send(connection, "receiver", value)
    return {"gave": value}


def receive_one(connection, then):
    value = receive(connection, "sender")
    if then == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if then == "raise":
        raise ZeroDivisionError(f"took {value}") from Lacking()
    return {"took": value}


def wait_for(connection):
    receive(connection, "nobody")


def test_results_come_back_by_name(tmp_path):
    left, right = Pipe()
    found = run_workers(
        [Job("sender", send_one, (left, 7), False), Job("receiver", receive_one, (right, ""), True)],
        tmp_path,
        ends=(left, right),
    )
    assert found == {"sender": {"gave": 7}, "receiver": {"took": 7}}


class Lacking(RuntimeError):
    """An error that knows what to do about it."""

    advice = "take fewer"

    def __init__(self):
        super().__init__("too much")
        self.details = {"asked": 3}


def talk_then_fail(connection, then):
    print("words before the end", flush=True)
    send(connection, "waiter", 1)
    return receive_one(connection, then)


def wait_twice(connection):
    receive(connection, "talker")
    send(connection, "talker", 2)
    receive(connection, "talker")


@pytest.mark.parametrize("then", ["raise", "die"])
def test_the_one_at_fault_is_named_with_what_it_knew_and_not_the_one_who_lost_a_peer(tmp_path, then):
    left, right = Pipe()
    jobs = [Job("waiter", wait_twice, (left,), True), Job("talker", talk_then_fail, (right, then), False)]
    with refused(WorkerFailed) as caught:
        run_workers(jobs, tmp_path, ends=(left, right))
    assert "PeerGone" not in str(caught.value)
    if then == "raise":
        assert caught.value.advice == "take fewer" and caught.value.details == {"asked": 3}


def wait_for_file(path):
    while not Path(path).exists():
        time.sleep(0.05)
    return {"seen": True}


def test_a_stop_asks_the_leading_one_and_leaves_nobody_behind(tmp_path):
    flag = tmp_path / "stop"
    left, right = Pipe()

    def poll():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_workers(
            [Job("leader", wait_for_file, (str(flag),), True), Job("other", wait_for, (right,), False)],
            tmp_path,
            on_poll=poll,
            on_stop=flag.touch,
            grace_s=20,
        )
    left.close()
    assert (tmp_path / "leader.json").exists() and not (tmp_path / "other.json").exists()
    assert not multiprocessing.active_children()


def tell_and_wait(connection, path):
    Path(path + ".new").write_text(str(os.getpid()))
    os.replace(path + ".new", path)
    receive(connection, "nobody")


def test_a_child_ends_when_its_parent_is_killed(tmp_path):
    _left, right = Pipe()
    parent = os.fork()
    if not parent:
        try:
            run_workers([Job("child", tell_and_wait, (right, str(tmp_path / "pid")), True)], tmp_path)
        finally:
            os._exit(1)
    until = time.monotonic() + 60
    while not (tmp_path / "pid").exists():
        assert time.monotonic() < until and os.waitpid(parent, os.WNOHANG) == (0, 0)
        time.sleep(0.05)
    child = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    while child.exists() and child.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < until, "the child outlives its parent"
        time.sleep(0.05)


def test_a_closed_end_is_an_error_of_its_own_kind():
    left, right = Pipe()
    assert receive(left, "right", 0.01) is None
    right.close()
    with refused(PeerGone):
        receive(left, "right")
    with refused(PeerGone):
        send(left, "right", 1)
