"""Objects with many optional properties: an answer can go on to any of them, or the schema is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rayserve_moe.config.settings import StructuredSettings
from rayserve_moe.constraints.compiler import grammar_of
from rayserve_moe.constraints.matchers import built_matcher
from rayserve_moe.constraints.optional_properties import MAX_OPTIONAL
from rayserve_moe.requests.records import RequestError
from tests.support.text.constraints import schema_constraint, vocabulary

TOKENS = vocabulary().tokens()
HALF, QUARTER = MAX_OPTIONAL // 2, MAX_OPTIONAL // 4


def with_optional(count: int, *, named: str = "p", required: tuple[str, ...] = ()) -> dict[str, Any]:
    names = [f"{named}{place}" for place in range(count)]
    return {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": list(required)}


def within(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}


def union(*, of: int, each: int) -> dict[str, Any]:
    return {
        "anyOf": [{"$ref": f"#/$defs/d{place}"} for place in range(of)],
        "$defs": {f"d{place}": with_optional(each, named=f"p{place}_") for place in range(of)},
    }


def follow(schema: dict[str, Any], text: str) -> None:
    """Have an answer begin with a text, with a mask for every token."""
    matcher = built_matcher(TOKENS, grammar_of(schema_constraint(schema), limits=StructuredSettings()))
    mask = np.zeros(vocabulary().mask_words, np.int32)
    for token in [None, *TOKENS.tokenize_str(text)]:
        assert token is None or matcher.consume_token(token), matcher.get_error()
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        assert not matcher.is_error(), matcher.get_error()
        assert mask.any()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (with_optional(MAX_OPTIONAL), f'{{"p{HALF}":1,"p{MAX_OPTIONAL - 1}":2}}'),
        (with_optional(MAX_OPTIONAL) | {"additionalProperties": False}, '{"p0":1,"p1":2}'),
        (with_optional(MAX_OPTIONAL) | {"patternProperties": {"^x": {"type": "integer"}}}, '{"p0":1,"x":2}'),
        (within(with_optional(MAX_OPTIONAL)), '{"a":{"p0":1,"p2":2}}'),
        (with_optional(2 * MAX_OPTIONAL, required=(f"p{MAX_OPTIONAL}",)), f'{{"p5":1,"p{MAX_OPTIONAL}":2,"p1999":3'),
        ({"allOf": [with_optional(HALF - 2), with_optional(HALF - 2, named="q")]}, '{"p1":1,"q2":2}'),
        (within({"anyOf": [with_optional(QUARTER - 2, named=name) for name in "pqrs"]}), '{"a":{"r7":1,"r9":1}}'),
        (union(of=QUARTER // 2, each=6), '{"p7_1":1,"p7_2":2}'),
        (
            {"type": "array", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": with_optional(MAX_OPTIONAL)}},
            '[{"p8":1},{"',
        ),
        (with_optional(2 * MAX_OPTIONAL, required=tuple(f"p{i}" for i in range(2 * MAX_OPTIONAL))), '{"p0":1,"p1":2'),
    ],
    ids=["open", "closed", "patterns", "inner", "runs", "allOf", "anyOf", "union", "items", "required"],
)
def test_whatever_is_taken_can_be_followed_to_each_of_its_properties(schema, text):
    follow(schema, text)


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        (with_optional(2 * MAX_OPTIONAL), "`properties` at # amounts to 2000 optional"),
        (within(with_optional(MAX_OPTIONAL + 1)), "`properties` at #/properties/a amounts to 1001 optional"),
        (with_optional(MAX_OPTIONAL + 2, required=("p0",)), "`properties` at # amounts to 1001 optional"),
        (
            within({"allOf": [with_optional(HALF), with_optional(HALF, named="q")]}),
            "`allOf` at #/properties/a amounts to 1004",
        ),
        (union(of=QUARTER, each=3), "`anyOf` at # amounts to 1250 optional"),
        (
            {"items": with_optional(1 + MAX_OPTIONAL) | {"$ref": "#/items"}},
            "`properties` at #/items amounts to 1001 optional",
        ),
    ],
    ids=["outer", "inner", "after", "allOf", "union", "itself"],
)
def test_more_than_can_be_followed_are_refused_with_their_place_and_number(schema, sentence):
    constraint = schema_constraint(schema)
    with pytest.raises(RequestError, match="can come next, more than 1000") as refused:
        grammar_of(constraint, limits=StructuredSettings())
    assert str(refused.value).startswith(sentence) and refused.value.param == constraint.param
