"""Where the seconds of something go that is done in phases."""

from __future__ import annotations

import time
from collections import defaultdict


class PhaseClock:
    """The present `phase`, and the `seconds` of those that have ended, by name. One thread enters, any may read."""

    def __init__(self) -> None:
        self.phase = ""
        self.seconds: dict[str, float] = defaultdict(float)
        self._since = time.monotonic()

    def enter(self, phase: str) -> None:
        """Begin a phase, which ends the one before."""
        now = time.monotonic()
        if self.phase not in ("", "serving"):
            self.seconds[self.phase] += now - self._since
        self.phase, self._since = phase, now
