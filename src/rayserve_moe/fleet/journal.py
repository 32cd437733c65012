"""The journal: a process that outlives replicas and keeps their requests and committed tokens.

    python -m rayserve_moe.fleet.journal --host H --port P --max-bytes N --ttl-s S

Replicas prove that they know the key, RAYSERVE_MOE_JOURNAL_KEY in the environment of both.

It depends on no model, no Ray and no HTTP; records are opaque bytes. It keeps everything in memory: if it ends, the
entries are lost, and replicas send the entries of running requests to the next journal.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rayserve_moe.cluster.channel import framed, prove_listening, read_frame
from rayserve_moe.config.load import environment_setting
from rayserve_moe.fleet.journal_wire import (
    CLOSE,
    COMMIT,
    MAX_FRAME_BYTES,
    OPEN,
    TAKE_OVER,
    UNSOLICITED,
    Fence,
    message_in,
    packed,
)

log = logging.getLogger(__name__)
EXPIRE_S = 1.0
MAX_UNREAD_BYTES = 64 << 20
"""Maximum bytes of unread answers for a replica. Above it the journal stops reading and disconnects after `READ_S`."""
READ_S = 30.0
ENTRY_BYTES = 512
"""Bytes counted for an entry in addition to its records."""


class Journal:
    """Serves a table over TCP to peers that prove `key`; `serve` runs in an event loop."""

    def __init__(self, table: JournalTable, *, key: bytes) -> None:
        self.table, self._key = table, key
        self._name = secrets.token_hex(8)
        self._writers: set[asyncio.StreamWriter] = set()

    async def serve(self, host: str, port: int) -> asyncio.Server:
        """Listen and return the server. Raises OSError if the port is taken."""
        server = await asyncio.start_server(self._answer, host, port)
        self._expiring = asyncio.create_task(self._expire())
        return server

    async def _expire(self) -> None:
        sent: list[int] = []
        while True:
            await asyncio.sleep(EXPIRE_S)
            self.table.expire()
            if sent != (sent := self._totals):  # inform replicas that write nothing
                for writer in self._writers:
                    writer.write(framed(packed([UNSOLICITED, [], [], sent])))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await prove_listening(reader, writer, key=self._key)
            writer.write(framed(packed([UNSOLICITED, self._name])))
            self._writers.add(writer)
            while True:
                message = message_in(await read_frame(reader, max_frame_bytes=MAX_FRAME_BYTES))
                reply = self._kept(message, writer) if len(message) == 2 else self._found(message, writer)
                writer.write(framed(packed(reply)))
                if writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
                    await asyncio.wait_for(writer.drain(), READ_S)
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            log.info("a replica has disconnected")
        finally:
            self._writers.discard(writer)
            self.table.lose(writer)
            writer.transport.abort()

    @property
    def _totals(self) -> list[int]:
        return [len(self.table), self.table.num_bytes, self.table.num_dropped]

    def _kept(self, message: list[Any], owner: asyncio.StreamWriter) -> list[Any]:
        number, operations = message
        fenced, dropped = [], []
        for kind, identity, term, epoch, records in operations:
            fence = Fence(term, epoch)
            is_kept: bool | None = True
            if kind == OPEN:
                is_kept = self.table.open(identity, fence, records=records, owner=owner)
            elif kind == COMMIT:
                is_kept = self.table.commit(identity, fence, records=records)
            elif kind == CLOSE:
                self.table.close(identity, fence)
            if is_kept is None:
                fenced.append([identity, *fence])
            elif not is_kept:
                dropped.append([identity, *fence])
        return [number, fenced, dropped, self._totals]

    def _found(self, message: list[Any], owner: asyncio.StreamWriter) -> list[Any]:
        number, kind, identity, epoch = message
        if kind == TAKE_OVER:
            taken = self.table.take_over(identity, epoch, owner=owner)
            if taken is None:
                return [number, None, []]
            entry, before, fence = taken
            if isinstance(before, asyncio.StreamWriter) and before is not owner:
                before.write(framed(packed([UNSOLICITED, [[identity, *fence]], [], self._totals])))
        elif (found := self.table.read(identity)) is None:
            return [number, None, []]
        else:
            entry = found
        return [number, list(entry.fence), entry.records]


async def run(host: str, port: int, *, table: JournalTable, key: bytes) -> None:
    """Serve until the task is cancelled."""
    server = await Journal(table, key=key).serve(host, port)
    async with server:
        await server.serve_forever()


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until a signal ends the process."""
    parser = argparse.ArgumentParser(prog="python -m rayserve_moe.fleet.journal", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-bytes", type=int, default=1 << 30)
    parser.add_argument("--ttl-s", type=float, default=120.0)
    given = parser.parse_args(arguments)
    table = JournalTable(max_bytes=given.max_bytes, ttl_s=given.ttl_s)
    if not (key := environment_setting("journal_key")):
        parser.error("RAYSERVE_MOE_JOURNAL_KEY is not set: without a key anyone could read and write the journal")
    with suppress(KeyboardInterrupt):
        asyncio.run(run(given.host, given.port, table=table, key=key.encode()))


@dataclass
class Entry:
    """A request in the journal."""

    fence: Fence
    owner: object
    """Connection of the owning replica."""
    records: list[bytes] = field(default_factory=list)
    """The request, then the committed updates."""
    num_bytes: int = ENTRY_BYTES
    closed_at: float | None = None
    """Clock time at which its last byte was sent; None: open."""


class JournalTable:
    """Entries by identity. `owner` is any object that stands for a replica's connection.

    Above `max_bytes` the oldest closed entries are dropped; if that is not enough, the growing entry itself is dropped.
    `num_dropped` counts both.
    """

    def __init__(self, *, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._ttl_s, self._clock = max_bytes, ttl_s, clock
        self._entries: dict[bytes, Entry] = {}
        self._closed: OrderedDict[bytes, None] = OrderedDict()
        self.num_bytes = self.num_dropped = self.num_taken_over = 0

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, identity: bytes, fence: Fence, *, records: Sequence[bytes], owner: object) -> bool | None:
        """Begin an entry, or restore an entry of an earlier journal; return True if it is kept.

        Return None if the entry was taken over from this fence, False if another replica owns the identity or memory is
        full.
        """
        before = self._entries.get(identity)
        is_owned = before is not None and before.fence != fence and before.closed_at is None
        if before is not None and is_owned and before.fence.term >= fence.term:
            return None if before.fence.term > fence.term else False
        self._remove(identity)
        self._entries[identity] = Entry(fence, owner)
        return all(self._append(identity, record) for record in records)

    def commit(self, identity: bytes, fence: Fence, *, records: Sequence[bytes]) -> bool | None:
        """Append records; return True if they are kept.

        Return None if the fence is not the owner's, False if no such entry is open or memory is full.
        """
        entry = self._entries.get(identity)
        if entry is None:
            return False
        if entry.fence != fence:
            return None
        return entry.closed_at is None and all(self._append(identity, record) for record in records)

    def close(self, identity: bytes, fence: Fence) -> None:
        """Close an entry: its owner writes no more. It is kept for the time to live."""
        entry = self._entries.get(identity)
        if entry is not None and entry.fence == fence:
            self._close(identity, entry)

    def read(self, identity: bytes) -> Entry | None:
        """Return an entry, or None."""
        return self._entries.get(identity)

    def take_over(self, identity: bytes, epoch: int, *, owner: object) -> tuple[Entry, object, Fence] | None:
        """Make another replica the owner; return the entry, its previous owner and fence. None if it does not exist."""
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
        """Remove entries that have been closed for longer than the time to live."""
        now = self._clock()
        while self._closed:
            identity = next(iter(self._closed))
            closed_at = self._entries[identity].closed_at
            if closed_at is not None and now - closed_at < self._ttl_s:
                return
            self._remove(identity)

    def check_integrity(self) -> None:
        """Assert that bytes and closed entries agree with an independent count."""
        sizes = [ENTRY_BYTES + sum(map(len, entry.records)) for entry in self._entries.values()]
        assert self.num_bytes == sum(sizes) <= self._max_bytes, "num_bytes is wrong or above the limit"
        closed = {identity for identity, entry in self._entries.items() if entry.closed_at is not None}
        assert closed == set(self._closed), "the set of closed entries is wrong"

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


if __name__ == "__main__":
    main()
