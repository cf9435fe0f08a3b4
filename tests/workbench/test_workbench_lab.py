"""The first page of JupyterLab says what is here and stays true; Lab starts on it, for this machine only."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import mistune
import psutil
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from traitlets import import_item

from dflash_lab import cli, lab
from dflash_lab.errors import StoreError
from dflash_lab.files import write_json
from dflash_lab.lab import OwnKernelSpecs
from dflash_lab.runs import StageStatus
from dflash_lab.stage_run import stage_lock
from dflash_lab.stages import STAGES

REPO = Path(__file__).resolve().parents[2]
EVIL = "<b>a|b</b> *c* _d_ [e](f) `g`"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A workspace with the repository's notebooks and parameters, and no run."""
    for name in ("notebooks", "params", "docs", "README.md"):
        (tmp_path / name).symlink_to(REPO / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def finish(folder: Path, **figures: float) -> None:
    record = {"schema_version": 1, "stage": folder.name.split("-")[0], "parameters": {}, "inputs": {}}
    record |= {"figures": figures, "seconds": 1.0, "time": "2025-03-01T10:00:00+00:00"}
    write_json(folder / "result.json", record)


def rendered(text: str) -> str:
    return str(mistune.create_markdown(plugins=["table"])(text))


def rows(text: str) -> list[list[str]]:
    """The cells of every row of every table, as a reader sees them."""
    found = re.findall(r"<tr>(.*?)</tr>", rendered(text), re.DOTALL)
    return [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL) for row in found]


def test_every_run_is_listed_with_its_state_and_why_stages_are_not_finished(here, monkeypatch):
    finish(here / "runs" / "demo" / "prepare")
    finish(here / "runs" / "demo" / "acceptance", tau_trained=1.25, tau_untrained=1.0)
    finish(here / "runs" / "mine" / "prepare")
    write_json(here / "runs" / "mine" / "extract" / "failure.json", {"state": "failed", "message": "no"})
    mine = [
        StageStatus("prepare", "prepare", "finished", "a later attempt failed: disk full"),
        StageStatus("dataset_stats", "dataset_stats", "finished", ""),
        StageStatus("extract", "extract", "stale", "token_budget is 1024, it was 512."),
        StageStatus("train_drafter", "train_drafter", "never run", ""),
        StageStatus("acceptance", "acceptance", "never run", ""),
    ]
    monkeypatch.setattr(lab, "run_status", lambda run: mine if Path(run).name == "mine" else [])
    text = lab.start_page()
    listed = {row[0]: row[1:] for row in rows(text)}
    assert listed["<strong>demo</strong>"][:2] == ["finished", "2/2"]
    assert listed["<strong>demo</strong>"][-2:] == ["1.00", "1.25"]
    assert listed["<strong>mine</strong>"][:2] == ["failed", "1/2"]
    points = re.findall(r"<li>(.*?)</li>", rendered(text), re.DOTALL)
    assert [re.sub("<.*?>", "", point) for point in points] == [
        "mine, prepare: finished: a later attempt failed: disk full",
        "mine, extract: stale: token_budget is 1024, it was 512.",
        "mine, train_drafter, acceptance: never run",
    ]
    waiting = next(line for line in text.splitlines() if line.startswith("Parameters that were not run"))
    assert "`paper`" in waiting and "`demo`" not in waiting


def test_the_notebooks_stand_in_order_with_the_readmes_questions_and_all_links_lead_somewhere(here):
    text = lab.write_start_page().read_text()
    assert "None yet" in text and "`make demo`" in text  # how to make the first run
    table = [row for row in rows(text) if len(row) == 3 and row[0].isdigit()]
    assert [re.sub("<.*?>", "", row[1]) for row in table] == list(STAGES)
    tour = re.findall(r"^\| `(\w+)` \| (.*?) \|", (REPO / "README.md").read_text(), re.MULTILINE)
    assert {re.sub("<.*?>", "", row[1]): row[2] for row in table} == dict(
        pair for pair in tour if pair[0] in STAGES
    )
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) >= 8
    for link in links:
        assert (here / "runs" / link).exists(), link


def test_text_of_runs_stays_text(here, monkeypatch):
    finish(here / "runs" / EVIL.replace("/", "") / "prepare")
    status = StageStatus("extract", "extract", "failed", f"{EVIL}\n# more")
    monkeypatch.setattr(lab, "run_status", lambda run: [status])
    html = rendered(lab.start_page())
    assert "<b>" not in html and "<h1>more" not in html and "<em>c" not in html and 'href="f"' not in html
    assert "&lt;b&gt;a|b&lt;/b&gt; *c* _d_ [e](f) `g` # more" in html


