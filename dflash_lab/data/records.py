"""Where records come from: JSON Lines, JSON, Parquet, folders and hub data sets, each fault told by file and
line.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import polars as pl

from dflash_lab.errors import InputError
from dflash_lab.files import walk
from dflash_lab.hub import out_of_reach

log = logging.getLogger(__name__)


# ---- What is wrong with the input: every record that is not stored has a problem, none goes unsaid ----
# `prepare` checks: ``records in == stored + duplicates + sum(problem.records)``.


@dataclass(frozen=True, slots=True)
class Problem:
    """`reason` says what is wrong and what to do; `kind` is the short name it is counted under."""

    file: str
    line: int  # 1-based line or row; 0 = the file as a whole
    reason: str
    kind: str = "malformed"
    records: int = 1  # records lost by it; 0 for a sample that is cut, a file of an unknown kind


def storable(text: str) -> str:
    """Return text that UTF-8 can hold: half surrogate pairs (in file names, JSON escapes) are spelled out."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


class BadRecord(ValueError):
    """One record (or `records` that cannot be told apart) cannot be used; it becomes a `Problem`."""

    def __init__(self, kind: str, reason: str, records: int = 1) -> None:
        self.kind = kind
        self.reason = storable(reason)
        self.records = records
        super().__init__(self.reason)

    def at(self, file: str, line: int) -> Problem:
        """Return the problem this record is, with its place."""
        return Problem(file, line, self.reason, self.kind, self.records)


# ---- Files, folders and data sets ----
# A container is registered by file suffix (`@container(".jsonl")`) and yields (line, record) pairs, where a
# record that could not be read is a `BadRecord`. All of them stream: memory is bounded by the largest record
# allowed, not by the file; of Parquet by twice a page, of the columns that a form may need (`FIELDS`).

Row = tuple[int, Any]  # (1-based line or row; 0 = whole file, the parsed record or a BadRecord)
Container = Callable[[Path, int], Iterator[Row]]
CONTAINERS: dict[str, Container] = {}
FIELDS: dict[tuple[str, ...], frozenset[str]] = {}  # keys that tell a kind of record -> all read of it

MAX_RECORD_BYTES = 64 << 20
_CHUNK = 1 << 20
_PYTHON_BYTES = 1 << 20  # of Parquet that are Python objects at a time, which are up to nine times as large
_UNDECODED = (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError)
_DATASET_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:\w[\w.-]*)?(@\w[\w.\[\]:%-]*)?")


def container(*suffixes: str) -> Callable[[Container], Container]:
    """Register a reader of files with one of `suffixes`."""

    def register(reader: Container) -> Container:
        CONTAINERS.update(dict.fromkeys(suffixes, reader))
        return reader

    return register


