"""Ordered changes of an engine's prefix trees, for a reader in another thread.

The engine's thread only records; the reader computes the pages' external names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np

MAX_RECORDS = 1 << 18
"""Maximum number of unread changes; a reader further behind counts as dead and is dropped."""


class PagesAdded(NamedTuple):
    """Pages that can be matched from now on."""

    namespace: Hashable
    """Namespace of the prefix."""
    above: int
    """Page before the first; NULL_PAGE at the start of a prompt."""
    run: bytes
    """Int32 token ids as bytes."""
    page_ids: np.ndarray
    """int32 [n]."""


class PagesRemoved(NamedTuple):
    """Pages int32 that can no longer be matched."""

    page_ids: np.ndarray


class PagesCleared(NamedTuple):
    """Removal of all pages from the index, locked pages included."""


class WeightsNamed(NamedTuple):
    """Weight version of all pages that are added from now on."""

    version: str


PageChange = PagesAdded | PagesRemoved | PagesCleared | WeightsNamed
PageWatcher = Callable[[PageChange], None]


class PageEvents:
    """Changes of all data ranks, each with its rank. `wake` is called in the engine's thread for the first change.

    Once `is_overrun`, nothing more is recorded, and the recorded changes are incomplete.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._changes: deque[tuple[int, PageChange]] = deque()
        self.is_overrun = False

    def record(self, data_rank: int, change: PageChange) -> None:
        """Record a change. Call in the engine's thread."""
        if len(self._changes) >= MAX_RECORDS or self.is_overrun:
            self.is_overrun = True
            self._changes.clear()
            return
        self._changes.append((data_rank, change))
        if len(self._changes) == 1:
            self._wake()

    def take(self, max_changes: int) -> list[tuple[int, PageChange]]:
        """Remove and return up to `max_changes` of the oldest changes. Call in the reader's thread until empty."""
        taken = []
        while self._changes and len(taken) < max_changes:
            taken.append(self._changes.popleft())
        return taken
