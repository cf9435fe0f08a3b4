"""The typed parameters of a stage: one frozen dataclass a stage, checked when it is made.

The notebook's `parameters` cell repeats the names and defaults, parameter files and the command line override
them, and all three end here, because papermill itself would only warn about `-p shrad 0` and run shard 0.

A stage declares its own fields after the shared ones:

>>> @dataclass(frozen=True, kw_only=True)
... class GreetParams(StageParams):
...     stage: ClassVar[str] = "greet"
...     times: int = param(1, "how often to greet", low=1, high=100)
...     lr: float = param(1e-3, "peak learning rate", low=0.0)
...     tap_ids: list[int] = param([], "layers to tap; empty: the default choice")
...     length: int = param(0, "longest sample; 0: no limit", unit="tokens", low=0)
...     mode: str = param("plain", "tone", choices=("plain", "loud"))
...
...     def check(self) -> None:
...         self.require(self.mode == "plain" or self.times < 10, "times", "a loud one at most 9 times")
>>> GreetParams(lr="1e-4", times=3.0).lr
0.0001
>>> GreetParams(times=0)
Traceback (most recent call last):
    ...
dflash_lab.errors.InputError: greet: times=0: must be between 1 and 100 (how often to greet)
>>> from_mapping(GreetParams, {"tmies": 2})
Traceback (most recent call last):
    ...
dflash_lab.errors.InputError: greet: unknown parameter 'tmies' (did you mean 'times'?). ...

In the notebook: `params = from_notebook(GreetParams, globals())`.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from dflash_lab.errors import InputError, near
from dflash_lab.workbench.coerce import coerce, type_name
from dflash_lab.workbench.kernel import enter_workspace, started_by_papermill
from dflash_lab.workbench.secrets import redact

P = TypeVar("P", bound="Params")


def param(
    default: Any,
    help: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple = (),
) -> Any:
    """Declare a parameter: its default, one line of help, its unit, inclusive range and allowed values.

    For a list the range and the choices hold for each item.
    """
    metadata = {"help": help, "unit": unit, "low": low, "high": high, "choices": tuple(choices)}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Params:
    """Parameters checked when they are made: types, ranges, choices, no access token, then the class's own
    rules.
    """

    stage: ClassVar[str] = ""
    renamed: ClassVar[Mapping[str, str]] = {}  # names of earlier versions, and those of today

    def __post_init__(self) -> None:
        kinds = field_types(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            try:
                value = coerce(value, kinds[field.name])
            except ValueError as error:
                raise InputError(f"{self.stage}: {field.name}={_shown(value)}: {error}") from None
            if isinstance(value, str) and value.startswith("~/"):  # a path in a file, which no shell has seen
                value = os.path.expanduser(value)
            object.__setattr__(self, field.name, value)
            _check_range(self.stage, field, value)
            if isinstance(value, str) and redact(value) != value:
                raise InputError(
                    f"{self.stage}: {field.name}: holds an access token, and notebooks save parameters. "
                    "Put it in the environment (HF_TOKEN) instead."
                )
        self.check()

    def check(self) -> None:
        """Check rules between fields; a subclass overrides it."""

    def require(self, holds: bool, name: str, why: str) -> None:
        """Raise an `InputError` that names the field and its value unless `holds`."""
        if not holds:
            raise InputError(f"{self.stage}: {name}={_shown(getattr(self, name))}: {why}")

    def as_dict(self) -> dict[str, Any]:
        """Return the parameters as plain JSON values, in declaration order."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclass(frozen=True, kw_only=True)
class StageParams(Params):
    """What every stage takes. A subclass sets `stage`, adds fields, and may override the methods below."""

    run_dir: str = param("runs/demo", "folder of the run; every stage reads and writes below it")
    target: str = param(
        "smollm2", "smollm2, a hub id, a local folder, or random:<config.json or named shape>"
    )
    device: str = param("auto", "auto, cpu, cuda or cuda:N")
    dtype: str = param("auto", "of the target's weights", choices=("auto", "float32", "bfloat16", "float16"))
    seed: int = param(0, "seed of everything random in this stage", low=0, high=2**31 - 1)
    interactive: bool = param(True, "widgets and live bars; false for headless runs")
    force: bool = param(False, "run again although finished; start although memory is predicted to be short")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(bool(self.run_dir), "run_dir", "the run folder must have a name, such as runs/mine")
        self.require(bool(self.target), "target", "name a target, such as smollm2")

    @property
    def run(self) -> Path:
        """The run folder as a path."""
        return Path(self.run_dir)

    @property
    def folder(self) -> Path:
        """Where the stage leaves its result."""
        return self.run / self.stage

    def path_or(self, given: str, name: str) -> Path:
        """Return the path `given`, or if it is empty `name` in the run folder."""
        return Path(given) if given else self.run / name

    def inputs(self) -> list[Path]:
        """Files or folders this stage reads; when one of them changes, a finished result no longer counts."""
        return []

    def outputs(self) -> list[Path]:
        """What a finished stage leaves outside its own folder; when one is gone, the stage runs again."""
        return []

    def stands(self) -> bool:
        """Say whether what a finished stage left outside its own folder is still as it should be. A stage
        that can tell more of it in no time than that it is there overrides this.
        """
        return all(path.exists() for path in self.outputs())


