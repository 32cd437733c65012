"""Calls of Qwen3-Coder and Qwen3.5: functions and parameters as tags, values on lines of their own."""

from __future__ import annotations

from rayserve_moe.text.tool_calls.tags import read_parameters
from rayserve_moe.text.tool_calls.tape import BrokenCall, CallFormat, Steps, Tape, close, expect, take, until
from rayserve_moe.text.tool_calls.typed_values import typed_call

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


def _read(tape: Tape) -> Steps[None]:
    """The markers around the function are left out by some models."""
    is_wrapped = (yield from take(tape, _BEGIN)) is not None
    yield from expect(tape, _FUNCTION)
    name, _ = yield from until(tape, ">")
    if not name.strip() or "<" in name:
        raise BrokenCall
    given = yield from read_parameters(tape, begin=_PARAMETER, key_end=">", end=_PARAMETER_END, last=_FUNCTION_END)
    if is_wrapped:
        yield from close(tape, _END)
    lines = {key: value.removeprefix("\n").removesuffix("\n") for key, value in given.items()}
    tape.call(typed_call(name.strip(), lines, tools=tape.tools))


QWEN_CODER = CallFormat({_BEGIN: _read, _FUNCTION: _read}, (_BEGIN, _END))
