"""A replica's connection to the journal: what is committed is sent once a step, and told to clients once it is kept.

The engine thread only queues; two threads send and receive. Without a connection tokens wait for `patience_s`, then
replicas go on without a journal; the next one gets all that still runs.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rayserve_moe.cluster.handshake import connect_proven
from rayserve_moe.fleet.journal_records import AskedRequest, packed_update
from rayserve_moe.fleet.journal_table import Fence
from rayserve_moe.fleet.journal_wire import (
    CLOSE,
    COMMIT,
    LENGTH_BYTES,
    OPEN,
    READ,
    TAKE_OVER,
    framed,
    length_in,
    message_in,
)
from rayserve_moe.requests import ChoiceResult

log = logging.getLogger(__name__)
PATIENCE_S = 5.0
_RETRY_S = 0.1
_CONNECT_S = 1.0


class JournalDownError(RuntimeError):
    """The journal does not answer now."""


@dataclass
class Ticket:
    """An HTTP request that this replica owns. `records` are all that the journal has or is to have of it.

    `on_loss` is called, from any thread, once another replica owns it. What `is_over` is told to nobody any more; what
    `is_dropped` is not kept.
    """

    identity: bytes
    fence: Fence
    records: list[bytes]
    on_loss: Callable[[], object] = lambda: None
    is_over: bool = False
    is_dropped: bool = False


class Found(NamedTuple):
    """What the journal has of a request."""

    fence: Fence
    records: list[bytes]


@dataclass
class _Item:
    """Something to send: an operation on a ticket with what is told after it, or a question with its future."""

    kind: int
    ticket: Ticket | None = None
    updates: list[tuple[int, ChoiceResult]] = field(default_factory=list)
    deliver: Callable[[], object] | None = None
    identity: bytes = b""
    answer: Future[Found | None] | None = None


class JournalClient:
    """The way to the journal at `address`, which knows `key`. `epoch` is higher for replicas that start later."""

    def __init__(
        self, address: tuple[str, int], *, key: bytes, epoch: int | None = None, patience_s: float = PATIENCE_S
    ) -> None:
        self._address, self._key, self._patience_s = address, key, patience_s
        self.epoch = time.time_ns() if epoch is None else epoch
        self._changed = threading.Condition(threading.RLock())
        self._tickets: dict[bytes, Ticket] = {}
        self._queue: deque[_Item] = deque()
        self._sent: dict[int, list[_Item]] = {}
        self._number = 0
        self._connection: socket.socket | None = None
        self._goes_without = self._is_stopped = False
        self._journal_name = ""
        self._closed_at: deque[float] = deque(maxlen=100_000)
        self.num_entries = self.num_bytes = self.num_dropped = self.num_lost = self.num_resumed = 0
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @property
    def is_up(self) -> bool:
        """Whether the journal keeps what is committed now."""
        return self._connection is not None

    def statistics(self) -> dict[str, float]:
        """The journal's entries and bytes, requests that were resumed here, and answers that it has lost."""
        lost = float(self.num_dropped + self.num_lost)
        found = {"entries": self.num_entries, "bytes": self.num_bytes, "resumed": self.num_resumed}
        return {"up": float(self.is_up), "lost": lost, **{name: float(value) for name, value in found.items()}}

    def open(self, identity: bytes, asked: AskedRequest) -> Ticket:
        """Begin to keep a request."""
        ticket = Ticket(identity, Fence(1, self.epoch), [asked.packed()])
        self._own(ticket)
        return ticket

    def own(self, identity: bytes, found: Found) -> Ticket:
        """Go on keeping a request that was taken over."""
        ticket = Ticket(identity, found.fence, list(found.records))
        with self._changed:
            self.num_resumed += 1
            self._tickets[identity] = ticket
        return ticket

    def owned(self, identity: bytes) -> Ticket | None:
        """Return the ticket of a request that this replica answers now."""
        return self._tickets.get(identity)

    def commit(self, ticket: Ticket, updates: list[tuple[int, ChoiceResult]], deliver: Callable[[], object]) -> None:
        """Keep updates, each with the number of its choice, then have them delivered; not after the ticket's end."""
        with self._changed:
            if ticket.is_over:
                return
            if ticket.is_dropped or self._goes_without:
                if not ticket.is_dropped:
                    ticket.records += [packed_update(*update) for update in updates]
                deliver()
                return
            self._put(_Item(COMMIT, ticket, updates, deliver))

    def close(self, ticket: Ticket, deliver: Callable[[], object] | None = None) -> None:
        """Write no more of a request; what was committed of it stays for a while."""
        with self._changed:
            if ticket.is_over:
                return
            ticket.is_over = True
            if self._tickets.get(ticket.identity) is ticket:
                del self._tickets[ticket.identity]
                self._closed_at.append(time.monotonic())
            self._put(_Item(CLOSE, ticket, deliver=deliver))

    def read(self, identity: bytes) -> Future[Found | None]:
        """Ask for what there is of a request. JournalDownError, at once or as the future's."""
        return self._ask(_Item(READ, identity=identity, answer=Future()))

    def take_over(self, identity: bytes) -> Future[Found | None]:
        """The same, and be its owner from then on."""
        return self._ask(_Item(TAKE_OVER, identity=identity, answer=Future()))

    def stop(self) -> None:
        """Close the connection and end the threads; what waits is told to nobody."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        self._disconnect()
        self._thread.join()

    def _own(self, ticket: Ticket) -> None:
        with self._changed:
            self._tickets[ticket.identity] = ticket
            self._put(_Item(OPEN, ticket))

    def _put(self, item: _Item) -> None:
        self._queue.append(item)
        self._changed.notify_all()

    def _ask(self, item: _Item) -> Future[Found | None]:
        assert item.answer is not None, "a question has a future"
        with self._changed:
            if self._connection is None:
                raise JournalDownError("the journal does not answer now")
            self._put(item)
        return item.answer

    def _run(self) -> None:
        lost_at = time.monotonic()
        while not self._is_stopped:
            receiving = None
            with suppress(OSError, EOFError, TimeoutError):
                connection = connect_proven(self._address, key=self._key, deadline=time.monotonic() + _CONNECT_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._greet(connection)
                receiving = threading.Thread(target=self._receive, args=(connection,), name="journal-in", daemon=True)
                receiving.start()
                self._send_all(connection)
            if receiving is not None:
                self._disconnect()
                receiving.join()
                lost_at = time.monotonic()
                log.warning("the journal is lost: tokens wait for another")
            if not self._goes_without and time.monotonic() - lost_at >= self._patience_s:
                self._go_without()
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopped, _RETRY_S)

    def _greet(self, connection: socket.socket) -> None:
        """Read the journal's name, and send it all that runs here; what waits is told once it has that."""
        _, name = _read_message(connection)
        with self._changed:
            waiting = [item for items in self._sent.values() for item in items] + list(self._queue)
            self._sent.clear()
            self._queue.clear()
            if name != self._journal_name and self._journal_name:
                self.num_lost += sum(1 for _ in self._closed_at)
            self._journal_name = name
            for item in waiting:
                self._pack(item)
                if item.answer is not None:
                    item.answer.set_exception(JournalDownError("the journal was lost"))
            operations = [self._operation(OPEN, ticket, ticket.records) for ticket in self._tickets.values()]
            for item in waiting:  # those that have ended meanwhile
                if item.kind == CLOSE and item.ticket is not None:
                    operations.append(self._operation(OPEN, item.ticket, item.ticket.records))
                    operations.append(self._operation(CLOSE, item.ticket, []))
            self._number += 1
            self._sent[self._number] = waiting or [_Item(OPEN)]
            number, self._connection, self._goes_without = self._number, connection, False
        connection.sendall(framed([number, operations]))

    def _send_all(self, connection: socket.socket) -> None:
        """Send what is queued until the connection is lost."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._connection is None)
                if self._connection is None:
                    return
                items = list(self._queue)
                self._queue.clear()
                kept = [item for item in items if item.answer is None]
                self._number += 1
                self._sent[self._number] = kept
                messages: list[list[Any]] = []
                operations = [self._packed_operation(item) for item in kept]
                messages.append([self._number, operations])
                for item in items:
                    if item.answer is not None:
                        self._number += 1
                        self._sent[self._number] = [item]
                        messages.append([self._number, item.kind, item.identity, self.epoch])
            connection.sendall(b"".join(map(framed, messages)))

    def _packed_operation(self, item: _Item) -> list[Any]:
        assert item.ticket is not None, "an operation is on a ticket"
        if item.kind == OPEN:
            return self._operation(OPEN, item.ticket, item.ticket.records)
        return self._operation(item.kind, item.ticket, self._pack(item))

    def _pack(self, item: _Item) -> list[bytes]:
        """Turn updates into one record of the ticket, once."""
        packed = [packed_update(*update) for update in item.updates]
        item.updates = []
        if item.ticket is not None:
            item.ticket.records += packed
        return packed

    def _operation(self, kind: int, ticket: Ticket, records: list[bytes]) -> list[Any]:
        return [kind, ticket.identity, *ticket.fence, records]

    def _receive(self, connection: socket.socket) -> None:
        try:
            while True:
                self._take(_read_message(connection))
        except (OSError, EOFError):
            self._disconnect()

    def _take(self, message: list[Any]) -> None:
        """Take an answer: tell what is kept, and whose requests are no longer ours."""
        if len(message) == 3:
            number, fence, records = message
            with self._changed:
                (item,) = self._sent.pop(number)
            assert item.answer is not None, "a question has a future"
            item.answer.set_result(None if fence is None else Found(Fence(*fence), records))
            return
        number, fenced, dropped, (self.num_entries, self.num_bytes, self.num_dropped) = message
        with self._changed:
            items = self._sent.pop(number, [])
            lost = [ticket for identity in fenced if (ticket := self._tickets.pop(identity, None)) is not None]
            for ticket in lost:
                ticket.is_over = True
            for identity in dropped:
                if (ticket := self._tickets.pop(identity, None)) is not None:
                    ticket.is_dropped, ticket.records = True, []
            told = [item.deliver for item in items if item.deliver and not (item.ticket and item.ticket in lost)]
            for deliver in told:
                deliver()
        for ticket in lost:
            ticket.on_loss()

    def _go_without(self) -> None:
        """Tell what waits, and keep in this process what is committed from now on."""
        with self._changed:
            log.error("there has been no journal for %.0f s: requests do not outlive this replica", self._patience_s)
            waiting = [item for items in self._sent.values() for item in items] + list(self._queue)
            self._sent.clear()
            self._queue.clear()
            self._goes_without = True
            for item in waiting:
                self._pack(item)
                if item.answer is not None:
                    item.answer.set_exception(JournalDownError("the journal was lost"))
                elif item.deliver is not None:
                    item.deliver()

    def _disconnect(self) -> None:
        with self._changed:
            connection, self._connection = self._connection, None
            self._changed.notify_all()
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def _read_message(connection: socket.socket) -> list[Any]:
    return message_in(_read(connection, length_in(_read(connection, LENGTH_BYTES))))


def _read(connection: socket.socket, length: int) -> bytes:
    parts = bytearray(length)
    view, num_read = memoryview(parts), 0
    while num_read < length:
        count = connection.recv_into(view[num_read:])
        if not count:
            raise EOFError("the journal has closed the connection")
        num_read += count
    return bytes(parts)
