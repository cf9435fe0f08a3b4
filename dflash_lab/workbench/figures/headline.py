"""A stage's headline figures as a small table: three to a row in a notebook, one a line in a log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_lab.workbench.figures.style import escape

_COLUMNS = 3
_LONG = 32  # characters of a value that takes a line of its own, below the others
_NAME = "text-align: left; padding: 2px 8px 2px 24px"


class Headline:
    """Flat figures by name, shown by whoever displays it; the values themselves stay in `figures`."""

    def __init__(self, figures: Mapping[str, Any]) -> None:
        self.figures = dict(figures)

    def __repr__(self) -> str:
        shown = [(name, shown_number(value)) for name, value in self.figures.items()]
        width = max((len(name) for name, _ in shown), default=0)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in shown)

    def _repr_html_(self) -> str:
        """Columns are read from top to bottom, as the figures' order groups them; sentences stand below."""
        whole = [(name, shown_number(value)) for name, value in self.figures.items()]
        shown = [(name, value) for name, value in whole if len(value) <= _LONG]
        rows = -(-len(shown) // _COLUMNS)
        lines = []
        for row in range(rows):
            cells = "".join(
                f'<td style="{_NAME}">{escape(name).replace("_", " ")}</td>'
                f'<td style="text-align: right"><b>{escape(value)}</b></td>'
                for name, value in shown[row::rows]
            )
            lines.append(f"<tr>{cells}</tr>")
        for name, value in whole:
            if len(value) > _LONG:
                cell = f'<td colspan="{2 * _COLUMNS - 1}" style="text-align: left">{escape(value)}</td>'
                lines.append(f'<tr><td style="{_NAME}">{escape(name).replace("_", " ")}</td>{cell}</tr>')
        return f"<table>{''.join(lines)}</table>"


def headline(figures: Mapping[str, Any]) -> Headline:
    """Return the table of a result's `figures`."""
    return Headline(figures)


def shown_number(value: Any) -> str:
    """Return a number as a person reads it, four significant digits; others as text, None as a dash."""
    if isinstance(value, bool | str) or value is None:
        return "-" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:.3g}"
