"""The state of an entry kind: immutable entries at multiples of some tokens, which rows and cached prefixes share."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rayserve_moe.state.groups import EntryGroup
from rayserve_moe.state.protocol import NO_ROW_VALUES, RowValues

NO_ENTRY = 0
"""Stands for the state before the first token: zeros, which no row writes."""
ENTRY_COLUMNS = 3
"""Values of a row on the devices: its own entry, the entry it began with, and the tokens before the latter."""
NOT_IN_USE = -1


class EntryState:
    """Entries of the rows of a data rank, and of its cached prefixes.

    A row owns an entry. The devices write a state to it whenever they compute a token at a multiple of `entry_tokens`,
    and read it from then on. Until then the row reads its source: an entry of a cached prefix, of the row that it
    forked off, or the entry that it owned before others read it. Entries with a page or with users are immutable: the
    row that wrote such an entry gets another.

    An entry is always found: there are two for each row and the null entry, and others belong to cached prefixes only.
    """

    def __init__(self, group: EntryGroup, *, num_rank_pages: int, page_size: int, num_rows: int) -> None:
        tokens = self._entry_tokens = group.entry_tokens
        assert not (tokens % page_size and page_size % tokens), f"entries of {tokens}, pages of {page_size} tokens"
        assert group.num_entries > 2 * num_rows, "every row has an entry of its own and a source"
        self.place_of = np.zeros(num_rank_pages, np.int32)
        """The entry after each page of the rank, int32 [pages of the rank]; NO_ENTRY for none."""
        self._page_size, self._num_entries = page_size, group.num_entries
        self._page_of = np.full(group.num_entries, NOT_IN_USE, np.int64)
        """The page that each entry belongs to."""
        self._num_users = np.zeros(group.num_entries, np.int64)
        """Rows that read each entry and do not own it."""
        self._are_owned = np.zeros(group.num_entries, np.bool_)
        """Entries that a row writes."""
        self._free = list(range(group.num_entries - 1, NO_ENTRY, -1))
        self._idle: dict[int, None] = {}
        """Entries of pages without users or owner, least recently used first."""
        self._restored: dict[int, int] = {}
        """Entries that are being restored, by page, in the order of their restores."""
        self._num_spare = group.num_entries - 1 - 2 * num_rows
        self._own = np.full(num_rows, NOT_IN_USE, np.int64)
        self._source = np.full(num_rows, NOT_IN_USE, np.int64)
        """The entry that holds the state after `_base` tokens of each row; may be its own."""
        self._base = np.zeros(num_rows, np.int64)
        self._kept: dict[int, tuple[int, ...]] = {}
        """Positions by row after which the state shall be found by others."""
        self._changed: dict[int, None] = {}
        """Rows with entries that the devices do not know yet."""

    def usable(self, are_held: np.ndarray) -> np.ndarray:
        """Return whether an entry stands after the first 0, 1 ... n pages, bool [n + 1]; True for 0."""
        return np.concatenate([[True], are_held])

    def restore(self, page: int, *, is_held: bool) -> None:
        """Attach an entry to a page if its data is held; rows must keep the entries that they need."""
        if not is_held or not self._num_spare:
            return
        if len(self._restored) == self._num_spare:
            self._detach(self._restored.pop(next(iter(self._restored))))
        entry = self._allocate()
        self._are_owned[entry] = False
        self._attach(entry, page)
        self._restored[page] = entry

    def end_restore(self, page_ids: np.ndarray) -> None:
        """Let the entries of restored pages [n] wait for a prefix to be found."""
        for page in page_ids.tolist():
            if (entry := self._restored.pop(page, None)) is not None:
                self._settle(entry)

    def enter(self, row: int, page_ids: np.ndarray, *, position: int, kept: tuple[int, ...] = ()) -> None:
        """Start a row from the entry at `position`; the states after `kept` tokens shall be found by others."""
        source = int(self.place_of[page_ids[-1]]) if position else NO_ENTRY
        assert source or not position, "a row starts after a page without an entry"
        self._start(row, source, base=position)
        self._kept[row] = kept

    def fork(self, row: int, page_ids: np.ndarray, *, position: int, leader: int) -> None:
        """Start a row at `position` from the last entry before it of the row `leader`."""
        base = int(self._base_before(position))
        if base == self._base[leader] and self._source[leader] == self._own[leader]:
            self._share_own(leader)
        source = self._own[leader] if base > self._base[leader] else self._source[leader]
        self._start(row, int(source), base=base)
        self._kept[row] = ()

    def grow(self, page_ids: np.ndarray) -> None:
        """Do nothing: a page gets an entry once that is computed."""

    def advance(self, num_computed: np.ndarray, page_ids: np.ndarray) -> None:
        """Note the entries that submitted steps have written: rows read them, and kept ones belong to pages."""
        bases = self._base_before(num_computed)
        for row in np.flatnonzero((self._own != NOT_IN_USE) & (bases > self._base)).tolist():
            self._move_on(row, int(bases[row]), page_ids[row])

    def leave(self, row: int, page_ids: np.ndarray, *, positions: tuple[int, int]) -> None:
        """Release the entries of a row whose next query is within `positions`; its last state stays with its page."""
        first, last = (self._base_before(position) for position in positions)
        own, written = int(self._own[row]), int(max(first, self._base[row]))
        holds_state = first == last and (first > self._base[row] or self._source[row] == own)
        self._release_source(row)
        self._own[row] = self._source[row] = NOT_IN_USE
        self._are_owned[own] = False
        self._kept.pop(row, None)
        self._changed.pop(row, None)
        if holds_state and written and written % self._page_size == 0:
            self._attach(own, int(page_ids[written // self._page_size - 1]))
        self._settle(own)

    def hand_over(self, page_ids: np.ndarray, cached_ids: np.ndarray) -> None:
        """Move the entries of `page_ids` [n] to the pages `cached_ids` [n] that have none."""
        movable = (self.place_of[page_ids] != NO_ENTRY) & (self.place_of[cached_ids] == NO_ENTRY)
        for page, cached in zip(page_ids[movable].tolist(), cached_ids[movable].tolist(), strict=True):
            entry = self.place_of[page]
            self.place_of[cached], self.place_of[page], self._page_of[entry] = entry, NO_ENTRY, cached

    def forget(self, page_ids: np.ndarray) -> None:
        """Release the entries of pages [n] that the rank has freed."""
        for page in page_ids[self.place_of[page_ids] != NO_ENTRY].tolist():
            self._detach(int(self.place_of[page]))

    def take_row_values(self) -> RowValues:
        """Return the changed columns of rows, ENTRY_COLUMNS of each."""
        if not self._changed:
            return NO_ROW_VALUES
        rows = np.array(list(self._changed), np.int64)
        self._changed.clear()
        values = np.stack([self._own[rows], self._source[rows], self._base[rows]], axis=1)
        return RowValues(
            np.repeat(rows, ENTRY_COLUMNS),
            np.tile(np.arange(ENTRY_COLUMNS), len(rows)),
            values.reshape(-1).astype(np.int32),
        )

    def check_integrity(self, pages_of_rows: Iterable[tuple[int, np.ndarray]], *, is_allocated: np.ndarray) -> None:
        """Assert that owners, users, pages and free entries agree with an independent count."""
        rows = [row for row, _ in pages_of_rows]
        assert sorted(rows) == np.flatnonzero(self._own != NOT_IN_USE).tolist(), "rows with entries and rows in use"
        own, source = self._own[rows], self._source[rows]
        assert len(set(own.tolist())) == len(rows) and (own != NO_ENTRY).all(), "two rows write one entry"
        users = np.bincount(source[(source != own) & (source != NO_ENTRY)], minlength=self._num_entries)
        assert np.array_equal(users, self._num_users), "users of an entry are miscounted"
        assert np.array_equal(np.sort(own), np.flatnonzero(self._are_owned)), "owners of entries are miscounted"
        pages = np.flatnonzero(self.place_of)
        attached = self.place_of[pages]
        assert np.array_equal(self._page_of[attached], pages), "an entry belongs to another page"
        assert np.count_nonzero(self._page_of != NOT_IN_USE) == len(pages), "an entry belongs to two pages"
        assert is_allocated[pages].all(), "an entry stands behind a free page"
        held = {*own.tolist(), *np.flatnonzero(users).tolist(), *self._restored.values()}
        assert set(self._idle) == set(attached.tolist()) - held, "idle entries are miscounted"
        assert not set(own.tolist()) & set(attached.tolist()), "a row writes an entry of a page"
        assert sorted([*self._free, *(held | set(attached.tolist()))]) == list(range(1, self._num_entries)), "lost"

    def _base_before(self, positions: np.ndarray | int) -> np.ndarray:
        """Return the last multiple of `entry_tokens` before or at the last computed token, given the next query's."""
        return np.maximum(np.asarray(positions) - 1, 0) // self._entry_tokens * self._entry_tokens

    def _start(self, row: int, source: int, *, base: int) -> None:
        if source:
            self._idle.pop(source, None)
            self._num_users[source] += 1
        self._source[row], self._base[row] = source, base
        self._own[row] = self._allocate()
        self._changed[row] = None

    def _move_on(self, row: int, base: int, page_ids: np.ndarray) -> None:
        """Make a row read its own entry, the state after `base` tokens; it gets another if others read that."""
        own = int(self._own[row])
        self._release_source(row)
        self._source[row], self._base[row] = own, base
        if base in self._kept[row]:
            self._attach(own, int(page_ids[base // self._page_size - 1]))
        if self._num_users[own] or self._page_of[own] != NOT_IN_USE:
            self._share_own(row)

    def _share_own(self, row: int) -> None:
        """Make a row read the entry that it owned, and own another."""
        self._num_users[self._own[row]] += 1
        self._are_owned[self._own[row]] = False
        self._own[row] = self._allocate()
        self._changed[row] = None

    def _release_source(self, row: int) -> None:
        source = int(self._source[row])
        if source not in (NO_ENTRY, self._own[row]):
            self._num_users[source] -= 1
            self._settle(source)

    def _attach(self, entry: int, page: int) -> None:
        """Attach an entry to a page that has none."""
        if self.place_of[page] == NO_ENTRY:
            self.place_of[page], self._page_of[entry] = entry, page

    def _settle(self, entry: int) -> None:
        """Free an entry that nothing refers to, or let it wait for a prefix to be found."""
        if self._num_users[entry] or self._are_owned[entry]:
            return
        if self._page_of[entry] == NOT_IN_USE:
            self._free.append(entry)
        else:
            self._idle[entry] = None

    def _detach(self, entry: int) -> None:
        """Take an entry from its page; it is free without users."""
        self.place_of[self._page_of[entry]] = NO_ENTRY
        self._page_of[entry] = NOT_IN_USE
        if not self._num_users[entry]:
            self._idle.pop(entry, None)
            self._free.append(entry)

    def _allocate(self) -> int:
        if not self._free:
            assert self._idle, "entries are too few for the rows"
            self._detach(next(iter(self._idle)))
        entry = self._free.pop()
        self._are_owned[entry] = True
        return entry
