"""Constraints of a request's answer: fields of three dialects, read into a `Constraint`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayserve_moe.requests.fields import (
    ANY_OBJECT,
    LONG_TEXT,
    MAX_CONSTRAINT_BYTES,
    OBJECT_OR_TEXT,
    PATTERN,
    TEXTS,
    stated,
)
from rayserve_moe.requests.records import Constraint, RequestError

Given = Mapping[str, Any]

_OBJECT_SCHEMA = {"type": "object"}
_OPTIONS = {"disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "disable_fallback"}
_KINDS = {"json", "json_object", "regex", "choice", "grammar", "structural_tag"}
_MAX_PATTERN = 256
_MAX_SPACES = 4
"""Maximum length of a schema with spaces, as a multiple of the limit without spaces."""
_EMPTY = "it is empty: leave it out for an answer that keeps to nothing"
_SGLANG_ANY = "$$ANY$$"
"""SGLang's schema for any object."""
_EMPTY_IS_NONE = {"json_schema", "regex", "ebnf", "structural_tag"}
"""SGLang's fields whose clients send an empty string for no constraint."""


@dataclass(frozen=True, kw_only=True)
class ConstraintFields:
    """Constraint fields under the names of every dialect; a request sets at most one, which `constraint_of` reads."""

    response_format: Any = stated(None, ANY_OBJECT, sglang=None, vllm=None)
    """OpenAI's: `text`, `json_object`, `json_schema` or `structural_tag`."""
    structured_outputs: Any = stated(None, ANY_OBJECT, sglang=None)
    """vLLM's: `json`, `regex`, `choice`, `grammar`, `json_object` or `structural_tag`, and options."""
    guided_decoding: Any = stated(None, ANY_OBJECT, sglang=None)
    """Former name of `structured_outputs`."""
    guided_json: Any = stated(None, OBJECT_OR_TEXT, sglang=None, vllm=None)
    """A JSON schema."""
    guided_regex: Any = stated(None, LONG_TEXT, sglang=None, vllm=None)
    """A regular expression that the whole answer matches."""
    guided_choice: Any = stated(None, TEXTS, sglang="choice", vllm=None)
    """Permitted answers."""
    guided_grammar: Any = stated(None, LONG_TEXT, sglang=None, vllm=None)
    """A grammar in GBNF or Lark."""
    guided_whitespace_pattern: Any = stated(None, PATTERN, sglang=None, vllm=None)
    """Expression for whitespace between JSON tokens."""
    json_schema: Any = stated(None, OBJECT_OR_TEXT, vllm=None)
    """A JSON schema."""
    regex: Any = stated(None, LONG_TEXT, vllm=None)
    """A regular expression that the whole answer matches."""
    ebnf: Any = stated(None, LONG_TEXT, vllm=None)
    """A grammar in GBNF or Lark."""
    structural_tag: Any = stated(None, OBJECT_OR_TEXT, openai=None, vllm=None)
    """A `format`, or `structures` with `begin`, `schema` and `end`, begun by `triggers` in free text."""


def constraint_of(given: Given, *, longest: int = MAX_CONSTRAINT_BYTES) -> Constraint | None:
    """Return the constraint in validated values, by the names of `ConstraintFields`; None without a constraint.

    A text several times longer than `longest` is rejected unread, because parsing blocks all other requests.

    Raises: RequestError that names a field with an empty or invalid value, or a second constraint.
    """
    for name, value in given.items():
        texts = value.values() if isinstance(value, Mapping) else (value,)
        if any(isinstance(text, str) and len(text) > _MAX_SPACES * longest for text in texts):
            raise RequestError(f"it is longer than {longest} bytes", name)
    stated = {name: value for name, value in given.items() if value != "" or name not in _EMPTY_IS_NONE}
    found = [read for name in _READERS if (value := stated.get(name)) is not None and (read := _read(name, value))]
    if len(found) > 1:
        raise RequestError(f"`{found[0].param}` is given too: an answer keeps to one constraint", found[1].param)
    return with_whitespace(found[0], given.get("guided_whitespace_pattern")) if found else None


def with_whitespace(constraint: Constraint, pattern: str | None) -> Constraint:
    """Return a constraint with this whitespace pattern for JSON, unless it already has a pattern."""
    if pattern is None or constraint.whitespace is not None:
        return constraint
    return constraint._replace(whitespace=pattern)


