"""Parameters as a person reads them: in a stage's help, in the notebook's cell, and in force with their
origin.
"""

from __future__ import annotations

import html
import json
import typing
from collections import Counter
from dataclasses import dataclass
from typing import Any

from dflash_lab.workbench.params import Params, StageParams, about, defaults, field_types

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
