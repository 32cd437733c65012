"""When a replica that Serve stops hands its requests over to others, instead of being killed with them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.fleet.member import GONE

log = logging.getLogger(__name__)
BEFORE_END_S = 5.0
"""From handing over what is left to the end of the time that Serve waits for a replica."""


@dataclass
class Leaving:
    """Has the replica `name` call `hand_over`, which returns how many requests it was for, again with every `look`."""

    name: str
    hand_over: Callable[[], int]
    server: ServerSettings
    clock: Callable[[], float] = time.monotonic
    _since: float | None = None

    def look(self, listed: Mapping[str, str]) -> None:
        """Look at the replicas that Serve lists, with their states, whether it is time."""
        if listed.get(self.name) not in GONE:
            return
        now = self.clock()
        self._since = now if self._since is None else self._since
        waits_s = self.server.drain_timeout_s - BEFORE_END_S
        if any(state == "RUNNING" for name, state in listed.items() if name != self.name):
            waits_s = min(waits_s, self.server.hand_over_after_s)
        if now - self._since >= waits_s and (number := self.hand_over()):
            log.warning("this replica ends: %d requests were handed over to whoever resumes them", number)
