"""Tool calls of Kimi K2: `functions.NAME:NUMBER` and JSON between special tokens, within a section."""

from __future__ import annotations

import re

from rayserve_moe.text.tool_calls.json_calls import named_call
from rayserve_moe.text.tool_calls.sections import sectioned
from rayserve_moe.text.tool_calls.tape import BrokenCall, Steps, Tape, close, expect, json_text, until

SECTION = "<|tool_calls_section_begin|>"
_SECTIONS = (SECTION, "<|tool_call_section_begin|>")
SECTION_END = "<|tool_calls_section_end|>"
_SECTION_ENDS = (SECTION_END, "<|tool_call_section_end|>")
CALL, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_CALL_ID = re.compile(r"(?:functions\.)?(?P<name>[^\s:<>]+)(?::\d+)?")


def _read(tape: Tape) -> Steps[None]:
    """Consume a call. The model's own id becomes the call's id; a bare number is not a function name."""
    yield from expect(tape, CALL)
    call_id, _ = yield from until(tape, ARGUMENTS)
    found = _CALL_ID.fullmatch(call_id.strip())
    if found is None or found["name"].isdigit():
        raise BrokenCall
    text = yield from json_text(tape)
    yield from close(tape, END)
    tape.call(named_call(found["name"], text, call_id=call_id.strip()))


KIMI = sectioned(_read, begins=_SECTIONS, call=CALL, ends=_SECTION_ENDS, inner=(ARGUMENTS, END))
