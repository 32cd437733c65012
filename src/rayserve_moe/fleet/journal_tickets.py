"""What a replica's side of the journal keeps of its requests: their tickets, and what is to be sent of them."""

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
class Item:
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


class Unanswered:
    """Items that wait to be sent, and those that were sent and not answered yet, by the number of their message."""

    def __init__(self) -> None:
        self.queue: deque[Item] = deque()
        self._sent: dict[int, list[Item]] = {}
        self._number = 0

    def send(self, items: list[Item]) -> int:
        """Note that items go with the next message; return its number."""
        self._number += 1
        self._sent[self._number] = items
        return self._number

    def answer(self, number: int) -> list[Item]:
        """Return the items of a message that was answered, once."""
        return self._sent.pop(number, [])

    def all(self) -> list[Item]:
        """Return all items, the oldest first."""
        return [item for items in self._sent.values() for item in items] + list(self.queue)

    def take_queued(self) -> list[Item]:
        """Return the items that were not sent, and keep none of them."""
        queued = list(self.queue)
        self.queue.clear()
        return queued

    def take_all(self) -> list[Item]:
        """Return all items, and keep none of them."""
        items = self.all()
        self._sent.clear()
        self.queue.clear()
        return items


class Totals(NamedTuple):
    """What a journal says that it keeps, and how many requests it had to drop."""

    num_entries: int = 0
    num_bytes: int = 0
    num_dropped: int = 0


def answered(item: Item, found: Found | None) -> Ticket | None:
    """Answer a question; returns the ticket of what was taken over for a task that has gone, to be closed."""
    assert item.answer is not None, "a question has a future"
    if item.answer.set_running_or_notify_cancel():
        item.answer.set_result(found)
    elif item.kind == TAKE_OVER and found is not None:
        return Ticket(item.identity, found.fence, [], is_over=True, is_dropped=True)
    return None


def lost_and_unkept(
    fenced: list[Any], dropped: list[Any], *, tickets: dict[bytes, Ticket], items: list[Item]
) -> tuple[list[Ticket], list[Ticket]]:
    """The tickets that have another owner, and those that are not kept.

    What a journal refuses to open is not kept: another replica has gone on with a request of this name.
    """
    lost, unkept = (_named(names, tickets, items=items) for names in (fenced, dropped))
    opened = {item.ticket for item in items if item.kind == OPEN}
    return [each for each in lost if each not in opened], unkept + [each for each in lost if each in opened]


def _named(names: list[Any], tickets: dict[bytes, Ticket], *, items: list[Item]) -> list[Ticket]:
    """The tickets that a journal names by identity and fence: another of that identity may have begun meanwhile."""
    wanted = [(identity, Fence(*fence)) for identity, *fence in names]
    known = [*(tickets.get(identity) for identity, _ in wanted), *(item.ticket for item in items if wanted)]
    running = dict.fromkeys(each for each in known if each is not None and not each.is_over)
    return [each for each in running if (each.identity, each.fence) in wanted]


def packed_operation(item: Item) -> list[Any]:
    """An item that is no question as the journal gets it."""
    assert item.ticket is not None, "an operation is on a ticket"
    return operation(item.kind, item.ticket, records=item.ticket.records if item.kind == OPEN else item.pack())


def operation(kind: int, ticket: Ticket, *, records: list[bytes]) -> list[Any]:
    """An operation with records as they are now: others may follow in the same message."""
    return [kind, ticket.identity, *ticket.fence, list(records)]
