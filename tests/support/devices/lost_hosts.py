"""A counting executor whose hosts can be lost and replaced, and one that fails on a token."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

from rayserve_moe.engine.executor import ExecutorFailure, GroupLayout
from rayserve_moe.scheduling.step_plan import StepPlan, StepResult
from tests.support.devices.counting_executor import CountingExecutor, rows_by_position


class LosingExecutor(CountingExecutor):
    """Loses its hosts at the calls of `execute` in `losses`, numbered over all generations, and has others then.

    Where `loses_late` the step was computed and only its answer is lost. The first `num_failing` rebuilds fail, and say
    that they are final if of `finals`. A step whose tokens include `poison` raises an error. Routing rows say at which
    position they stand. Hosts that follow serve as the `layouts` say, one after the other, the last of them from
    then on; rows of data ranks that they do not have are in no step, of `rows_per_rank` rows each.
    """

    phase = "starting"
    routing_of = staticmethod(rows_by_position)

    def __init__(
        self,
        losses: frozenset[int] = frozenset(),
        *,
        loses_late: bool = False,
        layouts: Sequence[GroupLayout] = (GroupLayout(),),
        rows_per_rank: int = 1000,
    ) -> None:
        super().__init__()
        self.layout, self._layouts, self._rows_per_rank = layouts[0], layouts, rows_per_rank
        self.losses, self._loses_late = losses, loses_late
        self.poison: int | None = None
        self.num_rebuilds = self.num_failing = 0
        self.finals: frozenset[int] = frozenset()
        self.on_loss: Callable[[], object] = lambda: None
        self.loss: ExecutorFailure | None = None
        self.phase_seconds: dict[str, float] = {}
        self.may_rebuild = threading.Event()
        self.may_rebuild.set()
        self.in_rebuild = threading.Event()
        self.loaded = "first"
        self._is_lost = self._is_cancelled = False

    def execute(self, plan: StepPlan) -> StepResult | None:
        assert not self._is_lost, "a step for hosts that are gone"
        assert (plan.chunks.rows < self.layout.num_data_ranks * self._rows_per_rank).all(), (
            "rows of ranks that are gone"
        )
        if self.num_calls + 1 in self.losses and not self._loses_late:
            self._lose("host 1 is gone")
        if self.poison is not None and (plan.chunks.token_ids == self.poison).any():
            self.num_calls += 1
            self._lose("host 1 failed", in_step=True)
        result = super().execute(plan)
        if self.num_calls in self.losses:
            self._lose("host 1 is gone")
        if plan.takes_staged_weights:
            self.loaded = self.serving
        return result

    def _lose(self, message: str, *, in_step: bool = False) -> NoReturn:
        self.num_calls += not self._loses_late and not in_step
        self._is_lost = True
        raise ExecutorFailure(message, in_step=in_step)

    def rebuild(self) -> None:
        self.in_rebuild.set()
        self.may_rebuild.wait()
        self.num_rebuilds += 1
        if self.num_rebuilds <= self.num_failing or self._is_cancelled:
            raise ExecutorFailure("no host joined", is_final=self.num_rebuilds in self.finals)
        self.device.reset()
        self.staged = None
        self.layout = self._layouts[min(self.num_rebuilds, len(self._layouts) - 1)]
        self.serving, self.loss, self._is_lost = self.loaded, None, False

    def cancel(self) -> None:
        self._is_cancelled = True
        self.may_rebuild.set()

    def lose_idle(self, *, is_loss: bool = True) -> None:
        """Lose a host while no step runs, or find others that had been done without."""
        self.loss = ExecutorFailure("host 0 is silent", is_loss=is_loss)
        self.on_loss()
