"""The typed parameters of a stage: one frozen dataclass a stage, checked when it is made.

Where the values come from (a run's folder in `params/`, the notebook's cell, the command line) is the matter
of `run_params`; all of them end here, because papermill itself would only warn about `-p shrad 0` and run
shard 0.

A stage declares its own fields after the shared ones; `group` heads the fields from there on:

>>> @dataclass(frozen=True, kw_only=True)
... class GreetParams(StageParams):
...     stage: ClassVar[str] = "greet"
...     times: int = param(1, "how often to greet", low=1, high=100, group="greeting")
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
"""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from dflash_lab.errors import InputError, near
from dflash_lab.workbench.coerce import coerce
from dflash_lab.workbench.replace import Move
from dflash_lab.workbench.secrets import redact_tree

P = TypeVar("P", bound="Params")


def param(
    default: Any,
    help: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple = (),
    group: str = "",
) -> Any:
    """Declare a parameter: its default, one line of help, its unit, inclusive range and allowed values.

    For a list the range and the choices hold for each item. `group` is the heading that this parameter and
    those after it stand under in notebooks and help.
    """
    metadata = {
        "help": help,
        "unit": unit,
        "low": low,
        "high": high,
        "choices": tuple(choices),
        "group": group,
    }
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
            if redact_tree(value) != value:
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


BROKEN = "what it left is not whole any more"
RUN_NAME = re.compile(r"\w[\w.+-]*")  # a folder's name that no shell, path or flag reads otherwise


@dataclass(frozen=True, kw_only=True)
class StageParams(Params):
    """What every stage takes. A subclass sets `stage`, adds fields, and may override the methods below."""

    origins: ClassVar[Mapping[str, str]] = {}  # of one that `run_params` made: where each value came from
    overridden: ClassVar[Mapping[str, Any]] = {}  # of one that `run_params` made: what was typed over
    passing: ClassVar[tuple[str, ...]] = (
        "run",
        "run_dir",
        "interactive",
        "force",
    )  # no finding rests on them
    growing: ClassVar[tuple[str, ...]] = ()  # more goes on with what is finished, less takes nothing away

    run: str = param("demo", "the run: params/<run>/ has its parameters, runs/<run>/ is its folder")
    target: str = param(
        "smollm2",
        "smollm2, a hub id, a local folder, or random:<config.json or named shape>",
        group="target and machine",
    )
    device: str = param("auto", "auto, cpu, cuda or cuda:N")
    dtype: str = param("auto", "of the target's weights", choices=("auto", "float32", "bfloat16", "float16"))
    seed: int = param(0, "seed of everything random in this stage", low=0, high=2**31 - 1)
    run_dir: str = param("", "folder of the run, on another disk perhaps; empty: runs/<run>")
    interactive: bool = param(True, "widgets and live bars; headless runs have none")
    force: bool = param(False, "do it again, and replace what is finished")

    def __post_init__(self) -> None:
        super().__post_init__()
        named = bool(RUN_NAME.fullmatch(self.run_name))
        self.require(named, "run", "a run's name is letters, digits, - . + and _, such as mine")
        self.require(bool(self.target), "target", "name a target, such as smollm2")

    @property
    def run_name(self) -> str:
        """The run's name, also where `run` is the path of its parameter folder."""
        return Path(self.run).name

    @property
    def run_folder(self) -> Path:
        """The run's folder."""
        return Path(self.run_dir) if self.run_dir else Path("runs") / self.run_name

    @property
    def folder(self) -> Path:
        """Where the stage leaves its result."""
        return self.run_folder / self.stage

    def path_or(self, given: str, name: str) -> Path:
        """Return the path `given`, or if it is empty `name` in the run folder."""
        return Path(given) if given else self.run_folder / name

    def inputs(self) -> list[Path]:
        """Files or folders this stage reads; when one of them changes, a finished result no longer counts."""
        return []

    def needs(self) -> list[tuple[Path, str]]:
        """What must be there before the stage can begin: a path, and the stage of this run that makes it
        (empty: a person gave the path).
        """
        return []

    def rendered(self) -> list[Path]:
        """Samples files that the stage makes, learns from, or stores the states of."""
        return []

    def outputs(self) -> list[Path]:
        """What a finished stage leaves outside its own folder; when one is gone, the stage runs again."""
        return []

    @property
    def fresh(self) -> Path:
        """Where a running stage makes its result; it takes the place of an earlier one when it is whole."""
        return self.folder / ".fresh"

    def products(self) -> list[Move]:
        """What the stage makes for a place outside its own folder."""
        return []

    def replacement(self) -> tuple[list[Move], list[Path]]:
        """What takes whose place when the stage is done, its result last, and what goes. Nothing while a part
        of the whole is still to be made by another process.
        """
        products = self.products()
        made = sorted(path for path in self.fresh.rglob("*") if path.is_file())
        made = [path for path in made if path not in [move.new for move in products]]
        own = [
            Move(path, self.folder / path.relative_to(self.fresh))
            for path in made
            if path.name != "result.json"
        ]
        return (
            [*products, *own, Move(self.fresh / "result.json", self.folder / "result.json")],
            [self.folder / "failure.json"],
        )

    def taken(self) -> list[Path]:
        """What stands in the place of a product although this run did not make it."""
        return []

    def lacks(self) -> str:
        """Say what is to be done of a finished stage although it would find the same; empty for nothing, when
        what it left outside its own folder is as it should be. A stage that can tell more of that in no time
        than that it is there overrides this, and one with `growing` parameters.
        """
        return "" if all(path.exists() for path in self.outputs()) else BROKEN

    def remains(self) -> str:
        """Say how a finished stage, which is all that was asked for, can go on; empty for not at all. A stage
        with `growing` parameters overrides this.
        """
        return ""


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
