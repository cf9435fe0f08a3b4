"""`dflash-lab`: the notebooks and their runs from a shell.

Heavy modules are imported by the commands that need them, so that help and completion answer at once.
"""

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
from typing import TYPE_CHECKING, Any

from dflash_lab import __version__
from dflash_lab.errors import InputError, LabError, file_error, near
from dflash_lab.secrets import redact
from dflash_lab.stages import PURPOSES, STAGES, params_class

if TYPE_CHECKING:
    from dflash_lab.run_params import Given

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


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 0, 1 for an error a person can mend, 2 for a wrong line, or the stage's code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        parser.error(f"unknown command {words[0]!r}{near(words[0], COMMANDS)}; see dflash-lab --help")
    try:
        options, extra = parser.parse_known_args(words)  # prints help, which may meet a closed pipe
        if extra and not options.passes_through:
            parser.error(f"unknown argument {extra[0]!r}")
        return options.function(options, extra)
    except LabError as error:
        print(f"dflash-lab: {redact(str(error))}", file=sys.stderr)
    except BrokenPipeError:  # `dflash-lab runs | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"dflash-lab: {file_error(error, 'a file') or error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("dflash-lab: interrupted; the same command goes on from what is finished", file=sys.stderr)
    return 1


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; each command sets `function` and `passes_through` (may options of the program that
    it starts follow).
    """
    parser = argparse.ArgumentParser(
        prog="dflash-lab", description="Train and measure DFlash drafters.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"dflash-lab {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(
        name: str, summary: str, function: Any, passes_through: bool = False, **more: Any
    ) -> argparse.ArgumentParser:
        more = {"description": summary, **more}
        command = commands.add_parser(name, help=summary, allow_abbrev=False, **more)
        command.set_defaults(function=function, passes_through=passes_through)
        return command

    add("stages", "list the stages in order, with what each answers", stages)
    command = add("new", "make a run of your own: params/NAME, from another run's parameters", new)
    command.add_argument("name", help="of the new run; its folder will be runs/NAME")
    command.add_argument(
        "--from", dest="source", default="own", metavar="RUN", help="whose parameters (default: %(default)s)"
    )
    command.add_argument("--target", default="", help="its target: a local folder or a hub id")
    command.add_argument("--input", default="", metavar="FILE", help="its conversations")

    command = add("run", "all stages of a run in order, skipping the finished", run, passes_through=True)
    command.add_argument("run", help="its name, such as demo: params/demo has a <stage>.yaml for each stage")
    command.add_argument("--stale", action="store_true", help="do again what is finished and out of date")
    _add_parameters(command)
    command = add("status", "each stage of a run: finished, out of date and why, failed", status)
    command.add_argument("run", nargs="?", default="demo", help="its name (default: %(default)s)")
    command = add("runs", "list runs with state, duration and main figures", runs)
    command.add_argument(
        "root", nargs="?", default="runs", help="folder that holds the runs (default: %(default)s)"
    )
    command.add_argument(
        "--compare", nargs="+", metavar="RUN", default=[], help="show figures and parameters side by side"
    )
    command = add("report", "write a run's report and the index of runs", report)
    command.add_argument("run", help="a run's name or folder, such as demo")
    command = add("verify", "check every part of a feature store against its manifest", verify)
    command.add_argument("store", help="the store's folder, such as runs/demo/store")

    command = add("merge", "join samples files of several runs, each sample once", merge)
    command.add_argument("output", help="the file to write, such as runs/all/samples.parquet")
    command.add_argument("inputs", nargs="+", metavar="input", help="samples.parquet of a run; one or more")
    command.add_argument(
        "--heldout-fraction",
        type=float,
        default=-1.0,
        metavar="SHARE",
        help="share held out, by content hash (default: that of the files, if they agree)",
    )
    command = add("export", "write a drafter in the speculators layout", export_drafter)
    command.add_argument("drafter", help="a drafter's folder, such as runs/demo/drafter")
    command.add_argument("output", help="the folder to write")
    command.add_argument("--target", required=True, help="hub id or path by which its users load the target")
    command.add_argument(
        "--architecture", default="", help="the target's class, such as Qwen3ForCausalLM, for the config"
    )
    command = add("import", "read a drafter of the speculators layout", import_drafter)
    command.add_argument("folder", help="a folder in the speculators layout")
    command.add_argument("output", help="the folder to write, in the layout that the stages read")
    command.add_argument(
        "--layers",
        type=int,
        default=0,
        metavar="N",
        help="decoder layers of the target (default: as its config says)",
    )

    command = add(
        "lab",
        "JupyterLab on this machine, opening on a page of runs and notebooks; its own options follow",
        lab,
        passes_through=True,
    )
    command.add_argument("--port", type=int, default=8888, metavar="N", help="(default: %(default)s)")
    command = add("completion", 'print a completion script: eval "$(dflash-lab completion bash)"', completion)
    command.add_argument("shell", choices=("bash", "zsh", "fish"))

    for name, purpose in PURPOSES.items():
        about = (
            f"Runs notebooks/{name}.ipynb through papermill; the executed notebook goes into the run folder. "
            "Options of papermill's own (--execution-timeout, --report-mode, --no-log-output ...) are passed "
            "through."
        )
        command = add(name, purpose, stage, passes_through=True, description=about, add_help=False)
        command.add_argument("-h", "--help", action=_StageHelp, nargs=0, help="show the stage's parameters")
        command.add_argument(
            "--run", default="", metavar="RUN", help="the run: params/RUN has its parameters (default: demo)"
        )
        _add_parameters(command)
    return parser


def _add_parameters(command: argparse.ArgumentParser) -> None:
    """Add papermill's five kinds of parameters, by papermill's own names."""
    for short, long, name, words, meaning in (
        ("-p", "--parameters", "typed", ("NAME", "VALUE"), "set one parameter"),
        ("-r", "--parameters_raw", "raw", ("NAME", "TEXT"), "set one parameter, as text"),
        ("-f", "--parameters_file", "files", "FILE", "YAML file of parameters"),
        ("-y", "--parameters_yaml", "yaml", "YAML", "parameters as YAML text"),
        ("-b", "--parameters_base64", "base64", "BASE64", "the same in base64"),
    ):
        count = 2 if isinstance(words, tuple) else None
        command.add_argument(
            short, long, dest=name, nargs=count, action="append", default=[], metavar=words, help=meaning
        )


class _StageHelp(argparse.Action):
    """Print the stage's options, then its parameters from its typed class."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(parser.format_help())
        print(parameter_help(parser.prog.split()[-1]))
        parser.exit()


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


