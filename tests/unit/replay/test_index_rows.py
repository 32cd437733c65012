"""Packed index rows hold the positions that were chosen, within the bytes of a store, and say which are missing."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe import extract_indexer_topk_from_meta_info
from rayserve_moe.replay.encoding import (
    decode_each_forced_index,
    decode_index,
    encode_index,
    index,
    routing_from,
    routing_until,
)
from rayserve_moe.replay.encoding.index import index_rows_of
from rayserve_moe.replay.index_rows import IndexStore, packed_index, unpacked_index
from rayserve_moe.replay.routing_store import RoutingStore
from rayserve_moe.requests.columns import ragged
from rayserve_moe.requests.records import IndexLayout, RoutedExperts, RoutingLayout
from rayserve_moe.rollouts.alignment import join_turns

TOP_K = 6
LAYOUT = IndexLayout((0, 2), (0, 1, 2, 4), TOP_K)
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
    store.write(slots, np.array([b"four", b"four", None, b"2."], object))
    assert store.num_bytes == 10 and store.read(slots).tolist() == [b"four", b"four", None, b"2."]
    store.write(np.array([0]), np.array([b"new"], object))  # the newest now
    store.write(np.array([2]), np.array([b"a"], object))
    assert store.num_bytes == 10
    store.write(np.array([9]), np.array([b"b"], object))
    assert store.read(np.arange(10)).tolist() == [b"new", None, b"a", b"2.", *[None] * 5, b"b"]


def test_a_row_of_another_stamp_is_missing_and_so_is_one_without_an_index():
    layout = RoutingLayout(num_hidden_layers=3, layer_ids=(1, 2), num_experts=8, top_k=2)
    store, slots = RoutingStore(layout, num_slots=8, parts={"index": IndexStore(max_bytes=100)}), np.array([3, 5])
    rows = np.zeros((2, 2, 2), np.uint8)
    store.write(slots, np.array([1, 1]), rows=rows, parts={"index": np.array([b"one", b"two"], object)})
    assert store.parts(slots, np.array([True, False]))["index"].tolist() == [b"one", None]
    store.write(slots[:1], np.array([2]), rows=rows[:1])
    assert store.parts(slots, np.array([True, True]))["index"].tolist() == [None, b"two"]


CHOSEN = [[{0}, {0}], [{0, 1}, {1}], [{1, 2}, {0, 2}]]
FORMS = ("sglang", "packed")


def routing_of(rows: np.ndarray, **fields: Any) -> RoutedExperts:
    return RoutedExperts(np.zeros((len(rows), 1, 1), np.uint8), parts={"index": packed_index(rows)}, **fields)


def answer_of(routing: RoutedExperts, form: str = "sglang") -> dict:
    rows, info = encode_index(routing, LAYOUT, form=form)
    return {"meta_info": {"indexer_topk": rows, "indexer_topk_info": info}}


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_has_the_rows_of_every_sparse_layer_and_a_checksum(form: str):
    """Layers without an index have the rows of the one that they share."""
    rows = rows_of(CHOSEN)
    answer = answer_of(routing_of(rows), form)
    np.testing.assert_array_equal(extract_indexer_topk_from_meta_info(answer), rows[:, [0, 0, 1, 1]])
    packed, layout = decode_index(answer["meta_info"]["indexer_topk"], answer["meta_info"]["indexer_topk_info"])
    assert packed.tolist() == packed_index(rows).tolist() and layout == LAYOUT
    info = answer["meta_info"]["indexer_topk_info"]
    assert info["shape"] == [3, {"sglang": 4, "packed": 2}[form], TOP_K] and info["missing"] == []
    assert (info["layer_ids"], info["indexer_layer_ids"]) == ([0, 1, 2, 4], [0, 2])


def test_the_form_of_sglang_is_plain_int32():
    rows = rows_of(CHOSEN)
    raw = base64.b64decode(answer_of(routing_of(rows))["meta_info"]["indexer_topk"])
    np.testing.assert_array_equal(np.frombuffer(raw, np.int32).reshape(3, 4, TOP_K), rows[:, [0, 0, 1, 1]])


def changed(form: str, **fields: Any) -> dict:
    meta_info = answer_of(routing_of(rows_of(CHOSEN)), form)["meta_info"]
    if "indexer_topk" in fields:
        return {**meta_info, **fields}
    return {**meta_info, "indexer_topk_info": {**meta_info["indexer_topk_info"], **fields}}


def text(rows: np.ndarray) -> str:
    return base64.b64encode(rows.astype("<i4").tobytes()).decode()


def packed_as(*rows: bytes, **fields: Any) -> dict:
    data = base64.b64encode(b"".join(rows)).decode()
    return {"indexer_topk": {"data": data, "lengths": [*map(len, rows)], **fields}}


COUNTS = np.array([-1, -1], "<i4").tobytes()
FAR = np.array([2, -1], "<i4").tobytes() + bytes([3, 255]) + np.array([2**31 - 5], "<u4").tobytes()
"""Packed row whose second position exceeds int32 by one."""


@pytest.mark.parametrize(
    ("form", "fields", "message"),
    [
        ("sglang", {"indexer_topk": text(np.roll(rows_of(CHOSEN)[:, [0, 0, 1, 1]], 1, axis=0))}, "match the crc32"),
        ("sglang", {"indexer_topk": text(rows_of(CHOSEN))}, "another shape"),
        ("sglang", {"indexer_topk": text(np.arange(12 * TOP_K))}, "same rows"),
        ("sglang", {"indexer_topk": "%"}, "indexer_topk is not valid base64"),
        ("sglang", {"indexer_topk": 5}, "indexer_topk must be a base64 string"),
        ("sglang", {"shape": [3, 2, TOP_K]}, "another shape"),
        ("sglang", {"layer_ids": [0, 1, 2]}, "another shape"),
        ("sglang", {"layer_ids": [0, 2, 1, 4]}, "layer_ids that do not ascend"),
        ("sglang", {"layer_ids": "01"}, "has no layer_ids"),
        ("sglang", {"indexer_layer_ids": [1, 2]}, "layers that no model has"),
        ("packed", {"indexer_layer_ids": []}, "do not ascend"),
        ("packed", {"shape": [4, 2, TOP_K]}, "another shape"),
        ("packed", packed_as(COUNTS, COUNTS, COUNTS), "match the crc32"),
        ("packed", packed_as(COUNTS, COUNTS, lengths=[8]), "lengths that add up"),
        ("packed", packed_as(COUNTS, lengths=[-1, 9]), "lengths that add up"),
        ("packed", packed_as(COUNTS[:4], COUNTS, COUNTS), "shorter than its counts"),
        ("packed", packed_as(np.array([-1, 0], "<i4").tobytes(), COUNTS, COUNTS), "1 to 6 entries"),
        ("packed", packed_as(np.array([-1, -7], "<i4").tobytes(), COUNTS, COUNTS), "1 to 6 entries"),
        ("packed", packed_as(np.array([-1, -(2**31)], "<i4").tobytes(), COUNTS, COUNTS), "1 to 6 entries"),
        ("packed", packed_as(np.array([2, -1], "<i4").tobytes() + b"a", COUNTS, COUNTS), "another length"),
        ("packed", packed_as(np.array([1, -1], "<i4").tobytes() + b"\xff", COUNTS, COUNTS), "another length"),
        ("packed", packed_as(FAR, COUNTS, COUNTS), "entries below 2147483647"),
    ],
)
def test_rows_that_do_not_match_their_description_are_refused(form: str, fields: dict, message: str):
    with pytest.raises(ValueError, match=message):
        extract_indexer_topk_from_meta_info({"meta_info": changed(form, **fields)})


def test_missing_rows_are_named_and_never_filled():
    rows = rows_of(CHOSEN)
    routing = routing_of(rows, start=7, missing=((9, 10),))
    assert routing.index is not None
    routing.index[1] = None
    answer = answer_of(routing)
    assert answer["meta_info"]["indexer_topk"] is None
    assert answer["meta_info"]["indexer_topk_info"]["missing"] == [[8, 10]]
    assert (index_rows_of(routing, LAYOUT)[0][1:] == -1).all()
    for form in FORMS:
        with pytest.raises(ValueError, match=r"misses rows: \[\[8, 10\]\]"):
            extract_indexer_topk_from_meta_info(answer_of(routing, form))
    packed = answer_of(routing, "packed")["meta_info"]
    known, _ = decode_index(packed["indexer_topk"], packed["indexer_topk_info"])
    assert known.tolist() == [packed_index(rows)[0], None, None]
    with pytest.raises(ValueError, match="return_indexer_topk=true"):
        extract_indexer_topk_from_meta_info({"meta_info": {}})


def test_rows_that_would_take_too_much_memory_are_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch):
    rows, num_bytes = rows_of(CHOSEN), 3 * 4 * TOP_K * 4
    monkeypatch.setattr(index, "MAX_WIRE_BYTES", num_bytes)
    np.testing.assert_array_equal(extract_indexer_topk_from_meta_info(answer_of(routing_of(rows)))[:, 1], rows[:, 0])
    monkeypatch.setattr(index, "MAX_WIRE_BYTES", num_bytes - 1)
    answer = answer_of(routing_of(rows))
    assert answer["meta_info"]["indexer_topk"] is None and answer["meta_info"]["indexer_topk_info"]["missing"] == []
    with pytest.raises(ValueError, match="GiB of rows: request them packed, or from a later position"):
        extract_indexer_topk_from_meta_info(answer)
    packed = extract_indexer_topk_from_meta_info(answer_of(routing_of(rows), "packed"))
    np.testing.assert_array_equal(packed[:, 1], rows[:, 0])


def forced(value: object, layout: IndexLayout | None = LAYOUT) -> np.ndarray | None:
    routing = RoutedExperts(np.zeros((3, 1, 1), np.uint8))
    (found,) = decode_each_forced_index(value, [routing], layout=layout, is_batch=False)
    assert found is not None
    return found.index


def test_every_form_can_be_forced():
    rows = rows_of(CHOSEN)
    wide, wanted = rows[:, [0, 0, 1, 1]], packed_index(rows).tolist()
    fields = [answer_of(routing_of(rows), form)["meta_info"]["indexer_topk"] for form in FORMS]
    for value in (*fields, rows, wide, text(rows), text(wide)):
        assert forced(value).tolist() == wanted


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (rows_of(CHOSEN)[:2], r"shape \[3, 4, 6\], found \[2, 2, 6\]"),
        (rows_of(CHOSEN)[:, [0, 1, 1, 1]], "share an index"),
        (text(rows_of(CHOSEN)[:2]), r"int32 of shape \[3, 4, 6\]"),
        ("%", "indexer_topk is not valid base64"),
        (packed_as(COUNTS, COUNTS)["indexer_topk"], "must hold 3 rows"),
        (packed_as(COUNTS, b"", COUNTS)["indexer_topk"], "none may be missing"),
        ({}, "indexer_topk must be a base64 string"),
    ],
)
def test_other_forms_are_refused(value: object, message: str):
    with pytest.raises(ValueError, match=message):
        forced(value)


def test_choices_need_a_server_that_captures_them_and_routing():
    with pytest.raises(ValueError, match="enable_return_indexer_topk"):
        forced(rows_of(CHOSEN), None)
    with pytest.raises(ValueError, match="forced_routed_experts"):
        decode_each_forced_index(text(rows_of(CHOSEN)), [None], layout=LAYOUT, is_batch=False)


def test_turns_join_with_their_index_rows():
    rows = rows_of(CHOSEN)
    whole = routing_of(rows)
    lacking = routing_until(routing_of(rows), 2)
    lacking.index[1] = None
    joined = join_turns([lacking, routing_from(whole, 1)])
    assert joined.index.tolist() == packed_index(rows).tolist()
    assert join_turns([replace(whole, parts={}), routing_from(whole, 1)]).index[0] is None
    assert join_turns([replace(whole, parts={})]).index is None
    other = routing_from(routing_of(rows[::-1]), 1)
    with pytest.raises(ValueError, match="disagree on the index row of position 2"):
        join_turns([whole, other])


def test_bytes_of_tokens_stay_bytes_when_some_are_taken():
    column = ragged((np.frombuffer(row, np.uint8) for row in (b"ab", b"", b"cde")), np.uint8)
    for taken in (column[slice(None)], column[np.array([True, True, True])]):
        assert [entry.tobytes() for entry in taken.entries()] == [b"ab", b"", b"cde"]
