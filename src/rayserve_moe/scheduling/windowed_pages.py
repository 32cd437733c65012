"""The pages of layers that see only the last positions: each stands behind a page of a rank, or none does."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

NOT_IN_USE = np.iinfo(np.int64).max


class WindowedPages:
    """Maps the pages of a rank to those of a group of layers with one window, and frees what no query will see.

    `page_of` int32 [pages of the rank] is 0 where none stands behind a page. A page has as many users as running
    sequences that see it or will; one without users stays for prefixes to be found until another takes its place,
    least recently used first, or its page of the rank is freed. Rows are counted from the first of the rank.

    There are always enough: `num_pages` is at least the rank's own number, or what all rows can see together
    (`config.derive.page_groups`).
    """

    def __init__(self, window: int, *, num_pages: int, num_rank_pages: int, page_size: int, num_rows: int) -> None:
        assert window > 0, "layers without a window see all pages"
        self.page_of = np.zeros(num_rank_pages, np.int32)
        self._window, self._num_pages, self._page_size = window, num_pages, page_size
        self._num_users = np.zeros(num_rank_pages, np.int32)
        self._free = list(range(num_pages - 1, 0, -1))
        self._idle: dict[int, None] = {}  # pages of the rank without users, least recently used first
        self._first_seen = np.full(num_rows, NOT_IN_USE)  # by row: index of the first page that it uses

    @property
    def num_in_use(self) -> int:
        """Pages that some running sequence sees or will see."""
        return self._num_pages - 1 - len(self._free) - len(self._idle)

    def put_behind(self, page_ids: np.ndarray) -> None:
        """Put a page behind each of `page_ids` [n], which a row has just got."""
        for page in page_ids.tolist():
            if not self._free:
                assert self._idle, "the pages of a window are too few for the rows"
                self._drop(next(iter(self._idle)))
            self.page_of[page] = self._free.pop()
        self._num_users[page_ids] = 1

    def forget(self, page_ids: np.ndarray) -> None:
        """Free what stands behind pages [n] that the rank has freed."""
        for page in page_ids[self.page_of[page_ids] > 0].tolist():
            self._drop(page)

    def enter(self, row: int, page_ids: np.ndarray, *, position: int) -> None:
        """Let a row use what its next query, at `position`, sees of the pages that it finds computed."""
        first = self._first_seen[row] = int(self._first_seen_from(position))
        seen = page_ids[first:]
        assert self.page_of[seen].all(), "a cached prefix lacks pages that are seen from its end"
        self._num_users[seen] += 1
        for page in seen.tolist():
            self._idle.pop(page, None)

    def follow(self, num_computed: np.ndarray, page_ids: np.ndarray) -> None:
        """Take from every row the pages that lie before all its coming queries.

        `num_computed` [rows] are the positions of the next query, `page_ids` [rows, n] the pages of the rank. Steps run
        in their order: those that are submitted have read a page before one that is planned now writes to it.
        """
        firsts = self._first_seen_from(num_computed)
        for row in np.flatnonzero(firsts > self._first_seen).tolist():
            self._give_up(page_ids[row, self._first_seen[row] : firsts[row]])
            self._first_seen[row] = firsts[row]

    def leave(self, row: int, page_ids: np.ndarray) -> None:
        """Take from a row all that it uses of its pages."""
        self._give_up(page_ids[self._first_seen[row] :])
        self._first_seen[row] = NOT_IN_USE

    def hand_over(self, page_ids: np.ndarray, cached_ids: np.ndarray) -> None:
        """Move what stands behind those of `page_ids` [n] that have no user to those of `cached_ids` [n] that lack it.

        Both hold the same tokens, and the latter are found by others.
        """
        movable = (self.page_of[page_ids] > 0) & (self.page_of[cached_ids] == 0) & (self._num_users[page_ids] == 0)
        for page, cached in zip(page_ids[movable].tolist(), cached_ids[movable].tolist(), strict=True):
            del self._idle[page]
            self._idle[cached] = None
            self.page_of[cached], self.page_of[page] = self.page_of[page], 0

    def is_whole_after(self, page_ids: np.ndarray) -> np.ndarray:
        """Whether a query after the first 0, 1 ... n of `page_ids` [n] finds all pages that it sees, bool [n + 1]."""
        counts = np.arange(len(page_ids) + 1)
        missing = np.where(self.page_of[page_ids] > 0, -1, counts[:-1])
        last_missing = np.maximum.accumulate(np.concatenate([[-1], missing]))
        return last_missing < self._first_seen_from(counts * self._page_size)

    def check_integrity(self, pages_of_rows: Iterable[tuple[int, np.ndarray]]) -> None:
        """Assert that users, owners and free pages agree with an independent count over rows and their pages."""
        used = [page_ids[self._first_seen[row] :] for row, page_ids in pages_of_rows]
        counted = np.bincount(np.concatenate([np.zeros(0, np.int64), *used]), minlength=len(self.page_of))
        assert np.array_equal(counted, self._num_users), "users of a page are miscounted"
        assert self.page_of[counted > 0].all(), "a page was freed while a query can see it"
        owners = np.flatnonzero(self.page_of)
        assert sorted([*self.page_of[owners], *self._free]) == list(range(1, self._num_pages)), "a page has two owners"
        assert set(self._idle) == set(owners[counted[owners] == 0].tolist()), "pages without users are miscounted"

    def _first_seen_from(self, positions: np.ndarray | int) -> np.ndarray:
        """Indices of the first pages that queries at `positions` see."""
        return np.maximum(np.asarray(positions) + 1 - self._window, 0) // self._page_size

    def _give_up(self, page_ids: np.ndarray) -> None:
        self._num_users[page_ids] -= 1
        for page in page_ids[self._num_users[page_ids] == 0].tolist():
            self._idle[page] = None

    def _drop(self, page: int) -> None:
        del self._idle[page]
        self._free.append(int(self.page_of[page]))
        self.page_of[page] = 0
