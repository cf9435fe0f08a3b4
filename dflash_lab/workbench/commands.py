"""What each `dflash-lab` command does. Heavy modules are imported inside the functions that need them."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
from pathlib import Path

from dflash_lab.errors import InputError
from dflash_lab.stages import PURPOSES, STAGES, params_class

COMMANDS = (
    "stages",
    "new",
    "run",
    "status",
    "runs",
    "report",
    "verify",
    "merge",
    "export",
    "import",
    "completion",
    "lab",
    *STAGES,
)


def stage(options: argparse.Namespace, extra: list[str]) -> int:
    """Run one stage's notebook."""
    from dflash_lab.workbench.launch import log_to_stderr, run_notebook, stops_with_words

    with log_to_stderr(), stops_with_words():
        return run_notebook(options.command, _given(options), extra)


def run(options: argparse.Namespace, extra: list[str]) -> int:
    """Run all stages of a run."""
    from dflash_lab.workbench.launch import log_to_stderr, stops_with_words
    from dflash_lab.workbench.pipeline import run_all

    with log_to_stderr(), stops_with_words():
        return run_all(_given(options), extra, stale=options.stale)


def new(options: argparse.Namespace, extra: list[str]) -> int:
    """Make the parameters of a run, and say what to type next."""
    from dflash_lab.workbench.kernel import enter_workspace
    from dflash_lab.workbench.named_runs import new_run

    typed_in = Path.cwd()
    enter_workspace()
    target, conversations = (_from_here(given, typed_in) for given in (options.target, options.input))
    folder = new_run(options.name, source=options.source, target=target, input=conversations)
    print(f"{folder}: made from {options.source}")
    about = (folder / "common.yaml").read_text(encoding="utf-8") if (folder / "common.yaml").exists() else ""
    for line in itertools.takewhile(lambda line: line.startswith("#"), about.splitlines()):
        print(f"  {line.removeprefix('#').strip()}")  # whose sizes these are
    for line in _open_ends(folder):
        print(f"  still to be set: {line}")
    hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", options.input)
    if options.input and not Path(options.input).exists() and not hub_id:
        print(f"  not there yet: {options.input}")
    print(f"Next: dflash-lab run {options.name}")
    print(f'or in a notebook: run = "{options.name}" in its first cell')
    return 0


def _from_here(given: str, typed_in: Path) -> str:
    """Return a path typed in another folder as it is from here; what is no path there (a hub id) as it is."""
    there = typed_in / given
    moved = given and typed_in != Path.cwd() and not Path(given).is_absolute() and there.exists()
    return os.path.relpath(there) if moved else given


def _open_ends(folder: Path) -> list[str]:
    """Return the lines that a new run's owner has to set: marked, and as they came."""
    return [
        f"{path}:{number}: {line.strip()}"
        for path in sorted(folder.glob("*.yaml"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if "# <--" in line
    ]


def status(options: argparse.Namespace, extra: list[str]) -> int:
    """Show each stage of a run: finished, out of date and why, failed, never run."""
    from dflash_lab.workbench.kernel import enter_workspace
    from dflash_lab.workbench.status import run_status

    enter_workspace()
    rows = run_status(options.run)
    width = max(len(row.folder) for row in rows)
    for row in rows:
        print(f"{row.folder:<{width}}  {row.state}{f': {row.why}' if row.why else ''}")
    return 0


def stages(options: argparse.Namespace, extra: list[str]) -> int:
    """List the stages, each with its purpose."""
    width = max(map(len, STAGES))
    for name, purpose in PURPOSES.items():
        print(f"{name:<{width}}  {purpose}")
    return 0


def runs(options: argparse.Namespace, extra: list[str]) -> int:
    """List runs, or compare the given ones."""
    import polars as pl

    from dflash_lab.workbench.kernel import enter_workspace
    from dflash_lab.workbench.runs import compare_closing, compare_parameters, overview

    typed_in = Path.cwd()
    enter_workspace()
    with pl.Config(
        tbl_rows=-1,
        tbl_cols=-1,
        fmt_str_lengths=60,
        tbl_hide_dataframe_shape=True,
        tbl_hide_column_data_types=True,
        tbl_width_chars=200,
        float_precision=2,
    ):
        if options.compare:
            folders = [_run_folder(name, typed_in) for name in options.compare]
            print("What was measured:", compare_closing(folders), sep="\n")
            print("Parameters that differ:", compare_parameters(folders), sep="\n")
        else:
            print(overview(Path(_from_here(options.root, typed_in))))
    return 0


def report(options: argparse.Namespace, extra: list[str]) -> int:
    """Write a run's report and the index beside all runs."""
    from dflash_lab.workbench.kernel import enter_workspace
    from dflash_lab.workbench.report import write_index, write_report

    typed_in = Path.cwd()
    enter_workspace()
    folder = _run_folder(options.run, typed_in)
    print(write_report(folder))
    print(write_index(folder.resolve().parent))
    return 0


def _run_folder(given: str, typed_in: Path) -> Path:
    """Return a run's folder by its path, as typed in that folder, or its name."""
    path = Path(_from_here(given, typed_in))
    return path if path.is_dir() or len(path.parts) > 1 else Path("runs") / given


def verify(options: argparse.Namespace, extra: list[str]) -> int:
    """Check a feature store; 1 when something in it is not what its manifest says."""
    from dflash_lab.extraction.checks import verify as verify_store
    from dflash_lab.extraction.store import open_store

    folder = Path(options.store)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such store. A run's store is runs/<run>/store.")
    faults = verify_store(folder)
    for fault in faults:
        print(f"{fault.file}: {fault.what}")
    if faults:
        print(f"{folder}: {len(faults)} faults")
        if any(fault.part for fault in faults):
            print("extract again with -p recheck True: exactly the samples of damaged parts are redone")
        return 1
    store = open_store(folder)
    print(f"{folder}: whole, {store.num_samples:,} samples of {store.num_tokens:,} tokens read again")
    return 0


def lab(options: argparse.Namespace, extra: list[str]) -> int:
    """Run JupyterLab, opening on the first page."""
    from dflash_lab.workbench.start_page import run_lab

    return run_lab(options.port, extra)


def completion(options: argparse.Namespace, extra: list[str]) -> int:
    """Print the completion script of a shell."""
    from dflash_lab.workbench.completion import script

    sys.stdout.write(script(options.shell, COMMANDS))
    return 0


def parameter_help(stage_name: str) -> str:
    """Return a stage's parameters as help text: name, type, unit, default, range, meaning."""
    from dflash_lab.workbench.param_words import fields_table

    lines, group = ["parameters (-p NAME VALUE):"], ""
    for row in fields_table(params_class(stage_name)):
        if row.group != group:
            group = row.group
            lines.append(f" {group}:")
        kind = f"{row.type} {row.unit}".strip()
        allowed = f", {row.allowed}" if row.allowed else ""
        lines.append(f"  {row.name} ({kind}; default {json.dumps(row.default)}{allowed})")
        lines.append(f"      {row.help}")
    return "\n".join(lines)


def _given(options: argparse.Namespace):  # type: ignore[no-untyped-def]
    from dflash_lab.workbench.param_files import Given

    return Given(
        run=options.run,
        base64=options.base64,
        files=options.files,
        yaml=options.yaml,
        typed=[tuple(pair) for pair in options.typed],
        raw=[tuple(pair) for pair in options.raw],
    )
