"""Control of expert balancing: sends expert counts to the planner, and valid plans to the engine's steps.

Planning runs in its own thread. If it fails, steps continue under the current placement.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from rayserve_moe.balancing.load_window import LoadWindow
from rayserve_moe.balancing.migration import Migration, MigrationProgress
from rayserve_moe.balancing.placement import ExpertPlacement, PlacementError
from rayserve_moe.balancing.planning import (
    PlanFailure,
    Planner,
    PlanningConfig,
    Proposal,
    RefusedPlanError,
    checked_placement,
    has_enough,
    imbalance,
    rank_loads,
)
from rayserve_moe.balancing.traffic import traffic_of
from rayserve_moe.engine.eplb.health import ActorView, PlannerHealth
from rayserve_moe.engine.eplb.steps import EplbSteps

log = logging.getLogger(__name__)

MAX_RECORDS = 64
"""Number of migrations in the history."""
MAX_PLANS = 16
"""Number of plans whose loads are kept: some 100 KB each for a model of 60 layers and 256 experts."""
PLANNER_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, OSError),
    *(RuntimeError, TypeError, ValueError),
)
"""Errors of a faulty planner: it is asked again."""
MAX_SHOWN_ROWS = 256
"""Maximum number of sampled rows from which ranks per token are computed for `/experts` and metrics."""
UNDER_WAY, FINISHED, REPLACED, FAILED = "under way", "finished", "replaced", "failed"


class EplbControl:
    """Connection between `eplb` and a planner; without a planner it only counts.

    After a planner failure, the next request follows a pause, which doubles with every failure. `layer_ids` are the
    numbers of the layers with experts. `view` may be called from any thread.
    """

    def __init__(
        self, eplb: EplbSteps, planner: Planner | None, *, config: PlanningConfig, layer_ids: tuple[int, ...]
    ) -> None:
        self._eplb, self._planner = eplb, planner
        self._config, self._layer_ids = config, layer_ids
        self._window, self._window_lock = LoadWindow(config.window), threading.Lock()
        self._since_move, self._moved_version = LoadWindow(config.window), 0
        self._before = eplb.migration.placement
        self.history = MigrationHistory(eplb.migration)
        self.health = PlannerHealth(interval=config.interval)
        self.planning_s = 0.0
        self._is_stopping = False
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eplb-control", daemon=True)
        eplb.on_reading = self._take_reading if planner is None else self._news.set
        if planner is not None:
            self._thread.start()

    def stop(self) -> None:
        """Follow no further plans; the thread ends once the planner has answered. May be called twice."""
        self._is_stopping = True
        self._news.set()

    def view(self) -> BalancingView:
        """Return loads, placements and past migrations, as of now."""
        tokens, now = self._take_reading(), self._eplb.migration.placement
        return self._view_of(self._loads_of(tokens, before=self._before, after=now))

    def view_of_plan(self, version: int) -> BalancingView | None:
        """Return `view` with the loads of a past plan, or None if these are not kept."""
        loads = self.history.plans().get(version)
        return None if loads is None else self._view_of(loads, plan=version)

    def _view_of(self, loads: ShownLoads, *, plan: int | None = None) -> BalancingView:
        now, ep_size = self._eplb.migration.placement, loads.after.shape[1]
        return BalancingView(
            enabled=self._eplb.moves_experts,
            num_layers=now.num_layers,
            num_experts=now.num_experts,
            num_slots=now.num_slots,
            ep_size=ep_size,
            layer_ids=list(self._layer_ids),
            tokens=loads.tokens.tolist(),
            rank_load_identity=_in_expert_order(loads.tokens, ep_size).tolist(),
            rank_load_now=loads.after.tolist(),
            rank_load_before=loads.before.tolist(),
            imbalance_before=imbalance(loads.before).tolist(),
            imbalance_now=imbalance(loads.after).tolist(),
            counts_every=self._eplb.counts_every,
            progress=self._eplb.migration.progress,
            history=self.history.records(),
            plan=plan,
            plans=list(self.history.plans()),
            actor=self.health.view(step=self._eplb.reading.step, is_running=self._thread.is_alive()),
            realised=self._realised(),
        )

    def _realised(self) -> RealisedBalance:
        migration, (rows, batch) = self._eplb.migration, self._eplb.sampled_rows()
        placement, progress = migration.placement, migration.progress
        with self._window_lock:
            tokens = self._since_move.totals()
        is_known = progress.is_done and has_enough(tokens)
        loads = rank_loads(placement, tokens, dispatch=self._config.dispatch) if is_known else None
        rows, distinct = rows[-MAX_SHOWN_ROWS:], None
        if len(rows) and self._config.dispatch == "shares":
            traffic = traffic_of(placement, rows, batch=batch, num_slices=migration.num_slices)
            distinct = traffic.distinct_ranks.tolist()
        return RealisedBalance(
            imbalance_promised=self.history.promised(progress),
            imbalance_realised=None if loads is None else float(imbalance(loads).mean()),
            distinct_ranks=distinct,
            peak_rows=self._eplb.peak_rows.tolist(),
        )

    def _loads_of(self, tokens: np.ndarray, *, before: ExpertPlacement, after: ExpertPlacement) -> ShownLoads:
        ranks = (rank_loads(each, tokens, dispatch=self._config.dispatch) for each in (before, after))
        return ShownLoads(tokens, *ranks)

    def _take_reading(self) -> np.ndarray:
        """Add the last reading to the window; return the window's tokens per layer and expert."""
        with self._window_lock:
            reading, progress = self._eplb.reading, self._eplb.migration.progress
            self._window.add(reading)
            if progress.is_done:
                if progress.version != self._moved_version:
                    self._since_move, self._moved_version = LoadWindow(self._config.window), progress.version
                self._since_move.add(reading)
            return self._window.totals()

    def _run(self) -> None:
        assert self._planner is not None, "the thread runs only with a planner"
        while not self._is_stopping:
            tokens = self._take_reading()
            if not has_enough(tokens) or self._eplb.state() is None:
                self.health.postpone(self._eplb.reading.step)
            if not self.health.rest_of_pause_s:
                self._ask(self._planner)
            self._news.wait(self.health.rest_of_pause_s)
            self._news.clear()

    def _ask(self, planner: Planner) -> None:
        try:
            self.health.record_call()
            is_due = planner.observe(self._eplb.reading)
            self.health.record_answer()
            if is_due:
                self._follow_plan(planner)
        except PlanFailure as failure:
            self.health.record_failure(failure)
        except PLANNER_ERRORS as error:
            self.health.record_failure(PlanFailure("failed", f"{type(error).__name__}: {error}"))

    def _follow_plan(self, planner: Planner) -> None:
        """Request a plan; the engine migrates to it if it fits the current placement and counts."""
        state = self._eplb.state()
        if state is None:
            return
        began, step = time.perf_counter(), self._eplb.reading.step
        self.health.record_call()
        rows, batch = self._eplb.sampled_rows()
        proposal = planner.propose(replace(state, rows=rows, batch=batch))
        self.health.record_answer()
        self.planning_s += time.perf_counter() - began
        if self._is_stopping:
            return
        if proposal is None:
            self.health.record_decision(step)
            return
        try:
            now = self._eplb.state()
            if now is None:
                raise RefusedPlanError("stale", "experts are moving")
            placement = checked_placement(proposal, now)
        except RefusedPlanError as error:
            self.health.record_refusal(error)
            return
        self.health.record_decision(step)
        self._before = now.placement
        loads = self._loads_of(self._take_reading(), before=now.placement, after=placement)
        self.history.begin(proposal, placement, step=self._eplb.reading.step, loads=loads)
        with suppress(PlacementError):  # hosts were lost meanwhile, so the plan has the wrong number of ranks
            self._eplb.set_target(placement)


