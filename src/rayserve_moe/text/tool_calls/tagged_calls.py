"""Calls of GLM-4.5 to 4.7 and Ling 3, MiniMax-M2, Qwen3-Coder, Qwen3.5 and MiMo: parameters between tags.

A value may contain such tags. It has no quotes: strings stay unchanged, other values follow the parameter's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from rayserve_moe.text.tool_calls.json_calls import is_json
from rayserve_moe.text.tool_calls.tape import (
    BrokenCall,
    CallFormat,
    Steps,
    Tape,
    ToolCall,
    Tools,
    close,
    expect,
    skip,
    take,
    until,
)

_BEGIN, _END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_BLOCK, _BLOCK_END = "<minimax:tool_call>", "</minimax:tool_call>"
_INVOKE, _INVOKE_END = '<invoke name="', "</invoke>"
_NAMED_PARAMETER = '<parameter name="'
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.0+)?")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_BOOLEANS = {"true": "true", "false": "false"}
UNTYPED = ("null", "boolean", "number", "object", "array")
"""Types tried in order for a parameter whose schema declares none; a text that fits none of them is a string."""
_TYPE_OF = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", dict: "object"}


def _read_glm(tape: Tape) -> Steps[None]:
    """Consume a name, then keys and values between tags, with or without newlines between them."""
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


GLM = CallFormat({_BEGIN: _read_glm}, (_BEGIN, _END, _KEY, _KEY_END, _VALUE, _VALUE_END))


def read_block(tape: Tape, begin: str, *, each: str, read: Callable[[Tape], Steps[None]], end: str) -> Steps[None]:
    """Consume a block of one or several calls; `read` consumes a call after its marker `each`."""
    yield from expect(tape, begin)
    yield from expect(tape, each)
    while True:
        yield from read(tape)
        yield from skip(tape)
        if (yield from take(tape, each)) is None:
            break
    yield from close(tape, end)
    tape.committed = tape.position


def _read_invocation(tape: Tape) -> Steps[None]:
    name, _ = yield from until(tape, '">')
    if not name.strip() or "<" in name:
        raise BrokenCall
    given = yield from read_parameters(tape, begin=_NAMED_PARAMETER, key_end='">', end=_PARAMETER_END, last=_INVOKE_END)
    tape.call(typed_call(name.strip(), given, tools=tape.tools))


_read_minimax = partial(read_block, begin=_BLOCK, each=_INVOKE, read=_read_invocation, end=_BLOCK_END)
MINIMAX = CallFormat({_BLOCK: _read_minimax}, (_BLOCK, _BLOCK_END))


def _read_qwen(tape: Tape) -> Steps[None]:
    """Consume a function whose values stand on lines of their own."""
    name, given = yield from _function(tape)
    lines = {key: value.removeprefix("\n").removesuffix("\n") for key, value in given.items()}
    tape.call(typed_call(name, lines, tools=tape.tools))


def _read_mimo(tape: Tape) -> Steps[None]:
    """Consume a function whose values stand directly between their tags."""
    name, given = yield from _function(tape)
    tape.call(typed_call(name, given, tools=tape.tools))


def _function(tape: Tape) -> Steps[tuple[str, dict[str, str]]]:
    """Consume a function; some models omit the markers around it."""
    is_wrapped = (yield from take(tape, _BEGIN)) is not None
    yield from expect(tape, _FUNCTION)
    name, _ = yield from until(tape, ">")
    if not name.strip() or "<" in name:
        raise BrokenCall
    given = yield from read_parameters(tape, begin=_PARAMETER, key_end=">", end=_PARAMETER_END, last=_FUNCTION_END)
    if is_wrapped:
        yield from close(tape, _END)
    return name.strip(), given


QWEN_CODER = CallFormat({_BEGIN: _read_qwen, _FUNCTION: _read_qwen}, (_BEGIN, _END))
MIMO = CallFormat({_BEGIN: _read_mimo, _FUNCTION: _read_mimo}, (_BEGIN, _END))


def read_parameters(tape: Tape, *, begin: str, key_end: str, end: str, last: str) -> Steps[dict[str, str]]:
    """Consume parameters `begin` KEY `key_end` VALUE `end` through `last`; return the raw values by key."""
    given: dict[str, str] = {}
    while (yield from expect(tape, begin, last)) == begin:
        key, _ = yield from until(tape, key_end)
        key = key.strip()
        if not key or "<" in key:
            raise BrokenCall
        given[key] = yield from read_value(tape, end=end, followed_by=(begin, last))
    return given


def read_value(tape: Tape, *, end: str, followed_by: tuple[str, ...]) -> Steps[str]:
    """Consume a value through the first `end` that is followed by a marker in `followed_by`, with optional whitespace.

    An `end` with other text after it belongs to the value.

    Raises: BrokenCall if no such `end` follows.
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


def typed_call(name: str, given: Mapping[str, str], *, tools: Tools) -> ToolCall:
    """Return the call of a function with these texts as parameter values."""
    schemas = tools.get(name, {})
    written = (f"{json.dumps(key, ensure_ascii=False)}: {value_json(given[key], schemas.get(key))}" for key in given)
    return ToolCall(name, "{" + ", ".join(written) + "}")


def value_json(text: str, schema: Any) -> str:
    """Return the JSON text of a value. A text that fits none of the schema's types is a string.

    If the schema declares no types, JSON other than strings is taken as JSON.
    """
    types, bare = list(types_of(schema)), text.strip()
    if "null" in types and bare in ("null", "None"):
        return "null"
    for kind in types or UNTYPED:
        if kind == "string":
            break
        if (written := _READERS.get(kind, _nothing)(bare)) is not None:
            return written
    return json.dumps(text, ensure_ascii=False)


def types_of(schema: Any) -> Iterable[str]:
    """Yield the types that a JSON schema allows, in order, including alternatives and listed values."""
    if not isinstance(schema, Mapping):
        return
    declared = schema.get("type")
    if isinstance(declared, str):
        yield declared
    elif isinstance(declared, list):
        yield from (each for each in declared if isinstance(each, str))
    else:
        listed = schema.get("enum")
        for value in [*(listed if isinstance(listed, list) else ()), *([schema["const"]] if "const" in schema else ())]:
            yield _TYPE_OF.get(type(value), "array")
    for union in ("anyOf", "oneOf"):
        for choice in schema.get(union) if isinstance(schema.get(union), list) else ():
            yield from types_of(choice)
    if schema.get("nullable") is True:
        yield "null"


def _nothing(text: str) -> None:
    return None


def _null(text: str) -> str | None:
    return "null" if text == "null" else None


def _boolean(text: str) -> str | None:
    return _BOOLEANS.get(text.lower())


def _integer(text: str) -> str | None:
    return text.partition(".")[0] if _INTEGER.fullmatch(text) else None


def _number(text: str) -> str | None:
    return text if _NUMBER.fullmatch(text) else None


def _object(text: str) -> str | None:
    return text if text.startswith("{") and is_json(text) else None


def _array(text: str) -> str | None:
    return text if text.startswith("[") and is_json(text) else None


_READERS: dict[str, Callable[[str], str | None]] = {
    "null": _null,
    "boolean": _boolean,
    "integer": _integer,
    "number": _number,
    "object": _object,
    "array": _array,
}
