"""The launcher with a real kernel: exit codes, the saved notebook, SIGTERM passed on, secrets hidden, GPU
memory freed.

A toy stage stands in for a real one: a module put under the name of a stage in both processes by
`sitecustomize`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import polars as pl
import pytest

from dflash_lab import papermill_engine
from dflash_lab.files import read_json
from dflash_lab.launch import log_to_stderr, stops_with_words
from dflash_lab.papermill_engine import KernelNotStarted, QuietEngine

REPO = Path(__file__).resolve().parents[2]

TOY = '''
"""A stage for tests: waits, fails or ends as told."""
import os, time
from dataclasses import dataclass, field
from typing import ClassVar
from dflash_lab.params import StageParams, param

class PrepareParams(StageParams):
    stage: ClassVar[str] = "prepare"
    mode: str = param("work", "what to do")

@dataclass
class PrepareResult:
    figures: dict = field(default_factory=dict)
    def save(self, folder):
        (folder / "table").write_text("rows")
    @classmethod
    def load(cls, folder):
        return cls({"loaded": 1})

class Held:
    alive = 0
    def __init__(self): Held.alive += 1
    def __del__(self): Held.alive -= 1

def run_prepare(params, progress):
    tensor = Held()
    if params.mode == "fail":
        raise RuntimeError("no room for " + os.environ.get("HF_TOKEN", "anyone"))
    if params.mode == "die":
        os.kill(os.getpid(), 9)
    for step in range(600 if params.mode == "wait" else 3):
        progress("steps", step + 1, 600)
        (params.folder / "steps").write_text(str(step))
        time.sleep(0.05 if params.mode == "wait" else 0)
    print("token is", os.environ.get("HF_TOKEN"))
    return PrepareResult({"steps": 3})
'''
SITE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("dflash_lab.stages.prepare", {path!r})
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return spec if name == "dflash_lab.stages.prepare" else None
sys.meta_path.insert(0, Finder)
"""
PARAMETERS = """\
run: str = "demo"  # the run
mode: str = None  # "work": what to do
target: str = None  # "smollm2": target
device: str = None  # "auto": device
dtype: str = None  # "auto": dtype
seed: int = None  # 0: seed
run_dir: str = None  # "": folder
interactive: bool = None  # True: live
force: bool = None  # False: again"""
RUN = """\
from dflash_lab.run_params import from_notebook
from dflash_lab.stage_run import execute
from dflash_lab.stages.prepare import Held, PrepareParams
params = from_notebook(PrepareParams, globals())
result = execute(params)"""


@pytest.fixture
def lab(tmp_path):
    """A workspace with one notebook of the toy stage; returns a function that starts a command in it."""
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE.format(path=str(tmp_path / "toy.py")))
    for name in ("demo", "toy"):
        (tmp_path / "params" / name).mkdir(parents=True)
        (tmp_path / "params" / name / "prepare.yaml").write_text(f"target: {name}\n")
    (tmp_path / "notebooks").mkdir()
    cells = [
        nbformat.v4.new_markdown_cell("# Toy"),
        nbformat.v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell(RUN),
        nbformat.v4.new_code_cell(
            'print("interactive", params.interactive, "held", Held.alive, "target", params.target)'
        ),
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(
        nbformat.v4.new_notebook(cells=cells, metadata=kernel), tmp_path / "notebooks" / "prepare.ipynb"
    )
    # A python3 that somebody once installed for the user, of an environment that is gone.
    stale = tmp_path / "jupyter" / "kernels" / "python3"
    stale.mkdir(parents=True)
    words = ["/gone/bin/python", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (stale / "kernel.json").write_text(json.dumps({"argv": words, "display_name": "x", "language": "python"}))
    environment = {
        **os.environ,
        "JUPYTER_PATH": str(tmp_path / "jupyter"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "PYTHONPATH": f"{tmp_path / 'site'}:{REPO}",
        "HF_TOKEN": "hidden-token-value",
        "OMP_NUM_THREADS": "1",
    }

    def start(*words: str, module: str = "dflash_lab.cli", **more) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", module, *words],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **more,
        )

    return start


def finish(process: subprocess.Popen) -> tuple[int, str]:
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def test_a_notebook_that_cannot_be_saved_is_named_and_never_half_there(lab, tmp_path):
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # the notebook is larger

    code, output = finish(lab("prepare", "--run", "toy", preexec_fn=small_files))
    assert code == 1 and "dflash-lab: runs/toy/prepare.ipynb: the file would be larger" in output, output
    assert "Traceback" not in output
    assert not (tmp_path / "runs/toy/prepare.ipynb").exists() and not list(tmp_path.glob("runs/toy/.*"))


def test_a_stage_ends_with_0_its_notebook_and_its_result(lab, tmp_path):
    code, output = finish(lab("prepare", "--run", "toy"))
    assert code == 0, output
    assert read_json(tmp_path / "runs/toy/prepare/result.json")["figures"] == {"steps": 3}
    saved = (tmp_path / "runs/toy/prepare.ipynb").read_text()
    assert "interactive False" in saved and "target toy" in saved
    assert "hidden-token-value" not in saved and "[hidden]" in saved
    assert "hidden-token-value" not in output and "steps: 1/600" in output
    assert "widget" not in saved
    # The kernel's words go past every filter; an interrupt that meets its shutdown is an ERROR of Jupyter's
    assert "[IPKernelApp] WARNING" not in output and "without encryption" not in output


def test_a_headless_kernel_keeps_no_history(lab, tmp_path):
    assert finish(lab("prepare", "-p", "run", "demo"))[0] == 0
    assert (tmp_path / "ipython").is_dir() and not list((tmp_path / "ipython").rglob("history.sqlite*"))


def test_a_kernel_whose_port_was_taken_is_started_once_more(monkeypatch, caplog):
    from jupyter_client.connect import LocalPortCache

    find, taken = LocalPortCache.find_available_port, socket.create_server(("127.0.0.1", 0))
    asked = []

    def first_taken(cache, ip):
        asked.append(ip)
        return taken.getsockname()[1] if len(asked) == 1 else find(cache, ip)

    monkeypatch.setattr(LocalPortCache, "find_available_port", first_taken)
    own = {"papermill": {}}  # where papermill writes what came of a notebook and of a cell
    cells = [nbformat.v4.new_code_cell("import sys; print(sys.executable)", metadata=own)]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}, **own}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=kernel)
    QuietEngine.execute_notebook(notebook, "python3")
    taken.close()
    assert len(asked) == 10 and [line for line in caplog.messages if "port was taken: once more" in line]
    assert notebook.cells[0].outputs[0].text.strip() == sys.executable


