"""The requests of a journal: records by identity, one owner each, within a bound on memory."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

ENTRY_BYTES = 512
"""Counted for an entry besides its records."""


class Fence(NamedTuple):
    """Who owns a request: how often it was taken over, and an epoch of its own from the replica that did, a later
    start's being higher. Replicas bring their fences; what is written under any other than the owner's is refused."""

    term: int
    epoch: int


@dataclass
class Entry:
    """A request: what was asked, then what was committed, as bytes. `closed_at` is when its last byte was sent."""

    fence: Fence
    owner: object
    records: list[bytes] = field(default_factory=list)
    num_bytes: int = ENTRY_BYTES
    closed_at: float | None = None


class JournalTable:
    """Entries by identity. `owner` is whatever stands for a connection of a replica.

    Beyond `max_bytes` entries that are closed make way, the oldest first; where that is not enough, what would grow is
    dropped itself. `num_dropped` counts both.
    """

    def __init__(self, *, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._ttl_s, self._clock = max_bytes, ttl_s, clock
        self._entries: dict[bytes, Entry] = {}
        self._closed: OrderedDict[bytes, None] = OrderedDict()
        self.num_bytes = self.num_dropped = self.num_taken_over = 0

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, identity: bytes, fence: Fence, *, records: Sequence[bytes], owner: object) -> bool | None:
        """Begin an entry, or bring back one that another journal had; None where it was taken over from this fence,
        False where another replica runs one of this identity."""
        before = self._entries.get(identity)
        is_owned = before is not None and before.fence != fence and before.closed_at is None
        if before is not None and is_owned and before.fence.term >= fence.term:
            return None if before.fence.term > fence.term else False
        self._remove(identity)
        self._entries[identity] = Entry(fence, owner)
        return all(self._append(identity, record) for record in records)

    def commit(self, identity: bytes, fence: Fence, *, records: Sequence[bytes]) -> bool | None:
        """Append records. None where the fence is no longer the owner's, False where there is no such entry that is
        open."""
        entry = self._entries.get(identity)
        if entry is None:
            return False
        if entry.fence != fence:
            return None
        return entry.closed_at is None and all(self._append(identity, record) for record in records)

    def close(self, identity: bytes, fence: Fence) -> None:
        """Note that the owner writes no more: the entry stays for a while."""
        entry = self._entries.get(identity)
        if entry is not None and entry.fence == fence:
            self._close(identity, entry)

    def read(self, identity: bytes) -> Entry | None:
        """Return an entry."""
        return self._entries.get(identity)

    def take_over(self, identity: bytes, epoch: int, *, owner: object) -> tuple[Entry, object, Fence] | None:
        """Make another replica the owner; returns the entry, who owned it by which fence, None where there is none."""
        entry = self._entries.get(identity)
        if entry is None:
            return None
        before, fence, entry.owner = entry.owner, entry.fence, owner
        entry.fence, entry.closed_at = Fence(entry.fence.term + 1, epoch), None
        self._closed.pop(identity, None)
        self.num_taken_over += 1
        return entry, before, fence

    def lose(self, owner: object) -> None:
        """Close all entries of a replica that is gone."""
        for identity, entry in self._entries.items():
            if entry.owner is owner and entry.closed_at is None:
                self._close(identity, entry)

    def expire(self) -> None:
        """Forget what was closed longer ago than its time."""
        now = self._clock()
        while self._closed:
            identity = next(iter(self._closed))
            closed_at = self._entries[identity].closed_at
            if closed_at is not None and now - closed_at < self._ttl_s:
                return
            self._remove(identity)

    def check_integrity(self) -> None:
        """Assert that bytes and closed entries add up against an independent count."""
        sizes = [ENTRY_BYTES + sum(map(len, entry.records)) for entry in self._entries.values()]
        assert self.num_bytes == sum(sizes) <= self._max_bytes, "bytes are miscounted, or too many"
        closed = {identity for identity, entry in self._entries.items() if entry.closed_at is not None}
        assert closed == set(self._closed), "closed entries are not those that may make way"

    def _append(self, identity: bytes, record: bytes) -> bool:
        if (entry := self._entries.get(identity)) is None:
            return False
        added = len(record) + (0 if entry.records else ENTRY_BYTES)
        while self.num_bytes + added > self._max_bytes and self._closed:
            self.num_dropped += 1
            self._remove(next(iter(self._closed)))
        if self.num_bytes + added > self._max_bytes:
            self.num_dropped += 1
            self._remove(identity)
            return False
        self.num_bytes += added
        entry.num_bytes += len(record)
        entry.records.append(record)
        return True

    def _close(self, identity: bytes, entry: Entry) -> None:
        entry.closed_at = self._clock()
        self._closed.pop(identity, None)
        self._closed[identity] = None

    def _remove(self, identity: bytes) -> None:
        self._closed.pop(identity, None)
        entry = self._entries.pop(identity, None)
        if entry is not None and entry.records:
            self.num_bytes -= entry.num_bytes
