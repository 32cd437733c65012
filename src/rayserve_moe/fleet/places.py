"""How many more requests replicas take, as far as one router knows: by their last reports, and what was sent since."""

from __future__ import annotations

import math
from collections import defaultdict

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
