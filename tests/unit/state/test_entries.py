"""Entries of recurrent layers: which one a row reads and writes, and which stay for others to be found."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.state.entries import ENTRY_COLUMNS, NO_ENTRY, EntryState
from rayserve_moe.state.groups import EntryGroup

GRID, PAGE, NUM_ROWS, NUM_PAGES = 8, 4, 3, 40
PAGES = np.arange(1, 11)
"""Pages of a row, for 40 tokens."""


@pytest.fixture
def state() -> EntryState:
    return state_with(num_kept=2)


def state_with(*, num_kept: int) -> EntryState:
    group = EntryGroup("delta", GRID, 1 + 2 * NUM_ROWS + num_kept)
    return EntryState(group, num_rank_pages=NUM_PAGES, page_size=PAGE, num_rows=NUM_ROWS)


def advance(state: EntryState, row: int, position: int, *, pages: np.ndarray = PAGES) -> None:
    """Move one row; the others stay at the first token."""
    positions = np.zeros(NUM_ROWS, np.int64)
    positions[row] = position
    state.advance(positions, np.tile(pages, (NUM_ROWS, 1)))


def columns_of(state: EntryState, row: int) -> tuple[int, ...] | None:
    """Return the changed values of a row; None if nothing has changed."""
    changes = state.take_row_values()
    own = changes.values[changes.rows == row]
    assert len(own) in (0, ENTRY_COLUMNS)
    return tuple(own.tolist()) or None


def usable(state: EntryState, pages: np.ndarray = PAGES) -> list[int]:
    """Return the tokens after which a prefix of pages is usable."""
    return (np.flatnonzero(state.usable(state.place_of[pages] > 0)) * PAGE).tolist()


def test_a_row_begins_with_zeros_and_an_entry_of_its_own(state: EntryState):
    state.enter(0, PAGES[:0], position=0)
    own, source, base = columns_of(state, 0)
    assert own != NO_ENTRY and (source, base) == (NO_ENTRY, 0)
    assert columns_of(state, 0) is None, "values are sent once"


def test_an_entry_that_is_not_kept_is_written_again(state: EntryState):
    state.enter(0, PAGES[:0], position=0)
    columns_of(state, 0)
    for position in (8, 9, 17, 40):
        advance(state, 0, position)
        assert columns_of(state, 0) is None
    assert usable(state) == [0]


def test_a_kept_entry_belongs_to_its_page_and_the_row_gets_another(state: EntryState):
    state.enter(0, PAGES[:0], position=0, kept=(16,))
    first = columns_of(state, 0)
    advance(state, 0, 16)
    assert columns_of(state, 0) is None, "the token at 16 writes the entry"
    advance(state, 0, 17)
    own, source, base = columns_of(state, 0)
    assert source == first[0] != own and base == 16
    assert usable(state) == [0, 16]


def test_the_last_state_of_a_row_stays_and_another_row_begins_with_it(state: EntryState):
    state.enter(0, PAGES[:0], position=0)
    own = columns_of(state, 0)[0]
    advance(state, 0, 17)
    state.leave(0, PAGES, positions=(30, 30))
    assert usable(state) == [0, 24], "a step that was submitted since has written it"
    state.enter(1, PAGES[:6], position=24)
    assert columns_of(state, 1)[1:] == (own, 24)


def test_a_state_at_an_unknown_position_is_dropped(state: EntryState):
    """Awaited drafts: the token at 24 may have been computed or not."""
    state.enter(0, PAGES[:0], position=0)
    advance(state, 0, 17)
    state.leave(0, PAGES, positions=(23, 26))
    assert usable(state) == [0]
    state.check_integrity([], is_allocated=np.ones(NUM_PAGES, np.bool_))


@pytest.mark.parametrize("has_folded", [False, True])
def test_a_fork_reads_what_its_leader_reads_or_writes(state: EntryState, has_folded: bool):
    state.enter(0, PAGES[:0], position=0)
    own = columns_of(state, 0)[0]
    if has_folded:
        advance(state, 0, 20)
    state.fork(1, PAGES[:5], position=20, leader=0)
    changes = state.take_row_values()
    values = {row: changes.values[changes.rows == row].tolist() for row in set(changes.rows.tolist())}
    assert values[1][1:] == [own, 16]
    if has_folded:
        assert values[0][1:] == [own, 16], "the leader writes another entry from now on"
    else:
        assert 0 not in values, "this step writes the entry that both read"
        advance(state, 0, 20)
        assert columns_of(state, 0)[1:] == (own, 16)
    state.leave(0, PAGES, positions=(21, 21))
    state.leave(1, PAGES, positions=(21, 21))
    state.check_integrity([], is_allocated=np.ones(NUM_PAGES, np.bool_))


@pytest.mark.parametrize("num_computed", [8, 9])
def test_a_fork_behind_a_multiple_begins_with_the_entry_before_it(state: EntryState, num_computed: int):
    """The entry at the multiple is written with the token behind it, which the fork computes itself."""
    state.enter(0, PAGES[:0], position=0)
    own = columns_of(state, 0)[0]
    advance(state, 0, num_computed)
    state.fork(1, PAGES[:4], position=2 * GRID, leader=0)
    fork_own, *source = columns_of(state, 1)
    assert source == [own, GRID] and fork_own != own
    for row in (0, 1):
        state.leave(row, PAGES, positions=(2 * GRID + 1, 2 * GRID + 1))
    state.check_integrity([], is_allocated=np.ones(NUM_PAGES, np.bool_))


def test_entries_without_readers_make_way_oldest_first():
    state = state_with(num_kept=0)
    for i, first in enumerate((1, 5, 9)):
        state.enter(i, PAGES[:0], position=0)
        advance(state, i, 9, pages=np.arange(first, first + 10))
        state.leave(i, np.arange(first, first + 10), positions=(9, 9))
    assert [usable(state, np.arange(first, first + 2)) for first in (1, 5, 9)] == [[0, 8]] * 3
    for row in range(NUM_ROWS):
        state.enter(row, PAGES[:0], position=0)
        advance(state, row, 9, pages=np.arange(20, 30))
        state._share_own(row)
    assert [usable(state, np.arange(first, first + 2)) for first in (1, 5, 9)] == [[0]] * 3


def test_entries_move_to_cached_twins_and_go_with_their_page(state: EntryState):
    state.enter(0, PAGES[:0], position=0)
    state.leave(0, PAGES, positions=(9, 9))
    twins = PAGES + 20
    state.hand_over(PAGES, twins)
    assert usable(state) == [0] and usable(state, twins) == [0, 8]
    state.forget(twins[1:2])
    assert usable(state, twins) == [0] and not state.place_of.any()
    state.check_integrity([], is_allocated=np.zeros(NUM_PAGES, np.bool_))


def test_pages_larger_than_the_grid_keep_entries_at_their_ends():
    group = EntryGroup("delta", GRID, 1 + 2 * NUM_ROWS)
    state = EntryState(group, num_rank_pages=NUM_PAGES, page_size=2 * GRID, num_rows=NUM_ROWS)
    for position, found in ((9, [True, False, False]), (17, [True, True, False])):
        state.enter(0, PAGES[:0], position=0)
        state.leave(0, PAGES[:2], positions=(position, position))
        assert state.usable(state.place_of[PAGES[:2]] > 0).tolist() == found
