"""Experts follow loads by themselves; whatever their planner does wrong, they stay where they are, and it goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import numpy as np
import pytest

from rayserve_moe.balancing.load_window import LoadReading
from rayserve_moe.balancing.migration import Migration
from rayserve_moe.balancing.placement import identity_placement
from rayserve_moe.balancing.planning import LocalPlanner, PlacementState, PlanFailure, PlanningConfig, Proposal
from rayserve_moe.engine.eplb.control import MAX_PLANS, EplbControl, MigrationHistory, ShownLoads
from rayserve_moe.engine.eplb.steps import COUNTS_EVERY, EplbSteps
from tests.support.experts.eplb_proposals import GARBAGE, CountedSteps, proposal_for
from tests.support.experts.placements import random_placement
from tests.unit.serving.test_balancing_metrics import scraped

LAYERS, EXPERTS, RANKS, REDUNDANT = 3, 16, 4, 4
START = identity_placement(LAYERS, EXPERTS, ep_size=RANKS, num_redundant=REDUNDANT)
RULES = PlanningConfig(interval=32, window=400)
LAYER_IDS = (1, 2, 4)
WITHIN_S = 600.0


class Faulty:
    """The real advisor, with something in the way of its first answers."""

    def __init__(self, failures: list[PlanFailure]) -> None:
        self._advisor = LocalPlanner(RULES)
        self.failures = failures
        self.spoil: Callable[[Proposal], object] | None = None
        self.has_planned, self.may_answer = threading.Event(), threading.Event()
        self.may_answer.set()

    def observe(self, reading: LoadReading) -> bool:
        if self.failures:
            raise self.failures.pop(0)
        return self._advisor.observe(reading)

    def propose(self, state: PlacementState) -> object:
        proposal = self._advisor.propose(state)
        self.has_planned.set()
        self.may_answer.wait(WITHIN_S)
        spoil, self.spoil = self.spoil, None
        return proposal if spoil is None or proposal is None else spoil(proposal)


class Served:
    """Steps with skewed loads, and the balancing that watches them."""

    def __init__(self, planner: Faulty) -> None:
        self.planner = planner
        self.eplb = EplbSteps(Migration(START, hosts=1, slots_per_step=1))
        odds = np.random.default_rng(1).lognormal(sigma=1.0, size=(LAYERS, EXPERTS))
        self.steps = CountedSteps(self.eplb, odds)
        self.balancing = EplbControl(self.eplb, planner, config=RULES, layer_ids=LAYER_IDS)

    @property
    def version(self) -> int:
        return self.eplb.migration.progress.version

    def run_until(self, condition: Callable[[], object]) -> None:
        """Take steps, at some pace, until it holds; after each, slots hold what the placement says.

        Only of a fetch that has just failed the engine does not know yet.
        """
        deadline = time.monotonic() + WITHIN_S
        while not condition():
            assert time.monotonic() < deadline, self.balancing.view()
            self.steps.run(1)
            if self.steps.failed_version <= self.eplb.migration.given_up_version:
                self.steps.assert_hold(self.eplb.migration.placement)
            time.sleep(0.001)

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait for the control thread, without steps."""
        deadline = time.monotonic() + WITHIN_S
        while not condition():
            assert time.monotonic() < deadline, self.balancing.view().actor
            time.sleep(0.001)

    def run_until_balanced(self) -> None:
        self.run_until(lambda: self.outcomes.count("finished"))
        view = self.balancing.view()
        assert np.mean(view.imbalance_now) < 1.05 < 1.08 < np.mean(view.imbalance_before)

    @property
    def outcomes(self) -> list[str]:
        return [record.outcome for record in self.balancing.view().history]


def served(*failures: PlanFailure) -> AbstractContextManager[Served]:
    return served_by(Faulty([*failures]))


