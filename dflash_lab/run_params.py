"""A run has a name, and the name owns its parameters: `params/<run>/` has them, `runs/<run>/` is its folder.

Two runs never share a folder. What a person types is preferred to the run's files, and behind both stand the
defaults: `resolve` keeps this order for notebooks, papermill and the command line alike.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dflash_lab.errors import InputError, StoreError, naming, near
from dflash_lab.files import as_json, read_json, write_bytes, write_json
from dflash_lab.params import (
    RUN_NAME,
    Params,
    StageParams,
    WrongParameters,
    check_names,
    coerce,
    defaults,
    field_types,
    number_or_text,
)
from dflash_lab.results import RESULT, of_today, read_result
from dflash_lab.stages import STAGES, params_class
from dflash_lab.strict_yaml import parameter_text, parse_parameters, read_parameter_file
from dflash_lab.workspace import enter_workspace, show_logging_in_kernel, started_by_papermill

COMMON = "common.yaml"
PARAMS, RUNS = Path("params"), Path("runs")
RUN_FILE = "run.json"  # in a run's folder: whose it is
TYPED = "typed in the notebook"

P = TypeVar("P", bound=Params)
S = TypeVar("S", bound=StageParams)
Typed = Mapping[str, tuple[Any, str]]  # name -> value, and where it was given


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
        lacks = f"{PARAMS / name} holds no parameters and {folder} is not there"
        if not (PARAMS / name).is_dir():
            lacks = f"neither {PARAMS / name} nor {folder} is there"
        raise InputError(f"no run {name!r}: {lacks}.{_known(name)} A new one: dflash-lab new {name}")
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


# --- The order: typed, then the run's files, then the defaults


def resolve(cls: type[S], typed: Typed) -> S:
    """Return the parameters of a stage for what was `typed`, and behind it what the run's folder says.

    Values that were typed when the finished result was made hold until other ones are typed, the folder says
    another thing, or the stage is done again (`force`).

    The result knows the origin of each value (`origins`). Nothing is made on disk. Raises an `InputError`
    that says where a wrong value was given, and for a run that does not exist.
    """
    check_names(cls, typed)
    run, origin = typed.get("run", ("", "default"))
    run_dir, _ = typed.get("run_dir", ("", ""))
    named = find_run(str(run) or defaults(cls)["run"], str(run_dir))
    if named.parameters is None:
        owned = _of_result(cls, named_folder(named.name, str(run_dir)), typed)
    else:
        owned = _of_folder(cls, named.parameters)
    values: dict[str, tuple[Any, str]] = {**owned, **typed}
    ours = named.parameters in (None, PARAMS / named.name)
    values["run"] = (named.name if ours else str(named.parameters), origin)
    made = _made(cls, values)
    said = {name: owned[name][0] if name in owned else value for name, value in defaults(cls).items()}
    if not made.force and (then := _typed_then(made, said, typed)):
        values |= then
        made = _made(cls, values)
    over = {
        name: said[name] for name, (value, _) in values.items() if not _same(cls, name, value, said[name])
    }
    plain = {name: _plainly(cls, name, value) for name, value in over.items() if name not in made.passing}
    object.__setattr__(made, "overridden", plain)
    return made


def _made(cls: type[S], values: Typed) -> S:
    """Return parameters that know where each value came from; an `InputError` says it of a wrong one."""
    try:
        made = cls(**{name: value for name, (value, _) in values.items()})
    except WrongParameters as error:
        places = {name: f" ({_place(values[name][1], name)})" for name in error.wrong if name in values}
        told = {name: words + places.get(name, "") for name, words in error.wrong.items()}
        raise WrongParameters(cls.stage, told) from None
    object.__setattr__(made, "origins", {name: where for name, (_, where) in values.items()})
    return made


def _typed_then(made: StageParams, said: Mapping[str, Any], typed: Typed) -> dict[str, tuple[Any, str]]:
    """Return the values that were typed when the stage's finished result was made, so that the run is opened
    as it was made: but for those typed now, and those of which the run's parameters say another thing since.
    """
    cls, path = type(made), made.folder / RESULT
    with contextlib.suppress(StoreError):  # one that cannot be read is told by whoever needs it
        result = read_result(path) if path.exists() else {"parameters": {}}
        values = of_today(cls, result["parameters"])
        overridden = {
            cls.renamed.get(name, name): then for name, then in result.get("overridden", {}).items()
        }
        return {
            name: (values[name], "typed when it was made")
            for name, then in overridden.items()
            if name in said and name not in typed and _same(cls, name, then, said[name])
        }
    return {}


def _plainly(cls: type[StageParams], name: str, value: Any) -> Any:
    """Return a value as its parameter takes it, or as it is where it does not."""
    try:
        return coerce(value, field_types(cls)[name])
    except ValueError:
        return value


def _same(cls: type[StageParams], name: str, one: Any, other: Any) -> bool:
    return bool(_plainly(cls, name, one) == _plainly(cls, name, other))


def _of_folder(cls: type[StageParams], folder: Path) -> dict[str, tuple[Any, str]]:
    """Return what a parameter folder says: its common file, and preferred to that the stage's own."""
    flags = {name for name, kind in field_types(cls).items() if kind is bool}
    found: dict[str, tuple[Any, str]] = {}
    for path in (folder / COMMON, folder / f"{cls.stage}.yaml"):
        if os.path.lexists(path):  # a link that leads nowhere is told of, not passed over
            values = read_parameter_file(path, flags)
            check_names(cls, values, where=str(path))
            if "run" in values:
                raise InputError(
                    f"{path}: a run's name is that of its folder, {folder.name}. Remove the line."
                )
            found |= {name: (value, str(path)) for name, value in values.items()}
    return found


