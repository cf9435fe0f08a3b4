"""`dflash-lab`: the notebooks and their runs from a shell."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from dflash_lab import __version__, commands
from dflash_lab.errors import LabError, near
from dflash_lab.stages import PURPOSES, STAGES

# ----------------------------------------------------------------------------------------------------
# `dflash-lab`: the notebooks from a shell.
#
# Only argparse and light modules are imported until a command runs, so that help and completion answer at
# once.


_STAGE_HELP = """\
Runs notebooks/{stage}.ipynb through papermill; the executed notebook goes into the run folder. Options of
papermill's own (--execution-timeout, --report-mode, --no-log-output ...) are passed through.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 0, 1 for an error a person can mend, 2 for a wrong line, or the stage's code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    if words and not words[0].startswith("-") and words[0] not in commands.COMMANDS:
        parser.error(
            f"unknown command {words[0]!r}{near(words[0], commands.COMMANDS)}; see dflash-lab --help"
        )
    try:
        options, extra = parser.parse_known_args(words)  # prints help, which may meet a closed pipe
        if extra and not options.passes_through:
            parser.error(f"unknown argument {extra[0]!r}")
        return options.function(options, extra)
    except LabError as error:
        from dflash_lab.secrets import redact

        print(f"dflash-lab: {redact(str(error))}", file=sys.stderr)
        return 1
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # `dflash-lab runs | head`: the reader has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        else:
            from dflash_lab.errors import file_error

            print(f"dflash-lab: {file_error(error, 'a file') or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("dflash-lab: interrupted; the same command goes on from what is finished", file=sys.stderr)
        return 1


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; each command sets `function` and `passes_through` (may papermill options follow)."""
    parser = argparse.ArgumentParser(
        prog="dflash-lab", description="Train and measure DFlash drafters.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"dflash-lab {__version__}")
    commands_parser = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(
        name: str, summary: str, function, passes_through: bool = False, **more
    ) -> argparse.ArgumentParser:  # type: ignore[no-untyped-def]
        command = commands_parser.add_parser(
            name, help=summary, description=more.pop("description", summary), allow_abbrev=False, **more
        )
        command.set_defaults(function=function, passes_through=passes_through)
        return command

    add("stages", "list the stages in order, with what each answers", commands.stages)
    new = add("new", "make a run of your own: params/NAME, from another run's parameters", commands.new)
    new.add_argument("name", help="of the new run; its folder will be runs/NAME")
    new.add_argument(
        "--from", dest="source", default="own", metavar="RUN", help="whose parameters (default: %(default)s)"
    )
    new.add_argument("--target", default="", help="its target: a local folder or a hub id")
    new.add_argument("--input", default="", metavar="FILE", help="its conversations")
    run = add("run", "all stages of a run in order, skipping the finished", commands.run, passes_through=True)
    run.add_argument("run", help="its name, such as demo: params/demo has a <stage>.yaml for each stage")
    run.add_argument("--stale", action="store_true", help="do again what is finished and out of date")
    _add_parameters(run, with_run=False)
    status = add("status", "each stage of a run: finished, out of date and why, failed", commands.status)
    status.add_argument("run", nargs="?", default="demo", help="its name (default: %(default)s)")
    runs = add("runs", "list runs with state, duration and main figures", commands.runs)
    runs.add_argument(
        "root", nargs="?", default="runs", help="folder that holds the runs (default: %(default)s)"
    )
    runs.add_argument(
        "--compare", nargs="+", metavar="RUN", default=[], help="show figures and parameters side by side"
    )
    report = add("report", "write a run's report and the index of runs", commands.report)
    report.add_argument("run", help="a run's name or folder, such as demo")
    verify = add("verify", "check every part of a feature store against its manifest", commands.verify)
    verify.add_argument("store", help="the store's folder, such as runs/demo/store")
    _add_exchange(add)
    lab = add(
        "lab",
        "JupyterLab on this machine, opening on a page of runs and notebooks; its own options follow",
        commands.lab,
        passes_through=True,
    )
    lab.add_argument("--port", type=int, default=8888, metavar="N", help="(default: %(default)s)")
    completion = add(
        "completion", 'print a completion script: eval "$(dflash-lab completion bash)"', commands.completion
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    for stage in STAGES:
        command = add(
            stage,
            PURPOSES[stage],
            commands.stage,
            True,
            description=_STAGE_HELP.format(stage=stage),
            add_help=False,
        )
        command.add_argument("-h", "--help", action=_StageHelp, nargs=0, help="show the stage's parameters")
        _add_parameters(command, with_run=True)
    return parser


def _add_exchange(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands that pass samples and drafters on."""
    merge = add("merge", "join samples files of several runs, each sample once", commands.merge)
    merge.add_argument("output", help="the file to write, such as runs/all/samples.parquet")
    merge.add_argument("inputs", nargs="+", metavar="input", help="samples.parquet of a run; one or more")
    merge.add_argument(
        "--heldout-fraction",
        type=float,
        default=-1.0,
        metavar="SHARE",
        help="share held out, by content hash (default: that of the files, if they agree)",
    )
    export = add("export", "write a drafter in the speculators layout", commands.export_drafter)
    export.add_argument("drafter", help="a drafter's folder, such as runs/demo/drafter")
    export.add_argument("output", help="the folder to write")
    export.add_argument("--target", required=True, help="hub id or path by which its users load the target")
    export.add_argument(
        "--architecture", default="", help="the target's class, such as Qwen3ForCausalLM, for the config"
    )
    bring = add("import", "read a drafter of the speculators layout", commands.import_drafter)
    bring.add_argument("folder", help="a folder in the speculators layout")
    bring.add_argument("output", help="the folder to write, in the layout that the stages read")
    bring.add_argument(
        "--layers",
        type=int,
        default=0,
        metavar="N",
        help="decoder layers of the target (default: as its config says)",
    )


def _add_parameters(command: argparse.ArgumentParser, *, with_run: bool) -> None:
    if with_run:
        command.add_argument(
            "--run", default="", metavar="RUN", help="the run: params/RUN has its parameters (default: demo)"
        )
    command.add_argument(
        "-p",
        "--parameters",
        dest="typed",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="set one parameter",
    )
    command.add_argument(
        "-r",
        "--parameters_raw",
        dest="raw",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "TEXT"),
        help="set one parameter, as text",
    )
    command.add_argument(
        "-f",
        "--parameters_file",
        dest="files",
        action="append",
        default=[],
        metavar="FILE",
        help="YAML file of parameters",
    )
    command.add_argument(
        "-y",
        "--parameters_yaml",
        dest="yaml",
        action="append",
        default=[],
        metavar="YAML",
        help="parameters as YAML text",
    )
    command.add_argument(
        "-b",
        "--parameters_base64",
        dest="base64",
        action="append",
        default=[],
        metavar="BASE64",
        help="the same in base64",
    )


class _StageHelp(argparse.Action):
    """Print the stage's options, then its parameters from its typed class."""

    def __call__(self, parser, namespace, values, option_string=None):  # type: ignore[no-untyped-def]
        stage = parser.prog.split()[-1]
        print(parser.format_help())
        print(commands.parameter_help(stage))
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
