"""Asking again: how long to wait between tries, and for how long to try."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rayserve_moe.rollouts.answers import Faulty, Unavailable, Unusable

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 10.0
_Result = TypeVar("_Result")


async def patiently(call: Callable[[], Awaitable[_Result]], *, give_up_s: float) -> _Result:
    """Call until it is answered. Unusable once nothing was for so long."""
    started, pause = time.monotonic(), Pause()
    while True:
        try:
            return await call()
        except (Unavailable, Faulty) as error:
            check_patience(started, error, give_up_s=give_up_s)
        await pause.wait()


def check_patience(since_s: float, error: Exception, *, give_up_s: float) -> None:
    """Raise Unusable where nobody has answered since `since_s` of the monotonic clock, which is too long."""
    if time.monotonic() - since_s > give_up_s:
        raise Unusable(f"no answer for {give_up_s:.0f} s; the last try: {error}") from error


class Pause:
    """Waits that double, by chance a little more or less."""

    def __init__(self) -> None:
        self._next_s = FIRST_PAUSE_S

    async def wait(self, least_s: float = 0.0) -> None:
        """Wait, at least for so long."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, LONGEST_PAUSE_S)
        await asyncio.sleep(max(least_s, pause_s * random.uniform(0.75, 1.25)))
