"""Steps over one TCP connection per host: both ends block, nothing polls, and a step is one message each way.

An actor call carries the same, for seven times as long and with four times the CPU time (ADR 0014). Ray still starts
the workers, passes their addresses, and carries everything that is not part of every step.

Messages are pickles without what both ends know: most of a plain pickle of a plan are names of fields and empty parts,
which take two thirds of the time to write and to read. So a connection begins with both ends proving that they know the
key that the actor call which opened it carried (`channel`).
"""

from __future__ import annotations

import io
import logging
import pickle
import secrets
import socket
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from operator import attrgetter
from threading import Thread
from typing import Any, Self, cast

import numpy as np
import ray
from ray.actor import ActorHandle

from rayserve_moe.cluster.channel import KEY_BYTES, Address, Channel, accept_proven, connect_proven, wait_readable
from rayserve_moe.scheduling.step_plan import (
    NO_BLOCK_WORK,
    NO_NEW_ROWS,
    NO_PAGE_CHANGES,
    BlockWork,
    PageTableChanges,
    RowAdjustment,
    RowSampling,
    SampleMasks,
    StepPlan,
    StepResult,
    TokenInspection,
    TokenScores,
)

log = logging.getLogger(__name__)


class HostLostError(RuntimeError):
    """A host is gone, does not answer, or failed on a step."""


class StepFailedError(HostLostError):
    """A host raised an error in a step, and lives."""


class Failed(str):
    """A worker's answer to a step that it failed on: the traceback."""


class Sockets:
    """A connection to every host. Nothing runs between steps, so idling costs nothing."""

    def __init__(self, addresses: Sequence[Address], *, key: bytes, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._channels: list[Channel] = []
        deadline = time.monotonic() + timeout_s
        for host_id, address in enumerate(addresses):
            with self._talking_to(host_id):
                channel = connect_proven(address, key=key, deadline=deadline)
                channel.limit_silence(timeout_s)
                self._channels.append(channel)

    @classmethod
    def to(cls, workers: Sequence[ActorHandle], *, timeout_s: float) -> Self:
        """Connect to all `workers`, which listen from now on, for as long. Ray's errors pass through."""
        key = secrets.token_bytes(KEY_BYTES)
        addresses = ray.get([worker.listen_for_steps.remote(key, timeout_s) for worker in workers], timeout=timeout_s)
        return cls(addresses, key=key, timeout_s=timeout_s)

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Hand a step to every host and wait for all; HostLostError names the one that is gone, late, or failed."""
        message = dumps(plan)
        for host_id, channel in enumerate(self._channels):
            with self._talking_to(host_id):
                channel.send(message)
        answers = {host_id: self._answer(host_id) for host_id in self._as_they_answer()}
        return answers[0]

    def release(self) -> None:
        """A connection on which nothing travels costs nothing."""

    def _as_they_answer(self) -> Iterator[int]:
        """Hosts in the order in which they answer: one that is gone ends the wait for the others."""
        waited_for = {channel: host_id for host_id, channel in enumerate(self._channels)}
        deadline = time.monotonic() + self._timeout_s
        while len(waited_for) > 1:
            ready = wait_readable(list(waited_for), timeout_s=deadline - time.monotonic())
            if not ready:
                raise self._late(min(waited_for.values()))
            for channel in ready:
                yield waited_for.pop(channel)
        yield from waited_for.values()

    def _answer(self, host_id: int) -> StepResult | None:
        with self._talking_to(host_id):
            answer = loads(self._channels[host_id].receive())
        if isinstance(answer, Failed):
            raise StepFailedError(f"host {host_id} failed: {answer}")
        return answer

    @contextmanager
    def _talking_to(self, host_id: int) -> Generator[None]:
        try:
            yield
        except (BlockingIOError, TimeoutError) as error:
            raise self._late(host_id) from error
        except (OSError, EOFError) as error:
            raise HostLostError(f"host {host_id} is gone: {error!r}") from error

    def _late(self, host_id: int) -> HostLostError:
        return HostLostError(f"host {host_id} has not answered within {self._timeout_s} s")


def listen_for_steps(
    execute: Callable[[StepPlan], StepResult | None], *, host: str, key: bytes, timeout_s: float
) -> Address:
    """Begin to serve steps to the first within `timeout_s` that knows the `key`; returns where.

    `execute` is called in a thread of its own, for one plan after the other, until the other end closes.
    """
    listener = socket.create_server((host, 0))
    Thread(target=_serve, args=(listener, execute, key, timeout_s), name="steps", daemon=True).start()
    return cast(Address, listener.getsockname())


def _serve(
    listener: socket.socket, execute: Callable[[StepPlan], StepResult | None], key: bytes, timeout_s: float
) -> None:
    try:
        with listener:
            channel = accept_proven(listener, key=key, timeout_s=timeout_s)
    except OSError as error:
        log.warning("no steps are served here: %s", error)
        return
    with channel, suppress(EOFError, OSError):
        while True:
            plan = loads(channel.receive())
            try:
                answer: StepResult | Failed | None = execute(plan)
            except Exception:
                log.exception("step %d has failed", plan.step_id)
                answer = Failed(traceback.format_exc())
            channel.send(dumps(answer))


RECORDS = (
    StepPlan,
    PageTableChanges,
    RowSampling,
    RowAdjustment,
    BlockWork,
    SampleMasks,
    StepResult,
    TokenScores,
    TokenInspection,
)
NOTHING = (NO_PAGE_CHANGES, NO_NEW_ROWS, NO_BLOCK_WORK)
"""Values of plans that change nothing: sent as their index here."""

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


def dumps(message: object) -> memoryview:
    """A plan, a result, or anything else that pickles. Arrays come out of `loads` read-only."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getbuffer()


loads = pickle.loads


def _reduced_array(array: np.ndarray) -> Reduced:
    return _array, (array.tobytes(), array.dtype.str, array.shape)


def _array(values: bytes, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(values, dtype).reshape(shape)


def _nothing(place: int) -> object:
    return NOTHING[place]


def _reduction(record: Any) -> Callable[[object], Reduced]:
    """How to write a record: by the values of its fields, in their order."""
    values_of = attrgetter(*(field.name for field in fields(record)))
    places = {id(nothing): place for place, nothing in enumerate(NOTHING)}

    def reduced(value: object) -> Reduced:
        place = places.get(id(value))
        return (record, values_of(value)) if place is None else (_nothing, (place,))

    return reduced


class _Pickler(pickle.Pickler):
    """Writes numpy arrays and the records of steps in its own way; all else as pickle does."""

    dispatch_table = {np.ndarray: _reduced_array, **{record: _reduction(record) for record in RECORDS}}  # noqa: RUF012
