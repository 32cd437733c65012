"""One output split into reasoning, content and calls, as it arrives."""

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
    """Reasoning between markers; `is_begun` where the prompt ends with the first of them."""

    begin: str = "<think>"
    end: str = "</think>"
    is_begun: bool = False


Split = Callable[[Tape], Steps[None]]


class OutputSplitter:
    """Feed it the text of one output in any pieces: the parts, joined, depend on the text alone.

    A call comes whole, once it is complete; text that begins like one and is none is content.
    """

    def __init__(self, split: Split, *, tools: Tools | None = None, max_calls: int | None = None) -> None:
        self._tape = Tape(tools or {}, max_calls=max_calls)
        self._steps = split(self._tape)
        next(self._steps, None)

    def push(self, piece: str) -> list[Part]:
        """Take the next piece; return the parts that it completes."""
        if piece:
            self._tape.text += piece
            next(self._steps, None)
        return self._taken()

    def finish(self) -> list[Part]:
        """End the text; return what was held back."""
        self._tape.is_ended = True
        for _ in self._steps:
            continue
        return self._taken()

    def _taken(self) -> list[Part]:
        parts, self._tape.parts = self._tape.parts, []
        return parts


def split_text(thinking: Thinking | None, calls: CallFormat | None) -> Split:
    """Return the parser of an answer that may begin with reasoning and hold calls."""

    def split(tape: Tape) -> Steps[None]:
        stray: tuple[str, ...] = ()
        if thinking is not None and (yield from _begins(tape, thinking)):
            stray = yield from _read_reasoning(tape, thinking, calls)
        yield from _read_content(tape, calls, stray=stray)

    return split


def _begins(tape: Tape, thinking: Thinking) -> Steps[bool]:
    """Read over the marker that begins reasoning, where it is the first of the output but for whitespace."""
    yield from skip(tape)
    if (yield from take(tape, thinking.begin)) is not None:
        return True
    tape.position = 0
    return thinking.is_begun


def _read_reasoning(tape: Tape, thinking: Thinking, calls: CallFormat | None) -> Steps[tuple[str, ...]]:
    """Read up to the end of reasoning, newlines around it left out. A whole call within it ends it too.

    Returns markers that mean nothing any more.
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


def _read_content(tape: Tape, calls: CallFormat | None, *, stray: tuple[str, ...]) -> Steps[None]:
    """Read to the end. Whitespace right before a call, and before the end where there are calls, is left out."""
    readers, bare = ({}, None) if calls is None else (calls.readers, calls.bare)
    may_be_bare = True
    while True:
        if may_be_bare and bare is not None and (yield from attempt(tape, bare)):
            continue
        marker = yield from pass_on(tape, "content", markers=(*stray, *readers), held="" if calls is None else None)
        if marker is None:
            break
        begin = tape.position
        yield from skip(tape)
        if marker in stray:
            tape.position += len(marker)
            continue
        may_be_bare = yield from attempt(tape, readers[marker])
        if not may_be_bare:
            tape.position += len(marker)
            tape.emit("content", tape.text[begin : tape.position])
    if not tape.num_calls:
        tape.emit("content", tape.text[tape.position :])


def attempt(tape: Tape, read: Reader) -> Steps[bool]:
    """Read calls; where there is none, go back to where the last one ended. Returns whether there was one."""
    begin = tape.committed = tape.position
    try:
        yield from read(tape)
    except BrokenCall:
        tape.position = tape.committed
        return tape.position > begin
    return True


def pass_on(tape: Tape, kind: Kind, *, markers: tuple[str, ...], held: str | None) -> Steps[str | None]:
    """Emit text up to the first marker, which is returned unread, or to the end, None.

    The `held` characters (None: whitespace) right before a marker or the end stay unread as well.
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
