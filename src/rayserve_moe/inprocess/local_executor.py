"""The executor that runs steps in this very process, without Ray."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from rayserve_moe.checkpoints.bucket import Heads, SentShares, SentTensor, WantedTensor, cut
from rayserve_moe.config.settings import UpdateSettings
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.execution.weights.staged import WeightReading, refusing, too_late
from rayserve_moe.execution.weights.tensor_staging import TensorStaging
from rayserve_moe.requests.records import WeightsRefusedError
from rayserve_moe.scheduling.step_plan import StartReport, StepPlan, StepResult


class LocalTensors:
    """Stages tensors in this process, as an `engine.executor.TensorReceiver`."""

    def __init__(self, staging: TensorStaging) -> None:
        self._staging = staging

    def begin(self, expert_of_slot: np.ndarray | None) -> None:
        self._staging.begin(expert_of_slot)

    def stage(self, tensors: Sequence[SentTensor]) -> None:
        wanted = self._staging.wanted([(tensor.name, tensor.shape) for tensor in tensors])
        for tensor, share in zip(tensors, wanted, strict=True):
            with refusing():
                pieces = cut(tensor, share)
            self._staging.add(pieces)

    def wanted(self, heads: Heads) -> list[list[WantedTensor]]:
        return [self._staging.wanted(heads)]

    def stage_shares(self, shares: SentShares) -> None:
        """Here a share is the pieces themselves."""
        (pieces,) = shares.by_host
        self._staging.add([piece.as_typed() for piece in pieces])

    def finish(self) -> None:
        self._staging.finish(threading.Event())

    def keep(self) -> None:
        """Nothing outlives this process."""

    def drop(self) -> None:
        self._staging.drop()


class LocalExecutor:
    """Wraps one HostRunner as an `engine.cycle.Executor`."""

    def __init__(self, runner: HostRunner, updates: UpdateSettings | None = None) -> None:
        self.runner = runner
        self.tensors = LocalTensors(runner.tensors)
        self._reading, self._updates = WeightReading(runner.staged), updates or UpdateSettings()

    def start(self) -> StartReport:
        return self.runner.prepare(self.runner.load())

    def execute(self, plan: StepPlan) -> StepResult | None:
        return self.runner.execute(plan)

    def stage_weights(self, model_path: str, expert_of_slot: np.ndarray | None) -> None:
        self._reading.begin(model_path, expert_of_slot)
        refusal = self._reading.outcome(self._updates.staging_timeout_s)
        if refusal is None:
            self._reading.give_up()
            raise too_late(self._updates.staging_timeout_s)
        if refusal:
            raise WeightsRefusedError(refusal)

    def release(self) -> None:
        """Nothing runs here between steps."""

    def shutdown(self) -> None:
        self._reading.give_up()
        if self.runner.later is not None:
            self.runner.later.stop()
