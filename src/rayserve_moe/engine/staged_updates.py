"""Weights of a checkpoint in two phases: every host reads them beside the steps, then they serve, or are dropped."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from rayserve_moe.engine.command_queue import CommandQueue, EngineStoppedError
from rayserve_moe.engine.executor import Executor, ExecutorFailure
from rayserve_moe.engine.tensor_updates import BetweenSteps, TensorUpdates
from rayserve_moe.engine.weight_orders import LOST_WHILE_READING, NOTHING_STAGED, WeightOrder, WeightOutcome
from rayserve_moe.requests import WeightsRefusedError


@dataclass
class StagedUpdates:
    """Calls from any thread; each runs in the thread of updates, one at a time."""

    executor: Executor
    commands: CommandQueue
    between: BetweenSteps
    tensors: TensorUpdates
    updates: ThreadPoolExecutor
    _generation: int | None = None

    def run(self, order: WeightOrder) -> Future[WeightOutcome]:
        """Both phases."""
        return self.updates.submit(self._run, order)

    def stage(self, model_path: str) -> Future[str]:
        """Have every host read and check a checkpoint; the result is why it is refused, empty where it is staged."""
        return self.updates.submit(self._stage, model_path)

    def swap(self, order: WeightOrder) -> Future[WeightOutcome]:
        """Have what is staged serve."""
        return self.updates.submit(self._swap, order)

    def drop(self) -> Future[None]:
        """Forget what is staged."""
        return self.updates.submit(self._drop)

    def _run(self, order: WeightOrder) -> WeightOutcome:
        if refusal := self._stage(order.model_path):
            return WeightOutcome(False, refusal, self.between.version())
        return self._swap(order)

    def _stage(self, model_path: str) -> str:
        self._drop()
        self.tensors.end_open()
        with ExitStack() as undo:
            undo.callback(self._let_go)
            expert_of_slot, generation = self.commands.call(self.between.hold).result()
            try:
                self._reach(model_path, expert_of_slot, generation)
            except WeightsRefusedError as refusal:
                return str(refusal)
            self._generation = generation
            undo.pop_all()
        return ""

    def _reach(self, model_path: str, expert_of_slot: np.ndarray | None, generation: int) -> None:
        """Have hosts read; WeightsRefusedError where one is lost."""
        try:
            self.executor.stage_weights(model_path, expert_of_slot)
        except ExecutorFailure as failure:
            self.commands.call(partial(self.between.note_loss, failure, generation=generation)).result()
            raise WeightsRefusedError(LOST_WHILE_READING) from failure

    def _swap(self, order: WeightOrder) -> WeightOutcome:
        generation, self._generation = self._generation, None
        if generation is None:
            return WeightOutcome(False, NOTHING_STAGED, self.between.version())
        try:
            return self.commands.call(partial(self.between.swap, order, generation)).result()
        finally:
            self._let_go()

    def _drop(self) -> None:
        if self._generation is not None:
            self._generation = None
            self.executor.tensors.drop()
            self._let_go()

    def _let_go(self) -> None:
        with suppress(EngineStoppedError):
            self.commands.call(self.between.let_go)
