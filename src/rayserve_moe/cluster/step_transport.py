"""Transports of step plans and results between engine and hosts: a compiled graph, or sockets."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.dag import InputNode, MultiOutputNode
from ray.exceptions import RayError

from rayserve_moe.cluster.step_sockets import HostLostError, Sockets
from rayserve_moe.scheduling.step_plan import StepPlan, StepResult

BUFFER_BYTES = 4 * 1024 * 1024
BUSY_STEPS = 32

TRANSPORT_ERRORS = (RayError, HostLostError)
"""Raised by `execute` where a host is lost."""

logging.getLogger("ray.dag.compiled_dag_node").setLevel(logging.WARNING)


class StepTransport(Protocol):
    """Carries one plan to every host and one result back. Calls come from one thread."""

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Send a step to every host; returns the first host's result of the step before, if there was one."""
        ...

    def release(self) -> None:
        """Stop what polls; the next `execute` starts it again."""
        ...


class CompiledGraph:
    """A compiled graph over all hosts, for as long as there is steady work.

    Its workers poll and compiling it takes about a second, so it is torn down when idle, and compiled again in the
    background once BUSY_STEPS steps have followed each other; until it is ready, steps go by actor calls.
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


def _owned(value: Any) -> Any:
    """Copy all arrays of a result, at any depth, out of the channel's buffer, which the next execution overwrites."""
    if isinstance(value, np.ndarray):
        return np.array(value)
    if isinstance(value, dict):
        return {name: _owned(part) for name, part in value.items()}
    if isinstance(value, tuple):
        parts = map(_owned, value)
        return tuple(parts) if type(value) is tuple else type(value)(*parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{field.name: _owned(getattr(value, field.name)) for field in dataclasses.fields(value)}
        )
    return value


TRANSPORTS: dict[str, Callable[..., StepTransport]] = {
    "compiled_graph": CompiledGraph,
    "sockets": Sockets.to,
}
