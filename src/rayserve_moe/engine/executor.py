"""The one interface between the engine, which decides, and whatever computes its steps."""

from __future__ import annotations

from typing import Protocol

from rayserve_moe.scheduling.step_plan import StartReport, StepPlan, StepResult


class ExecutorFailure(RuntimeError):
    """The executor lost a host or a device: no further step can run on it."""


class Executor(Protocol):
    """Runs steps: in this process (`execution.host_runner`) or over a Ray graph (`cluster.step_graph`).

    Calls come from one thread. After `ExecutorFailure` only `shutdown` may follow.
    """

    def start(self) -> StartReport:
        """Load weights, allocate pages, compile every step and run it once."""
        ...

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Hand a step to the devices, then wait for the result of the one before; None where there is none.

        So the devices find their next step waiting. A plan without chunks computes nothing.
        """
        ...

    def release(self) -> None:
        """Give back what costs CPU while no request is running; the next `execute` takes it again."""
        ...

    def shutdown(self) -> None:
        """Stop for good. May be called twice."""
        ...
