"""What a router has sent to replicas and they have not reported yet: prompts that will be cached, and load."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from rayserve_moe.fleet.load_average import Load, kept_share

PAGES_BOOKED_S = 5.0
"""A prompt counts as cached where it was sent for this long: until its pages are there, or something kept them away."""
MOST_BOOKED_PAGES = 1 << 19


@dataclass(frozen=True)
class _Sent:
    at: float
    replica_id: str
    digests: tuple[bytes, ...]


class Bookings:
    """Bookings of one router. Times are of one clock, in seconds; memory is bounded, the oldest goes first."""

    def __init__(self) -> None:
        self._sent: deque[_Sent] = deque()
        self._pages: defaultdict[str, Counter[bytes]] = defaultdict(Counter)
        self._num_pages = 0
        self._load: dict[str, tuple[float, Load]] = {}

    def add(self, replica_id: str, digests: Sequence[bytes], *, load: Load, now: float) -> None:
        """Note a request that was sent to a replica, the pages of its prompt, and what load it is there."""
        booked = self.load(replica_id, now=now)
        self._load[replica_id] = now, Load(*map(sum, zip(booked, load, strict=True)))
        if digests:
            self._sent.append(_Sent(now, replica_id, tuple(digests)))
            self._pages[replica_id].update(digests)
            self._num_pages += len(digests)
        self._expire(now)

    def forget(self, replica_id: str) -> None:
        """Drop what is booked for a replica that is gone."""
        self._pages.pop(replica_id, None)
        self._load.pop(replica_id, None)

    def load(self, replica_id: str, *, now: float) -> Load:
        """What was sent to a replica, as far as the average load that it reports does not include it yet."""
        at, booked = self._load.get(replica_id, (now, Load()))
        return Load(*(kept_share(now - at) * each for each in booked))

    def num_pages(self, replica_id: str, digests: Sequence[bytes], *, now: float) -> int:
        """How many pages at the start of a prompt a replica will have."""
        self._expire(now)
        pages = self._pages.get(replica_id)
        return 0 if not pages else bisect_left(range(len(digests)), True, key=lambda place: digests[place] not in pages)

    def __len__(self) -> int:
        return self._num_pages

    def _expire(self, now: float) -> None:
        while self._sent and (self._sent[0].at <= now - PAGES_BOOKED_S or self._num_pages > MOST_BOOKED_PAGES):
            oldest = self._sent.popleft()
            self._num_pages -= len(oldest.digests)
            pages = self._pages.get(oldest.replica_id)
            if pages is not None:
                pages.subtract(oldest.digests)
                for digest in oldest.digests:
                    if pages[digest] <= 0:
                        del pages[digest]
