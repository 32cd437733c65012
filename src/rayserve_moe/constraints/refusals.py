"""Messages for constraints that the grammar engine rejects: the keyword at fault and its path."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from rayserve_moe.requests.records import Constraint

MAX_PATH_LENGTH = 200
_NAMES = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
"""Keywords whose keys are names, not keywords."""
_NO_SCHEMAS = {"const", "enum", "default", "examples", "required"}
_CAUSES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("oneOf constraints", ("oneOf",)),
    ("Unknown format", ("format",)),
    ("patternPropert", ("patternProperties",)),
    ("min/maxProperties", ("minProperties", "maxProperties")),
    ("egex", ("pattern", "patternProperties", "format")),
    ("look-around", ("pattern", "patternProperties")),
    ("minLength", ("minLength", "maxLength")),
    ("minItems", ("minItems", "maxItems", "prefixItems", "items")),
    ("minProperties", ("minProperties", "maxProperties")),
    ("minimum", ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    ("multipleOf", ("multipleOf",)),
    ("Resource", ("$ref", "$id", "$schema")),
    ("ointer", ("$ref",)),
    ("$ref", ("$ref",)),
    ("nchor", ("$ref", "$anchor")),
    ("required", ("required",)),
    ("NoExtension", ("$ref", "allOf", "enum", "const", "not")),
)
"""Fragments of the engine's messages, and the keywords that may have caused them."""
_FALLBACK = ("$dynamicRef", "$ref", "$id", "allOf", "oneOf", "anyOf", "type", "enum", "const", "pattern", "format")
_SENTENCES = {
    "regex": "the expression cannot be used: it is no regular expression without look-around and back references, or "
    "needs too many states",
    "choice": "the choices cannot be used",
    "grammar": "the grammar cannot be used: it is not well formed, needs too many states, or allows nothing",
    "calls": "the parameters of a tool cannot be used: a keyword in their schema is not supported",
    "structural_tag": "the tags cannot be used: a schema in them is not supported, or they need too many states",
}


def refusal(constraint: Constraint, fault: str) -> str:
    """Return a sentence for a message of `matchers.fault_of`; of the constraint it shows only a keyword and a path."""
    if constraint.kind != "json_schema":
        return _SENTENCES.get(constraint.kind, "it cannot be used")
    found = [(keyword, path) for inner, path in objects_in(json.loads(constraint.text)) for keyword in inner]
    keyword, path = _culprit(found, fault)
    if keyword is None:
        return "the schema is not supported: it allows nothing, or is too large"
    why = "cannot be met" if "nsatisfiable" in fault or "NoExtension" in fault else "is not supported here"
    return f"`{keyword}` at {shown_path(path)} {why}"


def _culprit(found: list[tuple[str, str]], fault: str) -> tuple[str | None, str]:
    """Return the keyword that caused a message, and the path of its first occurrence."""
    if unknown := re.search(r"Unimplemented keys: \[(.*?)\]", fault):
        wanted: tuple[str, ...] = tuple(re.findall(r'"([^"]+)"', unknown.group(1)))
    else:
        quoted = tuple(re.findall(r"'([a-zA-Z]+)'", fault))
        wanted = (*quoted, *next((keywords for text, keywords in _CAUSES if text in fault), ()))
    for keyword in (*wanted, *_FALLBACK):
        for name, path in found:
            if name == keyword:
                return name, path
    return found[0] if found else (None, "#")


def objects_in(schema: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield every object of a schema that has keywords, with its path, outer objects first."""
    open_schemas = [(schema, "#")]
    for inner, at in open_schemas:
        if isinstance(inner, list):
            open_schemas += [(one, f"{at}/{place}") for place, one in enumerate(inner)]
        elif isinstance(inner, dict):
            yield inner, at
            for name, value in inner.items():
                if name in _NAMES and isinstance(value, dict):
                    open_schemas += [(one, f"{at}/{name}/{key}") for key, one in value.items()]
                elif name not in _NO_SCHEMAS:
                    open_schemas.append((value, f"{at}/{name}"))


def shown_path(path: str) -> str:
    """Return a path in printable ASCII, of bounded length."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in path[:MAX_PATH_LENGTH])
