"""Where PRELOADED names the socket of server.py, kernels and our commands are begun there, where all is
imported; this process stands for one with its streams, signals and exit code.
"""

import os
import sys

MODULES = ("ipykernel_launcher", "dflash_lab.cli", "dflash_lab.launch")
SCRIPTS = ("dflash-lab", "block.py")  # the second is Python of the documentation's pages


def stand_in(words: list[str]) -> int:
    """Have the server begin `python words`; return its exit code, or die of the signal that it died of."""
    import json
    import signal
    import socket

    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(os.environ["PRELOADED"])
    parent = os.getppid()
    pid, its_stand_in = map(int, os.environ.get("PRELOADED_AS", "0 0").split())
    seen = its_stand_in if parent == pid else parent  # whose command line says what started this
    asked = {"words": words, "path": sys.path, "folder": os.getcwd(), "pids": (os.getpid(), seen)}
    message = json.dumps({**asked, "environment": dict(os.environ)}).encode()
    socket.send_fds(server, [message], [0, 1, 2])
    pid = int(server.recv(64))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    server.settimeout(1)
    while True:
        try:
            status = int(server.recv(64) or b"1")
            break
        except TimeoutError:
            if "JPY_PARENT_PID" in os.environ and os.getppid() != parent:
                return 1  # a kernel ends with who started it, and the server sees this one end
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    return os.waitstatus_to_exitcode(status)


if "PRELOADED" in os.environ:
    words = sys.orig_argv[1:]
    first, *rest = (words[1:] if words[:1] == ["-P"] else words) or [""]
    if os.path.basename(first) in SCRIPTS or (first == "-m" and rest[0] in MODULES):
        os._exit(stand_in(words))