def test_a_run_that_cannot_be_judged_is_named_and_the_others_are_listed(here, monkeypatch):
    for name in ("good", "odd"):
        finish(here / "runs" / name / "prepare")

    def judged(run):
        if Path(run).name == "odd":
            raise StoreError("no parameters of that name")
        return []

    monkeypatch.setattr(lab, "run_status", judged)
    text = lab.start_page()
    assert "- **odd**: no parameters of that name" in text and "**good**" in text


FAKE_LAB = """
import json, os, sys, time
settings = [path for path in os.environ["JUPYTER_CONFIG_PATH"].split(os.pathsep)]
told = {"words": sys.argv[1:], "settings": settings, "spins": os.environ.get("GOMP_SPINCOUNT")}
open("told.json.new", "w").write(json.dumps(told))
os.rename("told.json.new", "told.json")
if "--end=7" in sys.argv:
    sys.exit(7)
time.sleep(60)
"""


def test_python3_in_lab_is_the_interpreter_that_lab_runs_in(tmp_path, monkeypatch):
    """Whatever the user once installed under that name; other kernels stay theirs."""
    for name in ("python3", "other"):
        (tmp_path / "kernels" / name).mkdir(parents=True)
        spec = {"argv": ["/gone/bin/python", "{connection_file}"], "display_name": name, "language": "python"}
        (tmp_path / "kernels" / name / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    specs = OwnKernelSpecs()
    found = {name: told["spec"]["argv"][0] for name, told in specs.get_all_specs().items()}
    assert found["python3"] == sys.executable and found["other"] == "/gone/bin/python"
    assert KernelSpecManager().get_kernel_spec("python3").argv[0] == "/gone/bin/python"


@pytest.fixture
def fake(here, monkeypatch):
    """A JupyterLab that only says what it was told, and a shell in a folder below the workspace."""
    (here / "fake" / "jupyterlab").mkdir(parents=True)
    (here / "fake" / "jupyterlab" / "__init__.py").touch()
    (here / "fake" / "jupyterlab" / "__main__.py").write_text(FAKE_LAB)
    (here / "below").mkdir()
    monkeypatch.chdir(here / "below")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here / "fake"), str(REPO)]))


def test_lab_listens_on_this_machine_keeps_its_token_and_opens_the_page(fake, here, monkeypatch):
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "/mine")
    assert cli.main(["lab", "--port", "9", "--no-browser", "--end=7"]) == 7
    told = json.loads((here / "told.json").read_text())
    words = told["words"]
    assert "--ip=127.0.0.1" in words and "--port=9" in words and f"--ServerApp.root_dir={here}" in words
    assert "--LabApp.default_url=/lab/tree/runs/start.md" in words
    assert words[-2:] == ["--no-browser", "--end=7"]
    assert not [word for word in words if "token" in word.lower() or "password" in word.lower()]
    (specs,) = (word.split("=")[1] for word in words if "kernel_spec_manager_class" in word)
    assert issubclass(import_item(specs), KernelSpecManager)
    assert ("--allow-root" in words) == (os.geteuid() == 0)
    assert (here / "runs" / "start.md").exists()
    assert told["settings"][1:] == ["/mine"]  # a person's own settings folders stay, and win
    overrides = Path(told["settings"][0]) / "labconfig" / "default_setting_overrides.json"
    viewers = json.loads(overrides.read_text())["@jupyterlab/docmanager-extension:plugin"]
    assert viewers == {"defaultViewers": {"markdown": "Markdown Preview"}}
    assert told["spins"] == "1000"


def test_the_page_follows_the_runs_while_lab_runs_and_sigterm_ends_both(fake, here, monkeypatch):
    monkeypatch.setattr(lab, "LOOK_S", 0.1)
    process = os.fork()
    if process == 0:
        with contextlib.suppress(BaseException):
            os._exit(cli.main(["lab"]))
        os._exit(99)
    page = here / "runs" / "start.md"

    def until(what: str) -> None:
        deadline = time.monotonic() + 60
        while not (page.exists() and re.search(what, page.read_text())):
            assert time.monotonic() < deadline, f"{what}\n{page.read_text()}"
            time.sleep(0.05)

    try:
        until("None yet")
        with stage_lock(here / "runs" / "demo" / "prepare"):
            until(r"\*\*demo\*\* \| running")
        until(r"\*\*demo\*\* \| killed")  # the lock is free, and no word was left
        finish(here / "runs" / "demo" / "prepare")
        until(r"\*\*demo\*\* \| finished")
        shutil.rmtree(here / "runs" / "demo")
        until("None yet")
        (child,) = psutil.Process(process).children()
    finally:
        os.kill(process, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) not in (0, 99)
    assert not child.is_running()
