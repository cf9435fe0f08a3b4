"""The typed parameters of a stage: declared once, checked when made, shown in help, notebook cell and tables.

Whoever runs papermill would only be warned about `-p shrad 0`, and get shard 0: all values end here instead.
"""

from __future__ import annotations

import html
import json
import os
import re
import typing
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from dflash_lab.errors import InputError, near
from dflash_lab.files import Move
from dflash_lab.secrets import redact_tree

LARGEST = 10**12  # of every number that declares no upper end: beyond it, libraries overflow in their words
EXPECTED: dict[Any, str] = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "text; quote it in YAML, or pass it with -r instead of -p",
    list: "a list such as [1, 2] or 1,2",
    dict: 'a mapping such as {"a": 1}',
}
SEEN = {type(None): "nothing (null)", bool: "the boolean {}", str: "the text {}"}


class WrongParameters(InputError):
    """Parameters that a class refuses, all of them at once: in `wrong`, by name, what is wrong with each."""

    def __init__(self, stage: str, wrong: Mapping[str, str]) -> None:
        super().__init__(stage, wrong)
        self.stage, self.wrong = stage, wrong

    def __str__(self) -> str:
        return "\n".join(f"{self.stage}: {words}" for words in self.wrong.values())


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
    about: dict[str, Any] = {"unit": unit, "low": low, "high": high, "choices": [*choices], "group": group}
    return Field(default, description=help, json_schema_extra=about)


def about(cls: type[Params], name: str) -> dict[str, Any]:
    """Return what `param` was told of a parameter: help, unit, low, high, choices, group."""
    field = cls.model_fields[name]
    return {"help": field.description or "", **typing.cast(dict, field.json_schema_extra)}


class Params(BaseModel):
    """Parameters checked when they are made: types, ranges, choices, no access token, then the class's own
    rules. Raises `WrongParameters`.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True
    )
    stage: ClassVar[str] = ""
    # Names of earlier versions, and those of today: one table, as a run's common.yaml is read by every stage.
    renamed: ClassVar[Mapping[str, str]] = {
        "processes": "gpus",
        "second": "dflash2",
        "accumulate": "grad_accum_steps",
        "floor": "min_lr_ratio",
        "head": "head_gpu",
        "targets": "target_gpus",
        "drafters": "drafter_gpus",
    }

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as refused:
            raise WrongParameters(self.stage, _wrong(type(self), refused, values)) from None
        self.check()

    @field_validator("*", mode="before")
    @classmethod
    def _meant(cls, value: Any, info: ValidationInfo) -> Any:
        return coerce(value, field_types(cls)[str(info.field_name)])

    @field_validator("*")
    @classmethod
    def _allowed(cls, value: Any, info: ValidationInfo) -> Any:
        if redact_tree(value) != value:
            raise ValueError(
                "holds an access token, and notebooks save parameters. Put it in the environment (HF_TOKEN) "
                "instead."
            )
        told = about(cls, str(info.field_name))
        for item in value if isinstance(value, list) else [value]:
            if words := _refused(item, told):
                raise ValueError(words)
        # A path in a file, which no shell has seen.
        return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value

    def check(self) -> None:
        """Check rules between fields; a subclass overrides it."""

    def require(self, holds: bool, name: str, why: str) -> None:
        """Raise `WrongParameters` that names the field and its value unless `holds`."""
        if not holds:
            raise WrongParameters(self.stage, {name: f"{name}={_shown(getattr(self, name))}: {why}"})

    def as_dict(self) -> dict[str, Any]:
        """Return the parameters as plain JSON values, in declaration order."""
        return {name: getattr(self, name) for name in type(self).model_fields}

    def changed(self, **values: Any) -> Self:
        """Return these parameters with some values changed, and checked again."""
        return type(self)(**{**self.as_dict(), **values})


def no_address(text: str) -> str:
    """Say why `text` is no server's address, empty if it is one."""
    found = urlsplit(text)
    if found.scheme not in ("http", "https") or not found.hostname:
        return "give an address such as http://localhost:8000/v1"
    if found.username or found.password or found.query:
        return "give the address alone; a key goes into the environment as DFLASH_LAB_SERVER_KEY"
    return ""


def _refused(item: Any, told: Mapping[str, Any]) -> str:
    """Say why a value of the right type is not allowed, empty if it is."""
    low, high, choices = told["low"], told["high"], told["choices"]
    if isinstance(item, str) and (odd := re.search("[\0\ud800-\udfff]", item)):
        what = "NUL" if odd[0] == "\0" else "half of one"
        return f"expected text, and character {odd.start() + 1} is {what}"
    if choices and item not in choices:
        return f"must be one of {', '.join(map(str, choices))}{near(str(item), map(str, choices))}"
    if isinstance(item, str | bool | dict):
        return ""
    if high is None and abs(item) > LARGEST:
        return f"must be at most {LARGEST:,} ({told['help']})"
    if (low is None or item >= low) and (high is None or item <= high):
        return ""
    least, most = f"at least {low}", f"at most {high}"
    ends = most if low is None else least if high is None else f"between {low} and {high}"
    return f"must be {ends}{told['unit'] and ' ' + told['unit']} ({told['help']})"


