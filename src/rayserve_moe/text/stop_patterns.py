"""Stop patterns: regular expressions whose first match ends a text. RE2 matches them, in time linear in the text."""

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
"""Quoted text, an escaped character, a class, or the beginning of a group without a name."""
_PARSER = import_module("re._parser")
"""That of Python's expressions, which no public name has."""
_READ_OTHERWISE = re.compile(r"\{,|[*+?}]\+|\[\[?:")
"""Counts without a beginning, which are text to RE2; repeated repetitions, which are possessive to Python; classes with
names."""
_MOST_HELD = 1024
_LITERAL = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_ ")


class PatternScanner:
    """Passes text on up to the first match of a pattern or the first stop string, as `StopStringScanner` does.

    Held back is as much text as any of them can match, all of it where that is not bounded, and nothing where text is
    kept whole. Of several matches the one that ends first counts, then the one that starts first. RequestError for a
    pattern that RE2 does not take, or that matches the empty text.
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
        longest = [*map(longest_match, patterns), *map(len, stops)]
        # Characters that are held back, and bytes that were passed on.
        self._num_held = None if None in longest else max((n for n in longest if n is not None), default=0)
        self._passed = 0
        self.matched: str | None = None

    def push(self, piece: str, *, may_end: bool = True) -> str:
        """Take the next piece; return what is certain to be text. After a match, nothing.

        Unless it `may_end`, no match ends in this piece.
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
        """End the text; return what was held back."""
        if self.matched is not None or self._keeps == "rest":
            return ""
        held, self._passed = self._text[self._passed :], len(self._text)
        return held.decode()

    def _certain(self) -> str:
        """Pass on what no match can reach any more: one that is yet to be found ends where the text ends, or later."""
        if self._num_held is None:
            return ""
        held = self._text[self._passed :].decode()
        certain = held[: max(0, len(held) - self._num_held)]
        self._passed += len(certain.encode())
        return certain

    def _find(self, place: int, may_end: bool) -> tuple[int, int, str] | None:
        """End, start and name of one pattern's first match; a match that may not end here is never found again."""
        pattern, name = self._named[place]
        while span := span_of(pattern, self._text[self._first[place] :]):
            start, length = span[0] + self._first[place], span[1]
            if may_end:
                return start + length, start, name
            self._first[place] = start + len(self._text[start:].decode()[0].encode())
        return None


def span_of(pattern: str, text: bytes) -> tuple[int, int] | None:
    """Start and length in bytes of the first match of the group `stop`; None where there is none."""
    options = pc.ExtractRegexSpanOptions(pattern)
    found = pc.call_function("extract_regex_span", [pa.scalar(text, pa.string())], options).as_py()
    return None if found is None else (int(found["stop"][0]), int(found["stop"][1]))


@lru_cache(maxsize=1024)
def check_pattern(pattern: str) -> None:
    """RequestError for a pattern that RE2 does not take, or that matches the empty text."""
    try:
        matches_nothing = span_of(_named(pattern), b"") is not None
    except (pa.ArrowInvalid, UnicodeEncodeError):
        raise RequestError("is not a pattern in the syntax of RE2", "stop_regex") from None
    if matches_nothing:
        raise RequestError("matches the empty text, which would end every answer", "stop_regex")


@lru_cache(maxsize=1024)
def longest_match(pattern: str) -> int | None:
    """The most characters that a pattern can match; None where that is not bounded, or not known.

    Python reads it: what that refuses, or takes for something else than RE2 does, is not known.
    """
    if _READ_OTHERWISE.search(pattern):
        return None
    try:
        _, longest = _PARSER.parse(pattern).getwidth()
    except (re.error, OverflowError, RecursionError):
        return None
    return longest if longest <= _MOST_HELD else None


def _named(pattern: str) -> str:
    """The pattern as a group called `stop`, the only one: pyarrow takes no group without a name."""
    return f"(?P<stop>{_GROUP.sub(lambda found: '(?:' if found[0] == '(' else found[0], pattern)})"


def escaped(text: str) -> str:
    """A pattern that matches this text alone; characters beyond ASCII stand for themselves."""
    return "".join(c if c in _LITERAL or not c.isascii() else f"\\x{{{ord(c):x}}}" for c in text)
