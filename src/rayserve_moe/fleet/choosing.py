"""Chooses a replica for a request: prompt tokens that it would compute there, times what runs there already.

As LMetric (arXiv 2603.15202) multiplies them: a prompt token that is computed delays everything that runs beside it.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rayserve_moe.fleet.load_average import Load, Report, kept_share
from rayserve_moe.fleet.prefix_index import PrefixIndex

ANSWER_TOKENS = 256
"""What an answer costs a replica, in prompt tokens: where a prompt is cached everywhere, load alone decides."""
IDLE_LOAD = 8
"""Running requests that cost the others about nothing: a step reads its weights for few rows and for many."""
QUEUE_TOKENS = 4096
"""So many prompt tokens that wait weigh as one more running request."""
NEARLY = 1.01
"""Costs within this factor of the least are equal: one of them is drawn."""


class Prompt(NamedTuple):
    """The prompt of a request, as far as a router understands it: tokens, and the digests of its whole pages.

    `num_choices` are the answers that it is asked for, of `num_requests` prompts, of which the first one is described.
    """

    num_tokens: int = 0
    digests: Sequence[bytes] = ()
    page_size: int = 1
    num_choices: int = 1
    num_requests: int = 1


UNKNOWN = Prompt()
"""Of a body that is not understood."""


class Choosing:
    """One router's choices, over an index that others fill. `clock` is in seconds."""

    def __init__(self, index: PrefixIndex, *, draw: random.Random, clock: Callable[[], float]) -> None:
        self._index, self._draw, self._clock = index, draw, clock
        self._loads: dict[str, Load] = {}
        self.bookings, self.places = Bookings(), Places()

    def report(self, replica_id: str, report: Report) -> None:
        """Note what a replica says as of now."""
        self._loads[replica_id] = report.load
        self.places.report(replica_id, report.num_requests)

    def forget(self, replica_id: str) -> None:
        """Forget load, places and bookings of a replica that is gone."""
        self._loads.pop(replica_id, None)
        self.places.forget(replica_id)
        self.bookings.forget(replica_id)

    def choose(self, prompt: Prompt, replica_ids: Sequence[str]) -> str:
        """Return one of the replicas, of which there are some, and book the request there.

        One that is full would refuse it: where all are, it goes where the most places are.
        """
        now = self._clock()
        free = {name: self.places.num_free(name, now=now) for name in replica_ids}
        needed = min(prompt.num_requests, max(free.values()))
        new = {name: prompt.num_tokens - self.num_cached(name, prompt) for name in replica_ids if free[name] >= needed}
        costs = {name: (tokens + ANSWER_TOKENS) * self._load(name, now) for name, tokens in new.items()}
        least = min(costs.values())
        chosen = self._draw.choice([name for name, cost in costs.items() if cost <= least * NEARLY])
        self.bookings.add(chosen, prompt.digests, load=Load(prompt.num_choices, new[chosen]), now=now)
        self.places.send(chosen, prompt.num_requests, now=now)
        return chosen

    def num_cached(self, replica_id: str, prompt: Prompt) -> int:
        """Tokens of a prompt that a replica need not compute, by events and bookings."""
        held = self._index.num_cached_pages(replica_id, prompt.digests)
        booked = self.bookings.num_pages(replica_id, prompt.digests, now=self._clock())
        return max(held, booked) * prompt.page_size

    def _load(self, replica_id: str, now: float) -> float:
        reported, sent = self._loads.get(replica_id, Load()), self.bookings.load(replica_id, now=now)
        num_choices, queued_tokens = map(sum, zip(reported, sent, strict=True))
        return IDLE_LOAD + num_choices + queued_tokens / QUEUE_TOKENS


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


REPORTED_WITHIN_S = 0.2
"""A replica whose number of requests has changed says so within this time: twice the interval of its reports."""


class Places:
    """Places of the replicas of one router. Times are of one clock, in seconds.

    What is not known to be full is not: a replica without a limit or a report has places without end.
    """

    def __init__(self) -> None:
        self._most: dict[str, int] = {}
        self._taken: dict[str, int] = {}
        self._sent: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)

    def limit(self, replica_id: str, most_requests: int | None) -> None:
        """Note how many requests a replica takes at once, if it says so."""
        if most_requests is not None:
            self._most[replica_id] = most_requests

    def report(self, replica_id: str, num_requests: int) -> None:
        """Note how many requests a replica has, those included that were sent to it."""
        self._taken[replica_id] = num_requests
        self._sent.pop(replica_id, None)

    def send(self, replica_id: str, num_requests: int, *, now: float) -> None:
        """Note that requests are sent to a replica."""
        self._sent[replica_id] = [*self._recent(replica_id, now), (now, num_requests)]

    def lose(self, replica_id: str) -> None:
        """Forget the report of a replica that sends no others."""
        self._taken.pop(replica_id, None)

    def forget(self, replica_id: str) -> None:
        """Forget a replica that is gone."""
        for known in (self._most, self._taken, self._sent):
            known.pop(replica_id, None)

    def num_free(self, replica_id: str, *, now: float) -> float:
        """Requests that a replica takes yet; infinite where that is not known."""
        most, taken = self._most.get(replica_id), self._taken.get(replica_id)
        if most is None or taken is None:
            return math.inf
        return most - taken - sum(number for _, number in self._recent(replica_id, now))

    def _recent(self, replica_id: str, now: float) -> list[tuple[float, int]]:
        """What may be missing in the last report. What is older and was not reported has ended, or taken no place."""
        return [(at, number) for at, number in self._sent.get(replica_id, ()) if at > now - REPORTED_WITHIN_S]