def _of_result(cls: type[StageParams], folder: Path, typed: Typed) -> dict[str, tuple[Any, str]]:
    """Return what the stage's finished result in a run's folder was made with, of the shard that was typed;
    without one, what another stage's tells of the parameters that all stages have.
    """
    own = sorted(folder.glob(f"{cls.stage}*/{RESULT}"))
    found: dict[str, tuple[Any, str]] = {}
    for path in [*own, *sorted({*folder.glob(f"*/{RESULT}")} - {*own})]:
        if found and path not in own:
            break
        result = read_result(path)
        values = of_today(cls, result["parameters"])
        shard = typed.get("shard", (values.get("shard"), ""))[0]
        same = result["stage"] == cls.stage and shard == values.get("shard")
        names = field_types(cls if same else StageParams).keys() - {*StageParams.passing}
        found = {name: (value, str(path)) for name, value in values.items() if name in names}
        if same:
            break
    return found


def _place(where: str, name: str) -> str:
    """Return where a parameter was given: an option, or a file with the line."""
    path = Path(where)
    if not path.is_file():
        return f"given with {where}" if where.startswith("-") else where
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    number = next((n for n, line in enumerate(lines, 1) if re.match(rf"\s*[\"']?{name}[\"']?\s*:", line)), 1)
    return f"{where}:{number}"


# --- The notebook


def from_notebook(cls: type[P], namespace: Mapping[str, Any]) -> P:
    """Make parameters from a notebook's `globals()`: what its cell or papermill sets is typed, what is None
    comes from the run. An injected name that `cls` lacks is an `InputError`.

    Also makes the folder above `notebooks/` the working directory, where papermill starts a kernel anyway and
    JupyterLab does not, so that relative paths mean the same in both; and turns `interactive` off when
    papermill runs the notebook, unless it was asked for by name.
    """
    injected = _injected(namespace)
    check_names(cls, dict.fromkeys(injected))
    known = list(field_types(cls))
    missing = [name for name in known if name not in namespace]
    if missing:
        old = {old: None for old, new in cls.renamed.items() if new in missing and old in namespace}
        check_names(cls, old, where="the parameters cell")
        lost = ", ".join(missing)
        raise InputError(
            f"{cls.stage}: the parameters cell does not set {lost}. Run it, or add the line back."
        )
    enter_workspace()
    show_logging_in_kernel()
    values = {name: namespace[name] for name in known if namespace[name] is not None}
    typed = {
        name: (value, "given to papermill" if name in injected else TYPED) for name, value in values.items()
    }
    if started_by_papermill():
        typed.setdefault("interactive", (False, "headless"))
    if issubclass(cls, StageParams):
        return resolve(cls, typed)
    return cls(**{name: value for name, (value, _) in typed.items()})


def _injected(namespace: Mapping[str, Any]) -> list[str]:
    """Return the names assigned by papermill's latest injected cell, which starts with ``# Parameters``."""
    for source in reversed(namespace.get("In", [])):
        if source.lstrip().startswith("# Parameters"):
            body = ast.parse(source).body
            return [
                target.id
                for line in body
                if isinstance(line, ast.Assign)
                for target in line.targets
                if isinstance(target, ast.Name)
            ]
    return []


