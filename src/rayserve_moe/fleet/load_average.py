"""The load of a replica as routers see it: an average over time, robust to bursts of short requests.

A report is outdated when a router uses it. For requests shorter than that delay the latest number is meaningless:
sixteen at one moment, none at the next. So a replica reports an average in which each moment weighs exp(-age /
`AVERAGED_S`); requests that a router has sent since then fill the missing weight. A running request is counted once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

AVERAGED_S = 0.3
"""The age in seconds at which a moment weighs 1 / e."""


class Load(NamedTuple):
    """A replica's load."""

    num_choices: float = 0.0
    """Choices in progress."""
    queued_tokens: float = 0.0
    """Prompt tokens still to be computed."""


class Report(NamedTuple):
    """A replica's report of its load."""

    load: Load = Load()
    """Average load."""
    num_requests: int = 0
    """Current number of requests."""


def kept_share(seconds: float) -> float:
    """Return the share of an average's weight that is left after a time."""
    return math.exp(-max(0.0, seconds) / AVERAGED_S)


class LoadAverage:
    """The average of a replica's load. Times are seconds of a single clock."""

    def __init__(self, now: float) -> None:
        self._at, self.load = now, Load()

    def add(self, load: Load, now: float) -> Load:
        """Add the load since the last call and return the average."""
        kept, self._at = kept_share(now - self._at), now
        self.load = Load(*(kept * before + (1 - kept) * new for before, new in zip(self.load, load, strict=True)))
        return self.load
