"""Parameters as a person gives them: YAML files, `-p name value`, in papermill's order of precedence.

The same options go to papermill afterwards; reading them here first means that a mistyped name or an
impossible value stops before a kernel starts, with the file and line.
"""

from __future__ import annotations

import base64
import dataclasses
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dflash_lab.errors import InputError
from dflash_lab.workbench import strict_yaml
from dflash_lab.workbench.coerce import number_or_text
from dflash_lab.workbench.params import P, check_names, field_types
from dflash_lab.workbench.registry import params_class

LARGEST_BYTES = 1 << 20
COMMON = "common.yaml"


def read_parameter_file(path: Path | str, flags: Collection[str] = ()) -> dict[str, Any]:
    """Read a flat YAML file of parameters; an `InputError` names the file and line of a fault. `flags` are
    the names whose value may be spelt yes, no, on or off.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot read parameters ({error.strerror}).") from error
    if len(data) > LARGEST_BYTES:
        raise InputError(f"{path}: {len(data)} bytes are no parameter file.")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise InputError(f"{path}:{line}: not UTF-8 text. Save it as UTF-8.") from None
    return parse_parameters(text, str(path), flags)


def parse_parameters(text: str, where: str, flags: Collection[str] = ()) -> dict[str, Any]:
    """Parse YAML text that maps parameter names to values; `where` names its source in errors."""
    try:
        values = strict_yaml.load(text, flags)
    except strict_yaml.Ambiguous as error:
        raise InputError(f"{where}:{error.line}: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise InputError(f"{where}:{line}: not valid YAML: {error.problem}.") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InputError(
            f"{where}:{line}: character {error.character:#06x} does not belong in text. Remove it."
        ) from None
    except RecursionError:
        raise InputError(f"{where}: nested too deeply for YAML. Parameters are `name: value`.") from None
    except yaml.YAMLError as error:
        raise InputError(f"{where}: not valid YAML: {error}.") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InputError(f"{where}: expected lines of `name: value`, got a {type(values).__name__}.")
    return values


@dataclass(frozen=True)
class Given:
    """What the command line gave: papermill's five kinds of parameters, and the folder of a named run."""

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
            yield "-b", parse_parameters(_decode(text), "-b", flags)
        for path in self.all_files(stage):
            yield path, read_parameter_file(path, flags)
        for text in self.yaml:
            yield "-y", parse_parameters(text, "-y", flags)
        for name, text in self.typed:
            yield "-p", {name: _typed(text)}
        for name, text in self.raw:
            yield "-r", {name: text}

    def all_files(self, stage: str) -> list[str]:
        """Return the parameter files in order: the run folder's two, then those given with -f."""
        return [*run_files(self.run, stage), *self.files] if self.run else list(self.files)

    def arguments(self, stage: str) -> list[str]:
        """Return papermill's options for these parameters."""
        words: list[str] = []
        for option, values in (("-b", self.base64), ("-f", self.all_files(stage)), ("-y", self.yaml)):
            for value in values:
                words += [option, value]
        for option, pairs in (("-p", self.typed), ("-r", self.raw)):
            for name, text in pairs:
                words += [option, name, text]
        return words


def run_files(folder: str, stage: str) -> list[str]:
    """Return `common.yaml` and `<stage>.yaml` of a run's parameter folder, those that exist."""
    if not Path(folder).is_dir():
        raise InputError(f"{folder}: no such folder of parameters. The repository has params/demo.")
    paths = [Path(folder) / COMMON, Path(folder) / f"{stage}.yaml"]
    found = [str(path) for path in paths if path.exists()]
    if not found:
        raise InputError(f"{folder}: has neither {COMMON} nor {stage}.yaml.")
    return found


def read_given(cls: type[P], given: Given) -> P:
    """Return the checked parameters that `given` means for a stage."""
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for where, values in given.sources(cls.stage):
        check_names(cls, values, where=where)
        merged.update(values)
        origins |= dict.fromkeys(values, where)
    try:
        return cls(**{"interactive": False, **merged})
    except InputError as error:
        told = re.match(rf"{cls.stage}: (\w+)[=:]", str(error))  # how `Params` begins what it says of a field
        if told is None or told[1] not in origins:
            raise
        raise InputError(f"{error} ({_place(origins[told[1]], told[1])})") from None


def _place(where: str, name: str) -> str:
    """Return where a parameter was given: an option, or a file with the line."""
    if where.startswith("-"):
        return f"given with {where}"
    lines = Path(where).read_text(encoding="utf-8-sig").splitlines()
    number = next((n for n, line in enumerate(lines, 1) if re.match(rf"[\"']?{name}[\"']?\s*:", line)), 1)
    return f"{where}:{number}"


def known_names(cls: type[P]) -> set[str]:
    """Return the names of a stage's parameters."""
    return {item.name for item in dataclasses.fields(cls)}


def _decode(text: str) -> str:
    try:
        return base64.b64decode(text, validate=True).decode("utf-8")
    except ValueError:
        raise InputError("-b: not base64 of UTF-8 text.") from None


def _typed(text: str) -> Any:
    """Read a `-p` value as papermill does: True, False, None, a number, else the text."""
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    return number_or_text(text)
