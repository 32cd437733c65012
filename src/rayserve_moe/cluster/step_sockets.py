"""Steps over one TCP connection per host: both ends block, nothing polls, and a step is one message each way.

A step is what a Ray actor call carries too, without what a call costs besides: on one machine a round trip takes some
0.1 ms where a call takes over 1 ms, and half the CPU time (ADR 0014). Ray still starts the workers, tells their
addresses, and carries everything that does not happen in every step.

Messages are pickled, so a connection begins with both ends proving that they know the key that the actor call which
opened it carried (`multiprocessing.connection`).
"""

from __future__ import annotations

import logging
import pickle
import secrets
import socket
import struct
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from threading import Thread
from typing import Self, cast

import ray
from ray.actor import ActorHandle

from rayserve_moe.scheduling.step_plan import StepPlan, StepResult

log = logging.getLogger(__name__)

KEY_BYTES = 32

Address = tuple[str, int]


class HostLostError(RuntimeError):
    """A host is gone, does not answer, or failed on a step."""


class Failed(str):
    """A worker's answer to a step that it failed on: the traceback."""


class Sockets:
    """A connection to every host. Nothing runs between steps, so idling costs nothing."""

    def __init__(self, addresses: Sequence[Address], *, key: bytes, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._connections = [_connect(address, key=key, timeout_s=timeout_s) for address in addresses]

    @classmethod
    def to(cls, workers: Sequence[ActorHandle], *, timeout_s: float) -> Self:
        """Connect to all `workers`, which begin to listen now. Ray's errors pass through."""
        key = secrets.token_bytes(KEY_BYTES)
        addresses = ray.get([worker.listen_for_steps.remote(key) for worker in workers], timeout=timeout_s)
        return cls(addresses, key=key, timeout_s=timeout_s)

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Hand a step to every host and wait for all; HostLostError names the one that is gone, late, or failed."""
        message = pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)
        for host_id, connection in enumerate(self._connections):
            with self._talking_to(host_id):
                connection.send_bytes(message)
        first, *_ = [self._answer(host_id) for host_id in range(len(self._connections))]
        return first

    def release(self) -> None:
        """A connection on which nothing travels costs nothing."""

    def _answer(self, host_id: int) -> StepResult | None:
        with self._talking_to(host_id):
            answer = pickle.loads(self._connections[host_id].recv_bytes())
        if isinstance(answer, Failed):
            raise HostLostError(f"host {host_id} failed: {answer}")
        return answer

    @contextmanager
    def _talking_to(self, host_id: int) -> Generator[None]:
        try:
            yield
        except BlockingIOError as error:
            raise HostLostError(f"host {host_id} has not answered within {self._timeout_s} s") from error
        except (OSError, EOFError) as error:
            raise HostLostError(f"host {host_id} is gone: {error!r}") from error


def listen_for_steps(execute: Callable[[StepPlan], StepResult | None], *, host: str, key: bytes) -> Address:
    """Begin to serve steps to whoever connects first and knows the `key`; returns where.

    `execute` is called in a thread of its own, for one plan after the other, until the other end closes.
    """
    listener = Listener((host, 0), authkey=key)
    Thread(target=_serve, args=(listener, execute), name="steps", daemon=True).start()
    return cast(Address, listener.address)


def _serve(listener: Listener, execute: Callable[[StepPlan], StepResult | None]) -> None:
    connection = _accepted(listener)
    _send_at_once(connection)
    with connection, suppress(EOFError, OSError):
        while True:
            plan = pickle.loads(connection.recv_bytes())
            try:
                answer: StepResult | Failed | None = execute(plan)
            except Exception:
                log.exception("step %d has failed", plan.step_id)
                answer = Failed(traceback.format_exc())
            connection.send_bytes(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))


def _accepted(listener: Listener) -> Connection:
    """Wait for the first who knows the key; all others are sent away."""
    with listener:
        while True:
            with suppress(AuthenticationError, EOFError, ConnectionError):
                return listener.accept()


def _connect(address: Address, *, key: bytes, timeout_s: float) -> Connection:
    connection = Client(address, authkey=key)
    _send_at_once(connection)
    wait = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1_000_000))
    with socket.socket(fileno=socket.dup(connection.fileno())) as handle:
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
    return connection


def _send_at_once(connection: Connection) -> None:
    """A message may go out in two writes, of which the second must not wait until the first is acknowledged."""
    with socket.socket(fileno=socket.dup(connection.fileno())) as handle:
        handle.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
