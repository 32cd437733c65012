"""The protocol of a state that layers of a kind keep of the sequences of a data rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np


class RowValues(NamedTuple):
    """Values of rows that the devices have to know, [n] each."""

    rows: np.ndarray
    columns: np.ndarray
    """Index of the value in its row: less than the number of columns of the state."""
    values: np.ndarray
    """int32."""


NO_ROW_VALUES = RowValues(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int32))


class SequenceState(Protocol):
    """Bookkeeping of a state kind on a data rank.

    Every sequence holds pages of the rank, and a state attaches its data to these pages, or to the row in which
    the sequence runs. Rows are counted from the first of the rank. A state is large enough for all rows at once: a
    sequence that has pages never waits for a state.
    """

    place_of: np.ndarray
    """Index in the pools of the data of each page of the rank, int32 [pages of the rank]; 0 for none."""

    def usable(self, are_held: np.ndarray) -> np.ndarray:
        """Return whether a sequence can start after the first 0, 1 ... n cached pages, bool [n + 1].

        `are_held` bool [n] is True for pages whose data is there. Position 0 is always usable.
        """
        ...

    def restore(self, page: int, *, is_held: bool) -> None:
        """Prepare a page that the rank has just allocated for data from elsewhere, or for none.

        If the state holds no more such data, the page restored first loses its place. Until `end_restore` no other page
        takes a place.
        """
        ...

    def end_restore(self, page_ids: np.ndarray) -> None:
        """Let the data of restored pages [n] wait for a prefix to be found."""
        ...

    def enter(self, row: int, page_ids: np.ndarray, *, position: int, kept: tuple[int, ...] = ()) -> None:
        """Start a row at `position`, the end of cached pages `page_ids`, after which the state is usable.

        After the positions `kept` the state shall be usable for others once the row has passed them.
        """
        ...

    def fork(self, row: int, page_ids: np.ndarray, *, position: int, leader: int) -> None:
        """Start a row at `position`, the end of the prompt of the row `leader`, inside a page or not.

        `page_ids` are the whole pages before it, which both share.
        """
        ...

    def grow(self, page_ids: np.ndarray) -> None:
        """Prepare pages [n] that the rank has just allocated, each for a single row."""
        ...

    def advance(self, num_computed: np.ndarray, page_ids: np.ndarray) -> None:
        """Move every row to the position of its next query, before a step is planned.

        `num_computed` [rows] are these positions, lower bounds while drafts of a draft model are awaited; `page_ids`
        [rows, n] are the pages of the rows. Rows that are not in use have any numbers. Steps run in order: submitted
        steps have read the data that a step planned from now on overwrites.
        """
        ...

    def leave(self, row: int, page_ids: np.ndarray, *, positions: tuple[int, int]) -> None:
        """Release the state of a row; `page_ids` are all pages of its sequence.

        Its next query is from the first to the last of `positions`, which differ while drafts are awaited.
        """
        ...

    def hand_over(self, page_ids: np.ndarray, cached_ids: np.ndarray) -> None:
        """Move unused data of `page_ids` [n] to the `cached_ids` [n] that lack it.

        Both hold the same tokens; the prefix cache finds the latter only.
        """
        ...

    def forget(self, page_ids: np.ndarray) -> None:
        """Release the data of pages [n] that the rank has freed."""
        ...

    def take_row_values(self) -> RowValues:
        """Return the values of rows that have changed since the last call, for the next step."""
        ...

    def check_integrity(self, pages_of_rows: Iterable[tuple[int, np.ndarray]], *, is_allocated: np.ndarray) -> None:
        """Assert that the state agrees with an independent count over the rows in use and their pages.

        `is_allocated` bool [pages of the rank] is False for pages to which nothing may be attached.
        """
        ...
