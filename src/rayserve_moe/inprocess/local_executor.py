"""The executor that runs steps in this very process, without Ray."""

from __future__ import annotations

import numpy as np

from rayserve_moe.execution.host_runner import HostRunner
from rayserve_moe.scheduling.step_plan import StartReport, StepPlan, StepResult


class LocalExecutor:
    """Wraps one HostRunner as an `engine.executor.Executor`."""

    def __init__(self, runner: HostRunner) -> None:
        self.runner = runner

    def start(self) -> StartReport:
        return self.runner.prepare(self.runner.load())

    def execute(self, plan: StepPlan) -> StepResult | None:
        return self.runner.execute(plan)

    def stage_weights(self, model_path: str, expert_of_slot: np.ndarray | None) -> None:
        self.runner.staged.read(model_path, expert_of_slot)

    def release(self) -> None:
        """Nothing runs here between steps."""

    def shutdown(self) -> None:
        """The runner's arrays go with the runner."""
