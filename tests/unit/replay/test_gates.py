"""Router gates on the wire: every form returns them, and contradictory ones are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.replay.encoding import decode_each_forced_gates, gates, routing_from
from rayserve_moe.replay.encoding.rollout import decode_rollout, encode_rollout
from rayserve_moe.replay.routing_store import GateStore, RoutingStore
from rayserve_moe.requests.records import GATES, GateScale, RoutedExperts, RoutingLayout
from rayserve_moe.requests.results import joined_routing
from rayserve_moe.requests.row_parts import are_known
from rayserve_moe.rollouts.alignment import join_turns

LAYOUT = RoutingLayout(num_hidden_layers=3, layer_ids=(1, 2), num_experts=8, top_k=2)
SCALE = GateScale("sigmoid", is_normalized=True, scale=2.5)


def gated(count: int, **fields: Any) -> RoutedExperts:
    values = np.arange(count * 4, dtype=np.float32).reshape(count, *LAYOUT.row_shape) / 7
    return RoutedExperts(np.zeros(values.shape, LAYOUT.dtype), parts={GATES: values}, **fields)


@given(st.integers(0, 6), st.integers(0, 9), st.booleans())
def test_both_forms_return_what_was_written(count: int, start: int, in_container: bool):
    routing = gated(count, start=start)
    info = gates.describe(routing, layout=LAYOUT, scale=SCALE)
    value = gates.known_gates(routing) if in_container else gates.encode(routing)
    found = gates.with_gates(replace(routing, parts={}), value, info=info)
    np.testing.assert_array_equal(found.gates, routing.gates)
    assert gates.scale_in(info) == SCALE and info["missing"] == [] and info["start"] == start


def test_missing_rows_are_reported_and_only_a_container_has_the_others():
    routing = gated(5, start=2, missing=((3, 5),))
    info = gates.describe(routing, layout=LAYOUT, scale=SCALE)
    assert gates.encode(routing) is None and info["missing"] == [[3, 5]] and info["crc32"] is None
    with pytest.raises(ValueError, match="misses rows"):
        gates.with_gates(routing, None, info=info)
    found = gates.with_gates(replace(routing, parts={}), gates.known_gates(routing), info=info)
    assert are_known(found.gates).tolist() == [True, False, False, True, True]
    np.testing.assert_array_equal(found.gates[[0, 3, 4]], routing.gates[[0, 3, 4]])


def test_rows_that_were_captured_without_gates_are_missing():
    """The answer comes from two servers, one of which captures no gates."""
    whole = gated(4)
    joined = joined_routing([routing_from(whole, 0), replace(gated(2, start=4), parts={})])
    assert gates.describe(joined, layout=LAYOUT, scale=SCALE)["missing"] == [[4, 6]]
    turns = [replace(whole, parts={}), gated(2, start=4)]
    assert gates.describe(join_turns(turns), layout=LAYOUT, scale=SCALE)["missing"] == [[0, 4]]
    again = replace(gated(2, start=2), parts={GATES: np.ones((2, 2, 2), np.float32)})
    np.testing.assert_array_equal(join_turns([whole, again]).gates, whole.gates)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"crc32": 5}, "gates were altered"),
        ({"start": 1}, "does not have the positions"),
        ({"start": None}, "has no start"),
        ({"shape": [3, 1, 2]}, "another shape than the rows"),
        ({"shape": [2, 2, 2]}, "another shape than the gates"),
    ],
)
def test_gates_that_contradict_their_description_are_refused(changes: dict[str, Any], message: str):
    routing = gated(3)
    info = gates.describe(routing, layout=LAYOUT, scale=SCALE) | changes
    with pytest.raises(ValueError, match=message):
        gates.with_gates(routing, gates.encode(routing), info=info)


@pytest.mark.parametrize("changes", [{"score": "tanh"}, {"scale": "1"}, {"normalized": 1}, {"expert_factors": None}])
def test_a_description_without_its_scale_is_refused(changes: dict[str, Any]):
    with pytest.raises(ValueError, match="router_gates_info"):
        gates.scale_in(gates.describe(gated(1), layout=LAYOUT, scale=SCALE) | changes)


def test_forced_gates_are_read_in_both_forms():
    routing = gated(3)
    plain = replace(routing, parts={})
    for value in (gates.encode(routing), routing.gates, routing.gates.astype(np.float64)):
        (found,) = decode_each_forced_gates(value, [plain], is_batch=False)
        assert found is not None and found.gates.dtype == np.float32
        np.testing.assert_array_equal(found.gates, routing.gates)
    assert decode_each_forced_gates([None], [plain], is_batch=True) == [plain]
    for value, message in ((7, "base64"), (np.ones((3, 2, 2), int), "must hold floats"), ([1, 2], "one entry")):
        with pytest.raises(ValueError, match=message):
            decode_each_forced_gates(value, [plain], is_batch=isinstance(value, list))


def test_a_store_returns_the_gates_of_its_rows():
    store = RoutingStore(LAYOUT, num_slots=8, parts={GATES: GateStore(LAYOUT, num_slots=8)})
    routing, slots = gated(3), np.array([1, 4, 6])
    store.write(slots, np.ones(3, np.int64), rows=routing.rows, parts=routing.parts)
    store.write(slots[:1], np.full(1, 2), rows=routing.rows[:1])
    found = store.parts(slots, np.array([True, True, False]))[GATES]
    assert are_known(found).tolist() == [False, True, False]
    np.testing.assert_array_equal(found[1], routing.gates[1])


ARRAYS = [{"sampling_mask_counts": np.array([1, 2], np.int32)}, {"router_gates": np.ones((2, 1, 3), np.float32)}]


@pytest.mark.parametrize("compress", [False, True])
def test_a_container_returns_the_arrays_of_each_choice(compress: bool):
    rows = [np.zeros((1, 2, 2), np.uint8)]
    body = encode_rollout({"answers": [{"a": 1}, {}]}, rows, arrays=ARRAYS, compress=compress)
    header, found = decode_rollout(body)
    assert header["answers"][0].keys() == {"a", "sampling_mask_counts"} and np.array_equal(found[0], rows[0])
    for choice, arrays in zip(header["answers"], ARRAYS, strict=True):
        for name, array in arrays.items():
            assert choice[name].dtype == array.dtype
            np.testing.assert_array_equal(choice[name], array)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (b'[[{"name":"a","shape":[1],"dtype":"object"}]]', "unknown dtype"),
        (b'[[{"name":"a","shape":[-1],"dtype":"int32"}]]', "without a shape"),
        (b'[[{"shape":[1],"dtype":"int32"}]]', "without a name"),
        (b"[7]", "does not declare its arrays"),
        (b'[[],[{"name":"a","shape":[0],"dtype":"int32"}]]', "arrays of a choice"),
        (b'[[{"name":"a","shape":[1],"dtype":"int32"}]]', "another number of bytes"),
    ],
)
def test_a_container_with_wrong_arrays_is_refused(arrays: bytes, message: str):
    header = b'{"rollout":{"rows":[],"compression":null,"arrays":' + arrays + b"}}"
    with pytest.raises(ValueError, match=message):
        decode_rollout(len(header).to_bytes(4, "little") + header)