# --- The command line: `-p name value` and papermill's other options, read before a kernel starts


@dataclass(frozen=True)
class Given:
    """What the command line gave: the run by name, and papermill's five kinds of parameters."""

    run: str = ""
    base64: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    yaml: list[str] = field(default_factory=list)
    typed: list[tuple[str, str]] = field(default_factory=list)
    raw: list[tuple[str, str]] = field(default_factory=list)

    def sources(self, stage: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (where, values), the weakest first."""
        flags = {name for name, kind in field_types(params_class(stage)).items() if kind is bool}
        for text in self.base64:
            try:
                decoded = base64.b64decode(text, validate=True).decode("utf-8")
            except ValueError:
                raise InputError("-b: not base64 of UTF-8 text.") from None
            yield "-b", parse_parameters(decoded, "-b", flags)
        for path in self.files:
            yield path, read_parameter_file(path, flags)
        for text in self.yaml:
            yield "-y", parse_parameters(text, "-y", flags)
        for name, text in self.typed:
            words = {"True": True, "False": False, "None": None}  # as papermill reads them
            yield "-p", {name: words[text] if text in words else number_or_text(text)}
        for name, text in self.raw:
            yield "-r", {name: text}

    def named_run(self, stage: str) -> str:
        """Return the run that this names: by `--run`, among the parameters, or by files that lie in its
        parameter folder; empty when nothing does. `InputError` when it names two.
        """
        told = [str(values["run"]) for _, values in self.sources(stage) if values.get("run") is not None]
        if self.run and told and Path(told[-1]).name != Path(self.run).name:
            raise InputError(f"two runs are named, {self.run} and {told[-1]}: say which.")
        if self.run or told:
            return self.run or told[-1]
        folders = {run_of_file(path) for path in self.files} - {""}
        if len(folders) > 1:
            listed = ", ".join(sorted(folders))
            raise InputError(f"-f names parameters of several runs ({listed}): say which with -p run NAME.")
        return next(iter(folders), "")

    def arguments(self, stage: str) -> list[str]:
        """Return papermill's options for these parameters, the run by name among them."""
        words: list[str] = []
        for option, values in (("-b", self.base64), ("-f", self.files), ("-y", self.yaml)):
            for value in values:
                words += [option, value]
        for option, pairs in (("-p", self.typed), ("-r", self.raw)):
            for name, text in pairs:
                words += [option, name, text]
        if run := self.named_run(stage):
            words += ["-r", "run", run]  # as text: a run may be called 7
        return words


def run_of_file(path: str) -> str:
    """Return the run whose parameter folder a file lies in, as `find_run` takes it; empty for others."""
    given = Path(path)
    if given.name not in (COMMON, *(f"{stage}.yaml" for stage in STAGES)):
        return ""
    return str(given.parent) if given.parent.name else str(given.parent.resolve())


def read_given(cls: type[S], given: Given) -> S:
    """Return the checked parameters that `given` means for a stage: headless, and behind what was given those
    of the run. A last value of None unsets a name, as in the notebook.
    """
    told: dict[str, tuple[Any, str]] = {}
    for where, values in given.sources(cls.stage):
        check_names(cls, values, where=where)
        told |= {name: (value, where) for name, value in values.items()}
    typed = {name: one for name, one in told.items() if one[0] is not None}
    typed.setdefault("interactive", (False, "headless"))
    if run := given.named_run(cls.stage):
        typed["run"] = (run, "given by name")
    return resolve(cls, typed)


# --- Whose a run's folder is, and new runs


def check_owner(params: StageParams) -> None:
    """Raise an `InputError` when the run's folder belongs to another folder of parameters, which is still
    there.
    """
    owner = _owner(params.run_folder)
    mine = _parameters_of(params)
    if owner is None or mine is None or owner.resolve() == mine.resolve() or not owner.is_dir():
        return
    apart = f"rename one of the two folders, or give run_dir. To take it over, remove {RUN_FILE} there."
    if params.run_dir:
        where = params.origins.get("run_dir", "")
        apart = f"give another run_dir ({where}), or leave it out for runs/{params.run_name}."
    raise InputError(
        f"{params.run_folder} holds the run of {_shown(owner)}, and these parameters are those of {mine}. "
        f"Two runs never share a folder: {apart}"
    )


def claim(params: StageParams) -> None:
    """Write down in the run's folder which parameters it belongs to, unless it is another's (`check_owner`).
    The folder is made.
    """
    check_owner(params)
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
