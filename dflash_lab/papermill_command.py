"""`papermill extract.ipynb -p shard 0` says all that a person means, of one of the six notebooks: which
notebook, of which run, and that what is executed belongs into the run's folder. What is about any other
notebook stays as typed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_lab import launch
from dflash_lab.errors import InputError, LabError
from dflash_lab.files import make_folder
from dflash_lab.papermill_engine import ENGINE
from dflash_lab.run_params import Given, read_given
from dflash_lab.secrets import redact
from dflash_lab.stages import params_class
from dflash_lab.workspace import stage_notebook, workspace


def main(words: Sequence[str]) -> None:
    """Be papermill's command for `words`; or end with one sentence on stderr, exit code 1."""
    from papermill.cli import papermill

    own = papermill.callback
    papermill.callback = lambda **options: own(**filled_in(options, Path.cwd()))
    try:
        papermill.main(args=[*words], prog_name="papermill")
    except (LabError, OSError) as error:
        sys.exit(f"papermill: {redact(str(error))}")


def filled_in(options: dict[str, Any], cwd: Path) -> dict[str, Any]:
    """Return what papermill's command was given, typed in `cwd`, with the notebook, its output path, the run
    and our engine filled in; what is about another notebook, or only asks for help, as it is.

    The parameters are checked as the launcher does it: raises an `InputError` for those that the stage
    refuses, for a stage that is not ready to run, and where only the person can say where the notebook goes.
    """
    typed, output = options["notebook_path"] or "", options["output_path"]
    found = stage_notebook(typed, cwd)
    if found is None or options["help_notebook"]:
        return options
    stage, source = found
    root = workspace(cwd / (options["cwd"] or ""))
    files, here = options["parameters_file"], all(map(_is_here, options["parameters_file"]))
    if not output and (options["prepare_only"] or not here):
        what = "--prepare-only" if options["prepare_only"] else "a file of parameters that is not here"
        raise InputError(
            f"{stage}: with {what}, say where the notebook is to go: papermill {typed} out.ipynb ..."
        )
    files = [_nearest(path, cwd, root) if _is_here(path) else path for path in files]
    filled = {**options, "engine": options["engine"] or ENGINE, "parameters_file": tuple(files)}
    if not output or not (cwd / typed).exists():
        filled["notebook_path"] = launch.literal(source)
    if not here:
        return filled
    given = Given(
        base64=[*options["parameters_base64"]],
        files=[str(cwd / path) for path in files],
        yaml=[*options["parameters_yaml"]],
        typed=[*options["parameters"]],
        raw=[*options["parameters_raw"]],
    )
    with contextlib.chdir(root):  # where the notebook will run
        params = read_given(params_class(stage), given)
        if not options["prepare_only"]:
            launch.check_before(params)
        goal, attempt = launch.output_notebook(params).absolute(), launch.attempt_notebook(params).absolute()
        # Of `-f` the notebook is told the values, but not in which run's folder they lie.
        if given.named_run(stage) and all(values.get("run") is None for _, values in given.sources(stage)):
            filled["parameters_raw"] = (("run", params.run), *options["parameters_raw"])
    if not output:
        filled["output_path"] = launch.literal(goal)
        make_folder(goal.parent)
        launch.save_whole(goal, attempt)
        until = f"; until it ends well, to {attempt.name}" if attempt != goal else ""
        sys.stderr.write(f"papermill: the executed notebook goes to {goal}{until}\n")
    return filled


def _nearest(path: str, cwd: Path, root: Path) -> str:
    """Return a parameter file as typed; one that is only in the workspace by its path there."""
    return str(root / path) if not (cwd / path).exists() and (root / path).exists() else path


def _is_here(path: str) -> bool:
    """Say whether a parameter file is one on this machine, which papermill may also read from elsewhere."""
    return path != "-" and "://" not in path and not path.startswith("{")  # the last is JSON itself


if __name__ == "__main__":
    main(sys.argv[1:])
