"""Pieces join to what they were cut from."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.replay.encoding import routing_from
from rayserve_moe.requests.columns import ragged
from rayserve_moe.requests.records import RoutedExperts
from rayserve_moe.requests.results import ChoiceResult, joined_routing

COUNT = 12


def whole(start: int) -> RoutedExperts:
    end = start + COUNT
    return RoutedExperts(
        np.arange(COUNT, dtype=np.uint8).reshape(-1, 1, 1),
        start,
        missing=((start, start + 2), (start + 6, start + 7)),
        source=((start, start + 5, "cached"), (start + 5, end, "computed")),
        weight_version=((start + 2, start + 6, "a"), (start + 7, end, "b")),
        parts={"index": np.arange(start, end).astype(object)},
    )


def piece(routing: RoutedExperts, first: int, last: int) -> RoutedExperts:
    """Positions `[first, last)` of some routing."""
    tail = routing_from(routing, first)

    def cut(ranges: tuple) -> tuple:
        return tuple((a, min(b, last), *label) for a, b, *label in ranges if a < last)

    rows = tail.rows[: last - first]
    parts = {name: values[: last - first] for name, values in tail.parts.items()}
    return RoutedExperts(rows, first, cut(tail.missing), cut(tail.source), cut(tail.weight_version), parts)


@given(st.integers(0, 5), st.sets(st.integers(1, COUNT - 1)))
def test_pieces_of_routing_join_to_the_whole(start: int, cuts: set[int]):
    borders = [start, *(start + cut for cut in sorted(cuts)), start + COUNT]
    joined = None
    for first, last in pairwise(borders):
        joined = joined_routing([joined, piece(whole(start), first, last)])
        joined = joined_routing([joined, None])
    assert joined is not None and joined.start == start
    np.testing.assert_array_equal(joined.rows, whole(start).rows)
    assert joined.index.tolist() == whole(start).index.tolist()
    for name in ("missing", "source", "weight_version"):
        assert getattr(joined, name) == getattr(whole(start), name)


def test_index_rows_of_a_piece_without_any_are_not_known():
    first, second = piece(whole(0), 0, 3), replace(piece(whole(0), 3, 5), parts={})
    assert joined_routing([first, second]).index.tolist() == [0, 1, 2, None, None]
    assert joined_routing([replace(first, parts={}), second]).index is None


def test_a_gap_is_our_own_fault():
    with pytest.raises(AssertionError, match="does not follow"):
        joined_routing([piece(whole(0), 0, 3), piece(whole(0), 4, 6)])


def test_columns_of_updates_follow_each_other():
    whole = ChoiceResult()
    for n in (1, 3):
        mask = ragged([np.arange(i) for i in range(n)])
        whole.add(ChoiceResult(columns={"top_ids": np.full((n, 2), n), "mask_ids": mask}))
        whole.add(ChoiceResult())
    assert whole.columns["top_ids"].tolist() == [[1, 1], [3, 3], [3, 3], [3, 3]]
    assert whole.columns["mask_ids"].tolist() == [[], [], [0], [0, 1]]


def test_a_ragged_column_is_cut_as_an_array_is():
    column = ragged([np.arange(3), np.arange(0), np.arange(1), np.arange(2)])
    is_kept = np.array([True, False, True, True])
    assert column[1:3].tolist() == [[], [0]]
    assert column[is_kept].tolist() == [[0, 1, 2], [0], [0, 1]]
    assert column[:0].tolist() == [] and len(column[:0]) == 0 and column.size == 6
