"""What changes in the prefix trees of an engine, in order, for a reader in another thread.

Recording is all that happens in the engine's thread; what a page is called outside is the reader's work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np

MOST_RECORDS = 1 << 18
"""Changes that wait for their reader; one that is further behind has died, and is given up."""


class PagesAdded(NamedTuple):
    """Pages int32 that can be matched from now on, in a namespace, after page `above` (NULL_PAGE: from the start).

    `run` are their int32 token ids as bytes.
    """

    namespace: Hashable
    above: int
    run: bytes
    page_ids: np.ndarray


class PagesRemoved(NamedTuple):
    """Pages int32 that cannot be matched any more."""

    page_ids: np.ndarray


class PagesCleared(NamedTuple):
    """No page can be matched any more, locked ones included."""


class WeightsNamed(NamedTuple):
    """Pages that are added from now on are of these weights."""

    version: str


PageChange = PagesAdded | PagesRemoved | PagesCleared | WeightsNamed
PageWatcher = Callable[[PageChange], None]


class PageEvents:
    """Changes of all data ranks, each with its rank; `wake` is called, in the engine's thread, for the first one.

    Once `is_overrun`, nothing is recorded any more, and what was recorded is not whole.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._changes: deque[tuple[int, PageChange]] = deque()
        self.is_overrun = False

    def record(self, data_rank: int, change: PageChange) -> None:
        """Note a change; in the engine's thread."""
        if len(self._changes) >= MOST_RECORDS or self.is_overrun:
            self.is_overrun = True
            self._changes.clear()
            return
        self._changes.append((data_rank, change))
        if len(self._changes) == 1:
            self._wake()

    def take(self, most: int) -> list[tuple[int, PageChange]]:
        """Remove and return the oldest changes; in the reader's thread, which takes until none is left."""
        taken = []
        while self._changes and len(taken) < most:
            taken.append(self._changes.popleft())
        return taken
