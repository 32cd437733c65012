"""A state of entries at multiples of some tokens, as recurrent layers keep them, with entries that are numbers.

It follows the protocol of states and nothing else of the scheduler: what layers with entries will have to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

NOT_IN_USE = np.iinfo(np.int64).max
NO_ENTRY = 0
START = 0
"""Value of the state before the first token."""


class FakeEntryState:
    """Keeps an entry behind each page that ends at a multiple of `entry_tokens`, while there are entries.

    A row reads the last entry before its next query. `value_of(page)` is what an entry behind a computed page holds.
    """

    def __init__(
        self,
        entry_tokens: int,
        *,
        num_entries: int,
        num_rank_pages: int,
        page_size: int,
        num_rows: int,
        value_of: Callable[[int], int],
    ) -> None:
        assert entry_tokens % page_size == 0, "entries stand at the ends of pages"
        assert num_entries > num_rows + 1, "every row reads an entry, and one more is made before it releases that"
        self.entry_of = np.zeros(num_rank_pages, np.int64)
        self.source = np.zeros(num_rows, np.int64)
        """Entry that each row reads."""
        self.position = np.full(num_rows, NOT_IN_USE)
        """Tokens before that entry."""
        self.values = np.full(num_entries, START)
        self._entry_tokens, self._page_size, self._value_of = entry_tokens, page_size, value_of
        self._num_users = np.zeros(num_entries, np.int64)
        self._free = list(range(num_entries - 1, NO_ENTRY, -1))
        self._idle: dict[int, None] = {}
        """Pages whose entry no row reads, least recently used first."""

    def usable_after(self, page_ids: np.ndarray) -> np.ndarray:
        return np.concatenate([[True], self.entry_of[page_ids] > NO_ENTRY])

    def enter(self, row: int, page_ids: np.ndarray, *, position: int) -> None:
        assert position == len(page_ids) * self._page_size and position % self._entry_tokens == 0
        if position:
            assert self.entry_of[page_ids[-1]], "a row starts where no entry is"
            self._read(row, page=int(page_ids[-1]))
        self.position[row] = position

    def fork(self, row: int, page_ids: np.ndarray, *, position: int, leader: int) -> None:
        read = self.position[leader]
        assert read <= position, "a leader has gone on after its prompt"
        if read:
            page = int(page_ids[read // self._page_size - 1])
            assert self.entry_of[page] == self.source[leader], "a fork does not share the page of the entry"
            self._read(row, page=page)
        self.position[row] = read

    def grow(self, page_ids: np.ndarray) -> None:
        assert not self.entry_of[page_ids].any(), "an entry stands behind a page that was free"

    def advance(self, num_computed: np.ndarray, page_ids: np.ndarray) -> None:
        borders = num_computed // self._entry_tokens * self._entry_tokens
        for row in np.flatnonzero(borders > self.position).tolist():
            for border in range(self.position[row], borders[row], self._entry_tokens):
                page = int(page_ids[row, (border + self._entry_tokens) // self._page_size - 1])
                if not self.entry_of[page]:
                    self._make(page)
                before = self._page_of(self.source[row])
                self._read(row, page=page)
                self._release(before)
            self.position[row] = borders[row]

    def leave(self, row: int, page_ids: np.ndarray) -> None:
        self._release(self._page_of(self.source[row]))
        self.source[row], self.position[row] = NO_ENTRY, NOT_IN_USE

    def hand_over(self, page_ids: np.ndarray, cached_ids: np.ndarray) -> None:
        for page, cached in zip(page_ids.tolist(), cached_ids.tolist(), strict=True):
            if page in self._idle and not self.entry_of[cached]:
                del self._idle[page]
                self._idle[cached] = None
                self.entry_of[cached], self.entry_of[page] = self.entry_of[page], NO_ENTRY

    def forget(self, page_ids: np.ndarray) -> None:
        for page in page_ids[self.entry_of[page_ids] > NO_ENTRY].tolist():
            self._drop(page)

    def check_integrity(self, pages_of_rows: Iterable[tuple[int, np.ndarray]], *, is_allocated: np.ndarray) -> None:
        rows = dict(pages_of_rows)
        assert sorted(rows) == np.flatnonzero(self.position < NOT_IN_USE).tolist(), "a row was not left"
        for row, page_ids in rows.items():
            last = self.position[row] // self._page_size - 1
            expected = NO_ENTRY if last < 0 else self.entry_of[page_ids[last]]
            assert self.source[row] == expected, "a row reads another entry than that of its page"
        used = self.source[list(rows)]
        counted = np.bincount(used[used > NO_ENTRY], minlength=len(self.values))
        assert np.array_equal(counted, self._num_users), "users of an entry are miscounted"
        owners = np.flatnonzero(self.entry_of)
        assert sorted([*self.entry_of[owners], *self._free]) == list(range(1, len(self.values))), "an entry is lost"
        assert set(self._idle) == set(owners[counted[self.entry_of[owners]] == 0].tolist())
        assert is_allocated[owners].all(), "an entry stands behind a free page"

    def _make(self, page: int) -> None:
        if not self._free:
            self._drop(next(iter(self._idle)))
        entry = self.entry_of[page] = self._free.pop()
        self.values[entry] = self._value_of(page)
        self._idle[page] = None

    def _read(self, row: int, *, page: int) -> None:
        self._idle.pop(page, None)
        self.source[row] = self.entry_of[page]
        self._num_users[self.source[row]] += 1

    def _release(self, page: int | None) -> None:
        if page is not None:
            entry = self.entry_of[page]
            self._num_users[entry] -= 1
            if not self._num_users[entry]:
                self._idle[page] = None

    def _page_of(self, entry: int) -> int | None:
        return int(np.flatnonzero(self.entry_of == entry)[0]) if entry else None

    def _drop(self, page: int) -> None:
        del self._idle[page]
        self._free.append(int(self.entry_of[page]))
        self.entry_of[page] = NO_ENTRY
