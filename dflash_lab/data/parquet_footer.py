"""How large the row groups of a Parquet file are once they are decoded, from its footer alone.

Polars tells rows, not bytes, and whoever wants to bound memory must know those before a page is decoded. The
footer has them a column (FileMetaData of github.com/apache/parquet-format, in Thrift's compact protocol).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

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
