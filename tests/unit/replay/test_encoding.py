"""Laws of the routed-experts encodings: what goes in comes out, and what is missing is said."""

from __future__ import annotations

import zlib

import numpy as np
import pybase64
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.replay.encoding import (
    decode_routed_experts,
    encode_routed_experts,
    extract_routed_experts_from_meta_info,
    routed_experts_info,
    routing_from,
)
from rayserve_moe.requests.records import RoutedExperts, RoutingLayout
from tests.support.routing.routing_arrays import routed
from tests.support.session.hypothesis_examples import examples


@examples(200, deadline=None)
@given(routed())
def test_decoding_gives_back_every_row_and_zeros_for_layers_that_do_not_route(case):
    routing, layout = case
    encoded = encode_routed_experts(routing, layout)
    decoded = decode_routed_experts(encoded, layout)
    assert decoded.dtype == np.int32
    assert decoded.shape == (len(routing.rows), layout.num_hidden_layers, layout.top_k)
    np.testing.assert_array_equal(decoded[:, list(layout.layer_ids)], routing.rows)
    dense = [layer for layer in range(layout.num_hidden_layers) if layer not in layout.layer_ids]
    assert not decoded[:, dense].any()


@examples(100, deadline=None)
@given(routed())
def test_the_public_extractor_reads_the_same_ids_flat(case):
    routing, layout = case
    encoded = encode_routed_experts(routing, layout)
    flat = extract_routed_experts_from_meta_info({"meta_info": {"routed_experts": encoded}})
    assert flat.ndim == 1 and flat.dtype == np.int32
    np.testing.assert_array_equal(flat, decode_routed_experts(encoded, layout).ravel())


@examples(100, deadline=None)
@given(routed())
def test_the_checksum_can_be_verified_from_the_decoded_rows(case):
    routing, layout = case
    description = routed_experts_info(routing, layout)
    decoded = decode_routed_experts(encode_routed_experts(routing, layout), layout)
    stored = decoded[:, description["layer_ids"]].astype(description["dtype"])
    assert description["shape"] == list(stored.shape)
    assert description["crc32"] == zlib.crc32(stored.tobytes())


@examples(100, deadline=None)
@given(routed(), st.integers(0, 80))
def test_leaving_out_the_first_rows_equals_slicing_the_whole(case, start):
    routing, _ = case
    rest = routing_from(routing, start)
    skipped = max(0, start - routing.start)
    np.testing.assert_array_equal(rest.rows, routing.rows[skipped:])
    assert rest.start == max(start, routing.start)
    positions = [position for first, last, _ in rest.source for position in range(first, last)]
    assert positions == list(range(rest.start, rest.start + len(rest.rows)))


def test_the_wire_form_is_little_endian_int32():
    layout = RoutingLayout(2, (1,), 300, 2)
    routing = RoutedExperts(np.array([[[258, 1]]], np.uint16))
    raw = pybase64.b64decode(encode_routed_experts(routing, layout))
    assert raw == bytes([0, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0, 1, 0, 0, 0])


def test_a_missing_row_leaves_no_field_and_is_named():
    layout = RoutingLayout(1, (0,), 8, 2)
    routing = RoutedExperts(np.zeros((4, 1, 2), np.uint8), 3, missing=((4, 6),), source=((3, 4, "computed"),))
    description = routed_experts_info(routing, layout)
    assert encode_routed_experts(routing, layout) is None
    assert description["missing"] == [[4, 6]] and description["crc32"] is None
    answer = {"meta_info": {"routed_experts": None, "routed_experts_info": description}}
    with pytest.raises(ValueError, match=r"missing at positions \[\[4, 6\]\]"):
        extract_routed_experts_from_meta_info(answer)
    kept = routing_from(routing, 6)
    assert not kept.missing
    assert decode_routed_experts(encode_routed_experts(kept, layout), layout).shape == (1, 1, 2)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "meta_info"),
        ([{"meta_info": {"routed_experts": ""}}], "one element of a batch"),
        ({"meta_info": None}, "meta_info"),
        ({"meta_info": {}}, "return_routed_experts"),
        ({"meta_info": {"routed_experts": None}}, "null"),
        ({"meta_info": {"routed_experts": "a*b="}}, "base64"),
        ({"meta_info": {"routed_experts": "AAA="}}, "int32"),
        ({"meta_info": {"routed_experts": 5}}, "string"),
    ],
)
def test_the_extractor_says_what_is_wrong(answer, message):
    with pytest.raises(ValueError, match=message):
        extract_routed_experts_from_meta_info(answer)


def test_a_length_that_is_no_whole_row_is_refused():
    layout = RoutingLayout(2, (0, 1), 8, 2)
    encoded = pybase64.b64encode(np.zeros(6, "<i4").tobytes()).decode()
    with pytest.raises(ValueError, match="not a multiple of 4"):
        decode_routed_experts(encoded, layout)
