"""Packed index rows hold the positions that were chosen, within the bytes of a store, and say which are missing."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe import extract_indexer_topk_from_meta_info
from rayserve_moe.replay.encoding import encode_index
from rayserve_moe.replay.encoding.index import index_rows_of
from rayserve_moe.replay.index_rows import IndexStore, packed_index, unpacked_index
from rayserve_moe.replay.routing_store import RoutingStore
from rayserve_moe.requests.columns import ragged
from rayserve_moe.requests.records import IndexLayout, RoutedExperts, RoutingLayout

TOP_K = 6
LAYOUT = IndexLayout((0, 2), TOP_K)
POSITIONS = st.sets(st.integers(0, 2**31 - 2) | st.integers(0, 9), max_size=TOP_K)


def rows_of(chosen: list[list[set[int]]]) -> np.ndarray:
    """Positions of tokens and layers, ascending with -1 behind."""
    return np.array(
        [[sorted(each) + [-1] * (TOP_K - len(each)) for each in layers] for layers in chosen], np.int32
    ).reshape(len(chosen), 2, TOP_K)


@given(st.lists(st.lists(POSITIONS, min_size=2, max_size=2), max_size=5))
def test_what_is_packed_comes_back(chosen: list[list[set[int]]]):
    rows = rows_of(chosen)
    for packed, row in zip(packed_index(rows), rows, strict=True):
        np.testing.assert_array_equal(unpacked_index(packed, num_layers=2, top_k=TOP_K), row)


def test_a_byte_holds_a_position_and_none_those_without_gaps():
    whole, near, far = [{0, 1, 2}, set()], [{0, 5, 250}, {3}], [{0, 300}, {1, 1000}]
    assert [len(packed) - 2 * 4 for packed in packed_index(rows_of([whole, near, far]))] == [0, 4, 4 + 2 * 4]


def test_a_store_drops_the_oldest_rows_beyond_its_size():
    store, slots = IndexStore(max_bytes=10), np.arange(4)
    store.write(slots, [b"four", b"four", None, b"2."])
    assert store.num_bytes == 10 and store.read(slots).tolist() == [b"four", b"four", None, b"2."]
    store.write(np.array([0]), [b"new"])  # the newest now
    store.write(np.array([2]), [b"a"])
    assert store.num_bytes == 10
    store.write(np.array([9]), [b"b"])
    assert store.read(np.arange(10)).tolist() == [b"new", None, b"a", b"2.", *[None] * 5, b"b"]


def test_a_row_of_another_stamp_is_missing_and_so_is_one_without_an_index():
    layout = RoutingLayout(num_hidden_layers=3, layer_ids=(1, 2), num_experts=8, top_k=2)
    store, slots = RoutingStore(layout, num_slots=8, max_index_bytes=100), np.array([3, 5])
    rows = np.zeros((2, 2, 2), np.uint8)
    store.write(slots, np.array([1, 1]), rows=rows, index=[b"one", b"two"])
    assert store.index(slots, np.array([True, False])).tolist() == [b"one", None]
    store.write(slots[:1], np.array([2]), rows=rows[:1])
    assert store.index(slots, np.array([True, True])).tolist() == [None, b"two"]


def answer_of(routing: RoutedExperts) -> dict:
    rows, info = encode_index(routing, LAYOUT)
    return {"meta_info": {"indexer_topk": rows, "indexer_topk_info": info}}


def test_an_answer_has_the_rows_and_a_checksum():
    rows = rows_of([[{0}, {0}], [{0, 1}, {1}], [{1, 2}, {0, 2}]])
    answer = answer_of(RoutedExperts(np.zeros((3, 1, 1), np.uint8), index=packed_index(rows)))
    np.testing.assert_array_equal(extract_indexer_topk_from_meta_info(answer), rows)
    info = answer["meta_info"]["indexer_topk_info"]
    assert (info["shape"], info["layer_ids"], info["missing"]) == ([3, 2, TOP_K], [0, 2], [])
    altered = base64.b64encode(np.roll(rows, 1).astype("<i4").tobytes()).decode()
    with pytest.raises(ValueError, match="does not match the crc32"):
        extract_indexer_topk_from_meta_info({"meta_info": {**answer["meta_info"], "indexer_topk": altered}})


def test_missing_rows_are_named_and_never_filled():
    packed = packed_index(rows_of([[{0}, {0}], [{0, 1}, {1}], [{1, 2}, {0, 2}]]))
    packed[1] = None
    routing = RoutedExperts(np.zeros((3, 1, 1), np.uint8), start=7, missing=((9, 10),), index=packed)
    answer = answer_of(routing)
    assert answer["meta_info"]["indexer_topk"] is None
    assert answer["meta_info"]["indexer_topk_info"]["missing"] == [[8, 10]]
    assert (index_rows_of(routing, LAYOUT)[0][1:] == -1).all()
    with pytest.raises(ValueError, match=r"misses rows: \[\[8, 10\]\]"):
        extract_indexer_topk_from_meta_info(answer)
    with pytest.raises(ValueError, match="return_indexer_topk=true"):
        extract_indexer_topk_from_meta_info({"meta_info": {}})


def test_bytes_of_tokens_stay_bytes_when_some_are_taken():
    column = ragged((np.frombuffer(row, np.uint8) for row in (b"ab", b"", b"cde")), np.uint8)
    for taken in (column[slice(None)], column[np.array([True, True, True])]):
        assert [entry.tobytes() for entry in taken.entries()] == [b"ab", b"", b"cde"]
