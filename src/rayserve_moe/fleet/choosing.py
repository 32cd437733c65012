"""Chooses a replica for a request: prompt tokens that it would compute there, times what runs there already.

As LMetric (arXiv 2603.15202) multiplies them: a prompt token that is computed delays everything that runs beside it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rayserve_moe.fleet.bookings import Bookings
from rayserve_moe.fleet.load_average import Load, Report
from rayserve_moe.fleet.places import Places
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
