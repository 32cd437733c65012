"""The one interface between the engine, which decides, and whatever computes its steps."""

from __future__ import annotations

from typing import Protocol

from rayserve_moe.scheduling.step_plan import StepPlan, StepResult


class ExecutorFailure(RuntimeError):
    """The executor lost a host or a device: no further step can run on it."""


class Executor(Protocol):
    """Runs steps: in this process (`execution.host_runner`) or over a Ray graph (`cluster.step_graph`).

    Calls come from one thread. After `ExecutorFailure` only `shutdown` may follow.
    """

    def start(self) -> int:
        """Load weights, allocate pages, compile every step; return the number of usable KV pages."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step and wait for its tokens. A plan without chunks only harvests routing rows."""
        ...

    def release(self) -> None:
        """Give back what costs CPU while no request is running; the next `execute` takes it again."""
        ...

    def shutdown(self) -> None:
        """Stop for good. May be called twice."""
        ...