@contextmanager
def served_by(planner: Faulty) -> Iterator[Served]:
    running = Served(planner)
    try:
        yield running
    finally:
        running.planner.may_answer.set()
        running.balancing.stop()
        running.balancing._thread.join(WITHIN_S)
        assert not running.balancing._thread.is_alive()


def test_experts_follow_loads_unasked_and_all_of_it_is_told():
    with served() as running:
        running.run_until_balanced()
        view = running.balancing.view()
    record, totals = view.history[0], running.balancing.history.totals
    assert (view.num_layers, view.num_experts, view.num_slots, view.ep_size) == (LAYERS, EXPERTS, EXPERTS + 4, RANKS)
    assert view.layer_ids == list(LAYER_IDS) and view.enabled and view.actor.alive and view.actor.refused == {}
    assert record.moved_slots == totals["moved"] > 0 and totals["finished"] == totals["begun"] == record.version == 1
    assert record.step % COUNTS_EVERY <= 2 and record.layers == LAYERS and abs(record.time - time.time()) < WITHIN_S
    assert record.imbalance_after < record.imbalance_before and running.balancing.planning_s >= record.plan_seconds > 0
    whole = np.sum(view.tokens, axis=1)
    for loads in (view.rank_load_identity, view.rank_load_now, view.rank_load_before):
        np.testing.assert_allclose(np.sum(loads, axis=1), whole)
    tokens = np.array(view.tokens)
    np.testing.assert_allclose(view.rank_load_identity, tokens.reshape(LAYERS, RANKS, -1).sum(axis=2))


def test_loads_of_a_plan_are_kept_as_they_were():
    with served() as running:
        running.run_until_balanced()
        at_plan = running.balancing.view_of_plan(1)
        assert at_plan is not None
        running.run_until(lambda: running.balancing.view().tokens != at_plan.tokens)
        now, again = running.balancing.view(), running.balancing.view_of_plan(1)
        assert running.balancing.view_of_plan(99) is None
    assert again is not None and again.tokens == at_plan.tokens and again.rank_load_now == at_plan.rank_load_now
    assert now.plan is None and again.plan == 1 and now.plans == [record.version for record in now.history]
    whole = np.sum(at_plan.tokens, axis=1)
    for loads in (at_plan.rank_load_identity, at_plan.rank_load_now, at_plan.rank_load_before):
        np.testing.assert_allclose(np.sum(loads, axis=1), whole)
    assert np.mean(at_plan.imbalance_now) < 1.05 < 1.08 < np.mean(at_plan.imbalance_before)


def test_only_the_last_plans_are_kept():
    history = MigrationHistory(Migration(START, hosts=1, slots_per_step=1))
    loads = [ShownLoads(*(np.full((1, 1), version) for _ in range(3))) for version in range(MAX_PLANS + 3)]
    state = PlacementState(0, 0, START)
    for version, shown in enumerate(loads):
        proposal = replace(proposal_for(state, seed=0), version=version)
        history.begin(proposal, START, step=version, loads=shown)
    assert history.plans() == dict(enumerate(loads[3:], 3)) and len(history.plans()) == MAX_PLANS


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_refused_and_the_next_good_plan_is_followed(name):
    spoil, reason = GARBAGE[name]
    with served() as running:
        running.planner.spoil = spoil
        running.run_until(lambda: running.balancing.view().actor.refused)
        assert running.balancing.view().actor.refused == {reason: 1}
        assert running.version == 0 and running.eplb.migration.placement is START
        running.run_until_balanced()


def heads_elsewhere(running: Served) -> None:
    running.eplb.set_target(random_placement(START, seed=5))
    running.run_until(lambda: running.version == 1 and running.eplb.migration.progress.is_done)


def is_asked_to_head_elsewhere(running: Served) -> None:
    running.eplb.set_target(random_placement(START, seed=5))


def forgets_counts(running: Served) -> None:
    running.eplb.forget_counts()


