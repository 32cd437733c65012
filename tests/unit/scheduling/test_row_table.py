"""A row shows its sequence for as long as it has it, and nothing of those before."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.scheduling.row_table import NO_TOKEN, RowTable
from rayserve_moe.scheduling.sequence import NO_ROW, Sequence
from tests.support.engine.schedulers import one

PAGE_SIZE = 4


@pytest.fixture
def table() -> RowTable:
    return RowTable(num_rows=3, max_tokens=20, page_size=PAGE_SIZE)


def with_stop_ids(*ids: int) -> Sequence:
    request = GenerationRequest("r", np.arange(3, dtype=np.int32), SamplingParams(max_new_tokens=4))
    return Sequence(request, 0, seed=0, stop_token_ids=frozenset(ids))


def test_a_sequence_shows_what_its_row_holds_and_takes_it_along(table: RowTable):
    sequence = one("a", [11, 12, 13], num_new=4)
    table.take(1, sequence)
    assert sequence.row == 1 and table.sequences == [None, sequence, None]
    table.extend(1, np.array([7, 5], np.int32), generations=np.array([70, 50]))
    table.state.token_ids[1, 3], table.state.logprobs[1, 3] = 99, -0.25
    table.num_tokens[1], table.num_computed[1] = 4, 3
    for _ in ("in its row", "out of it"):
        assert (sequence.num_tokens, sequence.num_computed, sequence.limit) == (4, 3, 7)
        assert sequence.token_ids[:4].tolist() == [11, 12, 13, 99] and sequence.state.logprobs[3:4].tolist() == [-0.25]
        assert sequence.pages.tolist() == [7, 5] and sequence.page_generations[:2].tolist() == [70, 50]
        if sequence.row != NO_ROW:
            table.leave(sequence)
    assert sequence.row == NO_ROW and table.sequences == [None] * 3


def test_the_next_owner_of_a_row_changes_nothing_of_the_one_before(table: RowTable):
    first, second = one("a", [11, 12, 13]), one("b", [21])
    table.take(0, first)
    table.extend(0, np.array([3], np.int32), generations=np.array([9]))
    table.leave(first)
    table.take(0, second)
    table.extend(0, np.array([4, 5], np.int32), generations=np.array([1, 2]))
    table.num_tokens[0] = 2
    assert first.token_ids[: first.num_tokens].tolist() == [11, 12, 13] and first.pages.tolist() == [3]
    assert second.num_computed == 0 and table.capacities[0] == 2 * PAGE_SIZE


def test_an_epoch_ends_when_a_row_is_left(table: RowTable):
    sequence = one("a", 3)
    table.take(2, sequence)
    during = table.generations.copy()
    table.leave(sequence)
    table.take(2, sequence)
    assert (table.generations != during).tolist() == [False, False, True], (
        "also for the same sequence, when it comes back"
    )
    assert table.num_departures == 1


def test_no_two_rows_have_the_same_owner(table: RowTable):
    seen = set(table.generations.tolist())
    for row in (0, 1, 0):
        sequence = one("a", 3)
        table.take(row, sequence)
        table.leave(sequence)
        assert table.generations[row] not in seen
        seen.add(int(table.generations[row]))


def test_a_row_in_use_cannot_be_taken(table: RowTable):
    table.take(0, one("a", 3))
    with pytest.raises(AssertionError, match="row 0 is taken"):
        table.take(0, one("b", 3))


def test_pages_are_appended_to_each_row_where_it_ends(table: RowTable):
    for row in range(3):
        table.take(row, one(f"r{row}", 3))
    table.extend(1, np.array([8, 9], np.int32), generations=np.array([1, 1]))
    indices = table.add_pages(np.array([1, 2]), np.array([5, 6], np.int32), generations=np.array([3, 4]))
    assert indices.tolist() == [2, 0]
    assert table.num_pages.tolist() == [0, 3, 1] and table.capacities.tolist() == [0, 12, 4]
    assert table.state.page_ids[1, :3].tolist() == [8, 9, 5] and table.state.page_ids[2, :1].tolist() == [6]
    slots, generations = table.places(np.array([1, 1, 2]), np.array([3, 9, 2]))
    assert slots.tolist() == [8 * PAGE_SIZE + 3, 5 * PAGE_SIZE + 1, 6 * PAGE_SIZE + 2]
    assert generations.tolist() == [1, 3, 4]


def test_stop_ids_are_those_of_the_present_owner_however_many(table: RowTable):
    many, few, none = with_stop_ids(5, 6, 7), with_stop_ids(8), with_stop_ids()
    table.take(0, few)
    table.take(1, many)
    assert set(table.wants.stop_ids[0]) == {8, NO_TOKEN} and set(table.wants.stop_ids[1]) == {5, 6, 7}
    assert table.wants.num_with_stop_ids == 2
    for sequence in (few, many):
        table.leave(sequence)
    table.take(1, few)
    table.take(0, none)
    assert set(table.wants.stop_ids[1]) == {8, NO_TOKEN} and set(table.wants.stop_ids[0]) == {NO_TOKEN}
    assert table.wants.num_with_stop_ids == 1


def test_rows_that_want_routing_are_counted(table: RowTable):
    wanting, other = one("a", 3, routing=True), one("b", 3)
    table.take(0, wanting)
    table.take(1, other)
    assert table.wants.routing.tolist() == [True, False, False] and table.wants.num_with_routing == 1
    table.leave(wanting)
    assert table.wants.num_with_routing == 0
    table.take(0, one("c", 3))
    assert not table.wants.routing[0]
