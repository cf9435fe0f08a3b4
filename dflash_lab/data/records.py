"""Where records come from: JSON Lines, JSON, Parquet, a folder of those, or a Hugging Face data set.

A container is registered by file suffix (`@container(".jsonl")`) and yields (line, record) pairs, where a
record that could not be read is a `BadRecord`. All of them stream: memory is bounded by the largest record
allowed, not by the file.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import polars as pl

from dflash_lab.data.problems import BadRecord, Problem, storable
from dflash_lab.data.strict_json import parse, split_values
from dflash_lab.errors import InputError
from dflash_lab.folders import walk
from dflash_lab.hub import out_of_reach

log = logging.getLogger(__name__)

Row = tuple[int, Any]  # (1-based line or row; 0 = whole file, the parsed record or a BadRecord)
Container = Callable[[Path, int], Iterator[Row]]
CONTAINERS: dict[str, Container] = {}

MAX_RECORD_BYTES = 64 << 20
_CHUNK = 1 << 20
_BATCH_ROWS = 4096
_DATASET_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:\w[\w.-]*)?(@\w[\w.\[\]:%-]*)?")


def container(*suffixes: str) -> Callable[[Container], Container]:
    """Register a reader of files with one of `suffixes`."""

    def register(reader: Container) -> Container:
        CONTAINERS.update(dict.fromkeys(suffixes, reader))
        return reader

    return register


def read_records(
    source: str | Path, problems: list[Problem], *, max_record_bytes: int = MAX_RECORD_BYTES
) -> Iterator[tuple[str, int, Any]]:
    """Yield (file name, line, record) from a file, a folder or a Hugging Face data set id
    ``owner/name[:config][@split]``.

    File names are relative to the folder given. What cannot be read is appended to `problems` as the
    iterator advances. Raises `InputError` at once when there is nothing to read at `source`.
    """
    path = Path(source).expanduser()
    if not os.path.exists(path):  # unlike Path.exists, false for a name that no file can have
        if path.suffix.lower() not in CONTAINERS and _DATASET_ID.fullmatch(str(source)):
            return _read_hub(str(source))
        raise InputError(
            f"{storable(str(source))[:200]}: no such file or folder. Give a {_known()} file, "
            "a folder of them, or a Hugging Face data set id such as owner/name."
        )
    if path.is_dir():
        return _read_files(_files_in(path, problems), problems, max_record_bytes)
    if path.suffix.lower() not in CONTAINERS or not path.is_file():
        raise InputError(f"{path}: not a file of a known kind. Known are {_known()}; rename or convert it.")
    return _read_files([(path, storable(path.name))], problems, max_record_bytes)


def _files_in(folder: Path, problems: list[Problem]) -> list[tuple[Path, str]]:
    """Return the readable files below `folder` with their names in it, sorted; the others become problems."""

    def unreadable(error: OSError) -> None:
        name = storable(os.path.relpath(error.filename, folder))
        problems.append(Problem(name, 0, f"cannot be listed: {error.strerror}", "unreadable", records=0))

    known, others = [], 0
    for path in walk(folder, unreadable):
        name = storable(path.relative_to(folder).as_posix())
        if path.suffix.lower() in CONTAINERS and path.is_file():
            known.append((path, name))
        else:
            others += 1
            reason = f"not read: only {_known()} files are"
            problems.append(Problem(name, 0, reason, "not data", records=0))
    if not known:
        raise InputError(
            f"{folder}: the folder holds no {_known()} file ({others} others). Give one that does."
        )
    return sorted(known, key=lambda pair: pair[1])


def _known() -> str:
    return ", ".join(sorted(CONTAINERS))


def _read_files(
    files: list[tuple[Path, str]], problems: list[Problem], limit: int
) -> Iterator[tuple[str, int, Any]]:
    for path, name in files:
        empty = True
        try:
            for line, record in CONTAINERS[path.suffix.lower()](path, limit):
                empty = False
                if isinstance(record, BadRecord):
                    problems.append(record.at(name, line))
                else:
                    yield name, line, record
        except OSError as error:
            problems.append(
                Problem(name, 0, f"cannot be read: {error.strerror or error}", "unreadable", records=0)
            )
            continue
        if empty:
            problems.append(Problem(name, 0, "the file holds no record", "empty file", records=0))


def _check_text(file: BinaryIO) -> None:
    """Step over a UTF-8 byte-order mark; refuse UTF-16, whose every line would else be a problem of its
    own.
    """
    start = file.read(3)
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise BadRecord("encoding", "the file is UTF-16. Convert it, e.g. iconv -f UTF-16 -t UTF-8.")
    if start != b"\xef\xbb\xbf":
        file.seek(0)


@container(".jsonl", ".ndjson")
def read_jsonl(path: Path, limit: int) -> Iterator[Row]:
    """Yield one record a line."""
    return _text(path, lambda file: _lines(file, limit))


def _text(path: Path, rows: Callable[[BinaryIO], Iterator[Row]]) -> Iterator[Row]:
    """Yield the `rows` of a file of text, or a bad record alone when it is no UTF-8."""
    with open(path, "rb") as file:
        try:
            _check_text(file)
        except BadRecord as error:
            yield 0, error
            return
        yield from rows(file)


def _lines(file: BinaryIO, limit: int) -> Iterator[Row]:
    number = 0
    while data := file.readline(limit + 1):
        number += 1
        if len(data) > limit and not data.endswith(b"\n"):
            size = len(data)
            while rest := file.readline(_CHUNK):
                size += len(rest)
                if rest.endswith(b"\n"):
                    break
            yield number, BadRecord("too large", f"line of {size:,} bytes; the limit is {limit:,}")
            continue
        yield number, _parsed(data)


def _parsed(data: bytes) -> Any:
    try:
        return parse(data)
    except BadRecord as error:
        return error


@container(".json")
def read_json_values(path: Path, limit: int) -> Iterator[Row]:
    """Yield the elements of a list, one object, or (common under this name) JSON Lines."""
    return _text(path, lambda file: _values(file, limit))


def _values(file: BinaryIO, limit: int) -> Iterator[Row]:
    start = file.tell()
    lines = False
    if file.read(1) == b"{":
        file.seek(start)
        lines = not isinstance(_parsed(file.readline(limit + 1)), BadRecord)
    file.seek(start)
    if lines:
        yield from _lines(file, limit)
        return
    for line, value in split_values(iter(lambda: file.read(_CHUNK), b""), limit):
        yield line, value if isinstance(value, BadRecord) else _parsed(value)


@container(".parquet")
def read_parquet(path: Path, limit: int) -> Iterator[Row]:
    """Yield rows as dictionaries without their null fields, 4,096 at a time."""
    row = 0
    try:
        for batch in pl.scan_parquet(path, glob=False).collect_batches(
            chunk_size=_BATCH_ROWS, maintain_order=True
        ):
            for record in batch.iter_rows(named=True):
                row += 1
                yield row, {key: value for key, value in record.items() if value is not None}
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        reason = str(error).strip().split("\n")[0][:300]
        yield (
            row and row + 1,
            BadRecord("unreadable", f"Parquet cannot be read from row {row + 1} on: {reason}"),
        )


def _read_hub(name: str) -> Iterator[tuple[str, int, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"{name}: no such file or folder here. For a Hugging Face data set id install the extra that "
            "loads them: pip install 'dflash-lab[hub]'."
        ) from error
    if (why := out_of_reach()) and "OFFLINE" not in why:  # with that set, the library answers at once itself
        raise InputError(
            f"{name}: no such file or folder here, and as a Hugging Face data set it cannot be read: {why}."
        )
    repository, _, split = name.partition("@")
    repository, _, config = repository.partition(":")
    try:
        rows = datasets.load_dataset(repository, config or None, split=split or "train", streaming=True)
    except Exception as error:  # the library raises its own, requests' and fsspec's errors alike
        raise InputError(f"{name}: the data set cannot be opened: {error}") from error
    return ((name, number, row) for number, row in enumerate(rows, 1))
