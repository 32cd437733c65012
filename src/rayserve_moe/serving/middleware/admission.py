"""Threads that parse request bodies and tokenize prompts, with bounds on memory and queued work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from starlette.types import Receive

from rayserve_moe.serving.api.answers.streaming import while_connected
from rayserve_moe.serving.errors import ApiError

INLINE_BYTES = 16384
"""Maximum size of a body parsed on the event loop: a thread would take as long."""
SHORT_BYTES = 65536
"""Maximum size of work on the threads for short work, which never waits behind long work."""
MAX_WAITING = 1024
"""Maximum queued long work before further work is rejected."""
_THREADS = 2

Result = TypeVar("Result")
Work = Callable[[threading.Event], Result]
"""Runs on a thread; the event is set when the caller no longer waits for the result."""


class Admission:
    """Threads for short and for long work, and a bound on the bytes of bodies and prompts in memory."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = self._num_long = 0
        self._short, self._long = (
            ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix=f"admission-{name}")
            for name in ("short", "long")
        )

    @contextmanager
    def holding(self, num_bytes: int) -> Generator[None]:
        """Count bytes as in memory within the block; a single request is always admitted.

        Raises: ApiError 429 if the bound is exceeded.
        """
        if self._num_bytes and self._num_bytes + num_bytes > self._max_bytes:
            raise _too_much()
        self._num_bytes += num_bytes
        try:
            yield
        finally:
            self._num_bytes -= num_bytes

    async def run(self, work: Work[Result], *, size: int, receive: Receive) -> Result:
        """Run `work` on about `size` bytes on a thread.

        Raises: ApiError 429 if the queue is full. ClientDisconnect once the client has disconnected; queued work is
        dropped, and running work has its event set.
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
    is_cancelled = threading.Event()
    try:
        return await asyncio.get_running_loop().run_in_executor(threads, work, is_cancelled)
    finally:
        is_cancelled.set()


def _too_much() -> ApiError:
    return ApiError(429, "the server is busy: too many long requests are being read", code="intake_full")
