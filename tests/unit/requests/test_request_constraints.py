"""One constraint from the fields of three dialects, or a refusal that names the field."""

from __future__ import annotations

import json

import pytest

from rayserve_moe.requests.constraints import constraint_of
from rayserve_moe.requests.records import RequestError

LONGEST = 1000

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
TAGS = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}


@pytest.mark.parametrize(
    "given",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
        {"guided_decoding": {"json": SCHEMA, "backend": "guidance"}},
        {"guided_json": SCHEMA},
        {"json_schema": json.dumps(SCHEMA), "regex": "", "ebnf": ""},
    ],
)
def test_a_schema_is_the_same_from_every_field_with_its_keys_in_their_order(given):
    found = constraint_of(given)
    assert found is not None and (found.kind, found.whitespace) == ("json_schema", None)
    assert found.text == json.dumps(SCHEMA, separators=(",", ":"))


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type":"object"}'),
        ({"json_schema": "$$ANY$$"}, "json_schema", '{"type":"object"}'),
        ({"guided_choice": ["x", "y"]}, "choice", '["x", "y"]'),
        ({"structured_outputs": {"choice": ["x", "y"]}}, "choice", '["x", "y"]'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"ebnf": "root ::= x"}, "grammar", "root ::= x"),
        ({"guided_grammar": "root ::= x"}, "grammar", "root ::= x"),
        ({"structural_tag": json.dumps(TAGS)}, "structural_tag", json.dumps(TAGS)),
        ({"response_format": {"type": "structural_tag", **TAGS}}, "structural_tag", json.dumps(TAGS)),
    ],
)
def test_other_kinds_have_one_form_too(given, kind, text):
    found = constraint_of(given)
    assert found is not None and (found.kind, found.text) == (kind, text)


@pytest.mark.parametrize("given", [{}, {"response_format": {"type": "text"}}, {"regex": "", "json_schema": ""}])
def test_nothing_is_no_constraint(given):
    assert constraint_of(given) is None


@pytest.mark.parametrize(
    ("options", "whitespace"),
    [
        ({"disable_any_whitespace": True}, ""),
        ({"whitespace_pattern": " "}, " "),
        ({"disable_any_whitespace": True, "whitespace_pattern": " "}, ""),
        ({"disable_any_whitespace": False}, None),
    ],
)
def test_whitespace_is_that_of_the_request(options, whitespace):
    found = constraint_of({"structured_outputs": {"json": {}, **options}})
    assert found is not None and found.whitespace == whitespace


def test_objects_can_be_closed():
    found = constraint_of(
        {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}}, longest=LONGEST
    )
    assert found is not None and json.loads(found.text) == SCHEMA | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"regex": "a", "guided_json": {}}, "regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"jsonn": {}}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": "x" * 300}}, "structured_outputs"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": "[" * 100_000}, "json_schema"),
        ({"guided_json": "3"}, "guided_json"),
        ({"guided_choice": [1]}, "guided_choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structural_tag": "{}"}, "structural_tag"),
        ({"structural_tag": {**TAGS, "triggers": [""]}}, "structural_tag"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(given, param):
    with pytest.raises(RequestError) as refused:
        constraint_of(given)
    assert refused.value.param == param


@pytest.mark.parametrize("name", ["structured_outputs", "guided_json", "regex"])
def test_a_text_far_beyond_the_limit_is_not_read(name: str) -> None:
    text = '{"a": ' + "[" * (4 * LONGEST)  # no JSON, which nobody finds out
    with pytest.raises(RequestError, match=f"longer than {LONGEST} bytes") as refused:
        constraint_of({name: {"json": text} if name == "structured_outputs" else text}, longest=LONGEST)
    assert refused.value.param == name


def test_spaces_do_not_count_for_the_limit() -> None:
    schema = {"enum": ["a" * 10] * (LONGEST // 20)}
    found = constraint_of({"guided_json": json.dumps(schema, indent=16)}, longest=LONGEST)
    assert found is not None and json.loads(found.text) == schema


EMPTY = ["guided_json", "guided_regex", "guided_grammar"]


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_constraint_is_refused(name):
    with pytest.raises(RequestError, match="empty") as caught:
        constraint_of({name: ""})
    assert caught.value.param == name


@pytest.mark.parametrize("kind", ["json", "regex", "grammar", "structural_tag"])
def test_an_empty_kind_of_structured_outputs_is_refused(kind):
    with pytest.raises(RequestError, match="empty"):
        constraint_of({"structured_outputs": {kind: ""}})
