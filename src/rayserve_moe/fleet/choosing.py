"""Replica selection by cost: prompt tokens that a replica would compute, times its load.

The product follows LMetric (arXiv 2603.15202): computing a prompt token delays everything that runs beside it.
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
"""Cost of an answer in prompt tokens; if a prompt is cached everywhere, load alone decides."""
IDLE_LOAD = 8
"""Load that does not slow a replica down: a step reads the weights once for few rows or many."""
QUEUE_TOKENS = 4096
"""Waiting prompt tokens that weigh as much as a running request."""
TIE_FACTOR = 1.01
"""Replicas within this factor of the minimum cost are tied; one is chosen at random."""


class Prompt(NamedTuple):
    """The prompt of a request as parsed by the router."""

    num_tokens: int = 0
    digests: Sequence[bytes] = ()
    """Digests of its full pages."""
    page_size: int = 1
    """Tokens per page."""
    num_choices: int = 1
    """Requested answers of all prompts."""
    num_requests: int = 1
    """Prompts in the body; the other fields describe the first."""


UNPARSED = Prompt()
"""Stands for a body that the router cannot parse."""


class Choosing:
    """The choices of a router, over an index that others fill. `clock` counts seconds."""

    def __init__(self, index: PrefixIndex, *, draw: random.Random, clock: Callable[[], float]) -> None:
        self._index, self._draw, self._clock = index, draw, clock
        self._loads: dict[str, Load] = {}
        self.bookings, self.places = Bookings(), Places()

    def report(self, replica_id: str, report: Report) -> None:
        """Record a replica's report."""
        self._loads[replica_id] = report.load
        self.places.report(replica_id, report.num_requests)

    def forget(self, replica_id: str) -> None:
        """Forget load, capacity and bookings of a replica that is gone."""
        self._loads.pop(replica_id, None)
        self.places.forget(replica_id)
        self.bookings.forget(replica_id)

    def choose(self, prompt: Prompt, replica_ids: Sequence[str]) -> str:
        """Return a replica for the prompt and book the request there. `replica_ids` is not empty.

        Full replicas are skipped; if none has capacity for all requests, the replicas with the maximum are used.
        """
        now = self._clock()
        free = {name: self.places.num_free(name, now=now) for name in replica_ids}
        needed = min(prompt.num_requests, max(free.values()))
        new = {name: prompt.num_tokens - self.num_cached(name, prompt) for name in replica_ids if free[name] >= needed}
        costs = {name: (tokens + ANSWER_TOKENS) * self._load(name, now) for name, tokens in new.items()}
        min_cost = min(costs.values())
        replica_id = self._draw.choice([name for name, cost in costs.items() if cost <= min_cost * TIE_FACTOR])
        self.bookings.add(replica_id, prompt.digests, load=Load(prompt.num_choices, new[replica_id]), now=now)
        self.places.send(replica_id, prompt.num_requests, now=now)
        return replica_id

    def num_cached(self, replica_id: str, prompt: Prompt) -> int:
        """Return the prompt tokens that a replica need not compute, according to its events and to bookings."""
        held = self._index.num_cached_pages(replica_id, prompt.digests)
        booked = self.bookings.num_pages(replica_id, prompt.digests, now=self._clock())
        return max(held, booked) * prompt.page_size

    def _load(self, replica_id: str, now: float) -> float:
        reported, sent = self._loads.get(replica_id, Load()), self.bookings.load(replica_id, now=now)
        num_choices, queued_tokens = map(sum, zip(reported, sent, strict=True))
        return IDLE_LOAD + num_choices + queued_tokens / QUEUE_TOKENS


PAGES_BOOKED_S = 5.0
"""Seconds for which a sent prompt counts as cached at its replica, whether or not its pages are reported."""
MAX_BOOKED_PAGES = 1 << 19
"""Maximum number of booked pages of all replicas."""


@dataclass(frozen=True)
class _Sent:
    at: float
    replica_id: str
    digests: tuple[bytes, ...]


