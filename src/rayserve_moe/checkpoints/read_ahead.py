"""Pieces of tensors read before they are taken, many at once, with a bounded number of bytes in flight."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Generic, Self, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class ReadAhead(Generic[Key, Value]):
    """Reads keys in their order on `num_threads` threads; `take` returns what was read, from any thread.

    Keys are taken about in that order, as often as they are listed. Read but not taken are `most_bytes` at most, and
    one key. Leave the context to end it: what is not being read then never is.
    """

    def __init__(
        self,
        read: Callable[[Key], Value],
        keys: Iterable[tuple[Key, int]],
        *,
        num_threads: int,
        most_bytes: int,
    ) -> None:
        self._read, self._keys, self._most_bytes = read, iter(keys), most_bytes
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="read-ahead")
        self._begun: dict[Key, deque[tuple[Future[Value], int]]] = defaultdict(deque)
        self._changed = threading.Condition()
        self._num_bytes = 0
        self.most_bytes_seen = 0

    def take(self, key: Key) -> Value:
        """What was read for a key; waits for it, and raises what its reading raised."""
        with self._changed:
            while not self._begun[key]:
                self._begin_more(at_least_one=True)
            future, num_bytes = self._begun[key].popleft()
        try:
            return future.result()
        finally:
            with self._changed:
                self._num_bytes -= num_bytes
                self._begin_more()

    def _begin_more(self, *, at_least_one: bool = False) -> None:
        """Begin what the bound allows; the lock is held. KeyError where nothing is left and one more is needed."""
        while self._num_bytes < self._most_bytes or at_least_one:
            key, num_bytes = next(self._keys, (None, 0))
            if key is None:
                if at_least_one:
                    raise KeyError("a piece that was not listed")
                return
            at_least_one = False
            self._num_bytes += num_bytes
            self.most_bytes_seen = max(self.most_bytes_seen, self._num_bytes)
            self._begun[key].append((self._pool.submit(self._read, key), num_bytes))

    def __enter__(self) -> Self:
        with self._changed, ExitStack() as undo:
            undo.callback(self._pool.shutdown, cancel_futures=True)
            self._begin_more()
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
