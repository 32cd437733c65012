"""Pages behind windows: who uses them, which are found again, and which make way."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.state.paged import NOT_IN_USE, PagedState

WINDOW, PAGE = 5, 4
"""A query sees its own position and four before it: up to two pages."""
ALL = np.arange(1, 5)


@pytest.fixture
def state() -> PagedState:
    """Three rows, 19 pages of the rank, and 9 pages for layers with a window."""
    return PagedState(WINDOW, num_pages=10, num_rank_pages=20, page_size=PAGE, num_rows=3)


def start(state: PagedState, row: int, page_ids: np.ndarray) -> None:
    """Start a row with new pages."""
    state.enter(row, page_ids[:0], position=0)
    state.grow(page_ids)


def advance(state: PagedState, page_ids: np.ndarray, *, num_computed: int) -> None:
    """Move row 0 alone."""
    state.advance(np.array([num_computed, 0, 0]), np.stack([page_ids] * 3))


def check(state: PagedState, rows: dict[int, np.ndarray], *, freed: np.ndarray | None = None) -> None:
    is_allocated = np.ones(20, np.bool_)
    is_allocated[[0] if freed is None else freed] = False
    state.check_integrity(rows.items(), is_allocated=is_allocated)


def test_a_row_uses_the_pages_that_its_coming_queries_see(state: PagedState):
    start(state, 0, ALL)
    in_use = []
    for num_computed in (0, 7, 8, 11, 12, 16):
        advance(state, ALL, num_computed=num_computed)
        check(state, {0: ALL})
        in_use.append(int(np.count_nonzero(state.num_users)))
    assert in_use == [4, 4, 3, 3, 2, 1], "the query at 8 sees 4 to 8, the query at 16 sees 12 to 16"


def test_rows_that_are_not_in_use_stay_so(state: PagedState):
    state.advance(np.array([100, 100, 100]), np.zeros((3, 30), np.int32))
    check(state, {})
    assert (state._first_seen == NOT_IN_USE).all()


def test_a_prefix_is_usable_where_the_pages_that_the_next_query_sees_are_there(state: PagedState):
    start(state, 0, ALL)
    state.leave(0, ALL, positions=(0, 0))
    assert state.usable(state.place_of[ALL] > 0).all()
    state.forget(np.array([2]))
    assert state.usable(state.place_of[ALL] > 0).tolist() == [True, True, False, True, True], (
        "the query at 8 sees 4 to 8"
    )
    assert state.usable(state.place_of[ALL[:0]] > 0).tolist() == [True]
    check(state, {})


def test_pages_without_users_make_way_least_recently_used_first(state: PagedState):
    start(state, 0, ALL)
    state.leave(0, ALL, positions=(0, 0))
    start(state, 1, np.arange(5, 10))
    assert state.usable(state.place_of[ALL] > 0).all(), "nine pages are enough for both"
    state.grow(np.array([10, 11]))
    assert state.place_of[ALL].astype(bool).tolist() == [False, False, True, True]
    check(state, {1: np.arange(5, 12)})


def test_a_fork_uses_pages_of_its_leader(state: PagedState):
    start(state, 0, ALL)
    state.fork(1, ALL[:3], position=14, leader=0)
    check(state, {0: ALL, 1: ALL[:3]})
    state.leave(0, ALL, positions=(0, 0))
    assert int(np.count_nonzero(state.num_users)) == 1, "the query at 14 sees 10 to 14"
    advance(state, ALL, num_computed=0)
    check(state, {1: ALL[:3]})


def test_a_fork_comes_before_its_leader_releases_pages(state: PagedState):
    start(state, 0, ALL)
    advance(state, ALL, num_computed=16)
    with pytest.raises(AssertionError, match="released pages of its prompt"):
        state.fork(1, ALL[:2], position=8, leader=0)


def test_pages_move_to_cached_pages_that_lack_them(state: PagedState):
    cached, own = ALL, np.array([5, 6, 7, 8])
    start(state, 0, cached)
    state.leave(0, cached, positions=(0, 0))
    state.forget(cached[:2])
    start(state, 1, own)
    state.leave(1, own, positions=(0, 0))
    before = state.place_of[own].tolist()
    state.hand_over(own, cached)
    assert state.place_of[cached[:2]].tolist() == before[:2]
    assert state.place_of[own].tolist() == [0, 0, *before[2:]], "cached pages that lack nothing keep theirs"
    check(state, {})


def test_freed_pages_of_the_rank_have_none_behind_them(state: PagedState):
    start(state, 0, ALL)
    state.leave(0, ALL, positions=(0, 0))
    state.forget(ALL)
    check(state, {}, freed=ALL)
    assert not state.place_of.any()


def test_a_page_behind_a_free_one_is_noticed(state: PagedState):
    start(state, 0, ALL)
    with pytest.raises(AssertionError, match="behind a free one"):
        check(state, {0: ALL}, freed=ALL[-1:])


def test_a_page_that_is_lost_is_noticed(state: PagedState):
    start(state, 0, ALL)
    state.place_of[ALL[-1]] = 0
    with pytest.raises(AssertionError, match="while a query can see it"):
        check(state, {0: ALL})
