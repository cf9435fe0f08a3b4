"""The run's diary: one JSON object a line in `metrics.jsonl`, readable while the run goes on.

`kind` is `step` (every step: loss, gradient norm, rate), `train` (means over the last steps), `heldout`
(fixed held-out rows) or `note`. A resumed run first drops the lines behind its checkpoint, so each step is
told once. At the end the tables are written as parquet too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dflash_lab import files
from dflash_lab.errors import StoreError
from dflash_lab.file_errors import naming

NAME = "metrics.jsonl"


class Journal:
    """Appends records; `flush` makes them durable (before a checkpoint that relies on them, and at each
    log).
    """

    def __init__(self, folder: Path, resume_step: int) -> None:
        self.path = folder / NAME
        kept = [record for record in read_journal(folder) if record["step"] <= resume_step]
        files.write_bytes(self.path, "".join(json.dumps(record) + "\n" for record in kept).encode())
        with naming(self.path):
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append one record; numbers that JSON cannot hold (NaN, infinity) become None."""
        record = {"kind": kind, "step": step, **{name: _plain(value) for name, value in values.items()}}
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


def read_journal(folder: Path) -> list[dict[str, Any]]:
    """All whole records of a run so far; a last line still being written is left out."""
    path = folder / NAME
    if not path.exists():
        return []
    with naming(path):
        lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last line end is torn or empty
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise StoreError(
                f"{path}:{number}: not a line of a run's diary ({error}). Move the file's folder away to "
                "train anew, or put the file back."
            ) from error
    return records


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value - value != 0:
        return None
    return value