def schema_text(schema: Any, *, param: str) -> str:
    """Return a schema as compact JSON in the given key order, which is the order of properties in answers.

    Raises: RequestError unless it is an object, true or false, or JSON text for one of these.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError("it should be a JSON schema; this is no JSON", param) from error
    if not isinstance(schema, dict | bool):
        raise RequestError("it should be a JSON schema: an object, true or false", param)
    try:
        return json.dumps(schema, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise RequestError("it is nested too deeply, or has numbers that JSON has not", param) from error


def _read(name: str, value: Any) -> Constraint | None:
    return _READERS[name](value, name)


def _schema(value: Any, param: str) -> Constraint:
    if value == "":
        raise RequestError(_EMPTY, param)
    value = _OBJECT_SCHEMA if value == _SGLANG_ANY else value
    return Constraint("json_schema", schema_text(value, param=param), param)


def _regex(value: Any, param: str) -> Constraint:
    return _text("regex", value, param)


def _grammar(value: Any, param: str) -> Constraint:
    return _text("grammar", value, param)


def _text(kind: str, value: Any, param: str) -> Constraint:
    if not isinstance(value, str):
        raise RequestError("should be a string", param)
    if not value:
        raise RequestError(_EMPTY, param)
    return Constraint(kind, value, param)


def _choice(value: Any, param: str) -> Constraint:
    if not isinstance(value, list | tuple) or not value or not all(isinstance(one, str) for one in value):
        raise RequestError("should be a list of strings, one at least", param)
    return Constraint("choice", json.dumps(value, ensure_ascii=False), param)


def _tags(value: Any, param: str) -> Constraint:
    if value == "":
        raise RequestError(_EMPTY, param)
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise RequestError("it should be a JSON object", param) from error
    if not isinstance(value, Mapping):
        raise RequestError("it should be a JSON object", param)
    if "format" in value:
        return Constraint("structural_tag", schema_text({"format": value["format"]}, param=param), param)
    structures, triggers = value.get("structures"), value.get("triggers")
    if not isinstance(structures, list) or not structures or not all(map(_is_structure, structures)):
        raise RequestError("`structures` should be objects with `begin`, `schema` and `end`, one at least", param)
    if not isinstance(triggers, list) or not triggers or not all(isinstance(one, str) and one for one in triggers):
        raise RequestError("`triggers` should be strings, one at least", param)
    for structure in structures:
        schema_text(structure.get("schema", {}), param=param)
    text = json.dumps({"structures": structures, "triggers": triggers}, ensure_ascii=False)
    return Constraint("structural_tag", text, param)


def _is_structure(value: Any) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("schema", {}), dict | bool):
        return False
    begin, end = value.get("begin"), value.get("end")
    return isinstance(begin, str) and bool(begin) and isinstance(end, str)


def _response_format(value: Any, param: str) -> Constraint | None:
    """Return the constraint of OpenAI's field; `strict` has no effect, as in vLLM and SGLang."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return _schema(_OBJECT_SCHEMA, param)
    if kind == "structural_tag":
        return _tags({name: given for name, given in value.items() if name != "type"}, param)
    if kind != "json_schema":
        raise RequestError("`type` should be text, json_object, json_schema or structural_tag", param)
    inner = value.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, dict | bool):
        raise RequestError("`json_schema` should be an object with a `schema`", param)
    return _schema(schema, param)


def _structured_outputs(value: Any, param: str) -> Constraint:
    """Return the constraint of vLLM's field: a single kind, with options for JSON."""
    if not isinstance(value, Mapping):
        raise RequestError("should be an object", param)
    given = {name: one for name, one in value.items() if one is not None and one is not False}
    kinds = given.keys() & _KINDS
    if unknown := given.keys() - _KINDS - _OPTIONS - {"backend", "_backend"}:
        raise RequestError(
            f"has {len(unknown)} unknown names; it may have {', '.join(sorted(_KINDS | _OPTIONS))}", param
        )
    if len(kinds) != 1:
        raise RequestError(f"should have one of {', '.join(sorted(_KINDS))}", param)
    (kind,) = kinds
    content = _OBJECT_SCHEMA if kind == "json_object" else given[kind]
    if given.get("disable_additional_properties") and kind == "json":
        content = _closed(json.loads(schema_text(content, param=param)))
    constraint = _OF_KIND[kind](content, param)
    pattern = "" if given.get("disable_any_whitespace") else given.get("whitespace_pattern")
    if pattern is not None and (not isinstance(pattern, str) or len(pattern) > _MAX_PATTERN):
        raise RequestError(f"`whitespace_pattern` should be a string of at most {_MAX_PATTERN} characters", param)
    return with_whitespace(constraint, pattern)


def _closed(schema: Any) -> Any:
    """Return a schema whose objects permit only declared properties, unless they declare `additionalProperties`."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: _closed(value) for name, value in schema.items()}
    is_open = "properties" in schema and "additionalProperties" not in schema
    return inner | ({"additionalProperties": False} if is_open else {})


_OF_KIND = {
    "json": _schema,
    "json_object": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _tags,
}
_READERS = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_decoding": _structured_outputs,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _grammar,
    "structural_tag": _tags,
}
CONSTRAINT_NAMES = frozenset(ConstraintFields.__dataclass_fields__)
"""Names of all fields of `ConstraintFields`."""
