"""Planning for one engine: watches its expert loads, and proposes a placement where a better one is worth its moves."""

from __future__ import annotations

import time

import numpy as np

from rayserve_moe.balancing.load_window import LoadReading, LoadWindow
from rayserve_moe.balancing.planner import plan
from rayserve_moe.balancing.planning import TOLERANCE, PlanningConfig, chance, has_enough, imbalance, is_worth, rank_loads
from rayserve_moe.balancing.proposal import PlacementState, Proposal


class LocalPlanner:
    """A `Planner` that plans where it is called; not for several threads."""

    def __init__(self, rules: PlanningConfig) -> None:
        self._rules, self._window = rules, LoadWindow(rules.window)
        self._epoch, self._step, self._planned_at = 0, 0, 0

    def observe(self, reading: LoadReading) -> bool:
        """Take over a reading; says whether it is time for a plan and enough was counted."""
        if reading.epoch != self._epoch or reading.step < self._step:
            self._epoch, self._planned_at = reading.epoch, reading.step
        self._step = reading.step
        self._window.add(reading)
        return self._step - self._planned_at >= self._rules.interval and has_enough(self._window.totals())

    def propose(self, state: PlacementState) -> Proposal | None:
        """Plan from the window; None where it is of other counts, or no better placement is worth its moves."""
        started = time.perf_counter()
        tokens, now, dispatch = self._window.totals(), state.placement, self._rules.dispatch
        self._planned_at = self._step
        if state.epoch != self._epoch or tokens.shape != (now.num_layers, now.num_experts):
            return None
        before = imbalance(rank_loads(now, tokens, dispatch=dispatch))
        noise = chance(tokens, ep_size=now.ep_size)
        if not is_worth(before, np.ones_like(before), noise=noise):
            return None
        wanted = plan(
            tokens,
            ep_size=now.ep_size,
            num_redundant=now.num_redundant,
            previous=now,
            tolerance=max(TOLERANCE, noise),
        )
        after = imbalance(rank_loads(wanted, tokens, dispatch=dispatch))
        if not is_worth(before, after, noise=noise):
            return None
        return Proposal(
            state.version + 1,
            state.version,
            state.epoch,
            wanted.expert_of_slot,
            wanted.share_of_slot,
            float(before.mean()),
            float(after.mean()),
            time.perf_counter() - started,
        )
