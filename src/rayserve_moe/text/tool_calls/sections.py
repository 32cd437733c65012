"""Sections of calls between special tokens. Section markers are silent, and some models omit them."""

from __future__ import annotations

from collections.abc import Sequence

from rayserve_moe.text.tool_calls.tape import BrokenCall, CallFormat, Reader, Steps, Tape, expect, take, until


def sectioned(
    read: Reader, *, begins: Sequence[str], call: str, ends: Sequence[str], inner: Sequence[str]
) -> CallFormat:
    """Return the format of calls that `read` reads from the marker `call`.

    A begin marker is silent if a call follows; text between them becomes content. An end marker is silent after a call.
    """

    def begin(tape: Tape) -> Steps[None]:
        yield from expect(tape, *begins)
        between, found = yield from until(tape, call, *begins, *ends)
        if found != call:
            raise BrokenCall
        tape.position -= len(call)
        yield from read(tape)
        tape.emit("content", between.strip())

    def end(tape: Tape) -> Steps[None]:
        if tape.num_calls == 0:
            raise BrokenCall
        yield from take(tape, *ends)
        tape.committed = tape.position

    readers = {**dict.fromkeys(begins, begin), call: read, **dict.fromkeys(ends, end)}
    return CallFormat(readers, (*readers, *inner))
