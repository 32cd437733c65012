"""What each replica of a fleet has cached, as its page events say: exact at every quiet moment."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from rayserve_moe.fleet.page_log import ADDED, CLEARED, EVENTS, REMOVED, WEIGHTS, Event, PageMessage, digests_in


@dataclass
class _Held:
    """What one replica holds, by data rank.

    `next` is the number of the event that follows, None until the parts of a snapshot that are `num_to_come` are there.
    """

    epoch: str = ""
    next: int | None = None
    num_to_come: int = 0
    version: str = ""
    by_rank: dict[int, set[bytes]] = field(default_factory=dict)


class PrefixIndex:
    """Digests of cached pages by replica and data rank. It holds no more than the replicas it follows do.

    A replica counts as empty from a gap in its events, or another epoch, until a whole snapshot has come.
    """

    def __init__(self) -> None:
        self._replicas: dict[str, _Held] = {}

    def follow(self, replica_ids: Collection[str]) -> None:
        """Forget all replicas but these."""
        for gone in self._replicas.keys() - set(replica_ids):
            del self._replicas[gone]
        for added in replica_ids:
            self._replicas.setdefault(added, _Held())

    def lose(self, replica_id: str) -> None:
        """Forget what a replica holds, until its next snapshot."""
        if replica_id in self._replicas:
            self._replicas[replica_id] = _Held()

    def apply(self, replica_id: str, message: PageMessage) -> bool:
        """Take a message of a replica that is followed; False where it has to send a snapshot before others help."""
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
        """Whether a replica's events are whole."""
        held = self._replicas.get(replica_id)
        return held is not None and held.next is not None

    def weight_version(self, replica_id: str) -> str:
        """The weights that a replica's pages are of, by its events."""
        return self._replicas[replica_id].version

    def num_cached_pages(self, replica_id: str, digests: Sequence[bytes]) -> int:
        """How many pages at the start of a prompt the best data rank of a replica has; 0 where that is not known."""
        held = self._replicas.get(replica_id)
        if held is None or held.next is None or not digests:
            return 0
        return max((_num_first(digests, pages) for pages in held.by_rank.values()), default=0)

    def digests_of(self, replica_id: str) -> dict[int, set[bytes]]:
        """All that a replica holds, by data rank."""
        return {rank: set(pages) for rank, pages in self._replicas[replica_id].by_rank.items() if pages}

    def __len__(self) -> int:
        return sum(len(pages) for held in self._replicas.values() for pages in held.by_rank.values())

    def _apply_snapshot(self, replica_id: str, held: _Held, part: PageMessage) -> bool:
        if part.events[0][0] == WEIGHTS:  # as every snapshot begins
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
    """How many digests at the start are among `pages`, where none is without those before it."""
    return bisect_left(range(len(digests)), True, key=lambda place: digests[place] not in pages)