def read_records(
    source: str | Path,
    problems: list[Problem],
    *,
    name: str = "",
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> Iterator[tuple[str, int, Any]]:
    """Yield (file name, line, record) from a file, a folder or a Hugging Face data set id
    ``owner/name[:config][@split]``.

    File names are relative to the folder given; with `name`, a file is called that, and those of a folder
    begin with it, so that several sources can be told apart. What cannot be read is appended to `problems` as
    the iterator advances. Raises `InputError` at once when there is nothing to read at `source`.
    """
    path = Path(source).expanduser()
    if not os.path.exists(path):  # unlike Path.exists, false for a name that no file can have
        if path.suffix.lower() not in CONTAINERS and _DATASET_ID.fullmatch(str(source)):
            return _read_hub(str(source), problems)
        raise InputError(
            f"{storable(str(source))[:200]}: no such file or folder. Give a {_known()} file, "
            "a folder of them, or a Hugging Face data set id such as owner/name."
        )
    if path.is_dir():
        return _read_files(_files_in(path, problems, name), problems, max_record_bytes)
    if path.suffix.lower() not in CONTAINERS or not path.is_file():
        raise InputError(f"{path}: not a file of a known kind. Known are {_known()}; rename or convert it.")
    return _read_files([(path, storable(name or path.name))], problems, max_record_bytes)


def _files_in(folder: Path, problems: list[Problem], called: str) -> list[tuple[Path, str]]:
    """Return the readable files below `folder` with their names in it, after what the folder is `called`,
    sorted; the others become problems.
    """

    def named(path: str | Path) -> str:
        return storable(os.path.join(called, os.path.relpath(path, folder)))

    def unreadable(error: OSError) -> None:
        reason = f"cannot be listed: {error.strerror}"
        problems.append(Problem(named(error.filename), 0, reason, "unreadable", records=0))

    known, others = [], 0
    for path in walk(folder, unreadable):
        name = named(path)
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


@container(".jsonl", ".ndjson")
def read_jsonl(path: Path, limit: int) -> Iterator[Row]:
    """Yield one record a line."""
    return _text(path, lambda file: _lines(file, limit))


def _text(path: Path, rows: Callable[[BinaryIO], Iterator[Row]]) -> Iterator[Row]:
    """Yield the `rows` of a file of text, after its byte-order mark if it has one."""
    with open(path, "rb") as file:
        start = file.read(3)
        if start[:2] in (b"\xff\xfe", b"\xfe\xff"):  # once, for else every line would be a problem of its own
            yield 0, BadRecord("encoding", "the file is UTF-16. Convert it, e.g. iconv -f UTF-16 -t UTF-8.")
            return
        if start != b"\xef\xbb\xbf":
            file.seek(0)
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
    """Yield rows as dictionaries without their null fields, of the columns that are read of such records,
    decoded in ranges of about `limit` bytes: for every range, polars goes through its whole row group.

    A row of more than `limit` bytes is a bad record of its own. From the first row that cannot be decoded on,
    the rest of the file is one bad record that counts them all.
    """
    row = total = 0
    try:
        scan = pl.scan_parquet(path, glob=False)
        columns = columns_read(scan.collect_schema().names())
        scan = scan.select(columns)
        total = scan.select(pl.len()).collect().item()
        groups = row_groups(path, columns)
        if sum(rows for rows, _ in groups) != total:
            raise ValueError(f"its row groups do not make {total:,} rows")
        for count in _ranges(groups, limit):
            end, step = row + count, count
            while row < end:
                try:
                    part = scan.slice(row, min(step, end - row)).collect(engine="in-memory")
                    if not part.height:
                        raise pl.exceptions.ComputeError(f"it has {row:,} rows where it says {total:,}")
                except _UNDECODED:
                    if step == 1:
                        raise
                    step //= 2  # down to the first row that cannot be read
                    continue
                for record in _sized(part, limit):
                    row += 1
                    yield row, record
                del part  # before the next one is decoded
    except _UNDECODED as error:
        if isinstance(error, OSError) and not total:
            raise
        reason = f"Parquet cannot be read from row {row + 1} on: {_first_line(error)}"
        yield row + 1 if total else 0, BadRecord("unreadable", reason, max(1, total - row))


def _ranges(groups: list[tuple[int, int]], limit: int) -> Iterator[int]:
    """Yield how many rows to decode together for about `limit` bytes: small groups, or pieces of one."""
    rows = size = 0
    for count, bytes_of in groups:
        if rows and size + bytes_of > limit:
            yield rows
            rows = size = 0
        if bytes_of <= limit:
            rows, size = rows + count, size + bytes_of
            continue
        piece = max(1, count * limit // bytes_of)
        for start in range(0, count, piece):
            yield min(piece, count - start)
    if rows:
        yield rows


def columns_read(names: Sequence[str]) -> Sequence[str]:
    """Return those of `names` that are read of records which have such columns; all of them where no kind of
    record is known by them, so that what is said of a record names what it has.
    """
    known = [keys for needed, keys in FIELDS.items() if {*needed} <= {*names}]
    return [name for name in names if any(name in keys for keys in known)] if known else names


def _sized(part: pl.DataFrame, limit: int) -> Iterator[dict[str, Any] | BadRecord]:
    """Yield the rows of `part`, in place of those of more than `limit` bytes a bad record."""
    size = int(part.estimated_size())
    if size > limit and part.height > 1:
        for number in range(part.height):
            yield from _sized(part.slice(number, 1), limit)
    elif size > limit:
        yield BadRecord("too large", f"row of {size:,} bytes; the limit is {limit:,}")
    else:
        together = max(1, _PYTHON_BYTES * part.height // max(1, size))
        for record in part.iter_rows(named=True, buffer_size=together):
            yield _given(record)


def _given(value: Any) -> Any:
    """Return a value of a row without the fields that are null, however deep: all rows share one schema, so a
    field that another row has (an argument of another tool's call) is there as null.
    """
    if isinstance(value, dict):
        return {key: _given(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value[:1]):
        return [_given(item) for item in value]
    return value


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0][:300]


def _read_hub(name: str, problems: list[Problem]) -> Iterator[tuple[str, int, Any]]:
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
    split = split or "train"
    try:
        rows = datasets.load_dataset(repository, config or None, split=split, streaming=True)
    except Exception as error:  # the library raises its own, requests' and fsspec's errors alike
        raise InputError(f"{name}: the data set cannot be opened: {error}") from error
    return _hub_rows(name, split, rows, problems)


def _hub_rows(name: str, split: str, rows: Any, problems: list[Problem]) -> Iterator[tuple[str, int, Any]]:
    """Yield the rows of a streamed data set. Where that fails (a connection that drops, a file of another
    schema) it goes on from the row where it stopped; if that row fails again, what is left becomes a problem.
    """
    splits = getattr(getattr(rows, "info", None), "splits", None) or {}
    total = splits[split].num_examples if split in splits else 0
    done, tried = 0, -1  # rows read; how many were when it failed the last time
    while True:
        try:
            for row in rows.skip(done) if done else rows:
                done += 1
                yield name, done, _given(row)
            return
        except Exception as error:  # as above; what the consumer raises does not come here
            reason = _first_line(error)
        if done == tried:
            break
        log.warning("%s: reading stopped after row %d (%s); once more from there", name, done, reason)
        tried = done
    left = max(1, (total or 0) - done)
    count = f"{left:,} rows" if total else "nobody knows how many rows"
    reason = f"the data set cannot be read from row {done + 1} on ({count}): {reason}"
    log.error("%s: %s. What came before is kept", name, reason)
    problems.append(Problem(name, done + 1, storable(reason), "unreadable", records=left))


# ---- JSON from strangers ----
# The standard parser accepts what later breaks a tokenizer or hides data: the last of two equal keys wins,
# lone surrogates pass, NaN passes. Here each is an error in plain words. The splitter finds the borders of
# array elements by brackets and quotes alone, so that one malformed element costs that element and not the
# rest of a 1 GB file.

_OUTSIDE = re.compile(rb'["\[\]{},]')
_INSIDE = re.compile(rb'["\\]')
_BLANK = b" \t\r\n"


def parse(data: bytes) -> Any:
    """Parse one UTF-8 JSON value; `BadRecord` names the first thing wrong with it."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRecord(
            "encoding",
            f"not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}. Convert the file to UTF-8.",
        ) from None
    if not text.strip():
        raise BadRecord("empty", "empty record")
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string") or error.pos >= len(text.rstrip()):
            raise BadRecord("cut off", f"the JSON is cut off after {len(text.rstrip())} characters") from None
        found = "a NUL character" if text[error.pos : error.pos + 1] == "\0" else error.msg
        raise BadRecord("malformed", f"not valid JSON: {found} at character {error.pos}") from None
    except RecursionError:
        raise BadRecord("malformed", "JSON nested too deeply to read") from None
    except BadRecord:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise BadRecord("malformed", f"not usable JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BadRecord(
            "duplicate key", f"key {twice[:80]!r} appears twice in one object: which is meant is not known"
        )
    return value


def _no_constant(name: str) -> Any:
    raise BadRecord("malformed", f"{name} is not JSON")


@dataclass
class _Element:
    """The value being collected: its bytes so far, where it began, and the lexer's state inside it."""

    limit: int
    line: int = 1
    pieces: list[bytes] = field(default_factory=list)
    size: int = 0
    depth: int = 0
    blank: bool = True

    def add(self, data: bytes) -> None:
        if not data:
            return
        if self.blank:  # leading blanks belong to no element, but they move its line
            stripped = data.lstrip(_BLANK)
            self.line += data.count(b"\n", 0, len(data) - len(stripped))
            self.blank, data = not stripped, stripped
        self.size += len(data)
        if self.size > self.limit:
            self.pieces.clear()
        else:
            self.pieces.append(data)

    def take(self) -> tuple[int, bytes | BadRecord]:
        if self.size > self.limit:
            return self.line, BadRecord(
                "too large", f"record of {self.size:,} bytes; the limit is {self.limit:,}"
            )
        return self.line, b"".join(self.pieces).rstrip(_BLANK)


def split_values(chunks: Iterable[bytes], limit: int) -> Iterator[tuple[int, bytes | BadRecord]]:
    """Yield (line, bytes of one value) for every element of a top-level array, or for every value of a
    stream of values.

    Memory is bounded by `limit` bytes and one chunk. What cannot be delimited (too large, cut off) is
    yielded as a `BadRecord`.
    """
    array_open = in_string = escaped = False
    element = _Element(limit)
    line = 1
    for chunk in chunks:
        mark = position = counted = 0
        if escaped and chunk:
            position, escaped = 1, False
        while True:
            match = (_INSIDE if in_string else _OUTSIDE).search(chunk, position)
            if match is None:
                break
            position, token = match.end(), match.group()
            if in_string:
                in_string = token != b'"'
                if in_string and position == len(chunk):
                    escaped = True
                    break
                position += in_string  # the escaped character cannot end the string
                continue
            ends = False
            if token == b'"':
                in_string = True
            elif token in b"{[":
                before = element.blank and not chunk[mark : match.start()].strip(_BLANK)
                if token == b"[" and not array_open and element.depth == 0 and before:
                    array_open = True
                    line, counted = line + chunk.count(b"\n", counted, position), position
                    element, mark = _Element(limit, line=line), position
                else:
                    element.depth += 1
            elif token in b"}]":
                if element.depth:
                    element.depth -= 1
                    ends = element.depth == 0 and not array_open
                    stop = position
                elif token == b"]" and array_open:
                    array_open, ends, stop = False, True, match.start()
            elif element.depth == 0 and array_open:
                ends, stop = True, match.start()
            if ends:
                element.add(chunk[mark:stop])
                if not element.blank:
                    yield element.take()
                elif token == b",":
                    yield element.line, BadRecord("empty", "nothing between two commas")
                line, counted = line + chunk.count(b"\n", counted, position), position
                element, mark = _Element(limit, line=line), position
        element.add(chunk[mark:])
        line += chunk.count(b"\n", counted)
    if not element.blank:
        if array_open or element.depth or in_string:
            yield element.line, BadRecord("cut off", "the file ends inside this record")
        else:
            yield element.take()
    elif array_open:
        reason = "the file ends before the closing ] of its list; what followed is not known"
        yield line, BadRecord("cut off", reason)


# ---- How large the row groups of a Parquet file are once they are decoded, from its footer alone ----
# Polars tells rows, not bytes, and whoever wants to bound memory must know those before a page is decoded.
# The footer has them a column (FileMetaData of github.com/apache/parquet-format, in Thrift's compact
# protocol).

_MAGIC = b"PAR1"
_WIDTHS = (1, 4, 8, 12, 4, 8, 16, 16)  # bytes of a value by physical type; of text, those that find it
_STRUCT, _LIST, _SET, _MAP, _BINARY, _DOUBLE = 12, 9, 10, 11, 8, 7
Struct = dict[int, Any]  # a Thrift struct: number of a field -> its value


def row_groups(path: Path, columns: Collection[str]) -> list[tuple[int, int]]:
    """Return (rows, bytes of `columns` when decoded) of each row group; a `ValueError` for a footer that
    cannot be read.

    A column counts with its pages as they are without compression, or with the width of its values where an
    encoding makes the pages smaller than that.
    """
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 8))
        tail = file.read(8)
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != _MAGIC or length > size - 8:
            raise ValueError("the file has no Parquet footer")
        file.seek(size - 8 - length)
        data = file.read(length)
    try:
        footer = _Compact(data).struct()
        return [(group[3], sum(_sizes(group[1], columns))) for group in footer.get(4, [])]
    except (AttributeError, IndexError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"the Parquet footer cannot be read ({type(error).__name__})") from error


def _sizes(chunks: list[Struct], columns: Collection[str]) -> Iterator[int]:
    for chunk in chunks:
        about = chunk[3]  # ColumnMetaData: 1 type, 3 path in the schema, 5 values, 6 bytes uncompressed
        if about[3][0].decode("utf-8", "replace") in columns:
            yield max(about[6], about[5] * _WIDTHS[about[1]])


class _Compact:
    """A reader of Thrift's compact protocol."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def struct(self) -> Struct:
        found: Struct = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer()
            kind = head & 15
            found[number] = kind == 1 if kind <= 2 else self._value(kind)
        return found

    def _value(self, kind: int) -> Any:
        if kind == _STRUCT:
            return self.struct()
        if kind in (_LIST, _SET):
            head = self._byte()
            count = self._varint() if head >> 4 == 15 else head >> 4
            return [self._value(head & 15) for _ in range(count)]
        if kind == _BINARY:
            return self._take(self._varint())
        if kind == _DOUBLE:
            return self._take(8)
        if kind == _MAP:
            count = self._varint()
            kinds = self._byte() if count else 0
            return [(self._value(kinds >> 4), self._value(kinds & 15)) for _ in range(count)]
        if kind <= 3:  # a byte, or an element that is true or false
            return self._byte()
        if kind <= 6:
            return self._integer()
        raise ValueError(f"the Parquet footer holds a value of an unknown kind ({kind})")

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _take(self, count: int) -> bytes:
        self._at += count
        return self._data[self._at - count : self._at]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
