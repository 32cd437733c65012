"""A replica's requests as the journal has them: what is committed is queued, and delivered once it is kept.

The engine thread only queues; `journal_link` sends and receives. Without a connection tokens wait for a while, then
replicas go on without a journal; the next one gets all that still runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rayserve_moe.fleet.journal_link import JournalLink
from rayserve_moe.fleet.journal_records import AskedRequest, packed_update
from rayserve_moe.fleet.journal_table import Fence
from rayserve_moe.fleet.journal_wire import CLOSE, COMMIT, OPEN, READ, TAKE_OVER
from rayserve_moe.requests import ChoiceResult, FinishReason

log = logging.getLogger(__name__)
WAIT_S = 5.0
MOST_CLOSED = 100_000
"""Requests whose last byte was sent that are counted."""
TAKEN_OVER = FinishReason("error", message="this request is answered on another connection now")


class JournalDownError(RuntimeError):
    """The journal does not answer now."""


@dataclass(eq=False)
class Ticket:
    """An HTTP request that this replica owns. `records` are all that the journal has or is to have of it.

    `on_loss` is called, from any thread, with why its connection ends: another replica owns it, or is to; None until
    there is one. What `is_over` is delivered no longer; what `is_dropped` is not kept.
    """

    identity: bytes
    fence: Fence
    records: list[bytes]
    on_loss: Callable[[FinishReason], object] | None = None
    is_over: bool = False
    is_dropped: bool = False


class Found(NamedTuple):
    """What the journal has of a request."""

    fence: Fence
    records: list[bytes]


@dataclass
class _Item:
    """Something to send: an operation on a ticket with what it delivers, or a question with its future."""

    kind: int
    ticket: Ticket | None = None
    updates: list[tuple[int, ChoiceResult]] = field(default_factory=list)
    deliver: Callable[[], object] | None = None
    identity: bytes = b""
    answer: Future[Found | None] | None = None

    def pack(self) -> list[bytes]:
        """Turn updates into records of the ticket, once."""
        packed = [packed_update(*update) for update in self.updates]
        self.updates = []
        if self.ticket is not None:
            self.ticket.records += packed
        return packed


class JournalClient:
    """The way to the journal at `address`, which knows `key`. `epoch` is higher for replicas that start later.

    While it `is_up` the journal keeps what is committed, and for `ttl_s` what was answered. `tickets` are those of the
    requests that this replica answers now, by identity.
    """

    def __init__(
        self,
        address: tuple[str, int],
        *,
        key: bytes,
        epoch: int | None = None,
        wait_s: float = WAIT_S,
        ttl_s: float = 120.0,
    ) -> None:
        self._ttl_s = ttl_s
        self.epoch = time.time_ns() if epoch is None else epoch
        self.is_up = False
        self._changed, self._packing = threading.Condition(threading.RLock()), threading.Lock()
        self.tickets: dict[bytes, Ticket] = {}
        self._queue: deque[_Item] = deque()
        self._sent: dict[int, list[_Item]] = {}
        self._number = 0
        self._goes_without = False
        self._journal_name = ""
        self._closed_at: deque[float] = deque(maxlen=MOST_CLOSED)
        self.num_entries = self.num_bytes = self.num_dropped = self.num_lost = self.num_resumed = 0
        self.link = JournalLink(self, address, key=key, wait_s=wait_s)

    def statistics(self) -> dict[str, float]:
        """The journal's entries and bytes, requests that were resumed here, and answers that it has lost."""
        lost = float(self.num_dropped + self.num_lost)
        found = {"entries": self.num_entries, "bytes": self.num_bytes, "resumed": self.num_resumed}
        return {"up": float(self.is_up), "lost": lost, **{name: float(value) for name, value in found.items()}}

    def open(self, identity: bytes, asked: AskedRequest) -> Ticket:
        """Begin to keep a request. One of its name that still runs here goes on, and is not kept any longer."""
        with self._changed:
            if (before := self.tickets.get(identity)) is not None:
                with self._packing:
                    self._deliver_rest([before])
            term = 1 if before is None else before.fence.term + 1
            self.tickets[identity] = ticket = Ticket(identity, Fence(term, self.epoch), [asked.packed()])
            self._put(_Item(OPEN, ticket))
        return ticket

    def own(self, identity: bytes, found: Found) -> Ticket:
        """Go on keeping a request that was taken over."""
        ticket = Ticket(identity, found.fence, list(found.records))
        with self._changed:
            self.num_resumed += 1
            self.tickets[identity] = ticket
        return ticket

    def commit(self, ticket: Ticket, updates: list[tuple[int, ChoiceResult]], *, deliver: Callable[[], object]) -> None:
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
            if self.tickets.get(ticket.identity) is ticket:
                del self.tickets[ticket.identity]
                self._closed_at.append(time.monotonic())
            self._put(_Item(CLOSE, ticket, deliver=deliver))

    def ask(self, identity: bytes, *, takes_over: bool = False) -> Future[Found | None]:
        """Ask for what there is of a request, and perhaps own it from then on. JournalDownError, also the future's."""
        answer: Future[Found | None] = Future()
        with self._changed:
            if not self.is_up:
                raise JournalDownError("the journal does not answer now")
            self._put(_Item(TAKE_OVER if takes_over else READ, identity=identity, answer=answer))
        return answer

    def greet(self, name: str) -> list[Any]:
        """Return, for a journal with this name, all that runs here; what waits is delivered once it has that."""
        with self._changed:
            waiting = self._take_waiting()
            if self._journal_name not in ("", name):
                since = time.monotonic() - self._ttl_s
                self.num_lost += sum(1 for closed_at in self._closed_at if closed_at > since)
            self._journal_name = name
            self._closed_at.clear()
            operations = [_operation(OPEN, ticket, ticket.records) for ticket in self.tickets.values()]
            closed = [item.ticket for item in waiting if item.kind == CLOSE and item.ticket is not None]
            for ticket in (each for each in closed if not each.is_dropped):
                operations.append(_operation(OPEN, ticket, ticket.records))
                operations.append(_operation(CLOSE, ticket, []))
            self._number += 1
            self._sent[self._number] = waiting
            self.is_up, self._goes_without = True, False
            return [self._number, operations]

    def next_messages(self) -> list[list[Any]] | None:
        """Wait for something to send, and return all of it; None once the connection is lost."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or not self.is_up)
            if not self.is_up:
                return None
            items = list(self._queue)
            self._queue.clear()
            kept = [item for item in items if item.answer is None]
            self._number += 1
            self._sent[self._number] = kept
            messages: list[list[Any]] = [[self._number, []]]
            for item in (item for item in items if item.answer is not None):
                self._number += 1
                self._sent[self._number] = [item]
                messages.append([self._number, item.kind, item.identity, self.epoch])
        with self._packing:  # without the other lock: the engine thread does not wait for it
            messages[0][1] = [_packed_operation(item) for item in kept]
        return messages

    def note_loss(self) -> None:
        """Note that the connection is lost."""
        with self._changed:
            self.is_up = False
            self._changed.notify_all()

    def go_without(self) -> None:
        """Deliver what waits, and keep in this process what is committed from now on."""
        with self._changed:
            if self._goes_without:
                return
            log.error("there is no journal: requests do not outlive this replica")
            self._goes_without = True
            self._deliver(self._take_waiting())

    def _put(self, item: _Item) -> None:
        self._queue.append(item)
        self._changed.notify_all()

    def _deliver(self, items: list[_Item]) -> None:
        for item in items:
            deliver, item.deliver = item.deliver, None
            if deliver is not None:
                item.pack()
                deliver()

    def _take_waiting(self) -> list[_Item]:
        """Return what was not acknowledged, packed; questions are answered by an error."""
        waiting = [item for items in self._sent.values() for item in items] + list(self._queue)
        self._sent.clear()
        self._queue.clear()
        for item in waiting:
            item.pack()
            if item.answer is not None:
                item.answer.set_exception(JournalDownError("the journal was lost"))
        return [item for item in waiting if item.answer is None]

    def take(self, message: list[Any]) -> None:
        """Take an answer: deliver what is kept, and end requests that have another owner."""
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
            lost, unkept = (_named(names, self.tickets, items=items) for names in (fenced, dropped))
            for ticket in lost:
                ticket.is_over = True
            for ticket in (each for each in lost + unkept if self.tickets.get(each.identity) is each):
                del self.tickets[ticket.identity]
            self._deliver([item for item in items if item.ticket not in lost])
            with self._packing:  # what is delivered may change
                self._deliver_rest(unkept)
        for ticket in lost:
            if ticket.on_loss is not None:
                ticket.on_loss(TAKEN_OVER)

    def _deliver_rest(self, unkept: list[Ticket]) -> None:
        """Deliver what waits of requests that are not kept: what follows is delivered at once, and may not overtake."""
        for ticket in unkept:
            ticket.is_dropped, ticket.records = True, []
            waiting = [item for sent in self._sent.values() for item in sent] + list(self._queue)
            self._deliver([item for item in waiting if item.ticket is ticket])


def _named(names: list[Any], tickets: dict[bytes, Ticket], *, items: list[_Item]) -> list[Ticket]:
    """The tickets that a journal names by identity and fence: another of that identity may have begun meanwhile."""
    wanted = [(identity, Fence(*fence)) for identity, *fence in names]
    known = [*(tickets.get(identity) for identity, _ in wanted), *(item.ticket for item in items if wanted)]
    running = dict.fromkeys(each for each in known if each is not None and not each.is_over)
    return [each for each in running if (each.identity, each.fence) in wanted]


def _packed_operation(item: _Item) -> list[Any]:
    assert item.ticket is not None, "an operation is on a ticket"
    return _operation(item.kind, item.ticket, item.ticket.records if item.kind == OPEN else item.pack())


def _operation(kind: int, ticket: Ticket, records: list[bytes]) -> list[Any]:
    """An operation with records as they are now: others may follow in the same message."""
    return [kind, ticket.identity, *ticket.fence, list(records)]
