"""The state of a token kind with a window: a page of its own behind each page of a rank that some query sees."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rayserve_moe.state.entries import EntryState
from rayserve_moe.state.groups import EntryGroup, PageGroup
from rayserve_moe.state.protocol import NO_ROW_VALUES, RowValues, SequenceState

NOT_IN_USE = np.iinfo(np.int64).max


class PagedState:
    """Pages of layers with a window: a map from the pages of a rank, without those that no query will see.

    A page has as many users as running sequences that see it or will. A page without users stays for prefixes to be
    found until another takes its place, least recently used first, or until its page of the rank is freed.

    A free page is always found: `num_pages` is at least the number of the rank's own pages, or of the pages that all
    rows can see together (`state.groups.page_groups`).
    """

    def __init__(self, window: int, *, num_pages: int, num_rank_pages: int, page_size: int, num_rows: int) -> None:
        assert window > 0, "layers without a window see all pages"
        self.place_of = np.zeros(num_rank_pages, np.int32)
        """The page behind each page of the rank, int32 [pages of the rank]; 0 for none."""
        self._window, self._num_pages, self._page_size = window, num_pages, page_size
        self.num_users = np.zeros(num_rank_pages, np.int32)
        """Rows that see each page of the rank or will see it, int32 [pages of the rank]."""
        self._free = list(range(num_pages - 1, 0, -1))
        self._idle: dict[int, None] = {}  # pages of the rank without users, least recently used first
        self._restored: dict[int, None] = {}
        """Pages of the rank whose data is being restored, in the order of their restores."""
        self._num_spare = num_pages - 1 if num_pages >= num_rank_pages else (num_pages - 1) // 2
        """Maximum number of restored pages: the pages that rows do not need (`state.groups.page_groups`)."""
        self._first_seen = np.full(num_rows, NOT_IN_USE)  # by row: index of the first page that it uses

    def usable(self, are_held: np.ndarray) -> np.ndarray:
        """Return whether a query after the first 0, 1 ... n pages finds all pages that it sees, bool [n + 1]."""
        counts = np.arange(len(are_held) + 1)
        missing = np.where(are_held, -1, counts[:-1])
        last_missing = np.maximum.accumulate(np.concatenate([[-1], missing]))
        return last_missing < self._first_seen_from(counts * self._page_size)

    def restore(self, page: int, *, is_held: bool) -> None:
        """Keep or free the page behind a page of the rank that no row uses."""
        self.num_users[page] = 0
        if not is_held:
            self._drop(page)
            return
        self._restored[page] = None
        if len(self._restored) > self._num_spare:
            self._drop(next(iter(self._restored)))

    def end_restore(self, page_ids: np.ndarray) -> None:
        """Let the pages behind restored pages [n] wait for a prefix to be found."""
        for page in page_ids.tolist():
            if page in self._restored:
                del self._restored[page]
                self._idle[page] = None

    def enter(self, row: int, page_ids: np.ndarray, *, position: int, kept: tuple[int, ...] = ()) -> None:
        """Let a row use the computed pages that its next query, at `position`, sees."""
        first = self._first_seen[row] = int(self._first_seen_from(position))
        seen = page_ids[first:]
        assert self.place_of[seen].all(), "a cached prefix lacks pages that are seen from its end"
        self.num_users[seen] += 1
        for page in seen.tolist():
            self._idle.pop(page, None)

    def fork(self, row: int, page_ids: np.ndarray, *, position: int, leader: int) -> None:
        """Let a row use the pages of the row `leader` that its next query, at `position`, sees."""
        assert self._first_seen[leader] <= self._first_seen_from(position), "a leader has released pages of its prompt"
        self.enter(row, page_ids, position=position)

    def grow(self, page_ids: np.ndarray) -> None:
        """Put a page behind each of `page_ids` [n], which a row has just got."""
        for page in page_ids.tolist():
            if not self._free:
                assert self._idle, "the pages of a window are too few for the rows"
                self._drop(next(iter(self._idle)))
            self.place_of[page] = self._free.pop()
        self.num_users[page_ids] = 1

    def advance(self, num_computed: np.ndarray, page_ids: np.ndarray) -> None:
        """Release the pages of every row that lie before all its coming queries."""
        firsts = self._first_seen_from(num_computed)
        for row in np.flatnonzero(firsts > self._first_seen).tolist():
            self._release(page_ids[row, self._first_seen[row] : firsts[row]])
            self._first_seen[row] = firsts[row]

    def leave(self, row: int, page_ids: np.ndarray, *, positions: tuple[int, int]) -> None:
        """Release the pages that a row uses."""
        self._release(page_ids[self._first_seen[row] :])
        self._first_seen[row] = NOT_IN_USE

    def hand_over(self, page_ids: np.ndarray, cached_ids: np.ndarray) -> None:
        """Move unused pages behind `page_ids` [n] to the `cached_ids` [n] that have no page behind them."""
        movable = (self.place_of[page_ids] > 0) & (self.place_of[cached_ids] == 0) & (self.num_users[page_ids] == 0)
        for page, cached in zip(page_ids[movable].tolist(), cached_ids[movable].tolist(), strict=True):
            del self._idle[page]
            self._idle[cached] = None
            self.place_of[cached], self.place_of[page] = self.place_of[page], 0

    def forget(self, page_ids: np.ndarray) -> None:
        """Free the pages behind pages [n] that the rank has freed."""
        for page in page_ids[self.place_of[page_ids] > 0].tolist():
            self._drop(page)

    def take_row_values(self) -> RowValues:
        """Return nothing: the devices find pages in page tables."""
        return NO_ROW_VALUES

    def check_integrity(self, pages_of_rows: Iterable[tuple[int, np.ndarray]], *, is_allocated: np.ndarray) -> None:
        """Assert that users, owners and free pages agree with an independent count over rows and their pages."""
        used = [page_ids[self._first_seen[row] :] for row, page_ids in pages_of_rows]
        counted = np.bincount(np.concatenate([np.zeros(0, np.int64), *used]), minlength=len(self.place_of))
        assert np.array_equal(counted, self.num_users), "users of a page are miscounted"
        assert self.place_of[counted > 0].all(), "a page was freed while a query can see it"
        owners = np.flatnonzero(self.place_of)
        assert sorted([*self.place_of[owners], *self._free]) == list(range(1, self._num_pages)), "a page has two owners"
        unused = set(owners[counted[owners] == 0].tolist())
        assert set(self._idle) == unused - set(self._restored), "pages without users are miscounted"
        assert set(self._restored) <= unused, "a page is used before its data has arrived"
        assert is_allocated[owners].all(), "a page stands behind a free one"

    def _first_seen_from(self, positions: np.ndarray | int) -> np.ndarray:
        """Return the indices of the first pages that queries at `positions` see."""
        return np.maximum(np.asarray(positions) + 1 - self._window, 0) // self._page_size

    def _release(self, page_ids: np.ndarray) -> None:
        self.num_users[page_ids] -= 1
        for page in page_ids[self.num_users[page_ids] == 0].tolist():
            self._idle[page] = None

    def _drop(self, page: int) -> None:
        self._idle.pop(page, None)
        self._restored.pop(page, None)
        self._free.append(int(self.place_of[page]))
        self.place_of[page] = 0


def states_of(
    groups: tuple[PageGroup, ...],
    entry_groups: tuple[EntryGroup, ...] = (),
    *,
    num_rank_pages: int,
    page_size: int,
    num_rows: int,
) -> tuple[tuple[SequenceState, ...], tuple[np.ndarray, ...]]:
    """Build the states of page groups and entry groups on a rank, and map pages of the rank to pages of each group.

    A group without a window has no `PagedState`, since it uses the pages of the rank itself.

    Returns: the states, and an array int32 [pages of the rank] per group; no arrays if no group has pages of its own.
    """
    paged = {
        place: PagedState(
            group.window,
            num_pages=group.num_pages,
            num_rank_pages=num_rank_pages,
            page_size=page_size,
            num_rows=num_rows,
        )
        for place, group in enumerate(groups)
        if group.window
    }
    own_ids = np.arange(num_rank_pages, dtype=np.int32)
    maps = (paged[place].place_of if place in paged else own_ids for place in range(len(groups)))
    entries = (
        EntryState(group, num_rank_pages=num_rank_pages, page_size=page_size, num_rows=num_rows)
        for group in entry_groups
    )
    return (*paged.values(), *entries), tuple(maps) if len(groups) > 1 or paged else ()
