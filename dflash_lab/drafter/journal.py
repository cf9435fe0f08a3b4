"""The run's diary: one JSON object a line in `metrics.jsonl`, readable while the run goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dflash_lab import files
from dflash_lab.errors import StoreError, naming

NAME = "metrics.jsonl"
# Every step (loss, gradient norm, rate), means over the last steps, fixed held-out rows, a note.
KINDS = ("step", "train", "heldout", "note")
BY_SLOT = ("position_accuracy", "conditional_accuracy")  # lists of a measured record, a value a slot


class Journal:
    """Appends records; `flush` makes them durable (before a checkpoint that relies on them, and at each log).
    A resumed run first drops the lines behind its checkpoint, so each step is told once.
    """

    def __init__(self, folder: Path, resume_step: int) -> None:
        self.path = folder / NAME
        kept = [record for record in read_journal(folder) if record["step"] <= resume_step]
        files.write_bytes(self.path, "".join(json.dumps(record) + "\n" for record in kept).encode())
        with naming(self.path):
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append one record; numbers that JSON cannot hold (NaN, infinity) become None."""
        record = {"kind": kind, "step": step, **files.plain(values)}
        with naming(self.path):
            self._file.write(json.dumps(record, allow_nan=False) + "\n")

    def flush(self) -> None:
        """Sync to disk."""
        with naming(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Sync and close."""
        with naming(self.path), self._file:
            self.flush()


class Reader:
    """Reads a run's records as they are written; each call parses only what is new since the last."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._begin()

    def _begin(self) -> None:
        self.records: list[dict[str, Any]] = []
        self._file: tuple[int, int] | None = None
        self._end = 0  # bytes read so far, whole lines
        self._last = b""  # the last of them

    def read(self) -> list[dict[str, Any]]:
        """All whole records so far (the same list, grown); a last line still being written is left out."""
        if not self.path.exists():
            self._begin()
            return self.records
        with naming(self.path), open(self.path, "rb") as file:
            status = os.fstat(file.fileno())
            file.seek(self._end - len(self._last))
            if self._file != (status.st_dev, status.st_ino) or file.read(len(self._last)) != self._last:
                self._begin()  # another run's, or rewritten by one that was resumed
                self._file = status.st_dev, status.st_ino
                file.seek(0)
            lines = file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()  # torn, or still being written
        for line in lines:
            self.records.append(self._record(line))
            self._end, self._last = self._end + len(line), line
        return self.records

    def _record(self, line: bytes) -> dict[str, Any]:
        try:
            record = json.loads(line)
            measured = record["kind"] in ("train", "heldout")
            lists = [record[name] if measured else [] for name in BY_SLOT]
            same = all(isinstance(one, list) and len(one) == len(lists[0]) for one in lists)
            if same and record["kind"] in KINDS and isinstance(record["step"], int):
                return record
            fault = "its values are not those of any kind of line"
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            fault = f"{type(error).__name__}: {error}"
        raise StoreError(
            f"{self.path}:{len(self.records) + 1}: not a line of a run's diary ({fault}). Delete that line: "
            "training goes on from its checkpoint, and only what the line told is missing from the figures."
        )


def read_journal(folder: Path) -> list[dict[str, Any]]:
    """All whole records of a run so far; a last line still being written is left out."""
    return Reader(folder).read()
