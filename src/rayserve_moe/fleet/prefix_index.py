"""The cached prefixes of each replica of a fleet, built from page events; exact once all events have arrived."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from rayserve_moe.fleet.page_log import ADDED, CLEARED, EVENTS, REMOVED, WEIGHTS, Event, PageMessage, digests_in


@dataclass
class _Held:
    """The cached pages of a replica."""

    epoch: str = ""
    next: int | None = None
    """Number of the next event; None until the snapshot is complete."""
    num_to_come: int = 0
    """Missing parts of the snapshot."""
    version: str = ""
    """Weight version of the pages."""
    by_rank: dict[int, set[bytes]] = field(default_factory=dict)
    """Digests by data rank."""


class PrefixIndex:
    """Digests of cached pages by replica and data rank. It holds no more pages than the followed replicas do.

    After a gap in its events, or a new epoch, a replica counts as empty until a whole snapshot has arrived.
    """

    def __init__(self) -> None:
        self._replicas: dict[str, _Held] = {}

    def follow(self, replica_ids: Collection[str]) -> None:
        """Follow these replicas and forget all others."""
        for gone in self._replicas.keys() - set(replica_ids):
            del self._replicas[gone]
        for added in replica_ids:
            self._replicas.setdefault(added, _Held())

    def lose(self, replica_id: str) -> None:
        """Forget a replica's pages until its next snapshot."""
        if replica_id in self._replicas:
            self._replicas[replica_id] = _Held()

    def apply(self, replica_id: str, message: PageMessage) -> bool:
        """Apply a message of a followed replica. Return False if only a new snapshot can help."""
        held = self._replicas.get(replica_id)
        if held is None:
            return True
        if message.num_to_come != EVENTS:
            return self._apply_snapshot(replica_id, held, message)
        if held.next is None or held.epoch != message.epoch or message.first > held.next:
            self.lose(replica_id)
            return False
        for event in message.events[held.next - message.first :]:
            _apply(held, event)
        held.next = max(held.next, message.first + len(message.events))
        return True

    def is_known(self, replica_id: str) -> bool:
        """Return True if a replica's events are complete."""
        held = self._replicas.get(replica_id)
        return held is not None and held.next is not None

    def weight_version(self, replica_id: str) -> str:
        """Return the weight version of a replica's pages, according to its events."""
        return self._replicas[replica_id].version

    def num_cached_pages(self, replica_id: str, digests: Sequence[bytes]) -> int:
        """Return the maximum cached prefix of a prompt over a replica's data ranks, in pages; 0 if unknown."""
        held = self._replicas.get(replica_id)
        if held is None or held.next is None or not digests:
            return 0
        return max((_num_first(digests, pages) for pages in held.by_rank.values()), default=0)

    def digests_of(self, replica_id: str) -> dict[int, set[bytes]]:
        """Return all digests that a replica holds, by data rank."""
        return {rank: set(pages) for rank, pages in self._replicas[replica_id].by_rank.items() if pages}

    def __len__(self) -> int:
        return sum(len(pages) for held in self._replicas.values() for pages in held.by_rank.values())

    def _apply_snapshot(self, replica_id: str, held: _Held, part: PageMessage) -> bool:
        if part.events[0][0] == WEIGHTS:  # the first part of a snapshot
            self._replicas[replica_id] = held = _Held(part.epoch, num_to_come=part.num_to_come + 1)
        if (held.epoch, held.num_to_come) != (part.epoch, part.num_to_come + 1):
            self.lose(replica_id)
            return False
        held.num_to_come = part.num_to_come
        for event in part.events:
            _apply(held, event)
        if part.num_to_come == 0:
            held.next = part.first
        return True


def _apply(held: _Held, event: Event) -> None:
    kind, rank, body = event
    pages = held.by_rank.setdefault(rank, set())
    if kind == ADDED:
        pages.update(digests_in(body))
    elif kind == REMOVED:
        pages.difference_update(digests_in(body))
    elif kind == CLEARED:
        pages.clear()
    elif kind == WEIGHTS:
        held.version = body.decode()


def _num_first(digests: Sequence[bytes], pages: set[bytes]) -> int:
    """Return the number of leading digests in `pages`; if `pages` has a digest, it has all before it."""
    return bisect_left(range(len(digests)), True, key=lambda place: digests[place] not in pages)
