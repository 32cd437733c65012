"""A host says what it is doing, twice a second, from a thread and over a connection that nothing else uses."""

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
LEAST_STEP_LIMIT_S, TIMES_P99 = 5.0, 20.0
STEPS_KEPT, LEAST_STEPS = 512, 32
"""Steps whose times set the limit of the next, and how many there must be."""
STARTING, JOINING, LOADING, COMPILING, WARMING, SERVING, CHANGING = (
    *("starting", "joining", "loading", "compiling", "warming", "serving", "changing weights"),
)


class Beat(NamedTuple):
    """What a host does, for how many seconds, and for how many at most (0: without a limit of its own)."""

    phase: str
    step_id: int
    seconds: float
    limit_s: float


class Heartbeat:
    """What this host is doing. A step that takes much longer than steps do here is a hung device, which beats on."""

    def __init__(self) -> None:
        self._doing = (STARTING, -1)
        self._seconds = 0.0
        self._times: deque[float] = deque(maxlen=STEPS_KEPT)

    def enter(self, phase: str, step_id: int = -1) -> None:
        """Say what is done from now on; what is not a step in SERVING has no limit here."""
        self._doing, self._seconds = (phase, step_id), 0.0

    @contextmanager
    def step(self, step_id: int, *, phase: str = SERVING) -> Generator[None]:
        """While a step runs."""
        begun = time.perf_counter()
        self.enter(phase, step_id)
        try:
            yield
        finally:
            self.enter(SERVING)
            self._times.append(time.perf_counter() - begun)

    def limit_s(self) -> float:
        """Seconds that the present step may take, 0 for any."""
        phase, step_id = self._doing
        times = list(self._times)
        if phase != SERVING or step_id < 0 or len(times) < LEAST_STEPS:
            return 0.0
        return max(LEAST_STEP_LIMIT_S, TIMES_P99 * float(np.percentile(times, 99)))

    def beat(self, elapsed_s: float) -> Beat:
        """The next beat, `elapsed_s` after the last; a longer pause of the whole process counts as one beat."""
        before = self._doing
        self._seconds += min(elapsed_s, 2 * BEAT_S)
        beat = Beat(*before, self._seconds, self.limit_s())
        if self._doing is not before:
            self._seconds = 0.0
            return Beat(*self._doing, 0.0, 0.0)
        return beat

    def listen(self, *, host: str, key: bytes, timeout_s: float) -> Address:
        """Begin to beat to the first within `timeout_s` that knows the `key`; returns where it is to connect."""
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
                    time.sleep(BEAT_S)
        except OSError as error:
            log.info("the heartbeat ends: %s", error)


def read_beat(message: bytes) -> Beat:
    """The beat of a message. ValueError for anything else."""
    phase, step_id, seconds, limit_s = json.loads(message)
    if not math.isfinite(seconds + limit_s):
        raise ValueError("seconds are not finite")
    return Beat(str(phase), int(step_id), float(seconds), float(limit_s))
