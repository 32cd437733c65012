"""Worker processes that have loaded their libraries and wait to take the place of lost ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

DELAY_S = 3.0
"""From serving to starting them: the first steps of a new group recompute what running requests had, and need the
cores."""
ANSWER_S = 2.0


class Standbys:
    """One per host, started in a thread of its own a while after a group serves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, ActorHandle] = {}
        self._timer: threading.Timer | None = None

    def start_soon(self, starters: Mapping[int, Callable[[], ActorHandle]], *, delay_s: float = DELAY_S) -> None:
        """Call the starters, by host, after a while, unless standbys are taken or ended first."""
        self._timer = threading.Timer(delay_s, self._start, (starters,))
        self._timer.daemon = True
        self._timer.start()

    def take(self) -> dict[int, ActorHandle]:
        """Those that answer, by host; they are no longer waiting."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            waiting, self._waiting = self._waiting, {}
        return {host_id: worker for host_id, worker in waiting.items() if _answers(worker)}

    def end(self) -> None:
        """End all that wait."""
        for worker in self.take().values():
            ray.kill(worker)

    def _start(self, starters: Mapping[int, Callable[[], ActorHandle]]) -> None:
        with self._lock, suppress(RayError):
            if self._timer is threading.current_thread():
                self._waiting = {host_id: start() for host_id, start in starters.items()}


def _answers(worker: ActorHandle) -> bool:
    try:
        ray.get(worker.process.remote(), timeout=ANSWER_S)
    except RayError:
        ray.kill(worker)
        return False
    return True