@pytest.mark.parametrize("meanwhile", [heads_elsewhere, is_asked_to_head_elsewhere, forgets_counts])
def test_a_late_plan_is_refused_where_it_no_longer_fits(meanwhile):
    with served() as running:
        running.planner.may_answer.clear()
        running.run_until(running.planner.has_planned.is_set)
        running.run_until(lambda: running.balancing.view().actor.overdue_periods >= 2)
        assert scraped(running.balancing)["plan_overdue_periods",] >= 2
        assert running.version == 0, "serving does not wait, and nothing changes"
        meanwhile(running)
        asked_at = running.eplb.reading.step
        running.planner.may_answer.set()
        running.run_until(lambda: running.balancing.view().actor.refused)
        assert running.balancing.view().actor.refused == {"stale": 1}
        assert scraped(running.balancing)["plans_refused_total", "stale"] == 1
        assert all(record.step >= asked_at for record in running.balancing.view().history), "those are later plans"
        running.run_until_balanced()


@pytest.mark.parametrize(
    ("reason", "restarts", "refused"), [("lost", 1, {}), ("late", 1, {"late": 2}), ("failed", 0, {"failed": 2})]
)
def test_a_planner_that_fails_is_asked_again(reason, restarts, refused):
    with served() as running:
        running.run_until(lambda: running.balancing.view().actor.alive)
        running.planner.failures = [PlanFailure(reason, "planted"), PlanFailure(reason, "planted")]
        running.run_until(lambda: not running.balancing.view().actor.alive)
        assert running.balancing.view().actor.restarts == 0
        running.run_until_balanced()
        actor = running.balancing.view().actor
        assert (actor.alive, actor.restarts, actor.refused) == (True, restarts, refused)


class Dead(Faulty):
    """A planner that can be killed, hung, made to talk nonsense, or slowed down to more than two periods."""

    fault = ""

    def observe(self, reading: LoadReading) -> bool:
        if self.fault == "killed":
            raise PlanFailure("lost", "planted")
        if self.fault == "raises":
            raise KeyError("planted")
        is_due = super().observe(reading)
        return is_due and self.fault != "never due"

    def propose(self, state: PlacementState) -> object:
        if self.fault == "hangs":
            self.may_answer.clear()
        proposal = super().propose(state)
        if self.fault == "nonsense":
            return {"experts": "everywhere"}
        return proposal


Shown = dict[tuple[str, ...], float]
SEEN: dict[str, Callable[[Shown], bool]] = {
    "killed": lambda shown: shown["balancer_up",] == 0 and ("plan_problem_time_seconds", "lost") in shown,
    "raises": lambda shown: shown["balancer_up",] == 0 and shown["plans_refused_total", "failed"] > 0,
    "hangs": lambda shown: shown["plan_overdue_periods",] >= 2 and shown["plan_wait_seconds",] > 0,
    "nonsense": lambda shown: shown["plans_refused_total", "malformed"] > 0,
    "never due": lambda shown: shown["plan_overdue_periods",] >= 2,
}
"""Metrics that show each fault."""


@pytest.mark.parametrize("fault", SEEN)
def test_a_stuck_planner_is_seen_within_two_periods_and_serving_goes_on(fault):
    """Periods are steps; the control thread gets its time, as it has between the steps of a model."""
    planner = Dead([])
    with served_by(planner) as running:
        running.run_until_balanced()
        running.run_until(lambda: running.balancing.view().actor.plan_age_s is not None and not is_moving(running))
        before, healthy = running.eplb.migration.placement, running.balancing.view().actor
        assert healthy.alive and healthy.overdue_periods < 2
        planner.fault = fault
        running.steps.shift_odds()
        faulty_since = running.eplb.reading.step
        running.run_until(lambda: running.eplb.reading.step >= faulty_since + 2 * RULES.interval + COUNTS_EVERY)
        running.wait_until(lambda: SEEN[fault](scraped(running.balancing)))
        assert running.eplb.migration.placement is before, "the old placement serves"
        planner.fault = ""
        planner.may_answer.set()
        num_plans = len(running.outcomes)
        running.run_until(lambda: running.outcomes[num_plans:].count("finished"))
        actor, shown = running.balancing.view().actor, scraped(running.balancing)
        assert actor.alive and actor.overdue_periods < 2 and actor.plan_age_s is not None
        assert shown["balancer_up",] == 1 and shown["plan_overdue_periods",] < 2


