"""How busy experts are where they stay: counts of the devices, read every so many steps, and shown as balancing is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rayserve_moe.balancing.load_window import LoadReading, LoadWindow
from rayserve_moe.balancing.placement import identity_placement
from rayserve_moe.balancing.planning import imbalance, rank_loads
from rayserve_moe.balancing.view import ActorView, BalancingView, ProgressView
from rayserve_moe.config.settings import BalancingSettings
from rayserve_moe.requests import RoutingLayout
from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.step_plan import StartReport, StepResult

COUNTS_EVERY = 64
"""Steps from one reading to the next: nobody plans from them, and each costs about as much as a small step's launch."""


class ExpertCounting:
    """Takes the place of `EplbSteps` in a step cycle whose experts stay where they are. `view` is for any thread."""

    def __init__(self, layout: RoutingLayout, report: StartReport, *, settings: BalancingSettings) -> None:
        self._layer_ids = layout.layer_ids
        num_ranks, num_redundant = report.num_expert_ranks, report.num_redundant_experts
        self._placement = identity_placement(
            len(layout.layer_ids), layout.num_experts, ep_size=num_ranks, num_redundant=num_redundant
        )
        self._generation = self._num_steps = 0
        self._window = LoadWindow(settings.window)
        self._tokens = np.zeros((len(layout.layer_ids), layout.num_experts))
        self._window.add(LoadReading(0, 0, self._tokens.astype(np.int32)))

    def attach(self, schedule: Schedule) -> Schedule:
        """Have every so many steps that compute something bring the counts."""
        if not schedule.plan.num_chunks:
            return schedule
        self._num_steps += 1
        if self._num_steps % COUNTS_EVERY:
            return schedule
        return replace(schedule, plan=replace(schedule.plan, wants_expert_counts=True))

    def absorb(self, result: StepResult) -> None:
        """Take over counts, if a step brings any."""
        if result.expert_counts is not None:
            self._window.add(LoadReading(self._generation, self._num_steps, result.expert_counts))
            self._tokens = self._window.totals()

    def change_weights(self) -> None:
        """Begin anew: what was counted is of other weights."""
        self._generation += 1

    def view(self) -> BalancingView:
        """Loads of experts and ranks, with balancing off: one placement, and nothing done about it."""
        tokens, placement = self._tokens, self._placement
        loads = rank_loads(placement, tokens)
        told, imbalances = loads.tolist(), imbalance(loads).tolist()
        return BalancingView(
            enabled=False,
            num_layers=placement.num_layers,
            num_experts=placement.num_experts,
            num_slots=placement.num_slots,
            ep_size=placement.ep_size,
            layer_ids=list(self._layer_ids),
            tokens=tokens.tolist(),
            rank_load_identity=told,
            rank_load_now=told,
            rank_load_before=told,
            imbalance_before=imbalances,
            imbalance_now=imbalances,
            progress=ProgressView(0, 0, 0, 0, 0, True),
            history=[],
            actor=ActorView(False, 0, {}),
        )