class Bookings:
    """Requests in flight between a router and its replicas: expected cache entries, and unreported load.

    Times are seconds of a single clock. Memory is bounded; the oldest booking is dropped first.
    """

    def __init__(self) -> None:
        self._sent: deque[_Sent] = deque()
        self._pages: defaultdict[str, Counter[bytes]] = defaultdict(Counter)
        self._num_pages = 0
        self._load: dict[str, tuple[float, Load]] = {}

    def add(self, replica_id: str, digests: Sequence[bytes], *, load: Load, now: float) -> None:
        """Record a request that was sent to a replica, with the pages of its prompt and its load."""
        booked = self.load(replica_id, now=now)
        self._load[replica_id] = now, Load(*map(sum, zip(booked, load, strict=True)))
        if digests:
            self._sent.append(_Sent(now, replica_id, tuple(digests)))
            self._pages[replica_id].update(digests)
            self._num_pages += len(digests)
        self._expire(now)

    def forget(self, replica_id: str) -> None:
        """Drop the bookings of a replica that is gone."""
        self._pages.pop(replica_id, None)
        self._load.pop(replica_id, None)

    def load(self, replica_id: str, *, now: float) -> Load:
        """Return the load sent to a replica that its reported average does not include yet."""
        at, booked = self._load.get(replica_id, (now, Load()))
        return Load(*(kept_share(now - at) * each for each in booked))

    def num_pages(self, replica_id: str, digests: Sequence[bytes], *, now: float) -> int:
        """Return the number of pages at the start of a prompt that are booked at a replica."""
        self._expire(now)
        pages = self._pages.get(replica_id)
        return 0 if not pages else bisect_left(range(len(digests)), True, key=lambda index: digests[index] not in pages)

    def __len__(self) -> int:
        return self._num_pages

    def _expire(self, now: float) -> None:
        while self._sent and (self._sent[0].at <= now - PAGES_BOOKED_S or self._num_pages > MAX_BOOKED_PAGES):
            oldest = self._sent.popleft()
            self._num_pages -= len(oldest.digests)
            pages = self._pages.get(oldest.replica_id)
            if pages is not None:
                pages.subtract(oldest.digests)
                for digest in oldest.digests:
                    if pages[digest] <= 0:
                        del pages[digest]


REPORTED_WITHIN_S = 0.2
"""A replica reports a changed number of requests within this time: twice the interval of its reports."""


class Places:
    """Request capacity of the replicas of a router. Times are seconds of a single clock.

    A replica without a limit or a report has infinite capacity.
    """

    def __init__(self) -> None:
        self._max_requests: dict[str, int] = {}
        self._taken: dict[str, int] = {}
        self._sent: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)

    def limit(self, replica_id: str, max_requests: int | None) -> None:
        """Record the maximum number of concurrent requests of a replica; None leaves it unchanged."""
        if max_requests is not None:
            self._max_requests[replica_id] = max_requests

    def report(self, replica_id: str, num_requests: int) -> None:
        """Record the number of requests that a replica has, including all that were sent to it."""
        self._taken[replica_id] = num_requests
        self._sent.pop(replica_id, None)

    def send(self, replica_id: str, num_requests: int, *, now: float) -> None:
        """Record that requests are sent to a replica."""
        self._sent[replica_id] = [*self._recent(replica_id, now), (now, num_requests)]

    def lose(self, replica_id: str) -> None:
        """Forget the report of a replica that sends no further reports."""
        self._taken.pop(replica_id, None)

    def forget(self, replica_id: str) -> None:
        """Forget a replica that is gone."""
        for known in (self._max_requests, self._taken, self._sent):
            known.pop(replica_id, None)

    def num_free(self, replica_id: str, *, now: float) -> float:
        """Return the number of further requests that a replica accepts; infinite if it is not known."""
        max_requests, taken = self._max_requests.get(replica_id), self._taken.get(replica_id)
        if max_requests is None or taken is None:
            return math.inf
        return max_requests - taken - sum(number for _, number in self._recent(replica_id, now))

    def _recent(self, replica_id: str, now: float) -> list[tuple[float, int]]:
        """Return sent requests that the last report may not include. Older ones have ended or used no capacity."""
        return [(at, number) for at, number in self._sent.get(replica_id, ()) if at > now - REPORTED_WITHIN_S]