def test_a_kernel_that_never_answers_is_named_after_two_tries(monkeypatch):
    tries = []

    def execute(nb, kernel_name, options):
        tries.append(kernel_name)
        raise RuntimeError("Kernel died before replying to kernel_info")

    monkeypatch.setattr(papermill_engine, "_execute", execute)
    with pytest.raises(KernelNotStarted, match=r"'python3' ended twice .*ipykernel_launcher --version"):
        QuietEngine.execute_notebook(None, "python3")
    assert tries == ["python3"] * 2

    def broken(nb, kernel_name, options):
        tries.append("other")
        raise RuntimeError("a cell's own")

    monkeypatch.setattr(papermill_engine, "_execute", broken)
    with pytest.raises(RuntimeError, match="a cell's own"):
        QuietEngine.execute_notebook(None, "python3")
    assert tries[2:] == ["other"]  # what ran once is not run again


def test_plain_papermill_is_headless_too(lab, tmp_path):
    (tmp_path / "runs").mkdir()
    words = ["notebooks/prepare.ipynb", "runs/out.ipynb", "-p", "run", "toy"]
    code, output = finish(lab(*words, module="papermill"))
    assert code == 0, output
    saved = (tmp_path / "runs/out.ipynb").read_text()
    assert "interactive False" in saved and "target toy" in saved  # as params/toy has it
    assert (tmp_path / "runs/toy/prepare/result.json").exists() and not (tmp_path / "runs/demo").exists()
    settings = Path(sys.prefix) / "etc" / "ipython" / "ipython_kernel_config.json"  # `make install` makes it
    assert ("without encryption" in output) != settings.exists()


def test_plain_papermill_with_a_mistyped_name_stops_with_the_near_match(lab, tmp_path):
    (tmp_path / "runs").mkdir()
    code, output = finish(
        lab("notebooks/prepare.ipynb", "runs/out.ipynb", "-p", "mod", "x", module="papermill")
    )
    assert code == 1 and "did you mean 'mode'" in output
    assert not (tmp_path / "runs/demo/prepare/result.json").exists()


def test_a_failed_stage_leaves_a_readable_notebook_and_failure(lab, tmp_path):
    code, output = finish(lab("prepare", "--run", "toy", "-p", "mode", "fail"))
    assert code == 1 and "no room for [hidden]" in output and "failure.json" in output
    record = read_json(tmp_path / "runs/toy/prepare/failure.json")
    assert record["error"] == "RuntimeError" and record["message"] == "no room for [hidden]"
    saved = (tmp_path / "runs/toy/prepare.ipynb").read_text()
    assert "no room for [hidden]" in saved and "hidden-token-value" not in saved
    code, output = finish(lab("prepare", "--run", "toy"))
    assert code == 0 and not (tmp_path / "runs/toy/prepare/failure.json").exists()


