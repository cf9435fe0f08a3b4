"""The words of a `papermill` command about one of the six notebooks, with what was left out filled in.

`papermill extract.ipynb -p shard 0` says all that a person means: the notebook is that of this workspace, the
run is the one that the parameters name, and the executed notebook belongs into the run's folder. papermill by
itself would ask for that path, print the notebook into a pipe, or take `extract.ipynb` for the output if its
own input is a pipe. What is not about one of the six notebooks is none of our business and stays as typed.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_lab.workbench.kernel import workspace
from dflash_lab.workbench.registry import STAGES, params_class

if TYPE_CHECKING:
    from dflash_lab.workbench.param_files import Given

# papermill's options, each under all its names, and how many words follow it.
OPTIONS: dict[tuple[str, ...], int] = {
    ("--parameters", "-p"): 2,
    ("--parameters_raw", "-r"): 2,
    ("--parameters_file", "-f"): 1,
    ("--parameters_yaml", "-y"): 1,
    ("--parameters_base64", "-b"): 1,
    ("--inject-input-path",): 0,
    ("--inject-output-path",): 0,
    ("--inject-paths",): 0,
    ("--engine",): 1,
    ("--request-save-on-cell-execute", "--no-request-save-on-cell-execute"): 0,
    ("--autosave-cell-every",): 1,
    ("--prepare-only", "--prepare-execute"): 0,
    ("--kernel", "-k"): 1,
    ("--language", "-l"): 1,
    ("--cwd",): 1,
    ("--progress-bar", "--no-progress-bar"): 0,
    ("--log-output", "--no-log-output"): 0,
    ("--stdout-file",): 1,
    ("--stderr-file",): 1,
    ("--log-level",): 1,
    ("--start-timeout", "--start_timeout"): 1,
    ("--execution-timeout",): 1,
    ("--report-mode", "--no-report-mode"): 0,
    ("--help", "-h"): 0,
    ("--help-notebook",): 0,
    ("--version",): 0,
}
_COUNTS = {name: count for names, count in OPTIONS.items() for name in names}
_ANSWERED = {"--help", "-h", "--help-notebook", "--version"}  # papermill answers these and runs nothing
_FILE = ("-f", "--parameters_file")
_PATH, _END = "", "--"  # what stands in an option's place: for a positional, and where options end

Items = list[tuple[str, list[str]]]  # options, each with the words that belong to it, in the order typed


@dataclass(frozen=True)
class Filled:
    """The words that papermill is to read; if that was filled in, where the executed notebook goes, and where
    it stands until it has ended well. `ours`: a notebook of ours is run, under a run's name.
    """

    words: list[str]
    output: Path | None = None
    attempt: Path | None = None
    ours: bool = False


def filled_in(words: Sequence[str], cwd: Path) -> Filled:
    """Return papermill's words, typed in `cwd`, with the notebook, its output path and the run filled in.

    Words about any other notebook, and words that papermill refuses or only answers, come back as they are.
    The parameters are checked as the launcher does it: raises an `InputError` for those that the stage
    refuses, and for a stage that is not ready to run. Makes no folder and no file.
    """
    items = _items(words) or []
    paths = [values[0] for name, values in items if name == _PATH]
    found = _notebook(paths[0], cwd) if len(paths) in (1, 2) else None
    if found is None or any(name in _ANSWERED for name, _ in items):
        return Filled([*words])
    stage, source = found
    root = workspace(cwd / _last(items, "--cwd"))
    items = [(name, _nearest(values, cwd, root) if name in _FILE else values) for name, values in items]
    executed = _last_switch(items, "--prepare-only") != "--prepare-only"
    readable = all(map(_is_here, _values(items, "-f")))
    if len(paths) == 1 and not (executed and readable):  # papermill asks where it is to go
        return Filled([*words])
    place = [name for name, _ in items].index(_PATH)
    if len(paths) == 2 and not (cwd / paths[0]).exists():
        items[place] = (_PATH, [literal(source)])
    if not readable:
        return Filled(_words(items))
    with contextlib.chdir(root):  # where the notebook will run
        run, output, attempt = _checked(stage, _given(items, cwd), executed)
    if len(paths) == 2:
        return Filled(_words([*run, *items]), ours=True)
    items[place] = (_PATH, [literal(source), literal(output)])
    return Filled(_words([*run, *items]), output, attempt, ours=True)


def literal(path: Path) -> str:
    """Return a path that survives papermill's `{name}` formatting."""
    return str(path).replace("{", "{{").replace("}", "}}")


