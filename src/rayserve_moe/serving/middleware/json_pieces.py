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


def parse_in_pieces(text: bytes) -> object:
    """Parse one value: UTF-8, finite numbers, no name twice in an object, no lone surrogates. JsonFault otherwise.

    It is scanned from mark to mark; what is left of the outermost container is parsed at the end.
    """
    containers = [_Container(text, start=-1, closing=0)]
    at = num_strings = num_containers = 0
    while mark := _MARK.search(text, at):
        start, kind, inner = mark.start(), text[mark.start()], containers[-1]
        if start - inner.piece_start > PIECE_BYTES and len(containers) > 1:
            inner.cut(at, start)
        at = start + 1
        if kind == _QUOTE:
            num_strings += 1
            at = _end_of_string(text, at, num_strings)
        elif kind in _CLOSING:
            num_containers += 1
            _check_nesting(num_containers, depth=len(containers))
            containers.append(_Container(text, start=start, closing=_CLOSING[kind]))
        elif kind == inner.closing:
            containers.pop().close(start, outer=containers[-1])
        else:
            raise JsonFault("NaN and Infinity are not JSON numbers" if kind in b"NI" else "brackets do not match")
    if len(containers) > 1:
        raise JsonFault("it ends inside of a list or an object")
    return containers[0].parsed(len(text))


def _end_of_string(text: bytes, at: int, num_strings: int) -> int:
    if num_strings > MAX_STRINGS:
        raise JsonFault(f"it holds more than {MAX_STRINGS} strings, names of fields among them")
    while (part := _STRING_PART.match(text, at)) and part.end() > at:
        at = part.end()
    if text[at : at + 1] != b'"':
        raise JsonFault("a string in it does not end")
    return at + 1


def _check_nesting(num_containers: int, *, depth: int) -> None:
    if num_containers > MAX_CONTAINERS:
        raise JsonFault(f"it holds more than {MAX_CONTAINERS} lists and objects")
    if depth > MAX_DEPTH:
        raise JsonFault("it is nested too deeply")


class _Container:
    """An open container, or the whole text: `[parsed into taken | before, with placeholders | from piece_start on]`."""

    __slots__ = ("before", "closing", "piece_start", "start", "taken", "text", "values")

    def __init__(self, text: bytes, *, start: int, closing: int) -> None:
        self.text, self.start, self.closing = text, start, closing
        self.piece_start = start + 1
        self.before: tuple[bytes, ...] = ()
        self.values: tuple[object, ...] = ()
        self.taken: Any = None

    def cut(self, start: int, stop: int) -> None:
        """Parse pieces: between two marks, `[start, stop)`, all commas are its own."""
        while stop - self.piece_start > PIECE_BYTES:
            comma = self.text.find(b",", max(start, self.piece_start + PIECE_BYTES), stop)
            if comma < 0:
                return
            self._take(comma)
            self.piece_start = comma + 1

    def close(self, end: int, *, outer: _Container) -> None:
        """End at `end`; where it was cut, a placeholder replaces it in the outer one."""
        if self.taken is None and not self.before:
            return
        self._take(end)
        outer.before += (self.text[outer.piece_start : self.start], _PLACEHOLDER)
        outer.values += (self.taken,)
        outer.piece_start = end + 1

    def parsed(self, end: int) -> Any:
        """Parse what is not taken yet, up to `end`."""
        opening, closing = b"", b""
        if self.closing:
            opening, closing = self.text[self.start : self.start + 1], bytes([self.closing])
        raw = b"".join((opening, *self.before, self.text[self.piece_start : end], closing))
        return _parse_piece(raw, iter(self.values))

    def _take(self, end: int) -> None:
        """Parse up to `end`, and join it with the pieces before."""
        piece = self.parsed(end)
        if not piece:
            raise JsonFault("a value is missing between two commas")
        if self.taken is None:
            self.taken = piece
        elif isinstance(piece, list):
            self.taken.extend(piece)
        elif self.taken.keys().isdisjoint(piece):
            self.taken.update(piece)
        else:
            raise JsonFault("an object in it has the same key twice")
        self.before = self.values = ()


def _parse_piece(raw: bytes, values: Iterator[object]) -> object:
    try:
        text = raw.decode("utf-8")
        parsed = json.loads(text, parse_constant=lambda _: next(values), object_pairs_hook=_object_of_pairs)
        if _SURROGATE_ESCAPE.search(text) and (lone := _lone_surrogate(json.loads(text))):
            raise JsonFault(f"{lone} in a string or a key is half of a surrogate pair, without its other half")
    except UnicodeError as error:
        raise JsonFault("it is not valid Unicode text in UTF-8") from error
    except json.JSONDecodeError as error:
        raise JsonFault(error.msg) from error
    except JsonFault:
        raise
    except ValueError as error:
        raise JsonFault("a number in it has too many digits") from error
    return parsed


def _lone_surrogate(parsed: object) -> str:
    """Return the escape of the first lone surrogate in any string or key; empty without one."""
    try:
        json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        return f"\\u{ord(error.object[error.start]):04x}"
    return ""


def _object_of_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        raise JsonFault("an object in it has the same key twice")
    return parsed