def test_a_failed_attempt_leaves_the_notebook_of_the_result_that_stands(lab, tmp_path):
    assert finish(lab("prepare", "--run", "toy"))[0] == 0
    run = tmp_path / "runs" / "toy"
    before = {name: (run / name).read_bytes() for name in ("prepare.ipynb", "prepare/result.json")}
    code, output = finish(lab("prepare", "--run", "toy", "-p", "mode", "fail"))
    assert code == 1 and "mode was 'work', now 'fail'" in output and "-p force True" in output
    assert not (run / "prepare.attempt.ipynb").exists()  # no kernel was started
    code, output = finish(lab("prepare", "--run", "toy", "-p", "mode", "fail", "-p", "force", "True"))
    assert code == 1 and "the earlier result stands as it was: runs/toy/prepare/result.json" in output
    assert {name: (run / name).read_bytes() for name in before} == before
    assert "no room for [hidden]" in (run / "prepare.attempt.ipynb").read_text()
    code, output = finish(lab("prepare", "--run", "toy", "-p", "seed", "3", "-p", "force", "True"))
    assert code == 0 and not (run / "prepare.attempt.ipynb").exists(), output
    assert read_json(run / "prepare/result.json")["parameters"]["seed"] == 3
    assert (run / "prepare.ipynb").read_bytes() != before["prepare.ipynb"]


def test_a_dead_kernel_ends_with_138(lab):
    code, output = finish(lab("prepare", "--run", "toy", "-p", "mode", "die"))
    assert code == 138 and "not finished" in output


def test_sigterm_stops_the_stage_at_a_resumable_point(lab, tmp_path):
    process = lab("prepare", "--run", "toy", "-p", "mode", "wait")
    steps = tmp_path / "runs/toy/prepare/steps"
    deadline = time.monotonic() + 60
    while not steps.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 143 and time.monotonic() - sent < 30, output
    assert "stopped by SIGTERM" in output
    assert read_json(tmp_path / "runs/toy/prepare/failure.json")["state"] == "stopped"


def test_sigterm_between_notebooks_ends_with_words_and_143(caplog):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left, stops_with_words():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert left.value.code == 143 and "stopped by SIGTERM; the same command goes on" in caplog.text
    assert signal.getsignal(signal.SIGTERM) is before


def plain(lines: list[str]) -> str:
    """A traceback without its colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(lines))


def test_a_failed_cell_does_not_hold_what_its_frames_held():
    """In a real IPython kernel: the failed stage's locals are gone in the next cell, and the traceback is
    readable.
    """
    from jupyter_client.manager import start_new_kernel

    setup = """
import sys, types
class Held:
    alive = 0
    def __init__(self): Held.alive += 1
    def __del__(self): Held.alive -= 1
def run(params, progress):
    tensor = Held()
    raise RuntimeError("no room")
from dflash_lab import machine
from dflash_lab import stage_run as stage
from dflash_lab.params import StageParams
stage.run_function = lambda name: run
import tempfile
class Toy(StageParams):
    stage = "toy"
params = Toy(run_dir=tempfile.mkdtemp(), interactive=False)
"""
    manager, client = start_new_kernel(kernel_name="python3")
    try:

        def cell(code: str) -> tuple[dict, str]:
            text: list[str] = []
            reply = client.execute_interactive(
                code, timeout=60, output_hook=lambda m: text.append(m["content"].get("text", ""))
            )
            return reply["content"], "".join(text)

        assert cell(setup)[0]["status"] == "ok"
        failed, _ = cell("stage.execute(params)")
        assert failed["status"] == "error" and "raise RuntimeError" in plain(failed["traceback"])
        assert cell("print('held', Held.alive)")[1] == "held 0\n"
        hand = "def f():\n    tensor = Held()\n    1 / 0\nf()"
        assert cell(hand)[0]["status"] == "error"
        assert cell("print('held', Held.alive)")[1] == "held 1\n"  # what IPython does without help
        assert cell("machine.release()\nprint('held', Held.alive)")[1] == "held 0\n"
        # A warning of the package in a cell of its own is a line of text, not the red box of stderr.
        kinds: list[str | None] = []
        client.execute_interactive(
            "import logging; logging.getLogger('dflash_lab.x').warning('halved')",
            timeout=60,
            output_hook=lambda m: kinds.append(m["content"].get("name")),
        )
        assert [kind for kind in kinds if kind] == ["stdout"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_papermills_usage_error_is_2(lab):
    code, output = finish(lab("prepare", "--no-such-option"))
    assert code == 2 and "--no-such-option" in output


def test_of_a_table_the_terminal_shows_the_size(capsys):
    with log_to_stderr():
        logging.getLogger("papermill").info(repr(pl.DataFrame({"a": range(1200), "b": range(1200)})))
        logging.getLogger("papermill").info("shape: (a word of the notebook's)")
    assert capsys.readouterr().err == "table: 1,200 rows, 2 columns\nshape: (a word of the notebook's)\n"
