"""Heartbeats of a host: its phase, sent by a separate thread and connection, twice a second and at a change."""

from __future__ import annotations

import json
import logging
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple, cast

import numpy as np

from rayserve_moe.cluster.channel import Address, accept_proven

log = logging.getLogger(__name__)

BEAT_S = 0.5
MIN_STEP_LIMIT_S, TIMES_P99 = 5.0, 20.0
STEPS_KEPT, MIN_STEPS = 512, 32
"""Steps whose times set the limit of the next step, and the minimum number of them."""
STARTING, JOINING, LOADING, COMPILING, WARMING, SERVING, CHANGING = (
    *("starting", "joining", "loading", "compiling", "warming", "serving", "changing weights"),
)


class Beat(NamedTuple):
    """A host's current activity."""

    phase: str
    step_id: int
    """-1 outside of steps."""
    seconds: float
    """Time spent in the phase or step until now."""
    limit_s: float
    """Maximum of `seconds`; 0: no limit of its own."""


class Heartbeat:
    """The heartbeat of this host. A hung device keeps beating, but its step exceeds the limit that past steps set."""

    def __init__(self) -> None:
        self._doing = (STARTING, -1)
        self._seconds = 0.0
        self._times: deque[float] = deque(maxlen=STEPS_KEPT)
        self._is_due = threading.Event()
        """Set by a change of phase: the limit of silence depends on it."""

    def enter(self, phase: str, step_id: int = -1) -> None:
        """Record the current phase and step. Only a step in SERVING gets a limit."""
        before = self._doing[0]
        self._doing, self._seconds = (phase, step_id), 0.0
        if phase != before:
            self._is_due.set()

    @contextmanager
    def step(self, step_id: int, *, phase: str = SERVING) -> Generator[None]:
        """Record a step for the duration of the block, and its time at the end."""
        begun = time.perf_counter()
        self.enter(phase, step_id)
        try:
            yield
        finally:
            self.enter(SERVING)
            self._times.append(time.perf_counter() - begun)

    def limit_s(self) -> float:
        """Return the maximum seconds of the current step, 0 for no limit."""
        phase, step_id = self._doing
        times = list(self._times)
        if phase != SERVING or step_id < 0 or len(times) < MIN_STEPS:
            return 0.0
        return max(MIN_STEP_LIMIT_S, TIMES_P99 * float(np.percentile(times, 99)))

    def beat(self, elapsed_s: float) -> Beat:
        """Return the next beat, `elapsed_s` after the last; a longer pause of the whole process counts as two
        intervals.
        """
        before = self._doing
        self._seconds += min(elapsed_s, 2 * BEAT_S)
        beat = Beat(*before, self._seconds, self.limit_s())
        if self._doing is not before:
            self._seconds = 0.0
            return Beat(*self._doing, 0.0, 0.0)
        return beat

    def listen(self, *, host: str, key: bytes, timeout_s: float) -> Address:
        """Start beating to the first peer that proves `key` within `timeout_s`; return the address to connect to."""
        listener = socket.create_server((host, 0))
        arguments = (listener, key, timeout_s)
        threading.Thread(target=self._serve, args=arguments, name="heartbeat", daemon=True).start()
        return cast(Address, listener.getsockname())

    def _serve(self, listener: socket.socket, key: bytes, timeout_s: float) -> None:
        try:
            with listener:
                channel = accept_proven(listener, key=key, timeout_s=timeout_s)
            with channel:
                last = time.monotonic()
                while True:
                    now = time.monotonic()
                    channel.send(json.dumps(self.beat(now - last)).encode())
                    last = now
                    self._is_due.wait(BEAT_S)
                    self._is_due.clear()
        except OSError as error:
            log.info("the heartbeat has ended: %s", error)


def read_beat(message: bytes) -> Beat:
    """Parse a beat message. Raises ValueError if it is malformed."""
    phase, step_id, seconds, limit_s = json.loads(message)
    if not math.isfinite(seconds + limit_s):
        raise ValueError("seconds are not finite")
    return Beat(str(phase), int(step_id), float(seconds), float(limit_s))
