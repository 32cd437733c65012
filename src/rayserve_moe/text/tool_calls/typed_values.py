"""Arguments that a model writes without quotes: strings as they stand, other values by the schema of the parameter."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rayserve_moe.text.tool_calls.json_calls import is_json
from rayserve_moe.text.tool_calls.tape import ToolCall, Tools

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.0+)?")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_BOOLEANS = {"true": "true", "false": "false"}
UNTYPED = ("null", "boolean", "number", "object", "array")
"""Types that a text is tried for, where the schema of its parameter has none; else it is a string."""
_TYPE_OF = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", dict: "object"}


def typed_call(name: str, given: Mapping[str, str], *, tools: Tools) -> ToolCall:
    """Return the call of a function with these texts as the values of its parameters."""
    schemas = tools.get(name, {})
    written = (f"{json.dumps(key, ensure_ascii=False)}: {value_json(given[key], schemas.get(key))}" for key in given)
    return ToolCall(name, "{" + ", ".join(written) + "}")


def value_json(text: str, schema: Any) -> str:
    """Return the JSON text of a value. A text that is of none of the types that the schema allows stays a string.

    Without types in the schema, what is JSON and no string is taken as such.
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
    """Types that a JSON schema allows, in its order, those of alternatives and listed values included."""
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
