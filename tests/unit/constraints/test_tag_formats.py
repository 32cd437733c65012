"""Structural tags by `format`: which texts each kind lets an answer be, and which formats are refused."""

from __future__ import annotations

import json
from functools import cache

import pytest

from rayserve_moe.config.settings import StructuredSettings
from rayserve_moe.constraints.compiler import grammar_of
from rayserve_moe.constraints.matchers import built_matcher
from rayserve_moe.requests.constraints import constraint_of
from rayserve_moe.requests.records import RequestError
from tests.support.text.constraints import vocabulary

LIMITS = StructuredSettings(max_bytes=8192)
NUMBER = {"type": "json_schema", "json_schema": {"enum": [1, 2]}}
WORD = {"type": "const_string", "value": 'x/"y'}
ANY = {"type": "any_text"}
A = {"type": "tag", "begin": "<a>", "content": NUMBER, "end": "</a>"}
B = {"type": "tag", "begin": "<b>", "content": ANY, "end": ["</b>", "</c>"]}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<a", "<b"], "tags": [A, B]}
SEPARATED = {"type": "tags_with_separator", "tags": [A, B], "separator": ", "}

CASES = [
    (WORD, ['x/"y'], ["x", 'x/"yz', ""]),
    (NUMBER, ["1", "2"], ["3", "12"]),
    ({"type": "regex", "pattern": "a/[bc]+"}, ["a/b", "a/cb"], ["a/", "ab"]),
    ({"type": "grammar", "grammar": 'root ::= "x" ("y" | "z")'}, ["xy", "xz"], ["x", "xyz"]),
    (ANY, ["", "a<b\n"], []),
    (ANY | {"excludes": ["no", "<"]}, ["", "n o"], ["a no", "<"]),
    (ANY | {"max_chars": 3}, ["", "äöü"], ["abcd"]),
    (A, ["<a>1</a>"], ["<a>3</a>", "<a>1", "1"]),
    (B, ["<b></b>", "<b>x</</c>"], ["<b>", "<b>x</b>y", "<b></b></b>"]),
    (A | {"end": ""}, ["<a>1"], ["<a>1</a>"]),
    ({"type": "sequence", "elements": [WORD, A]}, ['x/"y<a>1</a>'], ['x/"y', "<a>1</a>"]),
    ({"type": "sequence", "elements": [ANY, A, WORD]}, ['z<<a>1</a>x/"y', '<a>1</a>x/"y'], ["<a>1</a>", '<a>x/"y']),
    ({"type": "sequence", "elements": [ANY, WORD]}, ['x/"y', 'ax/x/"y'], ["x", 'x/"yx']),
    ({"type": "or", "elements": [A, WORD]}, ["<a>2</a>", 'x/"y'], ["", '<a>2</a>x/"y']),
    (A | {"begin": "", "content": {"type": "or", "elements": [ANY, A]}, "end": "."}, ["a.", "."], ["a", "a.."]),
    (TRIGGERED, ["", "x < y", "<a>1</a>", "x<a>1</a>y<b>z</c>"], ["<a>3</a>", "<a", "x<b>"]),
    (TRIGGERED | {"excludes": ["no"]}, ["yes<a>1</a>yes"], ["no", "<a>1</a>no"]),
    (TRIGGERED | {"at_least_one": True}, ["<a>1</a>", "<b></b>x<a>1</a>"], ["", "x"]),
    (TRIGGERED | {"stop_after_first": True}, ["", "x", "x<a>1</a>"], ["<a>1</a>x", "<a>1</a><a>1</a>"]),
    (TRIGGERED | {"stop_after_first": True, "at_least_one": True}, ["<a>1</a>"], ["", "<a>1</a>x"]),
    ({"type": "tag", "begin": "(", "content": TRIGGERED, "end": ")"}, ["(x<a>1</a>y)", "()"], ["(", "()x", "(<a)"]),
    (SEPARATED, ["", "<a>1</a>", "<a>1</a>, <b></b>"], ["<a>1</a>, ", "x", "<a>1</a><a>1</a>"]),
    (SEPARATED | {"at_least_one": True, "stop_after_first": True}, ["<a>1</a>"], ["", "<a>1</a>, <a>1</a>"]),
    ({"type": "optional", "content": A}, ["", "<a>1</a>"], ["<a>1</a><a>1</a>"]),
    ({"type": "star", "content": A}, ["", "<a>1</a><a>2</a>"], ["<a>"]),
    ({"type": "plus", "content": A}, ["<a>1</a><a>2</a>"], [""]),
    ({"type": "repeat", "content": A, "min": 1, "max": 2}, ["<a>1</a><a>2</a>"], ["", "<a>1</a>" * 3]),
    ({"type": "repeat", "content": A, "min": 2, "max": -1}, ["<a>1</a>" * 3], ["<a>1</a>"]),
]  # fmt: skip


@cache
def tokens():
    return vocabulary().tokens()


def grammar(given: dict) -> str:
    constraint = constraint_of({"structural_tag": json.dumps({"format": given})})
    assert constraint is not None
    return grammar_of(constraint, limits=LIMITS)


def allows(given: dict, text: str) -> bool:
    """Whether an answer may be this text."""
    matcher = built_matcher(tokens(), grammar(given))
    assert not matcher.is_error(), matcher.get_error()
    ids = tokens().tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(("given", "allowed", "refused"), CASES, ids=lambda value: str(value)[:60])
def test_a_format_allows_what_it_says(given, allowed, refused):
    assert [text for text in allowed if not allows(given, text)] == []
    assert [text for text in refused if allows(given, text)] == []


@pytest.mark.parametrize(
    "given",
    [
        5,
        {},
        {"type": "token", "token": 5},
        {"type": "const_string"},
        {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"},
        {"type": "json_schema", "json_schema": 5},
        {"type": "regex", "pattern": 5},
        {"type": "grammar", "grammar": "no"},
        {"type": "any_text", "excludes": "x"},
        {"type": "any_text", "max_chars": "x"},
        {"type": "any_text", "max_tokens": 5},
        {"type": "sequence", "elements": []},
        {"type": "sequence", "elements": [ANY, NUMBER]},
        {"type": "star", "content": ANY},
        {"type": "repeat", "content": A, "min": 3, "max": 2},
        TRIGGERED | {"triggers": ["<x"]},
        TRIGGERED | {"tags": [WORD]},
        A | {"end": None},
        A | {"end": []},
    ],
    ids=str,
)
def test_a_format_that_is_not_computed_is_refused(given):
    with pytest.raises(RequestError):
        grammar(given)


def test_formats_nest_no_deeper_than_schemas():
    given = A
    for _ in range(10):
        given = {"type": "optional", "content": given}
    assert allows(given, "<a>1</a>")
    for _ in range(60):
        given = {"type": "optional", "content": given}
    with pytest.raises(RequestError, match="deeper"):
        allows(given, "")
