"""The values of a drafter's `config.json`, each read with its kind and range.

A checkpoint comes from another machine or another program: a word where a number belongs must be told with
the file and the field as that file spells it, not by the first layer that cannot be built from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dflash_lab.errors import InputError

REMEDY = "Copy it again from where it came, or remove it and run the stage that wrote it again."
LARGEST = 2**31 - 1  # of a size or an id: both end in 32-bit indices somewhere
MOST_LAYERS = 4096
LARGEST_FLOAT = 1e30
_WORDS = {bool: "true or false", str: "text", list: "a list", dict: "an object"}


def shown(value: Any) -> str:
    """`value` as JSON, cut to what a message can hold."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:60] + "..."


class Fields:
    """Typed reads from `objects`, of which the first that has a name rules; null counts as not there.

    `where` begins every message. All reads raise `InputError` for another kind of value; those with a default
    return it where the name is missing.
    """

    def __init__(self, where: str, *objects: Mapping[str, Any]) -> None:
        self._where, self._objects = where, objects

    def whole(self, name: str, default: int | None = None, *, low: int = 1, high: int = LARGEST) -> int:
        """A whole number in low..high; without a default it must be there."""
        return self._whole(name, self._must(name, default), low, high)

    def whole_or_none(self, name: str, *, low: int = 1) -> int | None:
        """The same, None where it is missing."""
        return None if self._get(name) is None else self.whole(name, low=low)

    def wholes(self, name: str, *, low: int, high: int, optional: bool = False) -> list[int]:
        """A list of at least one whole number; where it is missing and `optional`, an empty one."""
        found = self._of_kind(name, list, None)
        if not optional:
            self._must(name, found)
        if found == []:
            raise self.error(name, found, "a list of at least one number")
        return [self._whole(f"{name}[{at}]", one, low, high) for at, one in enumerate(found or ())]

    def number(self, name: str, default: float, *, positive: bool = True) -> float:
        """A finite number above zero, or, where not `positive`, also zero itself."""
        value = self._must(name, default)
        what = "a number above 0" if positive else "a number of at least 0"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, value, what)
        if not (0 < value < LARGEST_FLOAT or (value == 0 and not positive)):  # NaN is neither
            raise self.error(name, value, what)
        return float(value)

    def flag(self, name: str, default: bool | None) -> bool | None:
        """True, false, or the default."""
        return self._of_kind(name, bool, default)

    def words(self, name: str) -> list[str]:
        """A list of texts; an empty one where it is missing."""
        found = self._of_kind(name, list, [])
        for at, one in enumerate(found):
            if not isinstance(one, str):
                raise self.error(f"{name}[{at}]", one, "text")
        return found

    def part(self, name: str) -> dict[str, Any]:
        """An object within; an empty one where it is missing."""
        return self._of_kind(name, dict, {})

    def error(self, name: str, value: Any, must: str) -> InputError:
        """The error that `name` has a value it cannot have."""
        return InputError(f"{self._where}: {name!r} is {shown(value)}; it must be {must}. {REMEDY}")

    def _get(self, name: str) -> Any:
        found = (one.get(name) for one in self._objects)
        return next((value for value in found if value is not None), None)

    def _must(self, name: str, default: Any) -> Any:
        value = self._get(name)
        value = default if value is None else value
        if value is None:
            raise InputError(f"{self._where}: {name!r} is missing; is this a DFlash checkpoint? {REMEDY}")
        return value

    def _of_kind(self, name: str, kind: type, default: Any) -> Any:
        value = self._get(name)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise self.error(name, value, _WORDS[kind])
        return value

    def _whole(self, name: str, value: Any, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            many = f"between {low} and {high}" if high < LARGEST else f"of at least {low}"
            raise self.error(name, value, f"a whole number {many}")
        return value
