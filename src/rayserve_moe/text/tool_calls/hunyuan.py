"""Tool calls of Hy3: a name, then keys and values between tags, within a section.

Every tag of the published checkpoints has the suffix `:opensource`.
"""

from __future__ import annotations

from rayserve_moe.text.tool_calls.sections import sectioned
from rayserve_moe.text.tool_calls.tagged_calls import read_value, typed_call
from rayserve_moe.text.tool_calls.tape import BrokenCall, Steps, Tape, expect, until

SUFFIX = ":opensource"


def _tags(name: str) -> tuple[str, str]:
    return f"<{name}{SUFFIX}>", f"</{name}{SUFFIX}>"


SECTION, SECTION_END = _tags("tool_calls")
CALL, END = _tags("tool_call")
SEPARATOR, _ = _tags("tool_sep")
KEY, KEY_END = _tags("arg_key")
VALUE, VALUE_END = _tags("arg_value")
THINKING = _tags("think")


def _read(tape: Tape) -> Steps[None]:
    yield from expect(tape, CALL)
    name, _ = yield from until(tape, SEPARATOR)
    name = name.strip()
    if not name or "<" in name or len(name.split()) > 1:
        raise BrokenCall
    given: dict[str, str] = {}
    while (yield from expect(tape, KEY, END)) == KEY:
        key, _ = yield from until(tape, KEY_END)
        yield from expect(tape, VALUE)
        given[key.strip()] = yield from read_value(tape, end=VALUE_END, followed_by=(KEY, END))
    tape.call(typed_call(name, given, tools=tape.tools))


HUNYUAN = sectioned(
    _read,
    begins=(SECTION,),
    call=CALL,
    ends=(SECTION_END,),
    inner=(END, SEPARATOR, KEY, KEY_END, VALUE, VALUE_END),
)
