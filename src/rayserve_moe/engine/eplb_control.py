"""Balancing an engine's experts by itself: counts go to whoever plans, and plans that hold up come to the engine.

It has a thread of its own. Whatever goes wrong there, steps run on under the placement in force.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from rayserve_moe.balancing.load_window import LoadReading, LoadWindow
from rayserve_moe.balancing.planning import PlanningConfig, imbalance, rank_loads
from rayserve_moe.balancing.proposal import PlanFailure, Planner, RefusedPlanError, checked_placement
from rayserve_moe.balancing.view import ActorView, BalancingView, ProgressView
from rayserve_moe.config.settings import BalancingSettings, ExpertSettings
from rayserve_moe.engine.eplb_history import MigrationHistory
from rayserve_moe.engine.eplb_steps import EplbSteps

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0


def planning_config(balancing: BalancingSettings, experts: ExpertSettings) -> PlanningConfig:
    """What the settings say of planning."""
    dispatch = "first" if experts.selection == "topk" else experts.dispatch
    return PlanningConfig(balancing.interval, balancing.window, dispatch)


def start_eplb(
    eplb: EplbSteps | None,
    planner_for: Callable[[PlanningConfig], Planner],
    *,
    rules: PlanningConfig,
    layer_ids: tuple[int, ...],
) -> EplbControl | None:
    """Begin to balance an engine's experts; None where they stay where they are, and then nobody plans."""
    if eplb is None:
        return None
    return EplbControl(eplb, planner_for(rules), rules=rules, layer_ids=layer_ids)


class EplbControl:
    """Feeds `planner` with the readings of `eplb`, and has the engine follow its plans.

    A planner that fails is asked again after a pause, which doubles from one failure to the next. `layer_ids` are the
    numbers of the layers that have experts.
    """

    def __init__(self, eplb: EplbSteps, planner: Planner, *, rules: PlanningConfig, layer_ids: tuple[int, ...]) -> None:
        self._eplb, self._planner = eplb, planner
        self._rules, self._layer_ids = rules, layer_ids
        self._window = LoadWindow(rules.window)
        self._tokens = np.zeros_like(eplb.reading.counts, np.float64)
        self._before = eplb.migration.placement
        self.history = MigrationHistory(eplb.migration)
        self.contact = PlannerRetry()
        self.planning_s = 0.0
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="balance-experts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Follow no further plan; the thread ends once its planner has answered. May be called twice."""
        self._is_stopping = True
        self._eplb.has_news.set()

    def view(self) -> BalancingView:
        """Loads, placements and what was done, as of now; from any thread."""
        tokens, migration = self._tokens, self._eplb.migration
        now, before, progress = migration.placement, self._before, migration.progress
        dispatch = self._rules.dispatch
        loads_now, loads_before = (rank_loads(each, tokens, dispatch=dispatch) for each in (now, before))
        return BalancingView(
            enabled=True,
            num_layers=now.num_layers,
            num_experts=now.num_experts,
            num_slots=now.num_slots,
            ep_size=now.ep_size,
            layer_ids=list(self._layer_ids),
            tokens=tokens.tolist(),
            rank_load_identity=_in_expert_order(tokens, now.ep_size).tolist(),
            rank_load_now=loads_now.tolist(),
            rank_load_before=loads_before.tolist(),
            imbalance_before=imbalance(loads_before).tolist(),
            imbalance_now=imbalance(loads_now).tolist(),
            progress=ProgressView(
                progress.version,
                progress.num_layers,
                progress.num_layers_done,
                progress.num_slots,
                progress.num_slots_done,
                progress.is_done,
            ),
            history=self.history.records(),
            actor=self.contact.view(is_running=self._thread.is_alive()),
        )

    def _run(self) -> None:
        news = self._eplb.has_news
        while not self._is_stopping:
            self._turn(self._eplb.reading)
            news.wait(self.contact.rest_of_pause_s)
            news.clear()

    def _turn(self, reading: LoadReading) -> None:
        self._window.add(reading)
        self._tokens = self._window.totals()
        if self.contact.rest_of_pause_s:
            return
        try:
            is_due = self._planner.observe(reading)
            self.contact.note_answer()
            if is_due:
                self._follow_plan()
        except PlanFailure as failure:
            self.contact.note_failure(failure)

    def _follow_plan(self) -> None:
        """Ask for a plan, and have the engine head for it if it fits what is in force when it comes."""
        state = self._eplb.state()
        if state is None:
            return
        asked = time.perf_counter()
        proposal = self._planner.propose(state)
        self.planning_s += time.perf_counter() - asked
        if proposal is None or self._is_stopping:
            return
        try:
            now = self._eplb.state()
            if now is None:
                raise RefusedPlanError("stale", "experts are moving")
            placement = checked_placement(proposal, now)
        except RefusedPlanError as error:
            self.contact.refused[error.reason] += 1
            log.warning("a plan is refused as %s: %s", error.reason, error)
            return
        self._before = now.placement
        self.history.begin(proposal, placement, step=self._eplb.reading.step)
        self._eplb.head_for(placement)


class PlannerRetry:
    """Whether the planner may be asked now, how often it was lost and found again, and `refused` plans by reason."""

    def __init__(self) -> None:
        self.refused = Counter[str]()
        self._is_reached, self._was_reached = False, False
        self._num_losses_made_up, self._is_lost = 0, False
        self._pause_s, self._resume_at = 0.0, 0.0

    @property
    def rest_of_pause_s(self) -> float | None:
        """Seconds until it may be asked again, 0 where it may be now; None where nothing stands in the way."""
        return None if self._is_reached else max(0.0, self._resume_at - time.monotonic())

    def note_answer(self) -> None:
        """It has answered."""
        if self._is_lost:
            self._num_losses_made_up += 1
            log.info("experts are planned for again")
        self._is_reached, self._was_reached, self._is_lost, self._pause_s = True, True, False, 0.0

    def note_failure(self, failure: PlanFailure) -> None:
        """It has not; the next pause begins, twice as long as the one before."""
        if failure.reason == "lost":
            self._is_lost = self._was_reached
        else:
            self.refused[failure.reason] += 1
            self._is_lost |= failure.reason == "late"
        self._is_reached = False
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s or FIRST_PAUSE_S)
        self._resume_at = time.monotonic() + self._pause_s
        log.warning("no plan of experts, next try in %.1f s: %s", self._pause_s, failure)

    def view(self, *, is_running: bool) -> ActorView:
        """What is shown of it; with nobody `is_running` to ask it, it counts as gone."""
        return ActorView(is_running and self._is_reached, self._num_losses_made_up, dict(self.refused))


def _in_expert_order(tokens: np.ndarray, ep_size: int) -> np.ndarray:
    """Tokens per rank [layers, ranks] where experts lie over the ranks in their own order, without replicas."""
    loads = np.zeros((len(tokens), ep_size))
    np.add.at(loads.T, np.arange(tokens.shape[1]) * ep_size // tokens.shape[1], tokens.T)
    return loads
