"""A replica's bookkeeping of its requests in the journal: their tickets and the outgoing items."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rayserve_moe.fleet.journal_records import packed_update
from rayserve_moe.fleet.journal_wire import OPEN, TAKE_OVER, Fence
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.results import ChoiceResult


@dataclass(eq=False)
class Ticket:
    """An HTTP request that this replica owns."""

    identity: bytes
    fence: Fence
    records: list[bytes]
    """All that the journal has, or will receive, of it."""
    on_loss: Callable[[FinishReason], object] | None = None
    """Called from any thread with the reason why its connection ends: another replica owns it, or will."""
    is_over: bool = False
    """Nothing more is delivered."""
    is_dropped: bool = False
    """Nothing more is kept."""


class Found(NamedTuple):
    """A request as the journal has it."""

    fence: Fence
    records: list[bytes]


@dataclass
class Item:
    """An outgoing item: an operation on a ticket with its delivery, or a question with its future."""

    kind: int
    ticket: Ticket | None = None
    updates: list[tuple[int, ChoiceResult]] = field(default_factory=list)
    deliver: Callable[[], object] | None = None
    identity: bytes = b""
    answer: Future[Found | None] | None = None

    def pack(self) -> list[bytes]:
        """Turn updates into records of the ticket; later calls return nothing."""
        packed = [packed_update(*update) for update in self.updates]
        self.updates = []
        if self.ticket is not None:
            self.ticket.records += packed
        return packed


class Unanswered:
    """Items that wait to be sent, and sent items without an answer by message number."""

    def __init__(self) -> None:
        self.queue: deque[Item] = deque()
        self._sent: dict[int, list[Item]] = {}
        self._number = 0

    def send(self, items: list[Item]) -> int:
        """Record that items are sent with the next message; return its number."""
        self._number += 1
        self._sent[self._number] = items
        return self._number

    def answer(self, number: int) -> list[Item]:
        """Return and remove the items of an answered message."""
        return self._sent.pop(number, [])

    def all(self) -> list[Item]:
        """Return all items, the oldest first."""
        return [item for items in self._sent.values() for item in items] + list(self.queue)

    def take_queued(self) -> list[Item]:
        """Return and remove the items that were not sent."""
        queued = list(self.queue)
        self.queue.clear()
        return queued

    def take_all(self) -> list[Item]:
        """Return and remove all items."""
        items = self.all()
        self._sent.clear()
        self.queue.clear()
        return items


class Totals(NamedTuple):
    """A journal's report of its contents."""

    num_entries: int = 0
    num_bytes: int = 0
    num_dropped: int = 0
    """Requests dropped for lack of memory."""


def answered(item: Item, found: Found | None) -> Ticket | None:
    """Answer a question. Return a ticket to close if a request was taken over for a task that no longer waits."""
    assert item.answer is not None, "a question has a future"
    if item.answer.set_running_or_notify_cancel():
        item.answer.set_result(found)
    elif item.kind == TAKE_OVER and found is not None:
        return Ticket(item.identity, found.fence, [], is_over=True, is_dropped=True)
    return None


def lost_and_unkept(
    fenced: list[Any], dropped: list[Any], *, tickets: dict[bytes, Ticket], items: list[Item]
) -> tuple[list[Ticket], list[Ticket]]:
    """Return the tickets that have another owner, and the tickets that are no longer kept.

    A request that the journal refuses to open is not kept: another replica continues the request of this identity.
    """
    lost, unkept = (_named(names, tickets, items=items) for names in (fenced, dropped))
    opened = {item.ticket for item in items if item.kind == OPEN}
    return [each for each in lost if each not in opened], unkept + [each for each in lost if each in opened]


def _named(names: list[Any], tickets: dict[bytes, Ticket], *, items: list[Item]) -> list[Ticket]:
    """Return the tickets with the named identities and fences; a later request may have the same identity."""
    wanted = [(identity, Fence(*fence)) for identity, *fence in names]
    known = [*(tickets.get(identity) for identity, _ in wanted), *(item.ticket for item in items if wanted)]
    running = dict.fromkeys(each for each in known if each is not None and not each.is_over)
    return [each for each in running if (each.identity, each.fence) in wanted]


def packed_operation(item: Item) -> list[Any]:
    """Return the journal's form of an operation item."""
    assert item.ticket is not None, "an operation is on a ticket"
    return operation(item.kind, item.ticket, records=item.ticket.records if item.kind == OPEN else item.pack())


def operation(kind: int, ticket: Ticket, *, records: list[bytes]) -> list[Any]:
    """Return an operation with a copy of the records: later operations of the same message may extend them."""
    return [kind, ticket.identity, *ticket.fence, list(records)]