def defaults(cls: type[Params]) -> dict[str, Any]:
    """Return the default of each parameter of `cls` that has one."""
    found = {}
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            found[field.name] = field.default
    return found


def field_types(cls: type[Params]) -> dict[str, Any]:
    """Return the resolved type of each parameter of `cls`."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


LARGEST = (
    10**12
)  # of every number that declares no upper end: beyond it, libraries overflow in their own words


def _check_range(stage: str, field: dataclasses.Field, value: Any) -> None:
    low, high = field.metadata.get("low"), field.metadata.get("high")
    choices, unit = field.metadata.get("choices", ()), field.metadata.get("unit", "")
    head = f"{stage}: {field.name}={_shown(value)}: must be"
    for item in value if isinstance(value, list) else [value]:
        if high is None and isinstance(item, int | float) and abs(item) > LARGEST:
            raise InputError(f"{head} at most {LARGEST:,} ({field.metadata['help']})")
        if (low is not None and item < low) or (high is not None and item > high):
            words = _range_words(low, high) + (f" {unit}" if unit else "")
            raise InputError(f"{head} {words} ({field.metadata['help']})")
        if choices and item not in choices:
            listed = ", ".join(map(str, choices))
            raise InputError(f"{head} one of {listed}{near(str(item), map(str, choices))}")


def _range_words(low: float | None, high: float | None) -> str:
    if high is None:
        return f"at least {low}"
    return f"at most {high}" if low is None else f"between {low} and {high}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."


def check_names(cls: type[Params], values: Mapping[Any, Any], *, where: str = "") -> None:
    """Raise an `InputError` with the near match for a name that is no parameter of `cls`."""
    known = [field.name for field in dataclasses.fields(cls)]
    for name in values:
        if name in cls.renamed:
            new, place = cls.renamed[name], f" in {where}" if where else ""
            raise InputError(f"{cls.stage}: {name}{place} is now called {new}. Type {new} in its place.")
        if name not in known:
            place = (f" in {where}" if where else "") + near(str(name), known)
            listed = ", ".join(known)
            raise InputError(f"{cls.stage}: unknown parameter {_shown(name)}{place}. Parameters: {listed}.")


def from_mapping(cls: type[P], values: Mapping[str, Any], *, where: str = "") -> P:
    """Make parameters from names and values; an unknown name is an `InputError` with the near match."""
    check_names(cls, values, where=where)
    return cls(**values)


def from_notebook(cls: type[P], namespace: Mapping[str, Any]) -> P:
    """Make parameters from a notebook's `globals()`; an injected name that `cls` lacks is an `InputError`.

    Also makes the folder above `notebooks/` the working directory, where papermill starts a kernel anyway and
    JupyterLab does not, so that relative paths mean the same in both; and turns `interactive` off when
    papermill runs the notebook, unless it was asked for by name.
    """
    known = [field.name for field in dataclasses.fields(cls)]
    injected = _injected(namespace)
    check_names(cls, dict.fromkeys(injected))
    missing = [name for name in known if name not in namespace]
    if missing:
        for old, new in cls.renamed.items():
            if new in missing and old in namespace:
                raise InputError(
                    f"{cls.stage}: {old} in the parameters cell is now called {new}. Type {new} in its place."
                )
        lost = ", ".join(missing)
        raise InputError(
            f"{cls.stage}: the parameters cell does not set {lost}. Run it, or add the line back."
        )
    enter_workspace()
    values = {name: namespace[name] for name in known}
    if "interactive" not in injected and started_by_papermill():
        values["interactive"] = False
    return cls(**values)


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


@dataclass(frozen=True)
class FieldRow:
    """One parameter as help shows it."""

    name: str
    type: str
    default: Any
    unit: str
    allowed: str
    help: str


def fields_table(cls: type[Params]) -> list[FieldRow]:
    """Return what help shows of each parameter: the stage's own first, then those every stage has."""
    kinds = field_types(cls)
    shared = {field.name for field in dataclasses.fields(StageParams)}
    rows = []
    for field in sorted(dataclasses.fields(cls), key=lambda field: field.name in shared):
        rows.append(
            FieldRow(
                field.name,
                type_name(kinds[field.name]),
                _default(field),
                field.metadata.get("unit", ""),
                _allowed(field.metadata),
                field.metadata.get("help", ""),
            )
        )
    return rows


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _allowed(metadata: Mapping[str, Any]) -> str:
    low, high = metadata.get("low"), metadata.get("high")
    if metadata.get("choices"):
        return " | ".join(map(str, metadata["choices"]))
    if low is None and high is None:
        return ""
    return f"{'' if low is None else low}..{'' if high is None else high}"
