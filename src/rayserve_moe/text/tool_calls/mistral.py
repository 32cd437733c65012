"""Tool calls of Mistral: after `[TOOL_CALLS]`, a JSON list or a call in the form `NAME[ARGS]{...}`."""

from __future__ import annotations

from rayserve_moe.text.tool_calls.json_calls import call_of, items, named_call
from rayserve_moe.text.tool_calls.tape import CallFormat, Steps, Tape, ToolCall, expect, json_text, peek, until

BEGIN, ARGS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def _read(tape: Tape) -> Steps[None]:
    yield from expect(tape, BEGIN)
    if (yield from peek(tape)) == "[":
        text = yield from json_text(tape, opening=("[",))
        calls = [call_of(each) for each in items(text)]
    else:
        calls = [(yield from _read_named(tape))]
    for call in calls:
        tape.call(call)


def _read_named(tape: Tape) -> Steps[ToolCall]:
    name, found = yield from until(tape, ID, ARGS, "{")
    call_id = None
    if found == ID:
        call_id, found = yield from until(tape, ARGS, "{")
    if found == "{":
        tape.position -= 1
    text = yield from json_text(tape)
    return named_call(name, text, call_id=call_id)


MISTRAL = CallFormat({BEGIN: _read}, (BEGIN, ARGS, ID))
