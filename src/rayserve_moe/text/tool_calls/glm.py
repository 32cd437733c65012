"""Calls of GLM-4.5 to 4.7 and Ling 3: a name, then keys and values between tags, with newlines between or without."""

from __future__ import annotations

from rayserve_moe.text.tool_calls.tags import read_value
from rayserve_moe.text.tool_calls.tape import BrokenCall, CallFormat, Steps, Tape, expect, until
from rayserve_moe.text.tool_calls.typed_values import typed_call

_BEGIN, _END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def _read(tape: Tape) -> Steps[None]:
    yield from expect(tape, _BEGIN)
    name, found = yield from until(tape, _KEY, _END)
    name = name.strip()
    if not name or "<" in name or len(name.split()) > 1:
        raise BrokenCall
    given: dict[str, str] = {}
    while found == _KEY:
        key, _ = yield from until(tape, _KEY_END)
        yield from expect(tape, _VALUE)
        given[key.strip()] = yield from read_value(tape, end=_VALUE_END, followed_by=(_KEY, _END))
        found = yield from expect(tape, _KEY, _END)
    tape.call(typed_call(name, given, tools=tape.tools))


GLM = CallFormat({_BEGIN: _read}, (_BEGIN, _END, _KEY, _KEY_END, _VALUE, _VALUE_END))
