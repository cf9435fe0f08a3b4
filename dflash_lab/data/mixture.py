"""Several inputs mixed: what is taken of each, by a share of the whole or up to a number, drawn by a seed.

    mixture:
      chats.jsonl: {weight: 3}            # or chats.jsonl: 3
      code/: {weight: 1, cap: 20000}
      rules.jsonl: {cap: 500}
      owner/name: {}

What has a weight is thinned until its conversations stand to each other as the weights do: there is none of
them too few, so the one that is scarcest for its weight (after its cap) goes in whole, and nothing is
repeated. What has a cap alone goes in up to that number, what has neither as a whole; both beside the
weighted ones, whose shares they do not change.

Every conversation of an input gets a random number, by seed and name of the input and its place in it; the
smallest are taken. So a draw is the same each time, and a larger one holds the smaller.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
import xxhash

from dflash_lab.errors import InputError, near

T = TypeVar("T")
_KEYS = ("weight", "cap")
_FORM = "Type {weight: 2} for a share, {cap: 1000} for so many at most, both, or {} for all of it"


@dataclass(frozen=True)
class Ingredient:
    """An input as a person named it; `weight` 0: no share asked for, `cap` 0: as many as there are."""

    name: str
    weight: Fraction = Fraction(0)
    cap: int = 0

    @property
    def whole(self) -> bool:
        """Whether all of it goes in, so that nothing needs counting."""
        return not self.weight and not self.cap


def read_mixture(given: Mapping[Any, Any]) -> list[Ingredient]:
    """Return what a person's mapping of inputs to weights and caps means, in its order; a `ValueError` says
    which entry is wrong and what to type.
    """
    found = [_ingredient(name, value) for name, value in given.items()]
    places: dict[str, str] = {}
    for one in found:
        other = places.setdefault(os.path.realpath(os.path.expanduser(one.name)), one.name)
        if other != one.name:
            raise ValueError(f"{other} and {one.name} are one input. Name it once")
    return found


def _ingredient(name: Any, value: Any) -> Ingredient:
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"{name!r} is no input: name a file, a folder or a data set id")
    if isinstance(value, int | float):
        value = {"weight": value}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: {_shown(value)} says neither a weight nor a cap. {_FORM}")
    for key in value:
        if key not in _KEYS:
            raise ValueError(f"{name}: {_shown(key)} is unknown{near(str(key), _KEYS)}. {_FORM}")
    weight, cap = value.get("weight", 0), value.get("cap", 0)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ValueError(f"{name}: weight {_shown(weight)} is no number. Type one above 0, such as weight: 2")
    if "weight" in value and not 0 < weight <= 10**9:
        raise ValueError(f"{name}: weight {weight} is no share. Type one above 0, or leave the input out")
    if isinstance(cap, bool) or not isinstance(cap, int):
        raise ValueError(f"{name}: cap {_shown(cap)} is no whole number. Type one, such as cap: 1000")
    if "cap" in value and cap < 1:
        raise ValueError(f"{name}: cap {cap} takes nothing. Type 1 or more, or leave the input out")
    return Ingredient(name, Fraction(str(weight)), cap)


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)[:60]


def amounts(mixture: Sequence[Ingredient], counts: Sequence[int]) -> list[int]:
    """Return how many of each input's `counts` conversations are taken.

    Raises `InputError` for an input that has a weight and no conversation: shares with it would all be 0.
    """
    there = [min(count, one.cap or count) for one, count in zip(mixture, counts, strict=True)]
    weighted = [(one, number) for one, number in zip(mixture, there, strict=True) if one.weight]
    for one, number in weighted:
        if not number:
            raise InputError(
                f"mixture: {one.name} has a weight and no conversation that can be used, so nothing can be "
                "mixed with it in that share. Mend it, or take it out of the mixture."
            )
    scale = min((number / one.weight for one, number in weighted), default=Fraction(0))
    return [
        int(one.weight * scale) if one.weight else number for one, number in zip(mixture, there, strict=True)
    ]


def draw(items: Iterable[T], count: int, wanted: int, *, seed: int, name: str) -> Iterator[T | None]:
    """Yield each of `items` that is drawn, `wanted` of the first `count`, and None for each that is not."""
    numbers = np.random.default_rng([seed, xxhash.xxh3_64_intdigest(name.encode())]).random(count)
    taken = np.zeros(count, bool)
    taken[np.argsort(numbers, kind="stable")[:wanted]] = True
    for place, item in enumerate(items):
        yield item if place < count and taken[place] else None
