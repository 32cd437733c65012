"""Parameters between tags, whose values may hold such tags themselves."""

from __future__ import annotations

from rayserve_moe.text.tool_calls.tape import BrokenCall, Steps, Tape, expect, skip, take, until


def read_parameters(tape: Tape, *, begin: str, key_end: str, end: str, last: str) -> Steps[dict[str, str]]:
    """Read parameters, each `begin` KEY `key_end` VALUE `end`, up to and over `last`; returns values as they stand."""
    given: dict[str, str] = {}
    while (yield from expect(tape, begin, last)) == begin:
        key, _ = yield from until(tape, key_end)
        key = key.strip()
        if not key or "<" in key:
            raise BrokenCall
        given[key] = yield from read_value(tape, end=end, followed_by=(begin, last))
    return given


def read_value(tape: Tape, *, end: str, followed_by: tuple[str, ...]) -> Steps[str]:
    """Read a value up to and over the first `end` that one of `followed_by` follows, whitespace between them or not.

    BrokenCall where there is none. An `end` that stands in a value for itself belongs to the value.
    """
    begin = tape.position
    while True:
        yield from until(tape, end)
        after = tape.position
        yield from skip(tape)
        if (yield from take(tape, *followed_by)) is not None:
            value = tape.text[begin : after - len(end)]
            tape.position = after
            return value
        tape.position = after