def _wrong(cls: type[Params], refused: ValidationError, values: Mapping[str, Any]) -> dict[str, str]:
    """Return by name what pydantic refused, in our words; of a list the first wrong item."""
    found: dict[str, str] = {}
    for error in refused.errors(include_url=False):
        name, *item = map(str, error["loc"])
        if error["type"] == "extra_forbidden":
            found[name] = _unknown(cls, name)
            continue
        given, got = (redact_tree(one) for one in (values.get(name), error["input"]))
        kind = field_types(cls)[name]
        kind = typing.get_args(kind)[0] if item else typing.get_origin(kind) or kind
        seen = SEEN.get(type(got), f"{type(got).__name__} {{}}").format(_shown(got))
        words = f"expected {EXPECTED[kind]}, got {seen}"
        found.setdefault(name, f"{name}={_shown(given)}: {error.get('ctx', {}).get('error', words)}")
    return found


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."


def _unknown(cls: type[Params], name: Any, where: str = "") -> str:
    place = f" in {where}" if where else ""
    if new := cls.renamed.get(name):
        return f"{name}{place} is now called {new}. Type {new} in its place."
    known = cls.model_fields
    return f"unknown parameter {_shown(name)}{place}{near(str(name), known)}. Parameters: {', '.join(known)}."


def check_names(cls: type[Params], values: Mapping[Any, Any], *, where: str = "") -> None:
    """Raise `WrongParameters` with the near match for each name that is no parameter of `cls`."""
    if wrong := {name: _unknown(cls, name, where) for name in values if name not in cls.model_fields}:
        raise WrongParameters(cls.stage, wrong)


def defaults(cls: type[Params]) -> dict[str, Any]:
    """Return the default of each parameter of `cls`."""
    return {name: field.get_default() for name, field in cls.model_fields.items()}


def field_types(cls: type[Params]) -> dict[str, Any]:
    """Return the type of each parameter of `cls`."""
    return {name: field.annotation for name, field in cls.model_fields.items()}


BROKEN = "what it left is not whole any more"
RUN_NAME = re.compile(r"\w[\w.+-]*")  # a folder's name that no shell, path or flag reads otherwise


class StageParams(Params):
    """What every stage takes. A subclass sets `stage`, adds fields, and may override the methods below:

    >>> class GreetParams(StageParams):
    ...     stage: ClassVar[str] = "greet"
    ...     times: int = param(1, "how often to greet", low=1, high=100, group="greeting")
    ...     mode: str = param("plain", "tone", choices=("plain", "loud"))
    ...
    ...     def check(self) -> None:
    ...         self.require(self.mode == "plain" or self.times < 10, "times", "a loud one at most 9 times")
    >>> GreetParams(times="3").times
    3
    >>> GreetParams(times=0, tmies=2)
    Traceback (most recent call last):
        ...
    dflash_lab.params.WrongParameters: greet: times=0: must be between 1 and 100 (how often to greet)
    greet: unknown parameter 'tmies' (did you mean 'times'?). ...
    """

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

    @field_validator("run")
    @classmethod
    def _is_named(cls, run: str) -> str:
        if not RUN_NAME.fullmatch(Path(run).name):
            raise ValueError("a run's name is letters, digits, - . + and _, such as mine")
        return run

    @field_validator("target")
    @classmethod
    def _has_target(cls, target: str) -> str:
        if not target:
            raise ValueError("name a target, such as smollm2")
        return target

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


# --- What a value from YAML, the command line or a notebook cell means
#
# YAML hands over `1e-4` as a string and papermill's `-p` guesses a type from the text, so a parameter
# cannot trust the type it is given. What has one meaning is converted; the rest stays, for pydantic to
# refuse.


def coerce(value: Any, kind: Any) -> Any:
    """Return `value` as `kind` (int, float, bool, str, dict, list, list[scalar]) where it means one thing,
    else as it is; raises `ValueError` for a mapping that gives a name twice.
    """
    origin, items = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is list:
        value = _listed(value)
        return [coerce(item, items[0]) for item in value] if items and isinstance(value, list) else value
    if isinstance(value, str) and kind is bool:
        return {"true": True, "false": False}.get(value.lower(), value)
    if isinstance(value, str) and kind is dict:
        return _json(value, {})
    if isinstance(value, str) and kind in (int, float):
        value = number_or_text(value)
    return int(value) if kind is int and isinstance(value, float) and value.is_integer() else value


