"""Retries with exponential backoff, up to a deadline."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rayserve_moe.rollouts.answers import Faulty, Unavailable, Unusable

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 10.0
_Result = TypeVar("_Result")


async def with_retries(call: Callable[[], Awaitable[_Result]], *, give_up_s: float) -> _Result:
    """Call until it returns. Unusable once every call has failed for `give_up_s`."""
    started_s, backoff = time.monotonic(), Backoff()
    while True:
        try:
            return await call()
        except (Unavailable, Faulty) as error:
            check_deadline(started_s, error, give_up_s=give_up_s)
        await backoff.wait()


def check_deadline(since_s: float, error: Exception, *, give_up_s: float) -> None:
    """Raise Unusable where calls have failed since `since_s` of the monotonic clock, for longer than `give_up_s`."""
    if time.monotonic() - since_s > give_up_s:
        raise Unusable(f"no answer for {give_up_s:.0f} s; the last try: {error}") from error


class Backoff:
    """Waits that double, with jitter."""

    def __init__(self) -> None:
        self._next_s = FIRST_PAUSE_S

    async def wait(self, least_s: float = 0.0) -> None:
        """Wait for the next pause, at least `least_s`."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, LONGEST_PAUSE_S)
        await asyncio.sleep(max(least_s, pause_s * random.uniform(0.75, 1.25)))
