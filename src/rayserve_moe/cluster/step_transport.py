"""How step plans reach the hosts and results come back: the ways there are, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ray.exceptions import RayError

from rayserve_moe.cluster.step_graph import ActorCalls, CompiledGraph
from rayserve_moe.cluster.step_sockets import HostLostError, Sockets
from rayserve_moe.scheduling.step_plan import StepPlan, StepResult

TRANSPORT_ERRORS = (RayError, HostLostError)
"""What `execute` raises where a host is lost."""


class StepTransport(Protocol):
    """Carries one plan to every host and one result back. Calls come from one thread."""

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Hand a step to every host; returns the result of the one before, the first host's, if there was one."""
        ...

    def release(self) -> None:
        """Stop what polls; the next `execute` starts it again."""
        ...


TRANSPORTS: dict[str, Callable[..., StepTransport]] = {
    "compiled_graph": CompiledGraph,
    "actor_calls": ActorCalls,
    "sockets": Sockets.to,
}
