"""Tool calls of MiniMax-M3: elements named after parameters, nested for objects and arrays.

Every tag follows a namespace token, which no value can contain. Items of arrays are elements named `item`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rayserve_moe.text.tool_calls.json_calls import dumped
from rayserve_moe.text.tool_calls.tagged_calls import read_block, types_of, value_json
from rayserve_moe.text.tool_calls.tape import (
    BrokenCall,
    CallFormat,
    Steps,
    Tape,
    ToolCall,
    expect,
    take,
    until,
)

NAMESPACE = "]<]minimax[>["
BLOCK, BLOCK_END = f"{NAMESPACE}<tool_call>", f"{NAMESPACE}</tool_call>"
INVOKE, INVOKE_END = f'{NAMESPACE}<invoke name="', f"{NAMESPACE}</invoke>"
THINKING = "<mm:think>", "</mm:think>"
ITEM = "item"
_MAX_DEPTH = 64
"""Maximum nesting of elements in a call."""


def _read_invocation(tape: Tape) -> Steps[None]:
    name, found = yield from until(tape, '">', NAMESPACE)
    name = name.strip()
    if found == NAMESPACE or not name or "<" in name:
        raise BrokenCall
    text, children = yield from _children(tape, "invoke", {"properties": tape.tools.get(name, {})}, depth=0)
    if text.strip():
        raise BrokenCall
    tape.call(ToolCall(name, _object(children)))


_read = partial(read_block, begin=BLOCK, each=INVOKE, read=_read_invocation, end=BLOCK_END)
MINIMAX_M3 = CallFormat({BLOCK: _read}, (NAMESPACE, BLOCK, BLOCK_END, INVOKE, INVOKE_END))


def _children(tape: Tape, name: str, schema: Any, *, depth: int) -> Steps[tuple[str, list[tuple[str, str]]]]:
    """Consume an element through its end; return its text, and its child elements as names and JSON texts.

    Raises: BrokenCall for text beside child elements.
    """
    if depth > _MAX_DEPTH:
        raise BrokenCall
    children: list[tuple[str, str]] = []
    while True:
        text, _ = yield from until(tape, NAMESPACE)
        if (yield from take(tape, f"</{name}>")) is not None:
            return text, children
        if text.strip():
            raise BrokenCall
        yield from expect(tape, "<")
        child, _ = yield from until(tape, ">")
        if not child.strip() or any(one in child for one in "</\n"):
            raise BrokenCall
        children.append((child, (yield from _element(tape, child, _member(schema, child), depth=depth + 1))))


def _element(tape: Tape, name: str, schema: Any, *, depth: int) -> Steps[str]:
    """Consume an element through its end and return its value as JSON text."""
    text, children = yield from _children(tape, name, schema, depth=depth)
    types = list(types_of(schema))
    if not children:
        if not text.strip() and "string" not in types and types[:1] in (["array"], ["object"]):
            return "[]" if types[0] == "array" else "{}"
        return value_json(text, schema)
    if text.strip():
        raise BrokenCall
    are_items = all(child == ITEM for child, _ in children)
    is_array = "array" in types if "array" in types or "object" in types else are_items
    if is_array and are_items:
        return "[" + ", ".join(value for _, value in children) + "]"
    return _object(children)


def _object(children: Sequence[tuple[str, str]]) -> str:
    """Return elements as a JSON object; the values of a repeated name become an array."""
    values: dict[str, list[str]] = {}
    for name, value in children:
        values.setdefault(name, []).append(value)
    written = (f"{dumped(name)}: {_joined(each)}" for name, each in values.items())
    return "{" + ", ".join(written) + "}"


def _joined(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else "[" + ", ".join(values) + "]"


def _member(schema: Any, name: str) -> Any:
    """Return the schema of a child element, or None if it is unknown."""
    if not isinstance(schema, Mapping):
        return None
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return schema.get("items") if name == ITEM else schema.get("additionalProperties")
