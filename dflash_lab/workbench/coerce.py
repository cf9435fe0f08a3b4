"""Turn a value from YAML, the command line or a notebook cell into the type a parameter declares.

YAML hands over `1e-4` as a string and papermill's `-p` guesses a type from the text, so a parameter cannot
trust the type it is given. Everything that has one meaning is converted; everything else is an error that
says what to type instead.
"""

from __future__ import annotations

import json
import math
import types
import typing
from typing import Any

_WORDS = {"true": True, "false": False}


def coerce(value: Any, kind: Any) -> Any:
    """Return `value` as `kind` (int, float, bool, str, dict, list, list[scalar]) or raise `ValueError`."""
    origin = typing.get_origin(kind) or kind
    if isinstance(kind, types.UnionType) or origin is typing.Union:
        raise TypeError(f"{kind}: a parameter has exactly one type; use '', 0 or -1 for unset")
    return _READERS[origin](value, kind)


def type_name(kind: Any) -> str:
    """Return how a person writes this type: ``int``, ``list[float]``."""
    return str(kind) if typing.get_args(kind) else kind.__name__


def _to_int(value: Any, kind: Any) -> int:
    if isinstance(value, bool):
        raise ValueError("expected a whole number, got a boolean")
    number = _number(value, "a whole number")
    if number != int(number):
        raise ValueError("expected a whole number")
    return int(number)


def _to_float(value: Any, kind: Any) -> float:
    if isinstance(value, bool):
        raise ValueError("expected a number, got a boolean")
    try:
        return float(_number(value, "a number"))
    except OverflowError:
        raise ValueError("expected a number that a float can hold") from None


def _number(value: Any, what: str) -> int | float:
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            try:
                value = float(value)
            except ValueError:
                raise ValueError(f"expected {what}, got the text {value[:60]!r}") from None
    if not isinstance(value, float):
        raise ValueError(f"expected {what}, got {_seen(value)}")
    if not math.isfinite(value):
        raise ValueError(f"expected {what}, and a finite one")
    return value


def _to_bool(value: Any, kind: Any) -> bool:
    if isinstance(value, str) and value.lower() in _WORDS:
        return _WORDS[value.lower()]
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {_seen(value)}")
    return value


def _to_str(value: Any, kind: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(
            f"expected text, got {_seen(value)}; quote it in YAML, or pass it with -r instead of -p"
        )
    if "\0" in value:
        raise ValueError("expected text without NUL characters")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"expected text, and character {error.start + 1} is half of one") from None
    return value


def _to_list(value: Any, kind: Any) -> list:
    if isinstance(value, str):
        value = _split(value)
    elif isinstance(value, tuple | set | frozenset | range):
        value = list(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        value = [value]
    if not isinstance(value, list):
        raise ValueError(f"expected a list such as [1, 2] or 1,2, got {_seen(value)}")
    element = (typing.get_args(kind) or (None,))[0]
    return list(value) if element is None else [coerce(item, element) for item in value]


def _split(text: str) -> list:
    """Read ``[1, 2]`` as JSON and ``1,2`` as a comma list; the items' types are settled by the caller."""
    text = text.strip()
    if text.startswith("["):
        try:
            return json.loads(text)
        except (json.JSONDecodeError, RecursionError):
            raise ValueError(f"expected a list such as [1, 2] or 1,2, got the text {text[:60]!r}") from None
    return [number_or_text(item.strip()) for item in text.split(",")] if text else []


def number_or_text(text: str) -> Any:
    """Return the int or float that `text` is, else the text."""
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _to_dict(value: Any, kind: Any) -> dict:
    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=_unique) if value.strip() else {}
        except (json.JSONDecodeError, RecursionError):
            raise ValueError(f'expected a mapping such as {{"a": 1}}, got the text {value[:60]!r}') from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a mapping, got {_seen(value)}")
    return dict(value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is given twice")
    return found


def _seen(value: Any) -> str:
    return "nothing (null)" if value is None else f"{type(value).__name__} {str(value)[:60]!r}"


_READERS = {int: _to_int, float: _to_float, bool: _to_bool, str: _to_str, list: _to_list, dict: _to_dict}
