"""The errors that a person is meant to read: what is wrong, where, and what to type instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any


class LabError(Exception):
    """Base of every error this package raises on purpose."""


class InputError(LabError, ValueError):
    """A parameter, file or tensor given by the user is wrong; the message says what, where and the remedy."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows (IPython asks for it): the sentence, not the way through our code to it."""
        return [f"{type(self).__name__}: {self}"]


class StoreError(LabError, RuntimeError):
    """Something on disk is not what its manifest says: missing, cut, altered, or of another setup."""


class UnsupportedTarget(InputError):
    """A model whose structure is not understood; the message names it and says what would be needed."""


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its cause, the cause's cause, and so on; contexts where there is no cause."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def carried(error: BaseException, name: str, kind: type = object) -> Any:
    """Return the first `name` of `kind` that the error, or what caused it, carries; None if none does."""
    found = (getattr(link, name, None) for link in chain(error))
    return next((value for value in found if value and isinstance(value, kind)), None)


def near(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the closest of `known`, or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""
