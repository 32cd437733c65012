"""Transports of step plans and results between engine and hosts: sockets, or a compiled graph.

Over sockets both ends block, nothing polls, and a step is a message each way. An actor call does the same, but takes
seven times as long and four times the CPU time (ADR 0014). Ray still starts the workers, passes their addresses, and
carries everything that is not part of every step.

Messages are pickles without field names and empty parts, which make up most of a plain pickle of a plan and take two
thirds of the time to write and to read. Only ends that know a key read them (`channel`); the actor call that makes a
worker listen carries the key.
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
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from operator import attrgetter
from threading import Thread
from typing import Any, Protocol, Self, cast

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.dag import InputNode, MultiOutputNode
from ray.exceptions import RayError

from rayserve_moe.cluster.channel import KEY_BYTES, Address, Channel, accept_proven, connect_proven, wait_readable
from rayserve_moe.requests.columns import Ragged
from rayserve_moe.scheduling.step_plan import (
    NO_BLOCK_WORK,
    NO_CHUNKS,
    NO_NEW_ROWS,
    NO_PAGE_CHANGES,
    BlockWork,
    Chunks,
    PageTableChanges,
    RowAdjustment,
    RowSampling,
    SampleMasks,
    StepPlan,
    StepResult,
)
from rayserve_moe.scheduling.token_probe import TokenProbe

log = logging.getLogger(__name__)
logging.getLogger("ray.dag.compiled_dag_node").setLevel(logging.WARNING)

BUFFER_BYTES = 4 * 1024 * 1024
BUSY_STEPS = 32


class HostLostError(RuntimeError):
    """A host is gone, does not answer, or failed on a step."""


class StepFailedError(HostLostError):
    """A host raised an error in a step, and is alive."""


TRANSPORT_ERRORS = (RayError, HostLostError)
"""Raised by `execute` if a host is lost."""


class StepTransport(Protocol):
    """Carries a plan to every host and a result back. Calls come from a single thread."""

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Send a step to every host; return the first host's result of the previous step, or None."""
        ...

    def release(self) -> None:
        """Stop polling; the next `execute` starts it again."""
        ...


class Sockets:
    """A connection to every host. Nothing runs between steps, so an idle server costs nothing."""

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
        """Make all `workers` listen and connect to them, each within `timeout_s`. Ray's errors pass through."""
        key = secrets.token_bytes(KEY_BYTES)
        addresses = ray.get([worker.listen_for_steps.remote(key, timeout_s) for worker in workers], timeout=timeout_s)
        return cls(addresses, key=key, timeout_s=timeout_s)

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Send a step to every host and wait for all. Raises HostLostError with the id of a host that is gone, late or
        failed.
        """
        message = dumps(plan)
        for host_id, channel in enumerate(self._channels):
            with self._talking_to(host_id):
                channel.send(message)
        answers = {host_id: self._answer(host_id) for host_id in self._as_they_answer()}
        return answers[0]

    def release(self) -> None:
        """Do nothing: an idle connection costs nothing."""

    def _as_they_answer(self) -> Iterator[int]:
        """Yield hosts in the order of their answers, so that a lost host ends the wait for the others."""
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


class CompiledGraph:
    """A compiled graph over all hosts, for as long as work is steady.

    Its workers poll, and compiling it takes about a second. It is torn down when idle, and compiled again in the
    background after BUSY_STEPS consecutive steps; until it is ready, steps run as actor calls.
    """

    def __init__(self, workers: list[ActorHandle], *, timeout_s: float) -> None:
        self._workers, self._timeout_s = workers, timeout_s
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compile-graph")
        self._graph: Future[Any] | None = None
        self._num_steps = 0

    @property
    def is_compiled(self) -> bool:
        return self._graph is not None and self._graph.done()

    def execute(self, plan: StepPlan) -> StepResult | None:
        self._num_steps += 1
        if self._graph is None and self._num_steps > BUSY_STEPS:
            self._graph = self._compiler.submit(self._compile)
        if self._graph is None or not self._graph.done():
            return ray.get([worker.execute.remote(plan) for worker in self._workers], timeout=self._timeout_s)[0]
        result, *_ = ray.get(self._graph.result().execute(plan), timeout=self._timeout_s)
        return _owned(result) if result is not None else None

    def release(self) -> None:
        self._num_steps = 0
        if self._graph is not None:
            graph, self._graph = self._graph, None
            graph.result(timeout=self._timeout_s).teardown()

    def _compile(self) -> Any:
        with InputNode() as plan:
            outputs = MultiOutputNode([worker.execute.bind(plan) for worker in self._workers])
        return outputs.experimental_compile(_buffer_size_bytes=BUFFER_BYTES, _submit_timeout=self._timeout_s)


TRANSPORTS: dict[str, Callable[..., StepTransport]] = {
    "compiled_graph": CompiledGraph,
    "sockets": Sockets.to,
}


def listen_for_steps(
    execute: Callable[[StepPlan], StepResult | None], *, host: str, key: bytes, timeout_s: float
) -> Address:
    """Start serving steps to the first connection that proves `key` within `timeout_s`; return the address.

    `execute` is called in a separate thread, for plan after plan, until the other end closes.
    """
    listener = socket.create_server((host, 0))
    Thread(target=_serve, args=(listener, execute, key, timeout_s), name="steps", daemon=True).start()
    return cast(Address, listener.getsockname())


class Failed(str):
    """A worker's answer to a step that failed: the traceback."""


