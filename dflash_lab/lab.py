"""JupyterLab as `dflash-lab lab` starts it: its first page, and a `python3` kernel that is this interpreter.

The page is Markdown, so that no kernel is needed to read it; while Lab runs, it is kept as the runs are.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ipykernel.kernelspec import RESOURCES, get_kernel_dict
from jupyter_client.kernelspec import NATIVE_KERNEL_NAME, KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from traitlets import default

from dflash_lab.errors import InputError, LabError
from dflash_lab.files import make_folder, write_bytes
from dflash_lab.progress import handling
from dflash_lab.results import FAILURE, RESULT
from dflash_lab.runs import PLAN, overview, run_folders, run_status
from dflash_lab.secrets import redact
from dflash_lab.stage_run import LOCK, is_held
from dflash_lab.stages import STAGES
from dflash_lab.workspace import enter_workspace

PAGE = Path("runs") / "start.md"
LOOK_S = 2.0  # how often the runs are looked at while Lab runs
# Defaults of Lab's settings here: Markdown opens rendered, no news are asked for. A person's settings win.
SETTINGS = Path(__file__).parent / "jupyter"
QUESTIONS = {
    "prepare": "What will the drafter learn from?",
    "dataset_stats": "How long are the samples, and what does batching waste?",
    "extract": "What does the target think while it reads them?",
    "memory_sweep": "What fits into memory, predicted and measured?",
    "train_drafter": "Does the drafter learn?",
    "acceptance": "How many tokens per round does the target accept?",
}

Marks = list[tuple[Path, int, int, bool]]  # file, time, bytes, is its lock held

logger = logging.getLogger(__name__)


class OwnKernelSpecs(KernelSpecManager):
    """Jupyter's kernels, of which `python3` is the interpreter that starts it.

    Jupyter takes a `python3` that somebody once installed for the user (`~/.local/share/jupyter/kernels`)
    before that of the environment it runs in: a notebook would run in another environment, or in one that is
    gone.
    """

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        """Return the kernel of that name; raises `NoSuchKernel` for one that is not installed."""
        if kernel_name.lower() == NATIVE_KERNEL_NAME:
            return KernelSpec(resource_dir=RESOURCES, **get_kernel_dict())
        return super().get_kernel_spec(kernel_name)


class OwnKernelManager(AsyncKernelManager):
    """What nbclient starts a notebook's kernel with, over `OwnKernelSpecs`."""

    @default("kernel_spec_manager")
    def _own_specs(self) -> KernelSpecManager:
        return OwnKernelSpecs(data_dir=self.data_dir)


def run_lab(port: int, extra: Sequence[str]) -> int:
    """Write the first page, run JupyterLab on it until it ends, and return its exit code.

    It listens on this machine only and asks for its token, unless `extra`, options of its own, say otherwise.
    """
    root = enter_workspace()
    if not (root / "notebooks").is_dir():
        raise InputError(f"{root}: no notebooks/ here or above. Start in the repository.")
    seen = _kept_current(None)
    words = [sys.executable, "-m", "jupyterlab", "--ip=127.0.0.1", f"--port={port}"]
    words += [f"--ServerApp.root_dir={root}", f"--LabApp.default_url=/lab/tree/{PAGE.as_posix()}"]
    words.append("--ServerApp.kernel_spec_manager_class=dflash_lab.lab.OwnKernelSpecs")
    if os.geteuid() == 0:  # containers run as root, which Jupyter refuses unless told
        words.append("--allow-root")
    paths = [str(SETTINGS), *filter(None, [os.environ.get("JUPYTER_CONFIG_PATH")])]
    environment = {**os.environ, "JUPYTER_CONFIG_PATH": os.pathsep.join(paths)}
    with subprocess.Popen([*words, *extra], env=environment) as lab:
        # Ctrl-C reaches Lab by itself, which may ask about it; SIGTERM is passed on.
        leave_to_lab = {signal.SIGINT: lambda *_: None, signal.SIGTERM: lambda *_: lab.terminate()}
        with handling(leave_to_lab):
            while True:
                try:
                    return lab.wait(LOOK_S)
                except subprocess.TimeoutExpired:
                    seen = _kept_current(seen)


def _kept_current(seen: Marks | None) -> Marks | None:
    """Write the page if the runs are not as they were `seen`; what cannot be read or written is said, and Lab
    goes on.
    """
    marks = seen
    try:
        marks = _marks()
        if marks != seen:
            write_start_page()
    except (LabError, OSError) as error:
        logger.error("%s could not be brought up to date: %s", PAGE, redact(str(error)))
    return marks


def _marks() -> Marks:
    """Return what changes when a stage begins, ends or is killed, and when a run's parameters change."""
    names = (RESULT, FAILURE, LOCK)
    paths = [*Path("params").glob("*/*.yaml"), *PAGE.parent.glob(f"*/{PLAN}")]
    paths += [path for name in names for path in PAGE.parent.glob(f"*/*/{name}")]
    found: Marks = []
    for path in sorted(paths):
        with contextlib.suppress(FileNotFoundError):  # went away since it was listed
            held = path.name == LOCK and is_held(path.parent)
            found.append((path, path.stat().st_mtime_ns, path.stat().st_size, held))
    return found