def is_moving(running: Served) -> bool:
    return running.eplb.state() is None


def test_a_planner_with_nothing_to_do_is_not_overdue():
    """It decides every time that experts should stay, and that is a decision."""
    with served() as running:
        running.run_until_balanced()
        assert running.balancing.view().actor.plan_age_s is not None
        for _ in range(5):
            step = running.eplb.reading.step
            running.run_until(lambda step=step: running.eplb.reading.step >= step + RULES.interval)
            running.wait_until(lambda: running.balancing.view().actor.overdue_periods < 2)


def test_what_a_plan_promised_is_shown_beside_what_it_does():
    with served() as running:
        running.run_until_balanced()
        running.run_until(lambda: running.balancing.view().realised.imbalance_realised is not None)
        view = running.balancing.view()
        assert view.realised.imbalance_promised == view.history[-1].imbalance_after
        assert view.realised.imbalance_realised == pytest.approx(view.realised.imbalance_promised, rel=0.05)
        assert view.realised.distinct_ranks is None and min(view.realised.peak_rows) > 1
        running.eplb.set_target(random_placement(START, seed=5))
        running.run_until(lambda: running.eplb.state() is not None)
        assert running.balancing.view().realised.imbalance_promised is None, "nobody planned this placement"


def test_a_planner_that_is_not_there_yet_counts_as_none_that_was_lost():
    with served(PlanFailure("lost", "planted")) as running:
        running.run_until_balanced()
        assert running.balancing.view().actor.restarts == 0


@pytest.mark.parametrize("fails_at", [1, 5])
def test_experts_that_cannot_be_fetched_stay_and_the_next_plan_is_followed(fails_at):
    with served() as running:
        running.steps.fails_at = fails_at
        running.run_until(lambda: "failed" in running.outcomes)
        placement = running.eplb.migration.placement
        running.steps.run(3)
        running.steps.assert_hold(placement)
        record = running.balancing.view().history[0]
        moved = int((placement.expert_of_slot != START.expert_of_slot).sum())
        assert record.moved_slots == moved and (moved > 0) == (fails_at > 1)
        running.run_until_balanced()
        assert running.balancing.history.totals["failed"] == 1


def test_counts_of_other_weights_are_not_mixed_with_those_before():
    with served() as running:
        running.run_until(lambda: np.sum(running.balancing.view().tokens) > 0)
        running.steps.run(2)
        running.eplb.forget_counts()
        deadline = time.monotonic() + WITHIN_S
        while np.sum(running.balancing.view().tokens) > 0:
            assert time.monotonic() < deadline
            time.sleep(0.001)


def test_a_migration_that_another_one_replaces_is_told_as_such():
    with served() as running:
        running.run_until(lambda: running.version == 1)
        assert not running.eplb.migration.progress.is_done
        running.eplb.set_target(START)
        running.run_until(lambda: running.version == 2)
        assert running.outcomes == ["replaced"]


def test_where_experts_stay_nobody_plans_and_no_thread_runs():
    before = threading.active_count()
    eplb = EplbSteps(Migration(START, hosts=1, slots_per_step=1), counts_every=7, moves_experts=False)
    control = EplbControl(eplb, None, config=RULES, layer_ids=LAYER_IDS)
    assert threading.active_count() == before
    CountedSteps(eplb, np.ones((LAYERS, EXPERTS))).run(40)
    view = control.view()
    assert np.sum(view.tokens) > 0 and not view.enabled and not view.actor.alive and view.progress.version == 0
    control.stop()
    assert threading.active_count() == before
