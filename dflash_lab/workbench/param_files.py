"""Parameters as a person gives them on a command line: `-p name value` and papermill's other options, in its
order of precedence.

The same options go to papermill afterwards; reading them here first means that a mistyped name or an
impossible value stops before a kernel starts, with the file and line.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_lab.errors import InputError
from dflash_lab.stages import STAGES, params_class
from dflash_lab.workbench.coerce import number_or_text
from dflash_lab.workbench.named_runs import COMMON
from dflash_lab.workbench.params import check_names, field_types
from dflash_lab.workbench.run_params import S, resolve
from dflash_lab.workbench.strict_yaml import parse_parameters, read_parameter_file


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
            yield "-b", parse_parameters(_decode(text), "-b", flags)
        for path in self.files:
            yield path, read_parameter_file(path, flags)
        for text in self.yaml:
            yield "-y", parse_parameters(text, "-y", flags)
        for name, text in self.typed:
            yield "-p", {name: _typed(text)}
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
