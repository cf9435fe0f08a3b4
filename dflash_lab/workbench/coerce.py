"""What a value from YAML, the command line or a notebook cell means as the type that a parameter declares.

YAML hands over `1e-4` as a string and papermill's `-p` guesses a type from the text, so a parameter cannot
trust the type it is given. What has one meaning is converted; the rest stays, for pydantic to refuse.
"""

from __future__ import annotations

import json
import typing
from typing import Any


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
