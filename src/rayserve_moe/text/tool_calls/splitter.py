"""Incremental split of an output into reasoning, content and calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rayserve_moe.text.tool_calls.tape import (
    BrokenCall,
    CallFormat,
    Kind,
    Part,
    Reader,
    Steps,
    Tape,
    Tools,
    any_of,
    num_undecided,
    skip,
    take,
)


class Thinking(NamedTuple):
    """Markers around reasoning."""

    begin: str = "<think>"
    end: str = "</think>"
    is_begun: bool = False
    """True if the prompt ends with the begin marker."""
    may_recur: bool = False
    """True if reasoning may also begin after content; a stray end marker is then dropped."""


Split = Callable[[Tape], Steps[None]]


class OutputSplitter:
    """Incremental splitter of an output; the joined parts depend on the text alone, not on its pieces.

    A call is emitted when it is complete. Text that begins like a call but is invalid becomes content.
    """

    def __init__(self, split: Split, *, tools: Tools | None = None, max_calls: int | None = None) -> None:
        self._tape = Tape(tools or {}, max_calls=max_calls)
        self._steps = split(self._tape)
        next(self._steps, None)

    def push(self, piece: str) -> list[Part]:
        """Take the next piece and return the parts that it completes."""
        if piece:
            self._tape.text += piece
            next(self._steps, None)
        return self._taken()

    def finish(self) -> list[Part]:
        """End the text and return the held-back parts."""
        self._tape.is_ended = True
        for _ in self._steps:
            continue
        return self._taken()

    def _taken(self) -> list[Part]:
        parts, self._tape.parts = self._tape.parts, []
        return parts


def split_text(thinking: Thinking | None, calls: CallFormat | None) -> Split:
    """Return the parser of an answer with optional reasoning, content and calls."""

    recurring = thinking if thinking is not None and thinking.may_recur else None

    def split(tape: Tape) -> Steps[None]:
        stray: tuple[str, ...] = ()
        if thinking is not None and (yield from _begins(tape, thinking)):
            stray = yield from _read_reasoning(tape, thinking, calls)
        if recurring is not None:
            stray = (recurring.end,)
        yield from _read_content(tape, calls, stray=stray, recurring=recurring)

    return split


def _begins(tape: Tape, thinking: Thinking) -> Steps[bool]:
    """Consume a begin marker at the start of the output, after whitespace; return True if reasoning has begun."""
    yield from skip(tape)
    if (yield from take(tape, thinking.begin)) is not None:
        return True
    tape.position = 0
    return thinking.is_begun


def _read_reasoning(tape: Tape, thinking: Thinking, calls: CallFormat | None) -> Steps[tuple[str, ...]]:
    """Consume reasoning through its end, without surrounding newlines; a complete call also ends it.

    Returns: the markers to ignore from here on.
    """
    readers = {} if calls is None else calls.readers
    yield from skip(tape, "\n")
    while (marker := (yield from pass_on(tape, "reasoning", markers=(thinking.end, *readers), held="\n"))) is not None:
        begin = tape.position
        yield from skip(tape, "\n")
        if marker == thinking.end:
            tape.position += len(marker)
            yield from skip(tape, "\n")
            return ()
        if (yield from attempt(tape, readers[marker])):
            return (thinking.end,)
        tape.position += len(marker)
        tape.emit("reasoning", tape.text[begin : tape.position])
    tape.position = len(tape.text)
    return ()


def _read_content(
    tape: Tape, calls: CallFormat | None, *, stray: tuple[str, ...], recurring: Thinking | None
) -> Steps[None]:
    """Consume the rest, with the reasoning that may recur in it.

    Whitespace before a call is dropped, and trailing whitespace if the answer has calls.
    """
    readers, bare = ({}, None) if calls is None else (calls.readers, calls.bare)
    begins = () if recurring is None else (recurring.begin,)
    may_be_bare = True
    while True:
        if may_be_bare and bare is not None and (yield from attempt(tape, bare)):
            continue
        markers = (*stray, *begins, *readers)
        marker = yield from pass_on(tape, "content", markers=markers, held="" if calls is None else None)
        if marker is None:
            break
        begin = tape.position
        yield from skip(tape)
        if marker in stray:
            tape.position += len(marker)
            continue
        if recurring is not None and marker == recurring.begin:
            tape.position += len(marker)
            yield from _read_reasoning(tape, recurring, calls)
            continue
        may_be_bare = yield from attempt(tape, readers[marker])
        if not may_be_bare:
            tape.position += len(marker)
            tape.emit("content", tape.text[begin : tape.position])
    if not tape.num_calls:
        tape.emit("content", tape.text[tape.position :])


def attempt(tape: Tape, read: Reader) -> Steps[bool]:
    """Consume calls and return True if any was read; on failure return to the end of the last call."""
    begin = tape.committed = tape.position
    try:
        yield from read(tape)
    except BrokenCall:
        tape.position = tape.committed
        return tape.position > begin
    return True


def pass_on(tape: Tape, kind: Kind, *, markers: tuple[str, ...], held: str | None) -> Steps[str | None]:
    """Emit text up to the first marker, which stays unread and is returned, or up to the end (None).

    The `held` characters (None: whitespace) directly before a marker or the end also stay unread.
    """
    pattern = any_of(markers)
    while True:
        tape.trim()
        found = pattern.search(tape.text)
        undecided = 0 if found or tape.is_ended else num_undecided(tape.text, markers)
        text = tape.text[: found.start() if found else len(tape.text) - undecided].rstrip(held)
        tape.emit(kind, text)
        tape.position = len(text)
        if found or tape.is_ended:
            return found[0] if found else None
        yield
