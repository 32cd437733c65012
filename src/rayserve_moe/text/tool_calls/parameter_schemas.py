"""Schemas of parameters whose values are written without quotes: their split into plain text and JSON values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from rayserve_moe.text.tool_calls.lark_terms import ANY_TEXT, literal
from rayserve_moe.text.tool_calls.tagged_calls import UNTYPED, types_of

Schema = Mapping[str, Any]

_MAX_REFERENCES = 8
"""Maximum depth of references; a deeper chain counts as a cycle."""
_DEFINITIONS = ("$defs", "definitions")
SCALARS = frozenset({"null", "boolean", "integer", "number"})
ANNOTATIONS = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "nullable"),
    *("$comment", "$schema", "$id", "strict", "contentEncoding", "contentMediaType", *_DEFINITIONS),
}
OF_TEXT = {"minLength", "maxLength", "pattern", "format"}
OF_OTHERS = {
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "properties", "required"),
    *("additionalProperties", "patternProperties", "minProperties", "maxProperties"),
    *("items", "prefixItems", "minItems", "maxItems"),
}
_OF_ARRAYS = {"type", *ANNOTATIONS, *OF_TEXT, *OF_OTHERS} - {"prefixItems"}
TYPES = ("string", "integer", *UNTYPED)
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", type(None): "null", dict: "object", list: "array"}
_DATE = (
    "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "email": r"[A-Za-z0-9]([A-Za-z0-9_+-]{0,62}[A-Za-z0-9])?@([a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?\.)+[a-z]{2,12}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "uri": "[a-z][a-z0-9+.-]{0,20}:[A-Za-z0-9._~:?#@!$&'()*+,;=%\\x{2f}-]{1,2000}",
}
_SPACE = r"[\s\x{1c}-\x{1f}]*"
_LOOKS = {
    "null": "null",
    "boolean": "(?i:true|false)",
    "integer": r"-?[0-9]+(\.[0-9]+)?",
    "number": r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?",
    "object": r"\{(?s:.*)",
    "array": r"\[(?s:.*)",
}
"""Expressions that cover every text a reader could take for a value of the type."""


class UnwritableSchemaError(ValueError):
    """Error for a schema that the format cannot express; the message is the unsupported keyword."""


class ValueForms(NamedTuple):
    """Permitted values of a parameter."""

    texts: list[str]
    """Alternative terminal parts for plain text."""
    schema: Schema | None
    """Schema of JSON values, or None if only plain text is permitted."""


def resolved(schema: Any, root: Any, *, depth: int = _MAX_REFERENCES) -> Any:
    """Return a schema with references replaced by their targets in `root`, also inside alternatives."""
    if not isinstance(schema, Mapping) or depth == 0:
        return schema
    target, rest = _target(schema, root), {name: one for name, one in schema.items() if name != "$ref"}
    if target is not None:
        return resolved({**target, **rest}, root, depth=depth - 1)
    alternatives = schema.get("allOf")
    if isinstance(alternatives, list) and len(alternatives) == 1 and isinstance(alternatives[0], Mapping):
        rest.pop("allOf")
        return resolved({**alternatives[0], **rest}, root, depth=depth - 1)
    unions = {
        name: [resolved(one, root, depth=depth - 1) for one in schema[name]]
        for name in ("anyOf", "oneOf")
        if isinstance(schema.get(name), list)
    }
    return {**schema, **unions}


def value_forms(schema: Any, root: Schema, *, has_json_containers: bool = True) -> ValueForms:
    """Return the forms that `tagged_calls` reads as valid under a `resolved` schema.

    Without `has_json_containers`, objects and arrays are left out.

    Raises: UnwritableSchemaError with the unsupported keyword.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise UnwritableSchemaError("false")
    types = list(types_of(schema))
    before = types[: types.index("string")] if "string" in types else types or list(UNTYPED)
    readable = {*before, *(["null"] if "null" in types else [])}
    texts: list[str] = []
    others: list[Schema] = []
    for branch in branches(schema):
        text, other = split_branch(branch, readable if has_json_containers else readable & SCALARS)
        texts += text
        others += other
    looks = [f" & ~/{_SPACE}({_LOOKS[kind]}){_SPACE}/" for kind in TYPES if kind in readable]
    if "null" in types:
        looks.append(f" & ~/{_SPACE}None{_SPACE}/")
    if "oneOf" in schema and len(texts) > 1:
        raise UnwritableSchemaError("oneOf")
    if not texts and not others:
        raise UnwritableSchemaError("type")
    return ValueForms([text + "".join(looks) for text in texts], _union(schema, others, root))


def array_bounds(schema: Schema) -> tuple[int, int | None]:
    """Return the minimum and maximum number of an array's items; None is no maximum.

    Raises: UnwritableSchemaError with the unsupported keyword.
    """
    if unknown := sorted(schema.keys() - _OF_ARRAYS):
        raise UnwritableSchemaError(unknown[0])
    low, high = schema.get("minItems", 0), schema.get("maxItems")
    if not isinstance(low, int) or not isinstance(high, int | None) or (high is not None and high < low):
        raise UnwritableSchemaError("minItems")
    return low, high