class MigrationHistory:
    """Outcomes of the last migrations; may be read from any thread.

    `totals` counts migrations `begun`, `finished`, `replaced` and `failed`, and slots `moved`, since the start.
    """

    def __init__(self, migration: Migration) -> None:
        self.totals = Counter[str]()
        self._migration = migration
        self._records: deque[MigrationRecord] = deque(maxlen=MAX_RECORDS)
        self._plans: deque[tuple[int, ShownLoads]] = deque(maxlen=MAX_PLANS)
        self._target: ExpertPlacement | None = None
        self._lock = threading.Lock()

    def begin(self, proposal: Proposal, target: ExpertPlacement, *, step: int, loads: ShownLoads) -> None:
        """Record the start of a migration to `target`, which becomes the next version of the placement."""
        record = MigrationRecord(
            proposal.version,
            step,
            time.time(),
            0,
            0,
            proposal.imbalance_before,
            proposal.imbalance_after,
            proposal.plan_seconds,
            UNDER_WAY,
        )
        with self._lock:
            self._settle()
            self._target = target
            self._records.append(record)
            self._plans.append((proposal.version, loads))
            self.totals["begun"] += 1

    def records(self) -> list[MigrationRecord]:
        """Return the last migrations, oldest first, as of now."""
        with self._lock:
            self._settle()
            return list(self._records)

    def promised(self, progress: MigrationProgress) -> float | None:
        """Return the imbalance that the plan of the current placement expects; None for a placement without a plan."""
        if not progress.is_done:
            return None
        for record in reversed(self.records()):
            if (record.version, record.outcome) == (progress.version, FINISHED):
                return record.imbalance_after
        return None

    def plans(self) -> dict[int, ShownLoads]:
        """Return the loads of the last plans by version, oldest first."""
        with self._lock:
            return dict(self._plans)

    def _settle(self) -> None:
        if self._target is None:
            return
        record, migration = self._records[-1], self._migration
        progress = migration.progress
        if progress.version < record.version:
            return
        outcome = FINISHED if progress.is_done else UNDER_WAY
        if migration.target is not self._target:
            outcome = FAILED if migration.given_up_version >= record.version else REPLACED
        if outcome != REPLACED:
            record = replace(record, moved_slots=progress.num_slots, layers=progress.num_layers)
        record = replace(record, outcome=outcome)
        self._records[-1] = record
        if record.outcome != UNDER_WAY:
            self._target = None
            self.totals.update({record.outcome: 1, "moved": record.moved_slots})


