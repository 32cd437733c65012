"""A replica's client of the journal: committed tokens are queued, and delivered once the journal keeps them.

The engine thread only queues; two threads of the connection send and receive. Without a connection tokens wait for
`WAIT_S` seconds, then the replica continues without a journal. The next journal receives all running requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import Any, Protocol

from rayserve_moe.cluster.channel import Channel, connect_proven
from rayserve_moe.fleet.journal_records import AskedRequest, packed_update
from rayserve_moe.fleet.journal_tickets import (
    Found,
    Item,
    Ticket,
    Totals,
    Unanswered,
    answered,
    lost_and_unkept,
    operation,
    packed_operation,
)
from rayserve_moe.fleet.journal_wire import (
    CLOSE,
    COMMIT,
    MAX_FRAME_BYTES,
    OPEN,
    READ,
    TAKE_OVER,
    Fence,
    message_in,
    packed,
)
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.results import ChoiceResult

log = logging.getLogger(__name__)
WAIT_S = 5.0
MAX_CLOSED = 100_000
"""Maximum number of closed requests that are counted."""
TAKEN_OVER = FinishReason("error", message="this request is answered on another connection now")


class JournalDownError(RuntimeError):
    """The journal does not answer."""


class JournalClient:
    """The client of the journal at `address`, which knows `key`. `epoch` is higher for replicas that start later.

    While it `is_up`, the journal keeps committed updates, and answered requests for `ttl_s`. `tickets` are the requests
    that this replica answers now, by identity.
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
        self._epochs = count(self.epoch)
        self.is_up = False
        self._changed, self._packing = threading.Condition(threading.RLock()), threading.Lock()
        self.tickets: dict[bytes, Ticket] = {}
        self._unanswered = Unanswered()
        self._goes_without = False
        self._journal_name = ""
        self._closed_at: deque[float] = deque(maxlen=MAX_CLOSED)
        self._totals = Totals()
        self.num_lost = self.num_resumed = 0
        self.link = JournalLink(self, address, key=key, wait_s=wait_s)

    def statistics(self) -> dict[str, float]:
        """Return the journal's entries, bytes and dropped requests, and this replica's resumed requests and lost
        answers.
        """
        totals = self._totals
        found = {"entries": totals.num_entries, "bytes": totals.num_bytes, "dropped": totals.num_dropped}
        found |= {"up": self.is_up, "resumed": self.num_resumed, "lost": self.num_lost}
        return {name: float(value) for name, value in found.items()}

    def open(self, identity: bytes, request: AskedRequest) -> Ticket:
        """Begin to keep a request. A running request with the same identity continues, but is no longer kept."""
        with self._changed:
            if (before := self.tickets.get(identity)) is not None:
                with self._packing:
                    self._deliver_rest([before])
            term = 1 if before is None else before.fence.term + 1
            self.tickets[identity] = ticket = Ticket(identity, Fence(term, next(self._epochs)), [request.packed()])
            if not self._goes_without:  # the next journal receives it with the greeting
                self._put(Item(OPEN, ticket))
        return ticket

    def own(self, identity: bytes, found: Found) -> Ticket:
        """Continue to keep a request that was taken over."""
        ticket = Ticket(identity, found.fence, list(found.records))
        with self._changed:
            self.num_resumed += 1
            self.tickets[identity] = ticket
        return ticket

    def commit(self, ticket: Ticket, updates: list[tuple[int, ChoiceResult]], *, deliver: Callable[[], object]) -> None:
        """Keep updates, each with its choice index, then call `deliver`. Does nothing after the ticket's end."""
        with self._changed:
            if ticket.is_over:
                return
            if ticket.is_dropped or self._goes_without:
                if not ticket.is_dropped:
                    ticket.records += [packed_update(*update) for update in updates]
                deliver()
                return
            self._put(Item(COMMIT, ticket, updates, deliver))

    def close(self, ticket: Ticket, deliver: Callable[[], object] | None = None) -> None:
        """End the writing of a request; its committed updates are kept for the time to live."""
        with self._changed:
            if ticket.is_over:
                return
            ticket.is_over = True
            if self.tickets.get(ticket.identity) is ticket:
                del self.tickets[ticket.identity]
                self._closed_at.append(time.monotonic())
            if not self._goes_without:
                self._put(Item(CLOSE, ticket, deliver=deliver))
            elif deliver is not None:
                deliver()

    def ask(self, identity: bytes, *, takes_over: bool = False) -> Future[Found | None]:
        """Read a request from the journal, or take it over. JournalDownError is raised or set on the future."""
        answer: Future[Found | None] = Future()
        with self._changed:
            if not self.is_up:
                raise JournalDownError("the journal does not answer")
            self._put(Item(TAKE_OVER if takes_over else READ, identity=identity, answer=answer))
        return answer

    def greet(self, name: str) -> list[Any]:
        """Return the greeting for a journal, all that runs here. Waiting updates are delivered once it is kept."""
        with self._changed:
            waiting = self._take_waiting()
            if self._journal_name not in ("", name):
                since = time.monotonic() - self._ttl_s
                self.num_lost += sum(1 for closed_at in self._closed_at if closed_at > since)
            self._journal_name = name
            self._closed_at.clear()
            operations = [operation(OPEN, ticket, records=ticket.records) for ticket in self.tickets.values()]
            closed = [item.ticket for item in waiting if item.kind == CLOSE and item.ticket is not None]
            for ticket in (each for each in closed if not each.is_dropped):
                operations.append(operation(OPEN, ticket, records=ticket.records))
                operations.append(operation(CLOSE, ticket, records=[]))
            self.is_up, self._goes_without = True, False
            return [self._unanswered.send(waiting), operations]

    def next_messages(self) -> list[list[Any]] | None:
        """Wait for something to send and return all of it, or None once the connection is lost."""
        with self._changed:
            self._changed.wait_for(lambda: self._unanswered.queue or not self.is_up)
            if not self.is_up:
                return None
            items = self._unanswered.take_queued()
            kept = [item for item in items if item.answer is None]
            messages: list[list[Any]] = [[self._unanswered.send(kept), []]]
            messages += (
                [self._unanswered.send([item]), item.kind, item.identity, next(self._epochs)]
                for item in items
                if item.answer is not None
            )
        with self._packing:  # outside the other lock, so that the engine thread does not wait for it
            messages[0][1] = [packed_operation(item) for item in kept]
        return messages

    def record_loss(self) -> None:
        """Record that the connection is lost."""
        with self._changed:
            self.is_up = False
            self._changed.notify_all()

    def go_without(self) -> None:
        """Deliver waiting updates, and keep later ones only in this process."""
        with self._changed:
            if self._goes_without:
                return
            log.error("no journal is reachable: requests do not outlive this replica")
            self._goes_without = True
            self._deliver(self._take_waiting())

    def _put(self, item: Item) -> None:
        self._unanswered.queue.append(item)
        self._changed.notify_all()

    def _deliver(self, items: list[Item]) -> None:
        for item in items:
            deliver, item.deliver = item.deliver, None
            if deliver is not None:
                item.pack()
                deliver()

    def _take_waiting(self) -> list[Item]:
        """Return unacknowledged operations, packed, and fail unanswered questions."""
        waiting = self._unanswered.take_all()
        for item in waiting:
            item.pack()
            if item.answer is not None and item.answer.set_running_or_notify_cancel():
                item.answer.set_exception(JournalDownError("the journal was lost"))
        return [item for item in waiting if item.answer is None]

    def take(self, message: list[Any]) -> None:
        """Process an answer: deliver kept updates, and end requests that have another owner."""
        if len(message) == 3:
            number, fence, records = message
            with self._changed:
                (item,) = self._unanswered.answer(number)
            if (left := answered(item, None if fence is None else Found(Fence(*fence), records))) is not None:
                with self._changed:
                    self._put(Item(CLOSE, left))
            return
        number, fenced, dropped, totals = message
        self._totals = Totals(*totals)
        with self._changed:
            items = self._unanswered.answer(number)
            lost, unkept = lost_and_unkept(fenced, dropped, tickets=self.tickets, items=items)
            for ticket in lost:
                ticket.is_over = True
            for ticket in (each for each in lost + unkept if self.tickets.get(each.identity) is each):
                del self.tickets[ticket.identity]
            self._deliver([item for item in items if item.ticket not in lost])
            with self._packing:  # updates may change once delivered
                self._deliver_rest(unkept)
        for ticket in lost:
            if ticket.on_loss is not None:
                ticket.on_loss(TAKEN_OVER)

    def _deliver_rest(self, unkept: list[Ticket]) -> None:
        """Deliver waiting updates of requests that are no longer kept. Later ones are delivered at once and must not
        overtake.
        """
        for ticket in unkept:
            ticket.is_dropped, ticket.records = True, []
            self._deliver([item for item in self._unanswered.all() if item.ticket is ticket])


