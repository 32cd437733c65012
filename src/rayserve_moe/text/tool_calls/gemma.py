"""Tool calls of Gemma 4: `call:NAME{KEY:VALUE,...}` between special tokens, with nested objects and arrays.

Strings stand between quote tokens and cannot contain one. All other values are written bare.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayserve_moe.text.tool_calls.json_calls import dumped
from rayserve_moe.text.tool_calls.tagged_calls import UNTYPED, types_of, value_json
from rayserve_moe.text.tool_calls.tape import (
    BrokenCall,
    CallFormat,
    Steps,
    Tape,
    ToolCall,
    close,
    expect,
    skip,
    take,
    until,
)

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
CALL = "call:"
_MARKERS = (BEGIN, END, QUOTE)
_MAX_DEPTH = 64
"""Maximum nesting of objects and arrays in the arguments of a call."""


def _read(tape: Tape) -> Steps[None]:
    """Consume a call; some checkpoints write only the colon of `call:`."""
    yield from expect(tape, BEGIN)
    yield from expect(tape, CALL, ":")
    name, found = yield from until(tape, "{", *_MARKERS)
    name = name.strip()
    if found != "{" or not name or len(name.split()) > 1:
        raise BrokenCall
    tape.position -= 1
    arguments = yield from _object(tape, {"properties": tape.tools.get(name, {})}, depth=0)
    yield from close(tape, END)
    tape.call(ToolCall(name, arguments))


GEMMA = CallFormat({BEGIN: _read}, _MARKERS)


def _object(tape: Tape, schema: Any, *, depth: int) -> Steps[str]:
    """Consume an object and return it as JSON text; the last duplicate key wins."""
    yield from expect(tape, "{")
    yield from skip(tape)
    written: dict[str, str] = {}
    found = yield from take(tape, "}")
    while found != "}":
        key = yield from _key(tape)
        value = yield from _value(tape, _member(schema, key), depth=depth)
        written[dumped(key)] = value
        found = yield from expect(tape, ",", "}")
    return "{" + ", ".join(f"{key}: {value}" for key, value in written.items()) + "}"


def _array(tape: Tape, schema: Any, *, depth: int) -> Steps[str]:
    yield from expect(tape, "[")
    written: list[str] = []
    items = schema.get("items") if isinstance(schema, Mapping) else None
    yield from skip(tape)
    found = yield from take(tape, "]")
    while found != "]":
        written.append((yield from _value(tape, items, depth=depth)))
        found = yield from expect(tape, ",", "]")
    return "[" + ", ".join(written) + "]"


def _key(tape: Tape) -> Steps[str]:
    """Consume a key, with or without quotes, through its colon."""
    key, found = yield from until(tape, ":", ",", "{", "}", *_MARKERS)
    if found == QUOTE and not key.strip():
        key, _ = yield from until(tape, QUOTE)
        yield from expect(tape, ":")
        return key
    key = key.strip()
    if found != ":" or not key:
        raise BrokenCall
    return key


def _value(tape: Tape, schema: Any, *, depth: int) -> Steps[str]:
    """Consume a value, which text other than the next `,` or bracket may not follow; return it as JSON text."""
    if depth == _MAX_DEPTH:
        raise BrokenCall
    bare, found = yield from until(tape, ",", "{", "}", "[", "]", *_MARKERS)
    bare = bare.strip()
    if found == QUOTE and not bare:
        text, _ = yield from until(tape, QUOTE)
        return dumped(text)
    if found in (*_MARKERS, "{", "[") and (bare or found in _MARKERS):
        raise BrokenCall
    tape.position -= 1
    if found == "{":
        return (yield from _object(tape, schema, depth=depth + 1))
    if found == "[":
        return (yield from _array(tape, schema, depth=depth + 1))
    if not bare:
        raise BrokenCall
    return bare_json(bare, schema)


def bare_json(text: str, schema: Any) -> str:
    """Return the JSON text of a value without quotes: a string only if it fits no other type of the schema."""
    types = list(types_of(schema))
    others = [kind for kind in types if kind != "string"] if types else UNTYPED
    return value_json(text, {"type": [*others, "string"]})


def _member(schema: Any, key: str) -> Any:
    """Return the schema of an object's member, or None if it is unknown."""
    if not isinstance(schema, Mapping):
        return None
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    return schema.get("additionalProperties")
