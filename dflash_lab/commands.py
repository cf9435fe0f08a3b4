"""What each `dflash-lab` command does; heavy modules are imported inside the functions that need them."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_lab.errors import InputError
from dflash_lab.stages import PURPOSES, STAGES, params_class

# ----------------------------------------------------------------------------------------------------
# Shell completion: commands, parameter names after `-p` and `-r`, files elsewhere.
#
# The script holds the words themselves, so that completing never starts Python.


def script(shell: str, commands: Sequence[str]) -> str:
    """Return the completion script for bash, zsh or fish."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](" ".join(commands))


def _names() -> dict[str, str]:
    return {stage: " ".join(sorted(params_class(stage).model_fields)) for stage in STAGES}


def _bash(commands: str) -> str:
    cases = "\n".join(f"        {stage}) names='{names}' ;;" for stage, names in _names().items())
    return f"""\
_dflash_lab() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" names=''
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    if [ "$COMP_CWORD" = 1 ]; then
        COMPREPLY=($(compgen -W '{commands}' -- "$word"))
    elif [ "$before" = -p ] || [ "$before" = -r ]; then
        COMPREPLY=($(compgen -W "$names" -- "$word"))
    elif [[ "$word" == -* ]]; then
        COMPREPLY=($(compgen -W '--run -p -r -f -y -b --help' -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}}
complete -o filenames -F _dflash_lab dflash-lab
"""


def _zsh(commands: str) -> str:
    return "autoload -U +X bashcompinit && bashcompinit\n" + _bash(commands)


def _fish(commands: str) -> str:
    lines = [f"complete -c dflash-lab -n __fish_use_subcommand -f -a '{commands}'"]
    for stage, names in _names().items():
        lines.append(f"complete -c dflash-lab -n '__fish_seen_subcommand_from {stage}' -s p -x -a '{names}'")
    return "\n".join(lines) + "\n"


# ----------------------------------------------------------------------------------------------------
# Commands that pass work on: drafters in another layout, samples of several runs in one file.
#
# None of them writes over what is there.


def export_drafter(options: argparse.Namespace, extra: list[str]) -> int:
    """Write a drafter in the speculators layout."""
    from dflash_lab.drafter.checkpoint import load_checkpoint
    from dflash_lab.drafter.formats import export_speculators

    if not options.target.strip():
        raise InputError("--target is empty: give the hub id or path by which its users load the target.")
    goal = _new_folder(options.output)
    drafter = load_checkpoint(options.drafter)
    export_speculators(drafter, goal, target=options.target, target_architecture=options.architecture)
    print(f"{goal}: speculators layout, {drafter.config.parameter_count:,} parameters")
    return 0


def import_drafter(options: argparse.Namespace, extra: list[str]) -> int:
    """Write a drafter of the speculators layout as the checkpoint that every stage reads."""
    from dflash_lab.drafter.checkpoint import save_checkpoint
    from dflash_lab.drafter.formats import import_speculators

    goal = _new_folder(options.output)
    drafter = import_speculators(options.folder, num_target_layers=options.layers)
    save_checkpoint(goal, drafter)
    print(f"{goal}: z-lab layout, {drafter.config.parameter_count:,} parameters")
    return 0


def merge(options: argparse.Namespace, extra: list[str]) -> int:
    """Join samples files, each sample once."""
    from dflash_lab.data.samples import merge_samples, provenance_path, read_provenance

    goal = Path(options.output)
    if goal.suffix != ".parquet":  # what made the samples lies beside them, as .json
        raise InputError(f"{goal}: samples files end in .parquet. Give such a name.")
    _refuse_taken(goal, provenance_path(goal))
    made = {path: read_provenance(path) for path in options.inputs}
    fraction = options.heldout_fraction if options.heldout_fraction != -1 else _same_fraction(made)
    report = merge_samples(options.inputs, goal, heldout_fraction=fraction)
    print(
        f"{goal}: {report.stored:,} samples, {report.heldout:,} of them held out "
        f"({report.duplicates:,} of {report.given:,} were there twice)"
    )
    return 0


def _same_fraction(made: dict[str, dict[str, Any]]) -> float:
    """Return the held-out share that all files were made with."""
    shares = {path: one.get("heldout_fraction") for path, one in made.items()}
    found = set(shares.values())
    if len(found) != 1 or not isinstance(fraction := found.pop(), int | float):
        listed = ", ".join(f"{path}: {share}" for path, share in shares.items())
        raise InputError(f"held-out shares differ ({listed}): say which one with --heldout-fraction.")
    return float(fraction)


def _new_folder(name: str) -> Path:
    """Return the path of a folder to write; `InputError` when something is there."""
    path = Path(name)
    if not (path.is_dir() and not any(path.iterdir())):
        _refuse_taken(path)
    return path


def _refuse_taken(*paths: Path) -> None:
    taken = [path for path in paths if path.exists()]
    if taken:
        moves = " && ".join(shlex.join(["mv", str(path), f"{path}.old"]) for path in taken)
        raise InputError(
            f"{taken[0]}: exists already, whole or left by a command that was killed. Give another name, or "
            f"move it away: {moves}"
        )


# ----------------------------------------------------------------------------------------------------
# What each `dflash-lab` command does. Heavy modules are imported inside the functions that need them.


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
    from dflash_lab.launch import log_to_stderr, run_notebook, stops_with_words

    with log_to_stderr(), stops_with_words():
        return run_notebook(options.command, _given(options), extra)


def run(options: argparse.Namespace, extra: list[str]) -> int:
    """Run all stages of a run."""
    from dflash_lab.launch import log_to_stderr, run_all, stops_with_words

    with log_to_stderr(), stops_with_words():
        return run_all(_given(options), extra, stale=options.stale)


def new(options: argparse.Namespace, extra: list[str]) -> int:
    """Make the parameters of a run, and say what to type next."""
    from dflash_lab.named_runs import new_run
    from dflash_lab.workspace import enter_workspace

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
    from dflash_lab.runs import run_status
    from dflash_lab.workspace import enter_workspace

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

    from dflash_lab.runs import compare_closing, compare_parameters, overview
    from dflash_lab.workspace import enter_workspace

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
    from dflash_lab.report import write_index, write_report
    from dflash_lab.workspace import enter_workspace

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
    from dflash_lab.start_page import run_lab

    return run_lab(options.port, extra)


def completion(options: argparse.Namespace, extra: list[str]) -> int:
    """Print the completion script of a shell."""

    sys.stdout.write(script(options.shell, COMMANDS))
    return 0


def parameter_help(stage_name: str) -> str:
    """Return a stage's parameters as help text: name, type, unit, default, range, meaning."""
    from dflash_lab.params import fields_table

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
    from dflash_lab.run_params import Given

    return Given(
        run=options.run,
        base64=options.base64,
        files=options.files,
        yaml=options.yaml,
        typed=[tuple(pair) for pair in options.typed],
        raw=[tuple(pair) for pair in options.raw],
    )
