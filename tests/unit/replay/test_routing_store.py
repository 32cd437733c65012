"""A stored row is read by the one it was written for, or by nobody."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.replay.routing_store import RoutingStore
from rayserve_moe.requests.records import RoutingLayout

LAYOUT = RoutingLayout(num_hidden_layers=3, layer_ids=(1, 2), num_experts=8, top_k=2)
NUM_SLOTS = 12


def rows_for(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 8, (count, 2, 2)).astype(np.uint8)


def test_rows_come_back_for_the_stamp_they_were_written_under():
    store, slots, stamps = RoutingStore(LAYOUT, num_slots=NUM_SLOTS), np.array([3, 9, 4]), np.array([1, 5, 1])
    store.write(slots, stamps, rows=rows_for(3))
    rows, present = store.read(slots[::-1], stamps[::-1])
    np.testing.assert_array_equal(rows, rows_for(3)[::-1])
    assert present.all() and rows.dtype == np.uint8


def test_a_slot_that_was_never_written_is_missing():
    store = RoutingStore(LAYOUT, num_slots=NUM_SLOTS)
    rows, present = store.read(np.arange(NUM_SLOTS), np.ones(NUM_SLOTS, np.int64))
    assert not present.any() and (rows == 0).all()


@pytest.mark.parametrize("other_stamp", [4, 6, 2**40])
def test_a_row_of_another_stamp_is_missing_and_shows_nothing(other_stamp):
    store, slots = RoutingStore(LAYOUT, num_slots=NUM_SLOTS), np.array([1, 2, 3])
    store.write(slots, np.full(3, 5), rows=rows_for(3) | 1)
    stamps = np.array([5, other_stamp, 5])
    rows, present = store.read(slots, stamps)
    np.testing.assert_array_equal(present, [True, False, True])
    assert (rows[1] == 0).all()
    again, _ = store.read(slots, np.full(3, 5))
    np.testing.assert_array_equal(again, rows_for(3) | 1)


def test_the_next_owner_of_a_slot_takes_it_over():
    store, slots = RoutingStore(LAYOUT, num_slots=NUM_SLOTS), np.array([6, 7])
    store.write(slots, np.array([1, 1]), rows=rows_for(2))
    store.write(slots[:1], np.array([2]), rows=rows_for(1, seed=1))
    _, present = store.read(slots, np.array([1, 1]))
    np.testing.assert_array_equal(present, [False, True])
    rows, present = store.read(slots, np.array([2, 1]))
    np.testing.assert_array_equal(rows, np.concatenate([rows_for(1, seed=1), rows_for(2)[1:]]))
    assert present.all()


def test_rows_are_read_into_an_array_of_the_reader_and_nowhere_beside_it():
    store, slots, stamps = RoutingStore(LAYOUT, num_slots=NUM_SLOTS), np.array([3, 9, 4]), np.array([1, 5, 1])
    store.write(slots, stamps, rows=rows_for(3) | 1)
    held = np.full((5, 2, 2), 7, np.uint8)
    rows, present = store.read(slots, np.array([1, 6, 1]), out=held[1:4])
    assert np.shares_memory(rows, held) and present.tolist() == [True, False, True]
    np.testing.assert_array_equal(held[[1, 3]], (rows_for(3) | 1)[[0, 2]])
    assert (held[2] == 0).all() and (held[[0, 4]] == 7).all()


@pytest.mark.parametrize("out", [None, np.zeros((1, 2, 2), np.uint8)], ids=["no array", "an array"])
def test_a_slot_beyond_the_store_is_an_error(out: np.ndarray | None):
    store = RoutingStore(LAYOUT, num_slots=NUM_SLOTS)
    with pytest.raises(IndexError):
        store.read(np.array([NUM_SLOTS]), np.array([1]), out=out)


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, np.uint8), (256, np.uint8), (257, np.uint16)])
def test_ids_fit_the_dtype_of_the_layout(num_experts, dtype):
    layout = RoutingLayout(1, (0,), num_experts, 1)
    store = RoutingStore(layout, num_slots=2)
    largest = np.full((1, 1, 1), num_experts - 1, layout.dtype)
    store.write(np.array([1]), np.array([1]), rows=largest)
    rows, _ = store.read(np.array([1]), np.array([1]))
    assert rows.dtype == dtype and rows.item() == num_experts - 1
