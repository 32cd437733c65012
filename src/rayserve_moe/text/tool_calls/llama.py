"""Calls of Llama 3: `{"name": ..., "parameters": {...}}` as the whole answer, or after a special token."""

from __future__ import annotations

from rayserve_moe.text.tool_calls.json_calls import call_of, members
from rayserve_moe.text.tool_calls.tape import BrokenCall, CallFormat, Steps, Tape, expect, json_text, skip, take

_BEGIN = "<|python_tag|>"


def _read(tape: Tape) -> Steps[None]:
    yield from expect(tape, _BEGIN)
    yield from _read_bare(tape)


def _read_bare(tape: Tape) -> Steps[None]:
    """Between calls stands a semicolon. An object without name or parameters is an answer in JSON."""
    if tape.num_calls:
        yield from skip(tape)
        yield from take(tape, ";")
    text = yield from json_text(tape)
    if not members(text).keys() & {"arguments", "parameters"}:
        raise BrokenCall
    tape.call(call_of(text))


LLAMA = CallFormat({_BEGIN: _read}, (_BEGIN,), bare=_read_bare)
