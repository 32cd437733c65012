"""The engine's side of expert balancing: which piece of a rebalance a step takes along, and what was counted."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from rayserve_moe.balancing.placement import ExpertPlacement, identity_placement
from rayserve_moe.balancing.rebalance import Rebalance
from rayserve_moe.config.settings import BalancingSettings
from rayserve_moe.requests import RoutingLayout
from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.step_plan import StartReport, StepResult

COUNTS_EVERY = 16
"""Steps from one reading of the devices' counts to the next."""


def rebalancing_for(
    layout: RoutingLayout, report: StartReport, *, settings: BalancingSettings, num_hosts: int
) -> Rebalancing | None:
    """The balancing of a server that has just started, all experts in their own order; None where it is off."""
    if not settings.enabled:
        return None
    placement = identity_placement(
        len(layout.layer_ids),
        layout.num_experts,
        ep_size=report.num_expert_ranks,
        num_redundant=report.num_redundant_experts,
    )
    return Rebalancing(Rebalance(placement, hosts=num_hosts, slots_per_step=settings.slots_per_step))


class Rebalancing:
    """Hands the pieces of `rebalance` to steps, at most one each, and keeps what they tell of expert loads.

    The plan of a step carries its piece, so that every host runs the same one with the same step. `head_for` and what
    is read of `rebalance.progress` and `expert_counts` may come from any thread, all else from that of the engine.
    """

    def __init__(self, rebalance: Rebalance, *, counts_every: int = COUNTS_EVERY) -> None:
        self.rebalance = rebalance
        self.expert_counts: np.ndarray | None = None
        self._wanted: deque[ExpertPlacement] = deque(maxlen=1)
        self._counts_every, self._num_steps = counts_every, 0
        self._is_held = False

    def head_for(self, placement: ExpertPlacement) -> None:
        """Have the next steps bring experts to `placement`, whatever was under way or asked for before.

        PlacementError where it is of other layers, slots or ranks; then nothing changes.
        """
        self.rebalance.check(placement)
        self._wanted.append(placement)

    def hold(self) -> ExpertPlacement:
        """Have experts stay where they are until `go_on`; returns where that is."""
        self._is_held = True
        return self.rebalance.placement

    def go_on(self) -> None:
        """Let experts move again."""
        self._is_held = False

    def attach(self, schedule: Schedule) -> Schedule:
        """Give a step that computes something the next piece, and every few of them the question for counts."""
        if not schedule.plan.num_chunks:
            return schedule
        self._num_steps += 1
        piece, wants_counts = None, self._num_steps % self._counts_every == 0
        if not self._is_held:
            if self._wanted:
                self.rebalance.begin(self._wanted.pop())
            piece = self.rebalance.next_piece()
        if piece is None and not wants_counts:
            return schedule
        return replace(schedule, plan=replace(schedule.plan, rebalance=piece, wants_expert_counts=wants_counts))

    def absorb(self, result: StepResult) -> None:
        """Take over the counts that a step brought, if any: int32 [MoE layers, experts] since the start, wrapping."""
        if result.expert_counts is not None:
            self.expert_counts = result.expert_counts
