"""Imports once what kernels take 5 s to import, and forks for each process that sitecustomize.py sends here.

Of the package nothing is imported here: each process imports it anew, from the checkout that it runs in.
`python server.py SOCKET` ends, with all that it began, when its stdin is closed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from typing import Any

# Not ipykernel.kernelapp, which looks at its environment while it is imported.
SLOW = """torch transformers transformers.models.llama.modeling_llama safetensors.torch accelerate polars
    plotly.graph_objects ipywidgets anywidget ipykernel.zmqshell ipykernel.ipkernel nbclient jupyter_client
    nbformat pydantic psutil yaml xxhash requests click jinja2"""


def serve(address: str) -> dict[str, Any] | None:
    """Fork for each process asked for; return what was asked in the child, None in the server at its end."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    for name in SLOW.split():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # else the first collection in a child touches, and so copies, all of it
    begun: dict[int, tuple[int, socket.socket]] = {}  # pid and stand-in, by a file that is ready at the end
    while True:
        stand_ins = [stand_in for _, stand_in in begun.values()]
        ready, _, _ = select.select([sys.stdin, listener, *begun, *stand_ins], [], [])
        for pid, stand_in in begun.values():
            if stand_in in ready or sys.stdin in ready:  # it was killed
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for ended in [*begun] if sys.stdin in ready else [file for file in begun if file in ready]:
            pid, stand_in = begun.pop(ended)
            _, status = os.waitpid(pid, 0)
            os.close(ended)
            with contextlib.suppress(OSError):
                stand_in.send(str(status).encode())
            stand_in.close()
        if sys.stdin in ready:
            return None
        if listener in ready:
            stand_in, _ = listener.accept()
            message, streams, _, _ = socket.recv_fds(stand_in, 1 << 20, 3)
            pid = os.fork()
            if not pid:
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                os.closerange(3, 1024)
                return json.loads(message)
            for stream in streams:
                os.close(stream)
            with contextlib.suppress(OSError):
                stand_in.send(str(pid).encode())
            begun[os.pidfd_open(pid)] = (pid, stand_in)


def become(asked: dict[str, Any]) -> None:
    """Run what the stand-in was started for, as Python would."""
    os.setsid()
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"], PRELOADED_AS=f"{os.getpid()} {asked['pids'][0]}")
    os.getppid = lambda: asked["pids"][1]  # a kernel that looks whether who started it lives
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # type: ignore[union-attr]
    words = asked["words"]
    sys.orig_argv = [sys.executable, *words]
    alone = words[0] == "-P"
    words = words[alone:]
    if words[0] == "-m":
        sys.argv, sys.path = words[1:], [asked["folder"], *asked["path"]][alone:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path = words, [os.path.dirname(words[0]), *asked["path"]]
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__" and (asked := serve(sys.argv[1])):
    become(asked)