def _listed(value: Any) -> Any:
    """Read ``[1, 2]`` as JSON and ``1,2`` as a comma list; the items' types are settled by the caller."""
    if isinstance(value, str) and value.strip().startswith("["):
        return _json(value, [])
    if isinstance(value, str):
        return [number_or_text(item.strip()) for item in value.split(",")] if value.strip() else []
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [value]
    return list(value) if isinstance(value, tuple | set | frozenset | range) else value


def number_or_text(text: str) -> Any:
    """Return the int or float that `text` is, else the text."""
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _json(text: str, empty: Any) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique) if text.strip() else empty
    except (json.JSONDecodeError, RecursionError):
        return text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{twice!r} is given twice")
    return dict(pairs)


# --- Parameters as a person reads them: in help, in the notebook's cell, and in force with their origin


UNSET = """\
# What follows is unset (None): its value is that of params/<run>/common.yaml and {stage}.yaml, else
# the default, with which each comment begins. What you write here or give with -p is preferred to both."""


@dataclass(frozen=True)
class FieldRow:
    """One parameter as help shows it; `group` is the heading that it stands under."""

    name: str
    type: str
    default: Any
    unit: str
    allowed: str
    help: str
    group: str


def fields_table(cls: type[Params]) -> list[FieldRow]:
    """Return what help shows of each parameter: the run, the stage's own by group, those every stage has."""
    rows, group = [], ""
    shared, default = StageParams.model_fields.keys() - {"run"}, defaults(cls)
    for name, kind in sorted(field_types(cls).items(), key=lambda one: one[0] in shared):
        told = about(cls, name)
        group = told["group"] or group
        written = str(kind) if typing.get_args(kind) else kind.__name__
        ends = ["" if end is None else str(end) for end in (told["low"], told["high"])]
        allowed = " | ".join(map(str, told["choices"])) or ("..".join(ends) if any(ends) else "")
        rows.append(FieldRow(name, written, default[name], told["unit"], allowed, told["help"], group))
    return sorted(rows, key=lambda row: row.name != "run")


def cell_source(cls: type[StageParams]) -> str:
    """Return the source of a notebook's `parameters` cell: the run, then every other name, unset."""
    run, *rows = fields_table(cls)
    lines = [f'run: str = "{run.default}"  # {run.help}', UNSET.format(stage=cls.stage)]
    group = ""
    for row in rows:
        if row.group != group:
            group = row.group
            lines += ["", f"# {group}"]
        kind = row.type.split("[")[0]
        unit = f" ({row.unit})" if row.unit else ""
        shown = json.dumps(row.default) if not isinstance(row.default, bool) else str(row.default)
        lines.append(f"{row.name}: {kind} = None  # {shown}: {row.help}{unit}")
    return "\n".join(lines)


class InForce:
    """The parameters of a stage and where each came from, as a table that a notebook opens on a click."""

    def __init__(self, params: StageParams) -> None:
        self.stage, self.run, self.folder = params.stage, params.run_name, params.run_folder
        self.rows = [
            (row.group, row.name, getattr(params, row.name), params.origins.get(row.name, "default"))
            for row in fields_table(type(params))
        ]

    def __repr__(self) -> str:
        width = max(len(name) for _, name, _, _ in self.rows)
        lines = [
            f"{name:<{width}}  {value!r}  ({origin})"
            for _, name, value, origin in self.rows
            if origin != "default"
        ]
        return "\n".join([self._summary(), *lines])

    def _summary(self) -> str:
        counts = Counter(origin for _, _, _, origin in self.rows)
        told = ", ".join(f"{count} {origin}" for origin, count in counts.most_common())
        return f"run {self.run} in {self.folder}: {told}"

    def _repr_html_(self) -> str:
        lines, group = [], ""
        for heading, name, value, origin in self.rows:
            if heading != group:
                group = heading
                lines.append(f'<tr><th colspan="3" style="text-align: left">{html.escape(group)}</th></tr>')
            strong = name if origin == "default" else f"<b>{name}</b>"
            cells = (strong, html.escape(repr(value)), html.escape(origin))
            lines.append(
                "<tr>" + "".join(f'<td style="text-align: left">{cell}</td>' for cell in cells) + "</tr>"
            )
        table = f"<table>{''.join(lines)}</table>"
        return f"<details><summary>{html.escape(self._summary())}</summary>{table}</details>"


def in_force(params: StageParams) -> InForce:
    """Return the parameters in force and where each came from, for a notebook to show."""
    return InForce(params)