# --- Stages and runs


def stages(options: argparse.Namespace, extra: list[str]) -> int:
    """List the stages, each with its purpose."""
    width = max(map(len, STAGES))
    for name, purpose in PURPOSES.items():
        print(f"{name:<{width}}  {purpose}")
    return 0


def stage(options: argparse.Namespace, extra: list[str]) -> int:
    """Run one stage's notebook."""
    from dflash_lab.launch import log_to_stderr, run_notebook, stops_with_words

    with log_to_stderr(), stops_with_words():
        return run_notebook(options.command, given(options), extra)


def run(options: argparse.Namespace, extra: list[str]) -> int:
    """Run all stages of a run."""
    from dflash_lab.launch import log_to_stderr, run_all, stops_with_words

    with log_to_stderr(), stops_with_words():
        return run_all(given(options), extra, stale=options.stale)


def given(options: argparse.Namespace) -> Given:
    """Return what a line of `run` or of a stage gives: the run by name, and its parameters."""
    from dflash_lab.run_params import Given

    return Given(
        run=options.run,
        base64=options.base64,
        files=options.files,
        yaml=options.yaml,
        typed=[tuple(pair) for pair in options.typed],
        raw=[tuple(pair) for pair in options.raw],
    )


def new(options: argparse.Namespace, extra: list[str]) -> int:
    """Make the parameters of a run, and say what to type next."""
    from dflash_lab.run_params import new_run
    from dflash_lab.workspace import enter_workspace

    typed_in = Path.cwd()
    enter_workspace()
    target, conversations = (_from_here(path, typed_in) for path in (options.target, options.input))
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
    folder = Path(options.store)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such store. A run's store is runs/<run>/store.")
    from dflash_lab.extraction.checks import verify as verify_store
    from dflash_lab.extraction.store import open_store

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


# What is passed on: samples of several runs in one file, drafters in another layout. Nothing is overwritten.


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


# --- JupyterLab and the shell's completion


def lab(options: argparse.Namespace, extra: list[str]) -> int:
    """Run JupyterLab, opening on the first page."""
    from dflash_lab.lab import run_lab

    return run_lab(options.port, extra)


def completion(options: argparse.Namespace, extra: list[str]) -> int:
    """Print a shell's completion script: commands, parameter names after `-p` and `-r`, files elsewhere. It
    holds the words themselves, so that completing never starts Python.
    """
    names = {name: " ".join(sorted(params_class(name).model_fields)) for name in STAGES}
    if options.shell == "fish":
        print(f"complete -c dflash-lab -n __fish_use_subcommand -f -a '{' '.join(COMMANDS)}'")
        for name, words in names.items():
            print(f"complete -c dflash-lab -n '__fish_seen_subcommand_from {name}' -s p -x -a '{words}'")
        return 0
    if options.shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    cases = "\n".join(f"        {name}) names='{words}' ;;" for name, words in names.items())
    print(_BASH.replace("CASES", cases).replace("COMMANDS", " ".join(COMMANDS)))
    return 0


_BASH = """\
_dflash_lab() {
    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" names=''
    case "${COMP_WORDS[1]}" in
CASES
    esac
    if [ "$COMP_CWORD" = 1 ]; then
        COMPREPLY=($(compgen -W 'COMMANDS' -- "$word"))
    elif [ "$before" = -p ] || [ "$before" = -r ]; then
        COMPREPLY=($(compgen -W "$names" -- "$word"))
    elif [[ "$word" == -* ]]; then
        COMPREPLY=($(compgen -W '--run -p -r -f -y -b --help' -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}
complete -o filenames -F _dflash_lab dflash-lab"""


if __name__ == "__main__":
    sys.exit(main())