def _target(schema: Any, root: Any) -> Schema | None:
    """Return the target of a reference within `root`, or None for other references and missing targets."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found = root
    for step in reference[2:].split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        found = found.get(step) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None


def branches(schema: Schema) -> Iterator[Schema]:
    """Yield the alternatives of a schema, flattened."""
    for union in ("anyOf", "oneOf"):
        alternatives = schema.get(union)
        if not isinstance(alternatives, list) or schema.keys() - {union} - ANNOTATIONS:
            continue
        for alternative in alternatives:
            if not isinstance(alternative, Mapping):
                raise UnwritableSchemaError(union)
            yield from branches(alternative)
        return
    yield schema


def split_branch(schema: Schema, readable: Set[str]) -> tuple[list[str], list[Schema]]:
    """Return the text terminals of an alternative, and its JSON schemas restricted to the `readable` types.

    Raises: UnwritableSchemaError with the unsupported keyword.
    """
    declared = schema.get("type", TYPES)
    if not isinstance(declared, str | list | tuple):
        raise UnwritableSchemaError("type")
    types = [declared] if isinstance(declared, str) else [kind for kind in declared if isinstance(kind, str)]
    if "enum" in schema or "const" in schema:
        return _listed(schema, types, readable)
    others = [kind for kind in types if kind in readable]
    kept = {name: value for name, value in schema.items() if name not in OF_TEXT and name not in ANNOTATIONS}
    written: list[Schema] = [{**kept, "type": others}] if others else []
    return ([_text(schema)] if "string" in types else []), written


def _listed(schema: Schema, types: Sequence[str], readable: Set[str]) -> tuple[list[str], list[Schema]]:
    _check(schema, {"enum", "const", "type"})
    values = [schema["const"]] if "const" in schema else schema["enum"]
    if not isinstance(values, list) or {"const", "enum"} <= schema.keys():
        raise UnwritableSchemaError("enum")
    texts = [value for value in values if isinstance(value, str)] if "string" in types else []
    kinds = {kind for kind in types if kind in readable}
    others = [value for value in values if not isinstance(value, str) and _is_of(value, kinds)]
    written = [f"/({'|'.join(map(literal, texts))})/"] if texts else []
    return written, [{"enum": others}] if others else []


def _is_of(value: Any, kinds: set[str]) -> bool:
    kind = _JSON_TYPES[type(value)]
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _text(schema: Schema) -> str:
    """Return a terminal part for strings that satisfy a schema."""
    _check(schema, {"type", *OF_TEXT, *OF_OTHERS})
    for name in ("minLength", "maxLength"):
        if not isinstance(schema.get(name, 0), int):
            raise UnwritableSchemaError(name)
    min_length, max_length = schema.get("minLength", 0), schema.get("maxLength", "")
    parts = [f"/(?s:.{{{min_length:d},{max_length}}})/" if min_length or max_length != "" else ANY_TEXT]
    if "format" in schema:
        if (pattern := _FORMATS.get(str(schema["format"]))) is None:
            raise UnwritableSchemaError("format")
        parts.append(f"/{pattern}/")
    if "pattern" in schema:
        parts.append(_search(schema["pattern"]))
    return " & ".join(parts)


def _search(pattern: Any) -> str:
    """Return a terminal part for text that contains a match of the pattern."""
    if not isinstance(pattern, str):
        raise UnwritableSchemaError("pattern")
    is_start, is_end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[is_start : len(pattern) - is_end]
    inner = "".join(_IN_SLASHES.get(one, one) for one in _steps(inner))
    around = ["" if is_start else ANY_TEXT, f"/({inner})/", "" if is_end else ANY_TEXT]
    return f"({' '.join(filter(None, around))})"


_IN_SLASHES = {"/": "\\/", "\n": "\\n", "\r": "\\r"}


def _steps(pattern: str) -> Iterator[str]:
    """Yield the characters of a pattern, an escaped character together with its backslash."""
    at = 0
    while at < len(pattern):
        length = 2 if pattern[at] == "\\" else 1
        yield pattern[at : at + length]
        at += length


def _check(schema: Schema, known: set[str]) -> None:
    unknown = sorted(schema.keys() - known - ANNOTATIONS)
    if unknown:
        raise UnwritableSchemaError(unknown[0])


def _union(schema: Schema, others: list[Schema], root: Schema) -> Schema | None:
    if not others:
        return None
    definitions = {name: root[name] for name in _DEFINITIONS if name in root}
    if len(others) == 1:
        return {**others[0], **definitions}
    return {"oneOf" if "oneOf" in schema else "anyOf": others, **definitions}
