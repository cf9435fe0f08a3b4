"""Processes that end together: whose fault it was, results, stops, and a parent that is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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
        raise ZeroDivisionError(f"took {value}")
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


def lack(connection):
    raise ValueError("wrapped") from Lacking()


def test_what_an_error_knew_comes_back_with_it(tmp_path):
    left, right = Pipe()
    with refused(WorkerFailed) as caught:
        run_workers([Job("lacking", lack, (right,), True)], tmp_path, ends=(left, right))
    assert caught.value.advice == "take fewer" and caught.value.details == {"asked": 3}


def talk_then_fail(connection, then):
    print("words before the end", flush=True)
    send(connection, "waiter", 1)
    return receive_one(connection, then)


def wait_twice(connection):
    receive(connection, "talker")
    send(connection, "talker", 2)
    receive(connection, "talker")


@pytest.mark.parametrize(
    ("then", "words"),
    [
        ("raise", r"talker failed:[\s\S]*ZeroDivisionError: took 2"),
        ("die", r"talker was killed by SIGKILL\. The end of its output:\nwords before the end"),
    ],
)
def test_the_one_at_fault_is_named_and_not_the_one_who_lost_a_peer(tmp_path, then, words):
    left, right = Pipe()
    with refused(WorkerFailed) as caught:
        run_workers(
            [Job("waiter", wait_twice, (left,), True), Job("talker", talk_then_fail, (right, then), False)],
            tmp_path,
            ends=(left, right),
        )
    assert "PeerGone" not in str(caught.value)


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
    import multiprocessing

    assert not multiprocessing.active_children()


PARENT = """
import sys
from multiprocessing import Pipe
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_drafter_workers import tell_and_wait
from dflash_lab.drafter.workers import Job, run_workers
if __name__ == "__main__":
    left, right = Pipe()
    folder = Path(sys.argv[1])
    run_workers([Job("child", tell_and_wait, (right, str(folder / "pid")), True)], folder)
"""


def tell_and_wait(connection, path):
    Path(path + ".new").write_text(str(os.getpid()))
    os.replace(path + ".new", path)
    receive(connection, "nobody")


def test_a_child_ends_when_its_parent_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    here = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *sys.path])}
    parent = subprocess.Popen([sys.executable, str(script), str(tmp_path), here], env=environment)
    until = time.monotonic() + 60
    while not (tmp_path / "pid").exists():
        assert time.monotonic() < until and parent.poll() is None
        time.sleep(0.05)
    child = int((tmp_path / "pid").read_text())
    parent.kill()
    parent.wait()
    while _alive(child):
        assert time.monotonic() < until, "the child outlives its parent"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_closed_end_is_an_error_of_its_own_kind():
    left, right = Pipe()
    assert receive(left, "right", 0.01) is None
    right.close()
    with refused(PeerGone):
        receive(left, "right")
    with refused(PeerGone):
        send(left, "right", 1)
