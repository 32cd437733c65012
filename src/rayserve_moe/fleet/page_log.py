"""The published page events of an engine: digests instead of pages and tokens, numbered within an epoch."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from rayserve_moe.scheduling.page_digests import DIGEST_BYTES, chained_digests, root_digest, salt_of
from rayserve_moe.scheduling.page_events import PageChange, PagesAdded, PagesCleared, PagesRemoved
from rayserve_moe.scheduling.pages import NULL_PAGE

ADDED, REMOVED, CLEARED, WEIGHTS = range(4)
"""Kinds of events. Their bodies: concatenated digests, concatenated digests, empty, a version in UTF-8."""
SNAPSHOT_DIGESTS = 8192
"""Digests in a part of a snapshot; processing them takes the reader a few milliseconds."""
EVENTS = -1

Event = tuple[int, int, bytes]
"""Kind, data rank, body."""


class PageMessage(NamedTuple):
    """A message of page events, or a part of a snapshot.

    The parts of a snapshot sum up the events before `first` and have no numbers of their own.
    """

    epoch: str
    first: int
    """Number of the first event; the following events count on."""
    num_to_come: int
    """EVENTS, or the number of snapshot parts that follow this part."""
    events: tuple[Event, ...]


class PageLog:
    """Turns changes of pages into events, and keeps their sum.

    `num_pages` and `page_size` hold for every data rank. A namespace that is not a tuple, of a salt and an adapter if
    any, is private; its pages are never published. Each log has its own epoch, even for the same engine.
    """

    def __init__(self, key: bytes, *, num_data_ranks: int, num_pages: int, page_size: int) -> None:
        self.epoch = secrets.token_hex(8)
        self._key, self._page_bytes = key, 4 * page_size
        self._digests = np.zeros((num_data_ranks, num_pages), np.uint64)  # 0: not published
        self._version = ""
        self._next = 0

    def publish(self, changes: Iterable[tuple[int, PageChange]]) -> PageMessage:
        """Record changes, each with its data rank, in order; return the resulting events."""
        events = tuple(event for rank, change in changes if (event := self._event(rank, change)) is not None)
        first, self._next = self._next, self._next + len(events)
        return PageMessage(self.epoch, first, EVENTS, events)

    def snapshot(self) -> list[PageMessage]:
        """Return all published pages in parts of bounded size."""
        events: list[Event] = [(WEIGHTS, 0, self._version.encode())]
        for rank, digests in enumerate(self._digests):
            held = digests[digests != 0]
            parts = range(0, len(held), SNAPSHOT_DIGESTS)
            events += [(ADDED, rank, held[start : start + SNAPSHOT_DIGESTS].tobytes()) for start in parts]
        return [PageMessage(self.epoch, self._next, len(events) - i, (event,)) for i, event in enumerate(events, 1)]

    def _event(self, rank: int, change: PageChange) -> Event | None:
        table = self._digests[rank]
        if isinstance(change, PagesAdded):
            return self._added(rank, change)
        if isinstance(change, PagesRemoved):
            gone = table[change.page_ids]
            table[change.page_ids] = 0
            body = gone[gone != 0].tobytes()
            return (REMOVED, rank, body) if body else None
        if isinstance(change, PagesCleared):
            table[:] = 0
            return CLEARED, rank, b""
        self._version = change.version
        return WEIGHTS, rank, change.version.encode()

    def _added(self, rank: int, change: PagesAdded) -> Event | None:
        table = self._digests[rank]
        if not isinstance(change.namespace, tuple):
            return None
        above = table[change.above].tobytes()
        if change.above == NULL_PAGE:
            above = root_digest(self._key, salt_of(*change.namespace))
        body = b"".join(chained_digests(self._key, above, run=change.run, page_bytes=self._page_bytes))
        table[change.page_ids] = np.frombuffer(body, np.uint64)
        return ADDED, rank, body


def digests_in(body: bytes) -> list[bytes]:
    """Return the digests in the body of an event."""
    return [body[start : start + DIGEST_BYTES] for start in range(0, len(body), DIGEST_BYTES)]
