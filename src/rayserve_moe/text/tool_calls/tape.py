"""Output text as it arrives, read by parsers that are generators: they yield where they need more of it.

What a parser reads depends on the text alone, never on the pieces that it came in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar

_Result = TypeVar("_Result")
Steps = Generator[None, None, _Result]
"""A parser: yields for more text, and returns what it has read."""

_JSON_TOKEN = re.compile(r'["{}\[\]]|[^\s\w"{}\[\],:+.-]')
_STRING_TOKEN = re.compile(r'["\\]')


Kind = Literal["content", "reasoning"]


class TextPart(NamedTuple):
    """A piece of an answer's content or reasoning."""

    kind: Kind
    text: str


class ToolCall(NamedTuple):
    """One whole call: the function's name, its arguments as a JSON object in text, and the model's own id if any."""

    name: str
    arguments: str
    call_id: str | None = None


Part = TextPart | ToolCall
Tools = Mapping[str, Mapping[str, Any]]
"""The schemas of parameters by the names of functions and parameters."""


class BrokenCall(ValueError):
    """Text that begins like a call and is none."""


class Tape:
    """The text of one output, the position that its parser has reached, and the parts that it has found.

    `committed` is where a parser that fails begins again. Calls beyond `max_calls` are left out.
    """

    def __init__(self, tools: Tools, *, max_calls: int | None = None) -> None:
        self.tools, self.max_calls = tools, max_calls
        self.text, self.position, self.committed, self.is_ended = "", 0, 0, False
        self.num_calls = 0
        self.parts: list[Part] = []

    def emit(self, kind: Kind, text: str) -> None:
        """Add a piece of text."""
        if text:
            self.parts.append(TextPart(kind, text))

    def call(self, call: ToolCall) -> None:
        """Add a call, and commit what was read of it."""
        self.num_calls += 1
        if self.max_calls is None or self.num_calls <= self.max_calls:
            self.parts.append(call)
        self.committed = self.position

    def trim(self) -> None:
        """Forget the text before the position; only where nothing holds a place in it."""
        self.text, self.position, self.committed = self.text[self.position :], 0, 0


Reader = Callable[[Tape], Steps[None]]
"""Reads from a marker on and adds calls to the tape; BrokenCall where there is none."""


class CallFormat(NamedTuple):
    """How a family writes calls: readers by the markers that begin them, and all markers, those inside included.

    `bare` reads calls that have no marker: they may only begin an answer, or follow another call.
    """

    readers: Mapping[str, Reader]
    markers: tuple[str, ...]
    bare: Reader | None = None


def more(tape: Tape) -> Steps[None]:
    """Wait for more text. BrokenCall at the end."""
    if tape.is_ended:
        raise BrokenCall
    yield


@lru_cache(maxsize=64)
def any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that finds the first of the markers; no marker may lie within another but at its start."""
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))) or r"(?!)")


def num_undecided(text: str, markers: Iterable[str]) -> int:
    """Length of the longest end of `text` that begins a marker."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


def until(tape: Tape, *markers: str) -> Steps[tuple[str, str]]:
    """Read up to and over the first of the markers; returns the text before it, and the marker."""
    begin, search_from, pattern = tape.position, tape.position, any_of(markers)
    while (found := pattern.search(tape.text, search_from)) is None:
        search_from = max(begin, len(tape.text) - max(map(len, markers)) + 1)
        yield from more(tape)
    tape.position = found.end()
    return tape.text[begin : found.start()], found[0]


def skip(tape: Tape, characters: str | None = None) -> Steps[None]:
    """Read over whitespace, or over these characters."""
    while True:
        rest = tape.text[tape.position :]
        tape.position += len(rest) - len(rest.lstrip(characters))
        if tape.position < len(tape.text) or tape.is_ended:
            return
        yield


def peek(tape: Tape) -> Steps[str]:
    """Read over whitespace; returns the character after it. BrokenCall at the end."""
    yield from skip(tape)
    if tape.position == len(tape.text):
        raise BrokenCall
    return tape.text[tape.position]


def take(tape: Tape, *markers: str) -> Steps[str | None]:
    """Read over one of the markers where it comes next; returns it, or None."""
    while True:
        found = next((marker for marker in markers if tape.text.startswith(marker, tape.position)), None)
        if found is not None:
            tape.position += len(found)
            return found
        rest = tape.text[tape.position : tape.position + max(map(len, markers))]
        if tape.is_ended or not any(marker.startswith(rest) for marker in markers):
            return None
        yield


def expect(tape: Tape, *markers: str) -> Steps[str]:
    """Read over whitespace and one of the markers, which it returns. BrokenCall where something else comes."""
    yield from skip(tape)
    found = yield from take(tape, *markers)
    if found is None:
        raise BrokenCall
    return found


def close(tape: Tape, *markers: str) -> Steps[str | None]:
    """Read over whitespace and one of the markers, which it returns; the end may leave out a part of it, or all."""
    yield from skip(tape)
    found = yield from take(tape, *markers)
    if found is None:
        rest = tape.text[tape.position :]
        if not tape.is_ended or not any(marker.startswith(rest) for marker in markers):
            raise BrokenCall
        tape.position = len(tape.text)
    return found


def json_text(tape: Tape, *, opening: Sequence[str] = ("{",)) -> Steps[str]:
    """Read over whitespace and one JSON object, up to the bracket that closes it; returns its text, not yet checked."""
    yield from skip(tape)
    begin = at = tape.position
    if not tape.text.startswith(tuple(opening), begin):
        raise BrokenCall
    depth, in_string = 0, False
    while True:
        found = (_STRING_TOKEN if in_string else _JSON_TOKEN).search(tape.text, at)
        if found is None or (found[0] == "\\" and found.end() == len(tape.text)):
            at = len(tape.text) if found is None else found.start()
            yield from more(tape)
            continue
        at, token = found.end() + (found[0] == "\\"), found[0]
        if token == '"':
            in_string = not in_string
        elif token in "{[":
            depth += 1
        elif token in "}]":
            depth -= 1
            if depth == 0:
                tape.position = at
                return tape.text[begin:at]
        elif token != "\\":
            raise BrokenCall
