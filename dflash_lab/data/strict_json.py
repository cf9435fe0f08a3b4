"""JSON from strangers: strict parsing of one value, and splitting a byte stream into values without holding
the file.

The standard parser accepts what later breaks a tokenizer or hides data: the last of two equal keys wins,
lone surrogates pass, NaN passes. Here each is an error in plain words. The splitter finds the borders of
array elements by brackets and quotes alone, so that one malformed element costs that element and not the
rest of a 1 GB file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dflash_lab.data.problems import BadRecord

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
        yield (
            line,
            BadRecord(
                "cut off", "the file ends before the closing ] of its list; what followed is not known"
            ),
        )
