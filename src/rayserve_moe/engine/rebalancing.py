"""The engine's side of expert balancing: which piece of a rebalance a step takes along, and what was counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rayserve_moe.balancing.rebalance import Rebalance
from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.step_plan import StepResult

COUNTS_EVERY = 16
"""Steps from one reading of the devices' counts to the next."""


class Rebalancing:
    """Hands the pieces of `rebalance` to steps, at most one each, and keeps what they tell of expert loads.

    The plan of a step carries its piece, so that every host runs the same one with the same step.
    """

    def __init__(self, rebalance: Rebalance, *, counts_every: int = COUNTS_EVERY) -> None:
        self.rebalance = rebalance
        self.expert_counts: np.ndarray | None = None
        self._counts_every, self._num_steps = counts_every, 0

    def attach(self, schedule: Schedule) -> Schedule:
        """Give a step that computes something the next piece, and every few of them the question for counts."""
        if not schedule.plan.num_chunks:
            return schedule
        self._num_steps += 1
        piece, wants_counts = self.rebalance.next_piece(), self._num_steps % self._counts_every == 0
        if piece is None and not wants_counts:
            return schedule
        return replace(schedule, plan=replace(schedule.plan, rebalance=piece, wants_expert_counts=wants_counts))

    def absorb(self, result: StepResult) -> None:
        """Take over the counts that a step brought, if any: int32 [MoE layers, experts] since the start, wrapping."""
        if result.expert_counts is not None:
            self.expert_counts = result.expert_counts