_RETRY_S = 0.1
_CONNECT_S = 1.0


class Outbox(Protocol):
    """Outgoing messages and handlers of a journal connection, as in `journal_client.JournalClient`."""

    def greet(self, name: str) -> list[Any]: ...
    def next_messages(self) -> list[list[Any]] | None: ...
    def take(self, message: list[Any]) -> None: ...
    def record_loss(self) -> None: ...
    def go_without(self) -> None: ...


class JournalLink:
    """Connection to the journal, reopened after a loss until `stop`. After `wait_s` the outbox continues without it."""

    def __init__(self, outbox: Outbox, address: tuple[str, int], *, key: bytes, wait_s: float) -> None:
        self._outbox, self._address, self._key = outbox, address, key
        self.wait_s = wait_s
        self._stopped = threading.Event()
        self._channel: Channel | None = None
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the connection and end the threads."""
        self._stopped.set()
        self._disconnect()
        self._thread.join()

    def _run(self) -> None:
        lost_at = time.monotonic()
        while not self._stopped.is_set():
            was_connected = self._serve_once()
            if self._stopped.is_set():
                break  # not a loss
            if was_connected:
                lost_at = time.monotonic()
                log.warning("the journal is lost: tokens wait for the next connection")
            if time.monotonic() - lost_at >= self.wait_s:
                self._outbox.go_without()
            self._stopped.wait(_RETRY_S)

    def _serve_once(self) -> bool:
        """Connect, and send until the connection is lost. Return False if no connection served."""
        deadline = time.monotonic() + _CONNECT_S
        try:
            channel = connect_proven(self._address, key=self._key, deadline=deadline, max_frame_bytes=MAX_FRAME_BYTES)
        except (OSError, EOFError):
            return False
        with channel:
            self._channel = channel
            if self._stopped.is_set():  # `stop` has closed only the previous connection
                return False
            receiving = threading.Thread(target=self._receive, args=(channel,), name="journal-in", daemon=True)
            with suppress(OSError, EOFError):
                _, name = message_in(channel.receive())
                greeting = self._outbox.greet(name)
                receiving.start()
                channel.send(packed(greeting))
                while (messages := self._outbox.next_messages()) is not None:
                    channel.send(*map(packed, messages))
            self._disconnect()
            if receiving.ident is not None:
                receiving.join()
        return True

    def _receive(self, channel: Channel) -> None:
        try:
            with suppress(OSError, EOFError):
                while True:
                    self._outbox.take(message_in(channel.receive()))
        finally:
            self._outbox.record_loss()

    def _disconnect(self) -> None:
        self._outbox.record_loss()
        if (channel := self._channel) is not None:
            channel.shutdown()
