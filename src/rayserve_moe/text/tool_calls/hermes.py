"""Calls of Hermes, Qwen3 and Ling 2: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from rayserve_moe.text.tool_calls.json_calls import call_of
from rayserve_moe.text.tool_calls.tape import CallFormat, Steps, Tape, close, expect, json_text

_BEGIN, _END = "<tool_call>", "</tool_call>"


def _read(tape: Tape) -> Steps[None]:
    yield from expect(tape, _BEGIN)
    text = yield from json_text(tape)
    yield from close(tape, _END)
    tape.call(call_of(text))


HERMES = CallFormat({_BEGIN: _read}, (_BEGIN, _END))
