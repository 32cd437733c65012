"""Stop patterns: regular expressions whose first match ends a text, matched by RE2 in linear time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from rayserve_moe.requests.records import RequestError

_GROUP = re.compile(r"\\Q.*?(?:\\E|$)|\\.|\[\^?\]?(?:\[:.*?:\]|\\.|[^\]\\])*\]|\((?!\?)", re.DOTALL)
"""Matches quoted text, an escaped character, a class, or the beginning of an unnamed group."""
_PARSER = import_module("re._parser")
"""Python's regular expression parser; it has no public name."""
_READ_OTHERWISE = re.compile(r"\{,|[*+?}]\+|\[\[?:")
"""Syntax that RE2 and Python read differently: counts without a minimum, repeated repetitions, and named classes."""
_MAX_HELD = 1024
_LITERAL = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_ ")


class PatternScanner:
    """Scanner that passes text up to the first match of a pattern or the first stop string.

    It interprets `keeps` as `StopStringScanner` does. It holds back the maximum match length, all text if that is
    unbounded, and nothing with keeps="rest". The match that ends first wins; a tie goes to the earlier start.

    Raises: RequestError if RE2 rejects a pattern, or if a pattern matches the empty text.
    """

    def __init__(
        self, patterns: Sequence[str], stops: Sequence[str] = (), *, keeps: Literal["stop", "rest"] | None = None
    ) -> None:
        for pattern in patterns:
            check_pattern(pattern)
        named = [*((pattern, pattern) for pattern in patterns), *((escaped(stop), stop) for stop in stops if stop)]
        self._named = [(_named(pattern), name) for pattern, name in named]
        self._keeps = keeps
        self._text = b""
        self._first = [0] * len(self._named)
        lengths = [*map(max_match_length, patterns), *map(len, stops)]
        # Number of characters held back (None: all); number of bytes already passed.
        self._num_held = None if None in lengths else max((n for n in lengths if n is not None), default=0)
        self._passed = 0
        self.matched: str | None = None

    def push(self, piece: str, *, may_end: bool = True) -> str:
        """Take the next piece and return the text that certainly precedes any match; empty after a match.

        If `may_end` is False, no match ends in this piece.
        """
        if self.matched is not None or not piece:
            return ""
        first_new = len(self._text)
        self._text += piece.encode()
        found = [match for place in range(len(self._named)) if (match := self._find(place, may_end))]
        if not found:
            return piece if self._keeps == "rest" else self._certain()
        end, start, self.matched = min(found)
        passed = self._text[: {None: start, "stop": end, "rest": len(self._text)}[self._keeps]]
        return passed[first_new if self._keeps == "rest" else self._passed :].decode(errors="ignore")

    def flush(self) -> str:
        """End the text and return the held-back rest."""
        if self.matched is not None or self._keeps == "rest":
            return ""
        held, self._passed = self._text[self._passed :], len(self._text)
        return held.decode()

    def _certain(self) -> str:
        """Return the text that no later match can reach; a later match ends at or after the end of the current text."""
        if self._num_held is None:
            return ""
        held = self._text[self._passed :].decode()
        certain = held[: max(0, len(held) - self._num_held)]
        self._passed += len(certain.encode())
        return certain

    def _find(self, place: int, may_end: bool) -> tuple[int, int, str] | None:
        """Return end, start and name of a pattern's first match; a match that may not end here is skipped for good."""
        pattern, name = self._named[place]
        while span := span_of(pattern, self._text[self._first[place] :]):
            start, length = span[0] + self._first[place], span[1]
            if may_end:
                return start + length, start, name
            self._first[place] = start + len(self._text[start:].decode()[0].encode())
        return None


def span_of(pattern: str, text: bytes) -> tuple[int, int] | None:
    """Return start and length in bytes of the first match of the group `stop`, or None without a match."""
    options = pc.ExtractRegexSpanOptions(pattern)
    found = pc.call_function("extract_regex_span", [pa.scalar(text, pa.string())], options).as_py()
    return None if found is None else (int(found["stop"][0]), int(found["stop"][1]))


@lru_cache(maxsize=1024)
def check_pattern(pattern: str) -> None:
    """Check a stop pattern.

    Raises: RequestError if RE2 rejects it, or if it matches the empty text.
    """
    try:
        matches_nothing = span_of(_named(pattern), b"") is not None
    except (pa.ArrowInvalid, UnicodeEncodeError):
        raise RequestError("is not a pattern in the syntax of RE2", "stop_regex") from None
    if matches_nothing:
        raise RequestError("matches the empty text, which would end every answer", "stop_regex")


@lru_cache(maxsize=1024)
def max_match_length(pattern: str) -> int | None:
    """Return the maximum number of characters that a pattern can match, or None if that is unbounded or unknown.

    It is unknown if Python's parser rejects the pattern or reads it differently from RE2.
    """
    if _READ_OTHERWISE.search(pattern):
        return None
    try:
        _, max_length = _PARSER.parse(pattern).getwidth()
    except (re.error, OverflowError, RecursionError):
        return None
    return max_length if max_length <= _MAX_HELD else None


def _named(pattern: str) -> str:
    """Return the pattern as the only group, named `stop`: pyarrow requires every group to have a name."""
    return f"(?P<stop>{_GROUP.sub(lambda found: '(?:' if found[0] == '(' else found[0], pattern)})"


def escaped(text: str) -> str:
    """Return a pattern that matches exactly this text; characters beyond ASCII stay unescaped."""
    return "".join(c if c in _LITERAL or not c.isascii() else f"\\x{{{ord(c):x}}}" for c in text)
