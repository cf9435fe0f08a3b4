"""What is wrong with the input, by file and line: every record that is not stored has one of these, none is
dropped unsaid.

The invariant that `prepare` checks is ``records in == stored + duplicates + sum(problem.records)``. A
problem that costs no record (a truncated but stored sample, a file of an unknown kind) has ``records=0``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """`reason` says what is wrong and what to do; `kind` is the short name it is counted under."""

    file: str
    line: int  # 1-based line or row; 0 = the file as a whole
    reason: str
    kind: str = "malformed"
    records: int = 1  # records lost by it


def storable(text: str) -> str:
    """Return text that UTF-8 can hold: half surrogate pairs, as in some file names and JSON escapes, are
    spelled out.
    """
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


class BadRecord(ValueError):
    """One record cannot be used, or `records` that cannot be told apart; it becomes a `Problem` and reading
    goes on.
    """

    def __init__(self, kind: str, reason: str, records: int = 1) -> None:
        self.kind = kind
        self.reason = storable(reason)
        self.records = records
        super().__init__(self.reason)

    def at(self, file: str, line: int) -> Problem:
        """Return the problem this record is, with its place."""
        return Problem(file, line, self.reason, self.kind, self.records)
