"""Laws of every dialect: what goes in comes out, what is missing is said, and no wrong value is taken for routing."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.replay.encoding import DIALECTS, decode_forced, encode_nested, encode_packed, routed_experts_info
from rayserve_moe.replay.encoding.ranges import routing_from, routing_until
from rayserve_moe.requests.records import RoutedExperts, RoutingLayout
from tests.support.routing.routing_arrays import layouts, refusal, routed, routed_with_gaps, same
from tests.support.session.hypothesis_examples import examples

JSON_DIALECTS = ("sglang", "nested", "npy", "packed", "packed-int16")
BINARY_DIALECTS = ("binary", "binary+zstd")

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.just("int16"),
    lambda children: (
        st.lists(children, max_size=4)
        | st.dictionaries(st.sampled_from(["data", "shape", "start", "dtype"]), children, max_size=4)
    ),
    max_leaves=12,
)


def bare(routing: RoutedExperts) -> RoutedExperts:
    """Only what a value tells that comes without its description."""
    return RoutedExperts(routing.rows, routing.start)


@pytest.mark.parametrize("name", DIALECTS)
@examples(60, deadline=None)
@given(case=routed())
def test_decoding_gives_back_every_row_at_its_position(name, case):
    routing, layout = case
    value = DIALECTS[name].encode(routing, layout)
    decoded = DIALECTS[name].decode(value, layout, start=routing.start)
    assert same(decoded, routing if name in BINARY_DIALECTS else bare(routing))


@pytest.mark.parametrize("name", JSON_DIALECTS)
@examples(30, deadline=None)
@given(case=routed())
def test_json_carries_the_value_unchanged(name, case):
    routing, layout = case
    value = DIALECTS[name].encode(routing, layout)
    assert json.loads(json.dumps(value)) == value


@pytest.mark.parametrize("name", DIALECTS)
@examples(30, deadline=None)
@given(case=routed_with_gaps())
def test_a_missing_row_is_said_or_nothing_is(name, case):
    routing, layout = case
    value = DIALECTS[name].encode(routing, layout)
    if name in BINARY_DIALECTS:
        decoded = DIALECTS[name].decode(value, layout)
        assert same(routing, decoded)
        for first, last in decoded.missing:
            assert not decoded.rows[first - decoded.start : last - decoded.start].any()
    else:
        assert value is None


@examples(60, deadline=None)
@given(routed(), st.sampled_from(sorted(DIALECTS)), st.sampled_from(sorted(DIALECTS)))
def test_the_checksum_is_the_same_in_every_dialect(case, one, other):
    routing, layout = case
    decoded = [
        DIALECTS[name].decode(DIALECTS[name].encode(routing, layout), layout, start=routing.start)
        for name in (one, other)
    ]
    crc32 = {routed_experts_info(each, layout)["crc32"] for each in (*decoded, routing)}
    assert len(crc32) == 1


@examples(60, deadline=None)
@given(routed(), st.integers(0, 80))
def test_prompt_rows_then_generated_rows_are_all_rows(case, prompt_len):
    routing, layout = case
    prompt, generated = encode_nested(routing, layout, prompt_len=prompt_len)
    assert prompt + generated == routing.rows.tolist()
    assert len(prompt) == max(0, min(prompt_len - routing.start, len(routing.rows)))
    before, after = routing_until(routing, prompt_len), routing_from(routing, prompt_len)
    assert before.source + after.source == routing.source or len(before.source) + len(after.source) == 1 + len(
        routing.source
    )


def test_a_missing_row_leaves_neither_prompt_nor_generated_lists():
    layout = RoutingLayout(1, (0,), 8, 1)
    routing = RoutedExperts(np.zeros((4, 1, 1), np.uint8), missing=((0, 1),))
    assert encode_nested(routing, layout, prompt_len=2) == (None, None)


def test_clients_find_the_packed_object_by_its_first_bytes():
    layout = RoutingLayout(2, (1,), 300, 2)
    routing = RoutedExperts(np.array([[[258, 1]]], np.uint16), 5)
    text = json.dumps({"routed_experts": encode_packed(routing, layout)}, separators=(",", ":"))
    assert text == '{"routed_experts":{"data":"AAAAAAIBAQA=","shape":[1,2,2],"start":5,"dtype":"uint16"}}'


@pytest.mark.parametrize(("num_experts", "dtype"), [(1, "uint8"), (256, "uint8"), (257, "uint16"), (600, "uint16")])
def test_small_ids_take_one_byte_and_others_two(num_experts, dtype):
    layout = RoutingLayout(1, (0,), num_experts, 1)
    routing = RoutedExperts(np.zeros((3, 1, 1), layout.dtype))
    assert encode_packed(routing, layout)["dtype"] == dtype
    assert encode_packed(routing, layout, dtype="int16")["dtype"] == "int16"


def test_a_dtype_too_small_for_the_experts_is_refused():
    layout = RoutingLayout(1, (0,), 300, 1)
    routing = RoutedExperts(np.zeros((3, 1, 1), layout.dtype))
    for dtype in ("uint8", "float32", ""):
        with pytest.raises(ValueError, match="cannot hold the ids of 300 experts"):
            encode_packed(routing, layout, dtype=dtype)


@pytest.mark.parametrize("name", JSON_DIALECTS)
@examples(40, deadline=None)
@given(case=routed(max_start=0), whole=st.booleans())
def test_forced_routing_is_read_in_every_json_dialect(name, case, whole):
    routing, layout = case
    value = json.loads(json.dumps(DIALECTS[name].encode(routing, layout)))
    prompt_len = len(routing.rows) + (0 if whole else 1)
    assert same(decode_forced(value, layout, prompt_len=prompt_len), bare(routing))
    for wrong_len in (prompt_len + 2, len(routing.rows) - 1):
        with pytest.raises(ValueError, match="ends at position"):
            decode_forced(value, layout, prompt_len=wrong_len)


@examples(40, deadline=None)
@given(routed())
def test_forced_routing_starts_where_the_packed_object_says(case):
    routing, layout = case
    end = routing.start + len(routing.rows)
    decoded = decode_forced(encode_packed(routing, layout), layout, prompt_len=end)
    assert same(decoded, bare(routing))


@pytest.mark.parametrize("name", DIALECTS)
@examples(60, deadline=None)
@given(case=routed().filter(lambda case: len(case[0].rows) > 0))
def test_rows_of_a_model_with_fewer_experts_or_other_layers_are_refused(name, case):
    routing, layout = case
    value = DIALECTS[name].encode(routing, layout)
    others = []
    if largest := int(routing.rows.max()):
        others.append(replace(layout, num_experts=largest))
    if name != "sglang":
        others.append(replace(layout, top_k=layout.top_k + 1))
        others.append(replace(layout, layer_ids=(*layout.layer_ids, 6), num_hidden_layers=7))
    for other in others:
        assert refusal(lambda other=other: DIALECTS[name].decode(value, other))


@pytest.mark.parametrize("name", JSON_DIALECTS)
@examples(150, deadline=None)
@given(value=json_values, layout=layouts())
def test_anything_else_is_a_value_error_that_quotes_nothing(name, value, layout):
    rows = []
    for decode in (DIALECTS[name].decode, partial(decode_forced, prompt_len=0)):
        sentence = refusal(lambda decode=decode: rows.append(decode(value, layout).rows))
        if isinstance(value, str) and sentence is not None:
            assert value not in sentence or len(value) < 8
    assert not any(each.size for each in rows)


@pytest.mark.parametrize("name", DIALECTS)
@examples(80, deadline=None)
@given(case=routed(), choice=st.data())
def test_cutting_a_value_short_is_noticed(name, case, choice):
    routing, layout = case
    value = DIALECTS[name].encode(routing, layout)
    if isinstance(value, dict):
        text = value["data"]
        cuts = st.integers(0, len(text) - 1)
        if not text:
            return
        damaged = {**value, "data": text[: choice.draw(cuts)]}
    elif value:
        damaged = value[: choice.draw(st.integers(0, len(value) - 1))]
    else:
        return
    decoded = []
    if refusal(lambda: decoded.append(DIALECTS[name].decode(damaged, layout))) is None:
        # These two do not say how many rows they hold: whole rows less are rows less.
        assert name in ("sglang", "nested") and len(decoded[0].rows) < len(routing.rows)
