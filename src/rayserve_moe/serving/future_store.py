"""Requests whose answers their clients fetch later, in bounded memory of this replica."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

ABANDONED_S = 120.0
"""Time without a question after which a running request is cancelled."""
KEPT_S = 600.0
"""Time for which an answer is kept."""
MAX_BYTES = 256 << 20


@dataclass
class StoredFuture:
    """A request that runs, or its outcome."""

    task: asyncio.Task[Any]
    asked_at: float
    """When its client last asked, by the monotonic clock."""
    num_bytes: int = 0
    """Size of the outcome, once it is there."""
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)


class FutureStore:
    """Requests by id. The oldest outcomes leave when the store exceeds `max_bytes`."""

    def __init__(self, *, max_bytes: int = MAX_BYTES, abandoned_s: float = ABANDONED_S, kept_s: float = KEPT_S) -> None:
        self._max_bytes, self._abandoned_s, self._kept_s = max_bytes, abandoned_s, kept_s
        self._num_bytes = 0
        self._futures: dict[str, StoredFuture] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._futures)

    def lock_of(self, request_id: str) -> asyncio.Lock:
        """Return the lock of an id, held between looking the id up and starting its request."""
        return self._locks.setdefault(request_id, asyncio.Lock())

    def start(self, request_id: str, work: Coroutine[Any, Any, Any], *, size_of: Callable[[Any], int]) -> None:
        """Run `work` in the background under an id that is not taken. Call on the event loop."""
        assert request_id not in self._futures, "an id names one request"
        stored = StoredFuture(asyncio.create_task(work), time.monotonic())
        self._futures[request_id] = stored
        stored.task.add_done_callback(lambda _: self._end(request_id, stored, size_of))
        self._watch(request_id, stored, self._abandoned_s)

    def get(self, request_id: str) -> asyncio.Task[Any] | None:
        """Return a request that its client asks for, or None if there is none, or none any more."""
        if (stored := self._futures.get(request_id)) is None:
            return None
        stored.asked_at = time.monotonic()
        return stored.task

    def drop(self, request_id: str) -> bool:
        """Forget a request, and cancel it if it runs; return False if there is none."""
        if (stored := self._futures.pop(request_id, None)) is None:
            return False
        self._num_bytes -= stored.num_bytes
        if stored.timer is not None:
            stored.timer.cancel()
        stored.task.cancel()
        return True

    def _end(self, request_id: str, stored: StoredFuture, size_of: Callable[[Any], int]) -> None:
        """Count the outcome; drop the oldest ones if the store is full."""
        if stored.task.cancelled() or self._futures.get(request_id) is not stored:
            return
        stored.num_bytes = 0 if stored.task.exception() else size_of(stored.task.result())
        self._num_bytes += stored.num_bytes
        ended = [name for name, each in self._futures.items() if each.task.done()]
        while self._num_bytes > self._max_bytes and ended:
            self.drop(ended.pop(0))
        if request_id in self._futures:
            self._watch(request_id, stored, self._kept_s)

    def _watch(self, request_id: str, stored: StoredFuture, seconds: float) -> None:
        """Drop a request `seconds` after its client last asked."""
        if stored.timer is not None:
            stored.timer.cancel()

        def check() -> None:
            left_s = stored.asked_at + seconds - time.monotonic()
            if left_s > 0:
                stored.timer = loop.call_later(left_s, check)
            else:
                self.drop(request_id)

        loop = asyncio.get_running_loop()
        stored.timer = loop.call_later(seconds, check)
