"""Calls of DeepSeek V3 (JSON in a fenced block) and V3.1 (JSON right after the name), between special tokens."""

from __future__ import annotations

from rayserve_moe.text.tool_calls.json_calls import named_call
from rayserve_moe.text.tool_calls.sections import sectioned
from rayserve_moe.text.tool_calls.tape import BrokenCall, Steps, Tape, close, expect, json_text, peek, until

_BAR, _SPACE = "\N{FULLWIDTH VERTICAL LINE}", "\N{LOWER ONE EIGHTH BLOCK}"
BEGIN, SEPARATOR, END = (
    f"<{_BAR}tool{_SPACE}{word}{_BAR}>" for word in (f"call{_SPACE}begin", "sep", f"call{_SPACE}end")
)
SECTION = f"<{_BAR}tool{_SPACE}calls{_SPACE}begin{_BAR}>"
SECTION_END = f"<{_BAR}tool{_SPACE}calls{_SPACE}end{_BAR}>"


def _read(tape: Tape) -> Steps[None]:
    yield from expect(tape, BEGIN)
    name, _ = yield from until(tape, SEPARATOR)
    is_fenced = (yield from peek(tape)) != "{"
    if is_fenced:
        if name.strip() != "function":
            raise BrokenCall
        name, _ = yield from until(tape, "```json")
    text = yield from json_text(tape)
    if is_fenced:
        yield from close(tape, "```")
    yield from close(tape, END)
    tape.call(named_call(name, text))


DEEPSEEK = sectioned(_read, begins=(SECTION,), call=BEGIN, ends=(SECTION_END,), inner=(SEPARATOR, END))
