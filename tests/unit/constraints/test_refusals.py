"""What is refused before it is admitted: schemas that are not supported, by keyword and path, and what is too large."""

from __future__ import annotations

import json

import pytest

from rayserve_moe.config.settings import StructuredSettings
from rayserve_moe.constraints.compiler import MAX_DEPTH, grammar_of
from rayserve_moe.constraints.matchers import built_matcher, fault_of
from rayserve_moe.constraints.refusals import refusal
from rayserve_moe.requests.records import Constraint, RequestError
from tests.support.text.constraints import schema_constraint, vocabulary

TOKENS = vocabulary().tokens()


def fault(constraint: Constraint) -> str:
    """Why a constraint is not taken; empty where it is."""
    grammar = grammar_of(constraint, limits=StructuredSettings())
    found, _ = fault_of(built_matcher(TOKENS, grammar), mask_words=vocabulary().mask_words)
    return refusal(constraint, found) if found else ""


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({"not": {}}, "`not` at # is"),
        ({"properties": {"a": {"items": {"uniqueItems": True}}}}, "`uniqueItems` at #/properties/a/items is"),
        ({"anyOf": [{"type": "integer"}, {"contains": {}}]}, "`contains` at #/anyOf/1 is"),
        ({"properties": {"not": {"if": {}}}}, "`if` at #/properties/not is"),
        ({"$defs": {"x": {"propertyNames": {}}}, "$ref": "#/$defs/x"}, "`propertyNames` at #/$defs/x is"),
        ({"oneOf": [{"type": "string"}, {"maxLength": 2}]}, "`oneOf` at # is"),
        ({"format": "idn-email"}, "`format` at # is"),
        ({"pattern": "(?=a)b"}, "`pattern` at # is"),
        ({"$ref": "http://elsewhere/schema"}, "`$ref` at # is"),
        ({"$ref": "#"}, "`$ref` at # cannot be met"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "`minLength` at # cannot be met"),
    ],
)
def test_a_keyword_that_is_not_supported_is_named_with_its_path(schema, sentence):
    assert fault(schema_constraint(schema)).startswith(sentence)


@pytest.mark.parametrize("schema", [True, {}, {"type": "object"}, {"const": [1, {"not": 2}]}, {"enum": ["if", None]}])
def test_what_an_answer_can_begin_with_is_taken(schema):
    assert fault(schema_constraint(schema)) == ""


def test_options_of_the_engine_in_a_schema_are_passed_over():
    plain, opened = ({"type": "integer"} | more for more in ({}, {"x-guidance": {"lenient": True}}))
    limits = StructuredSettings()
    assert grammar_of(schema_constraint(plain), limits=limits) == grammar_of(schema_constraint(opened), limits=limits)


def nested(depth: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "constraint",
    [
        schema_constraint(False),
        schema_constraint(nested(MAX_DEPTH + 1)),
        schema_constraint({"anyOf": [{"enum": list(range(30))}, {"enum": list(range(30))}]}),
        schema_constraint({"description": "x" * 4096}),
        Constraint("choice", json.dumps([str(i) for i in range(51)])),
        Constraint("regex", "a\0"),
    ],
    ids=["false", "depth", "enum", "bytes", "choices", "NUL"],
)
def test_what_is_too_large_is_refused_before_it_is_compiled(constraint):
    with pytest.raises(RequestError) as refused:
        grammar_of(constraint, limits=StructuredSettings(max_bytes=2048, max_alternatives=50))
    assert refused.value.param == constraint.param


def test_the_deepest_schema_that_may_be_is_taken():
    grammar_of(schema_constraint(nested(MAX_DEPTH)), limits=StructuredSettings())


@pytest.mark.parametrize("text", ["a.b", "(x)", "[a-z]+ {2}", "\\d|^$", "a/b&c~d#e", 'ä\n"quoted"', "<id_300>"])
def test_a_choice_is_the_text_itself(text):
    matcher = built_matcher(TOKENS, grammar_of(Constraint("choice", json.dumps([text])), limits=StructuredSettings()))
    assert not matcher.is_error()
    ids = TOKENS.tokenize_str(text)
    assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