def _in_expert_order(tokens: np.ndarray, ep_size: int) -> np.ndarray:
    """Return tokens per rank [layers, ranks] with experts in their own order over the ranks, without replicas."""
    loads = np.zeros((len(tokens), ep_size))
    np.add.at(loads.T, np.arange(tokens.shape[1]) * ep_size // tokens.shape[1], tokens.T)
    return loads


class ShownLoads(NamedTuple):
    """Loads of a time: of L layers, E experts and R ranks."""

    tokens: np.ndarray
    """Tokens of the window per layer and expert, float64 [L, E]."""
    before: np.ndarray
    """Rank loads under the placement before the last plan, [L, R]."""
    after: np.ndarray
    """Rank loads under the placement of the last plan, [L, R]."""


@dataclass(frozen=True)
class MigrationRecord:
    """A migration of experts. Imbalances are means over layers."""

    version: int
    """Version of the placement it moves to."""
    step: int
    """Step at which it began."""
    time: float
    """Time at which it began, unix seconds."""
    moved_slots: int
    """Number of slots that it moves."""
    layers: int
    """Number of layers that it changes."""
    imbalance_before: float
    """Imbalance before it."""
    imbalance_after: float
    """Imbalance after it that the plan expects."""
    plan_seconds: float
    """Seconds of its planning."""
    outcome: str
    """`under way`, `finished`, `replaced` by a later migration, or `failed`. A failed migration leaves the finished
    layers in their new placement and the others unchanged."""


@dataclass(frozen=True)
class RealisedBalance:
    """Balance of the current placement beside the balance that its plan expected."""

    imbalance_promised: float | None
    """Imbalance that the last finished plan expected, mean over layers; None without one, or while experts move."""
    imbalance_realised: float | None
    """Imbalance of the tokens counted since then, mean over layers; None before enough are counted."""
    distinct_ranks: list[float] | None
    """Ranks that compute a token, mean over the sampled rows, [L]; None until requests ask for routing,
    and under other dispatches than `shares`."""
    peak_rows: list[float]
    """Rows of the hottest expert over the mean of its layer, between the last two readings, [L]."""


@dataclass(frozen=True)
class BalancingView:
    """State of expert balancing, for L layers, E experts and `ep_size` ranks. Loads are those of now, or of a plan.

    Rank loads are tokens of the window per rank. An imbalance is the maximum rank load over the mean, or 1.0
    without tokens.
    """

    enabled: bool
    """True if experts move."""
    num_layers: int
    num_experts: int
    num_slots: int
    ep_size: int
    layer_ids: list[int]
    tokens: list[list[float]]
    """Tokens of the window per layer and expert, [L][E]."""
    rank_load_identity: list[list[float]]
    """Rank loads with experts in their own order and without replicas, [L][ep_size]."""
    rank_load_now: list[list[float]]
    """Rank loads under the current placement, or that of `plan`, [L][ep_size]."""
    rank_load_before: list[list[float]]
    """Rank loads under the placement before the last migration, or before `plan`, [L][ep_size]."""
    imbalance_before: list[float]
    """Imbalance of `rank_load_before`, [L]."""
    imbalance_now: list[float]
    """Imbalance of `rank_load_now`, [L]."""
    counts_every: int
    """Steps between two readings of the counts."""
    plan: int | None
    """Version of the plan whose loads these are; None for now."""
    plans: list[int]
    """Versions of the last plans whose loads are kept, oldest first."""
    progress: MigrationProgress
    history: list[MigrationRecord]
    """The last migrations, oldest first."""
    actor: ActorView
    realised: RealisedBalance

    def as_json(self) -> dict[str, Any]:
        """Return the fields as dictionaries, lists and numbers, under the same names."""
        return {**asdict(self), "progress": self.progress.as_json()}
