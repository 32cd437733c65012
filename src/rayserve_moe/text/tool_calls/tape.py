"""Output text read incrementally by parsers, which are generators that yield when they need more text.

The result depends on the text alone, not on the pieces in which it arrives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar

_Result = TypeVar("_Result")
Steps = Generator[None, None, _Result]
"""A parser: it yields for more text and returns its result."""

_JSON_TOKEN = re.compile(r'["{}\[\]]|[^\s\w"{}\[\],:+.-]')
_STRING_TOKEN = re.compile(r'["\\]')


Kind = Literal["content", "reasoning"]


class TextPart(NamedTuple):
    """A piece of an answer's content or reasoning."""

    kind: Kind
    text: str


class ToolCall(NamedTuple):
    """Complete call of a function."""

    name: str
    """Name of the function."""
    arguments: str
    """Arguments as the text of a JSON object."""
    call_id: str | None = None
    """The model's own id of the call, if any."""


Part = TextPart | ToolCall
Tools = Mapping[str, Mapping[str, Any]]
"""Parameter schemas by function name and parameter name."""


class BrokenCall(ValueError):
    """Error for text that begins like a call but is invalid."""


class Tape:
    """Text of an output, with the position of its parser and the parts found.

    A failed parser restarts at `committed`. Calls beyond `max_calls` are dropped.
    """

    def __init__(self, tools: Tools, *, max_calls: int | None = None) -> None:
        self.tools, self.max_calls = tools, max_calls
        self.text, self.position, self.committed, self.is_ended = "", 0, 0, False
        self.num_calls = 0
        self.parts: list[Part] = []

    def emit(self, kind: Kind, text: str) -> None:
        """Append a piece of text, if any."""
        if text:
            self.parts.append(TextPart(kind, text))

    def call(self, call: ToolCall) -> None:
        """Append a call and commit the text read."""
        self.num_calls += 1
        if self.max_calls is None or self.num_calls <= self.max_calls:
            self.parts.append(call)
        self.committed = self.position

    def trim(self) -> None:
        """Drop the text before the position; no parser may hold an index into it."""
        self.text, self.position, self.committed = self.text[self.position :], 0, 0


Reader = Callable[[Tape], Steps[None]]
"""Parser of calls from a marker on; it adds calls to the tape.

Raises: BrokenCall if no call follows.
"""


class CallFormat(NamedTuple):
    """Call format of a model family."""

    readers: Mapping[str, Reader]
    """Readers by the marker that begins a call."""
    markers: tuple[str, ...]
    """All markers, including those inside calls."""
    bare: Reader | None = None
    """Reader of calls without a marker, tried at the start of an answer and after another call."""


def more(tape: Tape) -> Steps[None]:
    """Wait for more text.

    Raises: BrokenCall at the end.
    """
    if tape.is_ended:
        raise BrokenCall
    yield


@lru_cache(maxsize=64)
def any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that finds the first marker; a marker may lie within another only at its start."""
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))) or r"(?!)")


def num_undecided(text: str, markers: Iterable[str]) -> int:
    """Return the length of the longest suffix of `text` that begins a marker."""
    max_length = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), max_length, -1):
            if text.endswith(marker[:length]):
                max_length = length
                break
    return max_length


def until(tape: Tape, *markers: str) -> Steps[tuple[str, str]]:
    """Consume text through the first of the markers; return the text before it, and the marker."""
    begin, search_from, pattern = tape.position, tape.position, any_of(markers)
    while (found := pattern.search(tape.text, search_from)) is None:
        search_from = max(begin, len(tape.text) - max(map(len, markers)) + 1)
        yield from more(tape)
    tape.position = found.end()
    return tape.text[begin : found.start()], found[0]


def skip(tape: Tape, characters: str | None = None) -> Steps[None]:
    """Consume whitespace, or the given characters."""
    while True:
        rest = tape.text[tape.position :]
        tape.position += len(rest) - len(rest.lstrip(characters))
        if tape.position < len(tape.text) or tape.is_ended:
            return
        yield


def peek(tape: Tape) -> Steps[str]:
    """Consume whitespace and return the next character, unread.

    Raises: BrokenCall at the end.
    """
    yield from skip(tape)
    if tape.position == len(tape.text):
        raise BrokenCall
    return tape.text[tape.position]


def take(tape: Tape, *markers: str) -> Steps[str | None]:
    """Consume a marker if the text continues with it; return the marker or None."""
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
    """Consume whitespace and a marker; return the marker.

    Raises: BrokenCall if other text follows.
    """
    yield from skip(tape)
    found = yield from take(tape, *markers)
    if found is None:
        raise BrokenCall
    return found


def close(tape: Tape, *markers: str) -> Steps[str | None]:
    """Consume whitespace and a marker, and return the marker.

    At the end of the text the marker may be missing or partial; the result is then None.

    Raises: BrokenCall if other text follows.
    """
    yield from skip(tape)
    found = yield from take(tape, *markers)
    if found is None:
        rest = tape.text[tape.position :]
        if not tape.is_ended or not any(marker.startswith(rest) for marker in markers):
            raise BrokenCall
        tape.position = len(tape.text)
    return found


def json_text(tape: Tape, *, opening: Sequence[str] = ("{",)) -> Steps[str]:
    """Consume whitespace and a JSON object through its closing bracket; return its text, not yet validated."""
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