def _serve(
    listener: socket.socket, execute: Callable[[StepPlan], StepResult | None], key: bytes, timeout_s: float
) -> None:
    try:
        with listener:
            channel = accept_proven(listener, key=key, timeout_s=timeout_s)
    except OSError as error:
        log.warning("cannot serve steps here: %s", error)
        return
    with channel, suppress(EOFError, OSError):
        while True:
            plan = loads(channel.receive())
            try:
                answer: StepResult | Failed | None = execute(plan)
            except Exception:
                log.exception("step %d failed", plan.step_id)
                answer = Failed(traceback.format_exc())
            channel.send(dumps(answer))


def _owned(value: Any) -> Any:
    """Copy all arrays of a result, at any depth, out of the channel's buffer, which the next execution overwrites."""
    if isinstance(value, np.ndarray):
        return np.array(value)
    if isinstance(value, dict):
        return {name: _owned(part) for name, part in value.items()}
    if isinstance(value, tuple):
        parts = map(_owned, value)
        return tuple(parts) if type(value) is tuple else type(value)(*parts)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _owned(getattr(value, field.name)) for field in fields(value)})
    return value


RECORDS = (
    StepPlan,
    Chunks,
    PageTableChanges,
    RowSampling,
    RowAdjustment,
    BlockWork,
    SampleMasks,
    StepResult,
    TokenProbe,
    Ragged,
)
NOTHING = (NO_PAGE_CHANGES, NO_NEW_ROWS, NO_BLOCK_WORK, NO_CHUNKS)
"""Empty values of plan fields: sent as their index here."""

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


def dumps(message: object) -> memoryview:
    """Pickle a plan, a result, or anything else that pickles. `loads` returns its arrays read-only."""
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
    """Return the reducer of a record type, which writes the field values in their order."""
    values_of = attrgetter(*(field.name for field in fields(record)))
    places = {id(nothing): place for place, nothing in enumerate(NOTHING)}

    def reduced(value: object) -> Reduced:
        place = places.get(id(value))
        return (record, values_of(value)) if place is None else (_nothing, (place,))

    return reduced


class _Pickler(pickle.Pickler):
    """A pickler that writes numpy arrays and the records of steps compactly, and all else as pickle does."""

    dispatch_table = {np.ndarray: _reduced_array, **{record: _reduction(record) for record in RECORDS}}  # noqa: RUF012
