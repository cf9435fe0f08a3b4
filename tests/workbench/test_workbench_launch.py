"""The launcher with a real kernel: exit codes, the saved notebook, SIGTERM passed on, secrets hidden, GPU
memory freed.

A toy stage stands in for a real one: a module put under the name of a stage here and, by `sitecustomize`, in
the kernel.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import nbformat
import polars as pl
import pytest
from support.wording import check_wording, refused

from dflash_lab import cli, papermill_engine
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

def run_prepare(params, progress):
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
from dflash_lab.stages.prepare import PrepareParams
params = from_notebook(PrepareParams, globals())
result = execute(params)"""


KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}


@pytest.fixture
def lab(tmp_path, monkeypatch, capfd):
    """A workspace with one notebook of the toy stage; returns a function that runs a command in it, for its
    exit code and what it and its kernel said.
    """
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
        nbformat.v4.new_code_cell('print("interactive", params.interactive, "target", params.target)'),
    ]
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=KERNEL)
    nbformat.write(notebook, tmp_path / "notebooks" / "prepare.ipynb")
    # A python3 that somebody once installed for the user, of an environment that is gone.
    stale = tmp_path / "jupyter" / "kernels" / "python3"
    stale.mkdir(parents=True)
    words = ["/gone/bin/python", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (stale / "kernel.json").write_text(json.dumps({"argv": words, "display_name": "x", "language": "python"}))
    for name, value in {
        "JUPYTER_PATH": str(tmp_path / "jupyter"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "PYTHONPATH": f"{tmp_path / 'site'}:{REPO}",
        "HF_TOKEN": "hidden-token-value",
    }.items():
        monkeypatch.setenv(name, value)
    spec = importlib.util.spec_from_file_location("dflash_lab.stages.prepare", tmp_path / "toy.py")
    toy = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "dflash_lab.stages.prepare", toy)
    spec.loader.exec_module(toy)
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str]:
        capfd.readouterr()
        code = cli.main(words)
        said = capfd.readouterr()
        return code, said.out + said.err

    return run


def test_a_notebook_that_cannot_be_saved_is_named_and_never_half_there(lab, tmp_path):
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            sys.stderr = said = io.StringIO()  # a file of what was said has the limit too
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # the notebook is larger
            code = cli.main(["prepare", "--run", "toy"])
            assert said.getvalue().startswith("dflash-lab: runs/toy/prepare.ipynb: the file would be larger")
            assert "Traceback" not in said.getvalue()
            os._exit(code)
        os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert not (tmp_path / "runs/toy/prepare.ipynb").exists() and not list(tmp_path.glob("runs/toy/.*"))


