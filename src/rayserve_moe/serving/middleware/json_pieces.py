"""Strict JSON within bounds, parsed in pieces, between which other threads run.

A scan finds strings and brackets. A container longer than a piece is cut at its own commas and each piece is parsed by
itself; in the surrounding text the constant NaN, which strict JSON lacks, is the placeholder of the value.

    {"prompt": [1, ... | 8, ... | 16, ...], "n": 2}   ->   three lists that are joined, then {"prompt": NaN, "n": 2}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

MAX_STRINGS = 2**17
"""Strings that one text may hold, names of fields among them."""
MAX_CONTAINERS = 2**20
"""Lists and objects that one text may hold: routing to replay, as numbers, has one per token and layer."""
MAX_DEPTH = 64
PIECE_BYTES = 32768
"""One piece is parsed in a millisecond or two. A single string is never cut."""

_MARK = re.compile(rb'[\[\]{}"NI]')
_STRING_PART = re.compile(rb'(?:[^"\\]++|\\.){0,4096}+', re.DOTALL)
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_QUOTE = ord('"')
_CLOSING = {ord("["): ord("]"), ord("{"): ord("}")}
_PLACEHOLDER = b"NaN"


class JsonFault(ValueError):
    """A text that is not strict JSON, or over a bound. The message never quotes it."""


class _Container:
    """An open container, or the whole text: `[parsed into taken | before, with placeholders | from piece_start on]`."""

    __slots__ = ("before", "closing", "piece_start", "start", "taken", "values")

    def __init__(self, start: int, closing: int) -> None:
        self.start, self.closing = start, closing
        self.piece_start = start + 1
        self.before: tuple[bytes, ...] = ()
        self.values: tuple[object, ...] = ()
        self.taken: Any = None


def parse_in_pieces(text: bytes) -> object:
    """Parse one value: UTF-8, finite numbers, no name twice in an object, no lone surrogates. JsonFault otherwise."""
    return _Parsing(text).value()


class _Parsing:
    """The scan of one text; `_open` are the containers around the current position, outermost first."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._open = [_Container(-1, 0)]
        self._num_strings = self._num_containers = 0

    def value(self) -> object:
        """Scan from mark to mark, then parse the rest of the outermost container."""
        at = 0
        while mark := _MARK.search(self._text, at):
            start, kind = mark.start(), self._text[mark.start()]
            if start - self._open[-1].piece_start > PIECE_BYTES and len(self._open) > 1:
                self._cut(at, start)
            at = start + 1
            if kind == _QUOTE:
                at = self._end_of_string(at)
            elif kind in _CLOSING:
                self._enter(start, _CLOSING[kind])
            elif kind == self._open[-1].closing:
                self._leave(start)
            else:
                raise JsonFault("NaN and Infinity are not JSON numbers" if kind in b"NI" else "brackets do not match")
        (whole, *unclosed) = self._open
        if unclosed:
            raise JsonFault("it ends inside of a list or an object")
        return self._parsed(whole, len(self._text))

    def _end_of_string(self, at: int) -> int:
        self._num_strings += 1
        if self._num_strings > MAX_STRINGS:
            raise JsonFault(f"it holds more than {MAX_STRINGS} strings, names of fields among them")
        while (part := _STRING_PART.match(self._text, at)) and part.end() > at:
            at = part.end()
        if self._text[at : at + 1] != b'"':
            raise JsonFault("a string in it does not end")
        return at + 1

    def _enter(self, start: int, closing: int) -> None:
        self._num_containers += 1
        if self._num_containers > MAX_CONTAINERS:
            raise JsonFault(f"it holds more than {MAX_CONTAINERS} lists and objects")
        if len(self._open) > MAX_DEPTH:
            raise JsonFault("it is nested too deeply")
        self._open.append(_Container(start, closing))

    def _leave(self, end: int) -> None:
        """Close the innermost container; where it was cut, a placeholder replaces it in the outer one."""
        inner, outer = self._open.pop(), self._open[-1]
        if inner.taken is None and not inner.before:
            return
        self._take(inner, end)
        outer.before += (self._text[outer.piece_start : inner.start], _PLACEHOLDER)
        outer.values += (inner.taken,)
        outer.piece_start = end + 1

    def _cut(self, start: int, stop: int) -> None:
        """Parse pieces of the innermost container: between two marks, `[start, stop)`, all commas are its own."""
        inner = self._open[-1]
        while stop - inner.piece_start > PIECE_BYTES:
            comma = self._text.find(b",", max(start, inner.piece_start + PIECE_BYTES), stop)
            if comma < 0:
                return
            self._take(inner, comma)
            inner.piece_start = comma + 1

    def _take(self, inner: _Container, end: int) -> None:
        """Parse the rest of a container up to `end`, and join it with its earlier pieces."""
        piece = self._parsed(inner, end)
        if not piece:
            raise JsonFault("a value is missing between two commas")
        if inner.taken is None:
            inner.taken = piece
        elif isinstance(piece, list):
            inner.taken.extend(piece)
        elif inner.taken.keys().isdisjoint(piece):
            inner.taken.update(piece)
        else:
            raise JsonFault("an object in it has the same key twice")
        inner.before = inner.values = ()

    def _parsed(self, inner: _Container, end: int) -> Any:
        opening, closing = b"", b""
        if inner.closing:
            opening, closing = self._text[inner.start : inner.start + 1], bytes([inner.closing])
        raw = b"".join((opening, *inner.before, self._text[inner.piece_start : end], closing))
        return _parse_piece(raw, iter(inner.values))


def _parse_piece(raw: bytes, values: Iterator[object]) -> object:
    try:
        text = raw.decode("utf-8")
        parsed = json.loads(text, parse_constant=lambda _: next(values), object_pairs_hook=_object_of_pairs)
        if _SURROGATE_ESCAPE.search(text):
            json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise JsonFault("it is not valid Unicode text in UTF-8") from error
    except json.JSONDecodeError as error:
        raise JsonFault(error.msg) from error
    except JsonFault:
        raise
    except ValueError as error:
        raise JsonFault("a number in it has too many digits") from error
    return parsed


def _object_of_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        raise JsonFault("an object in it has the same key twice")
    return parsed
