"""Where PRELOADED names the socket of server.py, kernels and our commands are begun there, where all is
imported; this process stands for one with its streams, signals and exit code.
"""

import os
import sys

MODULES = ("ipykernel_launcher", "dflash_lab.cli", "dflash_lab.launch")
SCRIPTS = ("dflash-lab", "block.py")  # the second is Python of the documentation's pages


def is_meant(words: list[str]) -> bool:
    """Say whether Python, with these words after it, is a command that the server is to begin."""
    words = words[1:] if words[:1] == ["-P"] else words
    module = words[1] if words[:1] == ["-m"] else ""
    return module in MODULES or os.path.basename((words or [""])[0]) in SCRIPTS


def stand_in(address: str) -> int:
    """Have the server begin this process; return its exit code, or die of the signal that it died of."""
    import json
    import signal
    import socket

    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(address)
    parent = os.getppid()
    pid, its_stand_in = map(int, os.environ.get("PRELOADED_AS", "0 0").split())
    seen = its_stand_in if parent == pid else parent  # whose command line says what started this
    asked = {
        "words": sys.orig_argv[1:],
        "path": sys.path,
        "folder": os.getcwd(),
        "pid": os.getpid(),
        "parent": seen,
    }
    message = json.dumps({**asked, "environment": dict(os.environ)}).encode()
    socket.send_fds(server, [message], [0, 1, 2])
    pid = int(server.recv(64))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    server.settimeout(1)
    said = None
    while said is None:
        try:
            said = server.recv(64)
        except TimeoutError:
            if "JPY_PARENT_PID" in os.environ and os.getppid() != parent:
                return 1  # a kernel ends with who started it, and its server sees this one end
    status = int(said or b"1")
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    return os.waitstatus_to_exitcode(status)


if "PRELOADED" in os.environ and is_meant(sys.orig_argv[1:]):
    os._exit(stand_in(os.environ["PRELOADED"]))
