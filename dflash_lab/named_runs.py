"""Runs by their name: `params/<run>/` has its parameters, `runs/<run>/` is its folder and says whose it is.

Two runs never share a folder.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from dflash_lab.errors import InputError, naming, near
from dflash_lab.files import as_json, read_json, write_bytes, write_json
from dflash_lab.params import RUN_NAME, StageParams
from dflash_lab.stages import STAGES
from dflash_lab.strict_yaml import parameter_text

COMMON = "common.yaml"
PARAMS, RUNS = Path("params"), Path("runs")
RUN_FILE = "run.json"  # in a run's folder: whose it is


@dataclass(frozen=True)
class NamedRun:
    """A run as its name finds it: the parameter folder, None where it has none."""

    name: str
    parameters: Path | None


def find_run(given: str, run_dir: str = "") -> NamedRun:
    """Find a run by its name, or by the path of its parameter folder or of its run folder.

    Raises an `InputError` with the near match for a name that has neither.
    """
    path = Path(given)
    if len(path.parts) > 1:  # a path: of parameters, or of the run itself
        if _has_parameters(path):
            ours = path.resolve() == (PARAMS / path.name).resolve()
            return NamedRun(path.name, PARAMS / path.name if ours else path)
        path = Path(os.path.abspath(path))
        if path.parent.resolve() != RUNS.resolve():  # the run itself may be a link to another disk
            raise InputError(
                f"{given}: no such folder of parameters (it would hold {COMMON}).{_known(path.name)}"
            )
    name = path.name
    if not RUN_NAME.fullmatch(name):
        raise InputError(f"run={given!r}: a run's name is letters, digits, - . + and _, such as mine.")
    if _has_parameters(PARAMS / name):
        return NamedRun(name, PARAMS / name)
    folder = named_folder(name, run_dir)
    if not folder.is_dir():
        raise InputError(
            f"no run {name!r}: neither {PARAMS / name} nor {folder} is there.{_known(name)} "
            f"A new one: dflash-lab new {name}"
        )
    owner = _owner(folder)  # of a parameter folder elsewhere, which the run itself remembers
    return NamedRun(name, _shown(owner) if owner is not None and _has_parameters(owner) else None)


def named_folder(name: str, run_dir: str) -> Path:
    """Return the folder of the run of that name."""
    return Path(os.path.expanduser(run_dir)) if run_dir else RUNS / name


def known_runs() -> list[str]:
    """Return the names of runs that have parameters or a folder."""
    with_parameters = {path.name for path in PARAMS.glob("*") if _has_parameters(path)}
    marks = (RUN_FILE, "*/result.json", "*/failure.json")
    begun = {path.name for path in RUNS.glob("[!.]*") if any(any(path.glob(mark)) for mark in marks)}
    return sorted(with_parameters | begun)


def _known(name: str) -> str:
    known = known_runs()
    if not known:
        return f" {Path.cwd()} has no {PARAMS}/ with runs: start in the repository."
    return f"{near(name, known)} Runs: {', '.join(known)}."


def _has_parameters(folder: Path) -> bool:
    with naming(folder):
        return any((folder / name).is_file() for name in (COMMON, *(f"{stage}.yaml" for stage in STAGES)))


def check_owner(params: StageParams) -> None:
    """Raise an `InputError` when the run's folder belongs to another folder of parameters, which is still
    there.
    """
    owner = _owner(params.run_folder)
    mine = _parameters_of(params)
    if owner is None or mine is None or owner.resolve() == mine.resolve() or not owner.is_dir():
        return
    raise InputError(
        f"{params.run_folder} holds the run of {_shown(owner)}, and these parameters are those of {mine}. "
        f"Two runs never share a folder: {_apart(params)}"
    )


def claim(params: StageParams) -> None:
    """Write down in the run's folder which parameters it belongs to. The folder is made."""
    mine = _parameters_of(params)
    if mine is None:
        return
    record = {
        "run": params.run_name,
        "parameters": os.path.relpath(mine.resolve(), params.run_folder.resolve()),
    }
    path = params.run_folder / RUN_FILE
    if not path.is_file() or path.read_bytes() != as_json(record):
        write_json(path, record)


def _parameters_of(params: StageParams) -> Path | None:
    """Return the parameter folder of parameters that `resolve` made, None without one."""
    if not params.origins:
        return None
    return find_run(params.run, params.run_dir).parameters


def _owner(folder: Path) -> Path | None:
    path = folder / RUN_FILE
    if not path.is_file():
        return None
    record = read_json(path)
    told = record.get("parameters") if isinstance(record, dict) else None
    if not isinstance(told, str):
        raise InputError(f"{path}: does not say whose run this is. Remove the file to take the folder over.")
    return Path(os.path.normpath(folder.resolve() / told))


def _shown(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _apart(params: StageParams) -> str:
    if params.run_dir:
        where = params.origins.get("run_dir", "")
        return f"give another run_dir ({where}), or leave it out for runs/{params.run_name}."
    return f"rename one of the two folders, or give run_dir. To take it over, remove {RUN_FILE} there."


def new_run(name: str, *, source: str = "own", target: str = "", input: str = "") -> Path:
    """Make `params/<name>` from the parameters of another run, with its target and input set; return the
    folder.

    Comments and order of the files stay. Raises an `InputError` when the name is taken or the source has
    none.
    """
    if not RUN_NAME.fullmatch(name):
        raise InputError(f"{name!r}: a run's name is letters, digits, - . + and _, such as mine.")
    goal = PARAMS / name
    taken = next((path for path in (goal, RUNS / name) if path.exists()), None)
    if taken is not None:
        raise InputError(f"{taken} is there already. Give another name, or remove it.")
    found = find_run(source)
    if found.parameters is None:
        raise InputError(f"{source}: this run has no parameter folder to start from.")
    texts = {  # without their run_dir: the folder of a run is that of its name
        path.name: re.sub(r"(?m)^run_dir:.*\n?", "", parameter_text(path))
        for path in sorted(found.parameters.glob("*.yaml"))
    }
    for value, key, file in ((target, "target", COMMON), (input, "input", "prepare.yaml")):
        if value:
            texts[file] = _with_line(texts.get(file, ""), key, value)
    for file, text in texts.items():
        write_bytes(goal / file, text.encode())
    return goal


def _with_line(text: str, key: str, value: str) -> str:
    """Return YAML text whose line `key:` has a value; its comment stays, without the mark of a line to be
    set.
    """
    line = f"{key}: {json.dumps(value, ensure_ascii=False)}"  # in quotes, which YAML reads as JSON does
    changed, count = re.subn(
        rf"(?m)^{key}:[^#\n]*?([ \t]*#.*)?$",
        lambda m: line + (m[1] or "").replace("# <-- ", "# "),
        text,
        count=1,
    )
    return changed if count else f"{text.rstrip()}\n{line}\n".lstrip()
