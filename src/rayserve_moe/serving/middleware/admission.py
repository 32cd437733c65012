"""Where request bodies and prompts are made ready for the engine: on threads, with a bound on what waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from starlette.types import Receive

from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.responses.streaming import while_connected

INLINE_BYTES = 16384
"""Bodies up to here are parsed on the event loop: that takes no longer than handing them over."""
SHORT_BYTES = 65536
"""Work up to here has threads of its own, so that it does not wait behind what is long."""
MAX_WAITING = 1024
"""Pieces of work that wait for the threads of long work before more is refused."""
_THREADS = 2

Result = TypeVar("Result")
Work = Callable[[threading.Event], Result]
"""Runs on a thread; once the event is set nobody waits for its result any more."""


class Intake:
    """Threads for short and for long work, and the bytes of all bodies and prompts on their way to the engine."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = self._num_long = 0
        self._short, self._long = (
            ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix=f"intake-{name}") for name in ("short", "long")
        )

    @contextmanager
    def holding(self, num_bytes: int) -> Generator[None]:
        """Count bytes that are kept meanwhile. ApiError 429 where there are too many; one request alone always may."""
        if self._num_bytes and self._num_bytes + num_bytes > self._max_bytes:
            raise _too_much()
        self._num_bytes += num_bytes
        try:
            yield
        finally:
            self._num_bytes -= num_bytes

    async def run(self, work: Work[Result], *, size: int, receive: Receive) -> Result:
        """Run `work` on about `size` bytes on a thread.

        Once the client has left it is dropped, where it still waits, and told by its event otherwise: ClientDisconnect.
        ApiError 429 where too much waits already.
        """
        if size <= SHORT_BYTES:
            return await while_connected(receive, _result_of(self._short, work))
        if self._num_long >= MAX_WAITING:
            raise _too_much()
        self._num_long += 1
        try:
            return await while_connected(receive, _result_of(self._long, work))
        finally:
            self._num_long -= 1


async def _result_of(threads: ThreadPoolExecutor, work: Work[Result]) -> Result:
    given_up = threading.Event()
    try:
        return await asyncio.get_running_loop().run_in_executor(threads, work, given_up)
    finally:
        given_up.set()


def _too_much() -> ApiError:
    return ApiError(429, "the server is busy: too many long requests are being read", code="intake_full")
