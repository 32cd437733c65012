"""Calls of MiniMax-M2: several invocations in one block, parameters between tags."""

from __future__ import annotations

from rayserve_moe.text.tool_calls.tags import read_parameters
from rayserve_moe.text.tool_calls.tape import BrokenCall, CallFormat, Steps, Tape, close, expect, skip, take, until
from rayserve_moe.text.tool_calls.typed_values import typed_call

_BEGIN, _END = "<minimax:tool_call>", "</minimax:tool_call>"
_INVOKE, _INVOKE_END = '<invoke name="', "</invoke>"
_PARAMETER, _PARAMETER_END = '<parameter name="', "</parameter>"


def _read(tape: Tape) -> Steps[None]:
    yield from expect(tape, _BEGIN)
    yield from expect(tape, _INVOKE)
    while True:
        yield from _read_invocation(tape)
        yield from skip(tape)
        if (yield from take(tape, _INVOKE)) is None:
            break
    yield from close(tape, _END)
    tape.committed = tape.position


def _read_invocation(tape: Tape) -> Steps[None]:
    name, _ = yield from until(tape, '">')
    if not name.strip() or "<" in name:
        raise BrokenCall
    given = yield from read_parameters(tape, begin=_PARAMETER, key_end='">', end=_PARAMETER_END, last=_INVOKE_END)
    tape.call(typed_call(name.strip(), given, tools=tape.tools))


MINIMAX = CallFormat({_BEGIN: _read}, (_BEGIN, _END))
