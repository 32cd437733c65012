"""Queue of commands from other threads; the engine thread runs them between two steps, in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


class EngineStoppedError(RuntimeError):
    """The engine is shut down, has failed, or makes no progress."""


class CommandQueue:
    """Queue of commands for the engine thread. While a thread holds `lock`, no other thread can add commands."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._commands: deque[Callable[[], None]] = deque()
        self._calls: deque[Future] = deque()
        self._closed_because: str | None = None

    @property
    def is_closed(self) -> bool:
        return self._closed_because is not None

    def post(self, command: Callable[[], None]) -> None:
        """Queue a command."""
        with self.lock:
            self._commands.append(command)
            self._changed.notify()

    def call(self, command: Callable[[], Result]) -> Future[Result]:
        """Queue a command and return the future of its result.

        The future fails with EngineStoppedError if the engine stops first. If the command raises, the engine fails.
        """
        future: Future[Result] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(command())

        with self.lock:
            self.check_open()
            while self._calls and self._calls[0].done():
                self._calls.popleft()
            self._calls.append(future)
            self.post(run)
        return future

    def run_all(self) -> None:
        """Run all queued commands, in the engine thread."""
        while self._commands:
            self._commands.popleft()()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Sleep until a command is queued or the queue is closed; return False on timeout."""
        with self.lock:
            return self._changed.wait_for(lambda: bool(self._commands) or self.is_closed, timeout_s)

    def check_open(self) -> None:
        """Raise EngineStoppedError with the reason once the queue is closed."""
        if self._closed_because is not None:
            raise EngineStoppedError(self._closed_because)

    def close(self, reason: str) -> None:
        """Reject calls from now on. Only the first `reason` is kept."""
        with self.lock:
            self._closed_because = self._closed_because or reason
            self._changed.notify()

    def give_up(self) -> None:
        """Fail all pending calls with EngineStoppedError.

        Call once the queue is closed and the engine thread has ended.
        """
        with self.lock:
            for future in self._calls:
                if not future.done():
                    future.set_exception(EngineStoppedError(self._closed_because))
            self._calls.clear()