def test_a_stage_that_fails_ends_well_dies_and_is_done_again(lab, tmp_path):
    run = tmp_path / "runs" / "toy"

    code, output = lab("prepare", "--run", "toy", "-p", "mode", "fail")
    assert code == 1 and "no room for [hidden]" in output and "failure.json" in output
    record = read_json(run / "prepare" / "failure.json")
    assert record["error"] == "RuntimeError" and record["message"] == "no room for [hidden]"
    saved = (run / "prepare.ipynb").read_text()
    assert "no room for [hidden]" in saved and "hidden-token-value" not in saved

    code, output = lab("prepare", "--run", "toy")
    assert code == 0 and not (run / "prepare" / "failure.json").exists(), output
    assert read_json(run / "prepare" / "result.json")["figures"] == {"steps": 3}
    saved = (run / "prepare.ipynb").read_text()
    assert "interactive False" in saved and "target toy" in saved and "widget" not in saved
    assert "hidden-token-value" not in saved and "[hidden]" in saved
    assert "hidden-token-value" not in output and "steps: 1/600" in output
    # The kernel's words go past every filter; an interrupt that meets its shutdown is an ERROR of Jupyter's
    assert "[IPKernelApp] WARNING" not in output and "without encryption" not in output
    assert (tmp_path / "ipython").is_dir() and not list((tmp_path / "ipython").rglob("history.sqlite*"))

    before = {name: (run / name).read_bytes() for name in ("prepare.ipynb", "prepare/result.json")}
    code, output = lab("prepare", "--run", "toy", "-p", "mode", "die")
    assert code == 1
    check_wording(output)
    assert not (run / "prepare.attempt.ipynb").exists()  # no kernel was started

    code, output = lab("prepare", "--run", "toy", "-p", "mode", "die", "-p", "force", "True")
    assert code == 138 and "not finished" in output
    assert "the earlier result stands as it was: runs/toy/prepare/result.json" in output
    assert {name: (run / name).read_bytes() for name in before} == before
    assert (run / "prepare.attempt.ipynb").exists()

    code, output = lab("prepare", "--run", "toy", "-p", "seed", "3", "-p", "force", "True")
    assert code == 0 and not (run / "prepare.attempt.ipynb").exists(), output
    assert read_json(run / "prepare" / "result.json")["parameters"]["seed"] == 3
    assert (run / "prepare.ipynb").read_bytes() != before["prepare.ipynb"]


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
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={**KERNEL, **own})
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
    with refused(KernelNotStarted):
        QuietEngine.execute_notebook(None, "python3")
    assert tries == ["python3"] * 2

    def broken(nb, kernel_name, options):
        tries.append("other")
        raise RuntimeError("a cell's own")

    monkeypatch.setattr(papermill_engine, "_execute", broken)
    with pytest.raises(RuntimeError, match="a cell's own"):
        QuietEngine.execute_notebook(None, "python3")
    assert tries[2:] == ["other"]  # what ran once is not run again


def test_plain_papermill_is_headless_too_and_its_threads_sleep(lab, tmp_path):
    """OpenMP, asked to show what it read when torch loaded it, is the witness of the latter."""
    path = tmp_path / "notebooks" / "prepare.ipynb"
    path.write_text(path.read_text().replace('"print(', '"import torch; print('))
    (tmp_path / "runs").mkdir()
    words = ["papermill", "notebooks/prepare.ipynb", "runs/out.ipynb", "-p", "run", "toy"]
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    environment["OMP_DISPLAY_ENV"] = "VERBOSE"
    done = subprocess.run([sys.executable, "-m", *words], env=environment, capture_output=True, text=True)
    output, saved = done.stdout + done.stderr, (tmp_path / "runs/out.ipynb").read_text()
    assert done.returncode == 0, output
    assert "interactive False" in saved and "target toy" in saved  # as params/toy has it
    assert (tmp_path / "runs/toy/prepare/result.json").exists() and not (tmp_path / "runs/demo").exists()
    settings = Path(sys.prefix) / "etc" / "ipython" / "ipython_kernel_config.json"  # `make install` makes it
    assert ("without encryption" in output) != settings.exists()
    found = re.findall(r"GOMP_SPINCOUNT = '(\w+)'", output + saved)  # the kernel's are in one of them
    assert set(found) == {"1000"}


def test_sigterm_stops_the_stage_at_a_resumable_point(lab, tmp_path):
    steps = tmp_path / "runs/toy/prepare/steps"

    def send() -> None:
        deadline = time.monotonic() + 60
        while not steps.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    sent: list[float] = []
    threading.Thread(target=send).start()
    code, output = lab("prepare", "--run", "toy", "-p", "mode", "wait")
    assert code == 143 and time.monotonic() - sent[0] < 30, output
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
    code, output = lab("prepare", "--no-such-option")
    assert code == 2 and "--no-such-option" in output


def test_of_a_table_the_terminal_shows_the_size(capsys):
    with log_to_stderr():
        logging.getLogger("papermill").info(repr(pl.DataFrame({"a": range(1200), "b": range(1200)})))
        logging.getLogger("papermill").info("shape: (a word of the notebook's)")
    assert capsys.readouterr().err == "table: 1,200 rows, 2 columns\nshape: (a word of the notebook's)\n"
