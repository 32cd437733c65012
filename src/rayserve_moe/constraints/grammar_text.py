"""From a constraint to a grammar as the engine takes it, within the limits of a server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from rayserve_moe.config.settings import StructuredSettings
from rayserve_moe.constraints.optional_properties import excess_of
from rayserve_moe.constraints.tag_formats import TagGrammar, triggered
from rayserve_moe.requests.constraint_fields import Constraint
from rayserve_moe.requests.records import RequestError

WHITESPACE = "( |\\n {0,32})"
"""Between the parts of JSON, where a request does not say what: one space, or a line break and an indent. Unbounded, a
model may write nothing else until its limit."""
MAX_DEPTH = 64
"""Of a schema."""
NOTHING_FORCED = '%llguidance {"no_forcing": true}\n'
"""Lets the model choose the tokens of forced text."""
ENGINE_OPTIONS = "x-guidance"
"""A key of schemas that sets options of the engine."""


def grammar_of(constraint: Constraint, *, limits: StructuredSettings) -> str:
    """Return the grammar. RequestError for a constraint beyond the limits, or that no grammar can be read from."""
    if len(constraint.text.encode()) > limits.max_bytes:
        raise RequestError(f"it is longer than {limits.max_bytes} bytes", constraint.param)
    try:
        grammar = _GRAMMARS[constraint.kind](constraint, limits)
    except RecursionError as error:
        raise RequestError("it is nested too deeply", constraint.param) from error
    first, *others = _parts(grammar)
    whole = NOTHING_FORCED + (constraint.within or "start: @content\n")
    return json.dumps({"grammars": [{"lark_grammar": whole}, {**first, "name": "content"}, *others]})


def _parts(grammar: str) -> list[dict[str, Any]]:
    """A grammar, and those that it refers to: the engine takes one in Lark as it stands, and several as JSON."""
    return json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]


def _schema_grammar(constraint: Constraint, limits: StructuredSettings) -> str:
    schema = checked_schema(json.loads(constraint.text), limits, param=constraint.param)
    schema[ENGINE_OPTIONS] = json_options(constraint)
    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


def json_options(constraint: Constraint) -> dict[str, Any]:
    """Options of the engine for JSON: no whitespace, that of the request, or the usual."""
    pattern = WHITESPACE if constraint.whitespace is None else constraint.whitespace
    return {"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}


def checked_schema(schema: Any, limits: StructuredSettings, *, param: str) -> dict[str, Any]:
    """A schema as an object without options of the engine. RequestError for one beyond the limits."""
    if schema is False:
        raise RequestError("the schema `false` allows nothing", param)
    num_values = 0
    for depth, values in _levels(schema):
        if depth > MAX_DEPTH:
            raise RequestError(f"the schema is nested deeper than {MAX_DEPTH}", param)
        num_values += values
        if num_values > limits.max_alternatives:
            raise RequestError(f"`enum` has more than {limits.max_alternatives} values", param)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise RequestError("a schema should be an object, true or false", param)
    if excess := excess_of(schema):
        raise RequestError(excess, param)
    return {key: value for key, value in schema.items() if key != ENGINE_OPTIONS}


def _levels(value: Any) -> Iterator[tuple[int, int]]:
    """Of every object and list inside a value its depth, and how many values it enumerates."""
    open_values = [(value, 1)]
    while open_values:
        one, depth = open_values.pop()
        if isinstance(one, dict):
            enumerated = one.get("enum")
            yield depth, len(enumerated) if isinstance(enumerated, list) else 0
            open_values += [(inner, depth + 1) for inner in one.values()]
        elif isinstance(one, list):
            yield depth, 0
            open_values += [(inner, depth + 1) for inner in one]


def _regex_grammar(constraint: Constraint, limits: StructuredSettings) -> str:
    if "\0" in constraint.text:
        raise RequestError("an expression may not hold NUL", constraint.param)
    return LLMatcher.grammar_from_regex(constraint.text)


def _choice_grammar(constraint: Constraint, limits: StructuredSettings) -> str:
    """Of expressions, which take any character; a grammar's strings have escapes of their own."""
    choices = json.loads(constraint.text)
    if len(choices) > limits.max_alternatives:
        raise RequestError(f"there are more than {limits.max_alternatives} choices", constraint.param)
    return LLMatcher.grammar_from_regex("|".join(map(escaped, choices)))


def escaped(text: str) -> str:
    """An expression that is this text."""
    return re.sub(r"[\\^$.|?*+()\[\]{}/&~#-]", lambda found: "\\" + found.group(), text)


def _written_grammar(constraint: Constraint, limits: StructuredSettings) -> str:
    """GBNF as llama.cpp writes it, or Lark."""
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(constraint.text))
    except Exception as error:  # it raises this very class, for rules that are missing or stand twice
        raise RequestError("it is neither a GBNF nor a Lark grammar", constraint.param) from error


def _tag_grammar(constraint: Constraint, limits: StructuredSettings) -> str:
    """A format, or the earlier form: text in which every trigger begins one of the structures."""
    given, param = json.loads(constraint.text), constraint.param

    def schema_of(schema: Any) -> str:
        checked = checked_schema(schema, limits, param=param)
        return json.dumps(checked | {ENGINE_OPTIONS: json_options(constraint)})

    def grammars_of(text: str) -> list[dict[str, Any]]:
        return _parts(_written_grammar(constraint._replace(text=text), limits))

    if any(depth > MAX_DEPTH for depth, _ in _levels(given)):
        raise RequestError(f"it is nested deeper than {MAX_DEPTH}", param)
    wanted = given["format"] if "format" in given else triggered(given["structures"], given["triggers"])
    writer = TagGrammar(param=param, schema_of=schema_of, grammars_of=grammars_of)
    return json.dumps({"grammars": writer.grammars(wanted)})


def _calls_grammar(constraint: Constraint, limits: StructuredSettings) -> str:
    """Tool calls, whose arguments keep to the schemas of their functions."""
    given = json.loads(constraint.text)
    lines = [given["lark"]]
    for i, schema in enumerate(given["schemas"]):
        checked = checked_schema(schema, limits, param=constraint.param) | {ENGINE_OPTIONS: json_options(constraint)}
        lines.append(f"args_{i}: %json {json.dumps(checked)}\n")
    return LLMatcher.grammar_from_lark("".join(lines))


_GRAMMARS: Mapping[str, Callable[[Constraint, StructuredSettings], str]] = {
    "json_schema": _schema_grammar,
    "regex": _regex_grammar,
    "choice": _choice_grammar,
    "grammar": _written_grammar,
    "structural_tag": _tag_grammar,
    "calls": _calls_grammar,
}