def write_start_page() -> Path:
    """Write `runs/start.md` in the workspace, which is the working directory, and return its path."""
    make_folder(PAGE.parent)
    text = redact(start_page()).encode()
    if not PAGE.is_file() or PAGE.read_bytes() != text:
        write_bytes(PAGE, text)
    return PAGE


def start_page() -> str:
    """Return the page as Markdown, its links relative to `runs/`."""
    parts = [_HEAD, _runs(), _notebooks(), _own_run(), _MORE]
    return "\n\n".join(part.strip() for part in parts) + "\n"


_HEAD = """
# DFlash Lab

Six notebooks take you from conversations to a drafter with a measured acceptance length (tau): how many
tokens a round the target takes. Here are the runs, the notebooks in order, and how to make a run of your own.
"""

_MORE = """
## More

[README](../README.md) · [all pages of the documentation](../docs/README.md) · `dflash-lab --help`

*This page is brought up to date when a stage begins or ends, or parameters change: reload it to see that.*
"""


def _runs() -> str:
    root = PAGE.parent
    folders = run_folders(root)
    lines = ["## The runs that are here", ""]
    if folders:
        lines += ["| run | state | stages | last change (UTC) | samples | tau untrained | tau trained |"]
        lines += ["|---|---|---|---|---:|---:|---:|"]
        lines += [_run_row(row) for row in overview(root).iter_rows(named=True)]
        lines += ["", *(line for folder in folders for line in _open_stages(folder)), ""]
        lines.append("[The run browser](../notebooks/runs.ipynb) compares them: their curves, what differs.")
    else:
        lines.append("None yet. `make demo` makes `runs/demo`: all six stages on a small real model.")
    begun = {folder.name for folder in folders}
    others = sorted(path.parent.name for path in Path("params").glob("*/common.yaml"))
    if waiting := [f"`{name}`" for name in others if name not in begun]:
        lines += ["", f"Parameters that were not run here: {', '.join(waiting)}."]
    return "\n".join(lines)


def _run_row(row: dict[str, Any]) -> str:
    last = f"{row['last']:%Y-%m-%d %H:%M}" if row["last"] else ""
    samples = "" if row["samples"] is None else f"{row['samples']:,}"
    taus = ["" if row[name] is None else f"{row[name]:.2f}" for name in ("tau_untrained", "tau_trained")]
    cells = [f"**{_plain(row['run'])}**", row["state"], row["finished"], last, samples, *taus]
    return f"| {' | '.join(cells)} |"


def _open_stages(run: Path) -> list[str]:
    """Return a line for the stages of a run of which there is more to say than that they are finished, those
    of one reason together.
    """
    try:
        stages = [stage for stage in run_status(run) if stage.state != "finished" or stage.why]
    except LabError as error:
        return [f"- **{_plain(run.name)}**: {_plain(error)}"]
    reasons: dict[str, list[str]] = {}
    for stage in stages:
        reason = f"{stage.state}: {stage.why}" if stage.why else stage.state
        reasons.setdefault(reason, []).append(stage.folder)
    return [
        f"- **{_plain(run.name)}**, {_plain(', '.join(found))}: {_plain(reason)}"
        for reason, found in reasons.items()
    ]


def _notebooks() -> str:
    lines = ["## The six notebooks, in order", "", "| | notebook | question |", "|---:|---|---|"]
    for number, stage in enumerate(STAGES, 1):
        lines.append(f"| {number} | [{stage}](../notebooks/{stage}.ipynb) | {QUESTIONS[stage]} |")
    return "\n".join([*lines, "", _HOW])


_HOW = """
The first cell of each names its run, `run = "demo"` as it comes. *Run > Run All Cells* shows what that run
found, within seconds: a finished stage is loaded, not computed again. Write another run's name there to see
that run, or to go on with it.
""".strip()


def _own_run() -> str:
    activate = Path(sys.prefix) / "bin" / "activate"
    lines = [f"source {shlex.quote(os.path.relpath(activate))}"] if activate.exists() else []
    lines += [
        "# own-cpu is a first try on a CPU; on a GPU: --from own",
        "dflash-lab new mine --from own-cpu --target path/to/model --input mine.jsonl",
        "dflash-lab run mine",
    ]
    block = "\n".join(lines)
    return f"""
## A run of your own

All it takes: conversations in a `.jsonl`, and a model (a local folder or hub id). In a terminal
(*File > New > Terminal*):

```sh
{block}
```

`new` makes `params/mine/`, whose values you may edit before `run`. To see what came of it, open a notebook
and set `run = "mine"`.
"""


def _plain(value: object) -> str:
    """Return text in one line in which Markdown finds no markup."""
    text = " ".join(str(value).split())
    return "".join(f"\\{sign}" if sign in "\\`*_[]<>|#~$&" else sign for sign in text)