def _items(words: Sequence[str]) -> Items | None:
    """Split words into options and positionals as papermill's parser does; None for words that it refuses."""
    rest = deque(words)
    found: Items = []
    while rest:
        word = rest.popleft()
        if word == _END:
            return [*found, (_END, []), *((_PATH, [path]) for path in rest)]
        if not word.startswith("-") or word == "-":
            found.append((_PATH, [word]))
            continue
        if word.startswith("--"):
            name, glued, value = word.partition("=")
        else:
            name, glued, value = word[:2], word[2:], word[2:]
        if glued:
            rest.appendleft(value)
        count = _COUNTS.get(name)
        if count is None or len(rest) < count or (glued and count == 0):
            return None
        found.append((name, [rest.popleft() for _ in range(count)]))
    return found


def _words(items: Items) -> list[str]:
    return [word for name, values in items for word in (values if name == _PATH else [name, *values])]


def _values(items: Items, name: str) -> list[list[str]]:
    """Return what was given for an option, under whichever of its names."""
    names = next(names for names in OPTIONS if name in names)
    return [values for given, values in items if given in names]


def _last(items: Items, name: str) -> str:
    values = _values(items, name)
    return values[-1][0] if values else ""


def _last_switch(items: Items, name: str) -> str:
    """Return which of a switch's two names was given last, empty if none was."""
    names = next(names for names in OPTIONS if name in names)
    return next((given for given, _ in reversed(items) if given in names), "")


def _notebook(word: str, cwd: Path) -> tuple[str, Path] | None:
    """Return the stage and path of the notebook of ours that a word typed in `cwd` means; None for others.

    A path that exists is that file and no other. One that does not may be typed as if from the workspace or
    from its `notebooks/`.
    """
    given = Path(word)
    if given.suffix != ".ipynb" or given.stem not in STAGES:
        return None
    inside = Path("notebooks") / given.name
    ours = workspace(cwd) / inside
    if (cwd / given).exists():
        checkout = Path(__file__).resolve().parents[2]
        roots = [path for path in (ours, checkout / inside) if path.exists() and path.samefile(cwd / given)]
    else:
        roots = [ours] if ours.exists() and given in (inside, Path(given.name)) else []
    # Another project may have a notebooks/prepare.ipynb beside a params/ of its own.
    return next(((given.stem, path) for path in roots if b"dflash_lab" in path.read_bytes()), None)


def _nearest(values: list[str], cwd: Path, root: Path) -> list[str]:
    """Return a parameter file as typed; one that is only in the workspace by its path there."""
    (path,) = values
    return [str(root / path)] if not (cwd / path).exists() and (root / path).exists() else [path]


def _is_here(values: list[str]) -> bool:
    """Say whether a parameter file is one on this machine, which papermill may also read from elsewhere."""
    (path,) = values
    return path != "-" and "://" not in path and not path.startswith("{")  # the last is JSON itself


def _given(items: Items, cwd: Path) -> Given:
    from dflash_lab.workbench.param_files import Given

    return Given(
        base64=[text for (text,) in _values(items, "-b")],
        files=[str(cwd / path) for (path,) in _values(items, "-f")],
        yaml=[text for (text,) in _values(items, "-y")],
        typed=[(name, text) for name, text in _values(items, "-p")],
        raw=[(name, text) for name, text in _values(items, "-r")],
    )


def _checked(stage: str, given: Given, executed: bool) -> tuple[Items, Path, Path]:
    """Check the parameters of a stage, and if it is `executed` that it is ready to run. Return the option
    that names its run to the notebook, which is told the values of `-f` but not in which folder they lie; and
    where the executed notebook goes and where it stands until then.
    """
    from dflash_lab.workbench.launch import attempt_notebook, check_before, output_notebook
    from dflash_lab.workbench.param_files import read_given

    params = read_given(params_class(stage), given)
    if executed:
        check_before(params)
    told = any(values.get("run") is not None for _, values in given.sources(stage))
    by_files: Items = [("-r", ["run", params.run])] if given.named_run(stage) and not told else []
    return by_files, output_notebook(params).absolute(), attempt_notebook(params).absolute()
