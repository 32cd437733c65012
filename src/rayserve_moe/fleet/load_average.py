"""What runs at a replica, as routers see it: an average, so that short requests that end together do not move others.

A report is old when it is used. Of requests that take no longer than that, the last number says nothing: sixteen at one
moment, none at the next. A replica reports an average instead, each moment weighted by e to the minus of its age over
`AVERAGED_S`; what a router has sent since weighs what is missing there. A request that still runs is counted once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

AVERAGED_S = 0.3
"""The age at which a moment weighs 1 / e."""


class Load(NamedTuple):
    """Choices in progress, and prompt tokens that are still to be computed."""

    num_choices: float = 0.0
    queued_tokens: float = 0.0


class Report(NamedTuple):
    """What a replica says of itself: its average load, and the requests that it has at this moment."""

    load: Load = Load()
    num_requests: int = 0


def kept_share(seconds: float) -> float:
    """The share of an average's weight that is left after a time."""
    return math.exp(-max(0.0, seconds) / AVERAGED_S)


class LoadAverage:
    """The average of a replica's load; times are of one clock, in seconds."""

    def __init__(self, now: float) -> None:
        self._at, self.load = now, Load()

    def add(self, load: Load, now: float) -> Load:
        """Count a load as that since the last call, and return the average."""
        kept, self._at = kept_share(now - self._at), now
        self.load = Load(*(kept * before + (1 - kept) * new for before, new in zip(self.load, load, strict=True)))
        return self.load
