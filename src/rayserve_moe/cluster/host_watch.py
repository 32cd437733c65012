"""Listens to the heartbeats of a group of hosts, and notices one that ended, is silent, or hangs in what it does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import cast

from rayserve_moe.cluster.handshake import connect_proven
from rayserve_moe.cluster.heartbeat import JOINING, SERVING, Beat, read_beat
from rayserve_moe.cluster.step_sockets import Address

SILENCE_S, SILENCE_AT_START_S = 3.0, 30.0
"""Longest silence of a host that serves, and of one that starts: a thread that compiles may keep all others waiting."""
POLL_S = 0.25
OWN_DELAY_S = 1.0
"""From here on it is this process that was late, and what it has not heard counts against no host."""
PHASE_LIMITS_S = {JOINING: 60.0}
"""Longest times of phases in which nothing but another host is waited for. A long compilation is no fault."""
CONNECT_S = 10.0


class HostWatch:
    """Calls `on_loss` once, from its thread, with what is wrong with a host; `loss` is the same."""

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        key: bytes,
        on_loss: Callable[[str], object],
        limits_s: Mapping[str, float] = PHASE_LIMITS_S,
    ) -> None:
        self.loss: str | None = None
        self._on_loss, self._limits_s = on_loss, limits_s
        deadline = time.monotonic() + CONNECT_S
        self._hosts = {
            Connection(connect_proven(address, key=key, deadline=deadline).detach()): host_id
            for host_id, address in enumerate(addresses)
        }
        self._silence_s = dict.fromkeys(self._hosts, SILENCE_AT_START_S)
        self._found, self._is_closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="host-watch", daemon=True)
        self._thread.start()

    def await_loss(self, timeout_s: float) -> str | None:
        """What is wrong with a host, as soon as it is known, or None after `timeout_s`."""
        self._found.wait(timeout_s)
        return self.loss

    def close(self) -> None:
        """Notice nothing from now on. May be called twice."""
        self._is_closed.set()

    def _run(self) -> None:
        heard_at = dict.fromkeys(self._hosts, time.monotonic())
        last = time.monotonic()
        loss = None
        while loss is None and not self._is_closed.is_set():
            ready = wait(list(self._hosts), timeout=POLL_S)
            now = time.monotonic()
            if now - last > OWN_DELAY_S:
                heard_at = {connection: at + now - last for connection, at in heard_at.items()}
            last = now
            for connection in ready:
                heard_at[cast(Connection, connection)] = now
                loss = loss or self._heard(cast(Connection, connection))
            silent = [each for each, at in heard_at.items() if now - at > self._silence_s[each]]
            if silent and loss is None:
                loss = f"host {self._hosts[silent[0]]} has been silent for {self._silence_s[silent[0]]:g} s"
        for connection in self._hosts:
            with suppress(OSError):
                connection.close()
        if loss is not None and not self._is_closed.is_set():
            self.loss = loss
            self._on_loss(loss)
            self._found.set()

    def _heard(self, connection: Connection) -> str | None:
        """Read a beat; returns what is wrong, if anything."""
        host_id = self._hosts[connection]
        try:
            beat = read_beat(connection.recv_bytes())
        except (OSError, EOFError, ValueError, TypeError):
            return f"the process of host {host_id} has ended"
        self._silence_s[connection] = SILENCE_S if beat.phase == SERVING else SILENCE_AT_START_S
        return self._complaint(host_id, beat)

    def _complaint(self, host_id: int, beat: Beat) -> str | None:
        limit_s = beat.limit_s or self._limits_s.get(beat.phase, 0.0)
        if not limit_s or beat.seconds <= limit_s:
            return None
        what = f"step {beat.step_id}" if beat.step_id >= 0 else beat.phase
        return f"host {host_id} hangs in {what}: {beat.seconds:.1f} s of {limit_s:.1f}"
