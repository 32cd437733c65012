"""What a plan owes to the placement before it: few moves, none over the budget, none where all is well."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rayserve_moe.balancing.placement import ExpertPlacement, PlacementError, lowered_redundancy
from rayserve_moe.balancing.planner import lower_bound, plan
from tests.support.experts.eplb_planner import (
    KINDS,
    assert_fits,
    incoming,
    planner_cases,
    random_load,
    rank_loads,
    same,
)
from tests.support.session.hypothesis_examples import examples

SEEDS = st.integers(0, 1 << 30)
KIND = st.sampled_from(KINDS)
BUDGET = st.one_of(st.none(), st.integers(0, 20))
FEW = examples(30)  # each example is several searches


@FEW
@given(case=planner_cases(), seed=SEEDS, kind=KIND, budget=BUDGET, tolerance=st.sampled_from([0.0, 0.02, 0.3]))
def test_moves_stay_within_the_budget_and_no_layer_gets_hotter(case, seed, kind, budget, tolerance):
    previous = plan(case.load, **case.sizes)
    load = random_load(np.random.default_rng(seed), kind, case.load.shape)
    kept = load.copy()
    settings = {"previous": previous, "slot_budget": budget, "tolerance": tolerance}
    placement = plan(load, **case.sizes, **settings)
    assert_fits(placement, case.with_load(load))
    assert same(placement, plan(load, **case.sizes, **settings))
    np.testing.assert_array_equal(load, kept)
    if budget is not None:
        assert incoming(placement, previous).sum() <= budget
    assert (rank_loads(placement, load).max(axis=1) <= rank_loads(previous, load).max(axis=1) * (1 + 1e-5)).all()


@FEW
@given(case=planner_cases(), seed=SEEDS, tolerance=st.sampled_from([0.0, 0.02, 0.3]))
def test_layers_within_the_tolerance_are_left_alone(case, seed, tolerance):
    previous = plan(case.load, **case.sizes)
    assume(previous.slots_per_rank < previous.num_experts)
    load = case.load * np.exp(np.random.default_rng(seed).normal(0, 0.1, case.load.shape))
    placement = plan(load, **case.sizes, previous=previous, tolerance=tolerance)
    goal = (1 + tolerance) * lower_bound(load, ep_size=case.ep_size, num_redundant=placement.num_redundant)
    quiet = rank_loads(previous, load).max(axis=1) <= goal
    for name in ("expert_of_slot", "share_of_slot", "slot_for"):
        np.testing.assert_array_equal(getattr(placement, name)[quiet], getattr(previous, name)[quiet])


@FEW
@given(case=planner_cases(), seed=SEEDS)
def test_a_plan_that_got_there_is_its_own_successor(case, seed):
    previous = plan(case.load, **case.sizes)
    load = random_load(np.random.default_rng(seed), "lognormal", case.load.shape)
    placement = plan(load, **case.sizes, previous=previous)
    goal = 1.02 * lower_bound(load.astype(np.float64), ep_size=case.ep_size, num_redundant=placement.num_redundant)
    if (rank_loads(placement, load).max(axis=1) <= goal).all():
        assert same(plan(load, **case.sizes, previous=placement), placement)


@FEW
@given(case=planner_cases(), ep_size=st.integers(1, 9), num_redundant=st.integers(0, 24), budget=BUDGET)
def test_ranks_that_stay_keep_what_they_hold(case, ep_size, num_redundant, budget):
    """Moves are counted against it. A budget below what the change of ranks itself forces to move is refused."""
    previous = plan(case.load, **case.sizes)
    other = {"ep_size": ep_size, "num_redundant": num_redundant}
    try:
        fitting = lowered_redundancy(previous.num_experts, ep_size=ep_size, wanted=num_redundant)
    except PlacementError:
        with pytest.raises(PlacementError, match="smallest number of redundant experts that fits"):
            plan(case.load, **other, previous=previous)
        return
    unlimited = plan(case.load, **other, previous=previous, tolerance=1e9)
    if budget is not None and _has_to_move(unlimited, previous) > budget:
        with pytest.raises(PlacementError, match=r"force [0-9]+ slots to change"):
            plan(case.load, **other, previous=previous, slot_budget=budget)
        return
    placement = plan(case.load, **other, previous=previous, slot_budget=budget)
    assert placement.num_redundant == fitting and placement.ep_size == ep_size
    loads = rank_loads(placement, case.load)
    total = case.load.astype(np.float64).sum(axis=1)
    np.testing.assert_allclose(loads.sum(axis=1), total, rtol=1e-5)
    if budget is not None:
        assert incoming(placement, previous).sum() <= budget


def _has_to_move(unlimited: ExpertPlacement, previous: ExpertPlacement) -> int:
    """What moves where any imbalance will do: nothing as long as ranks and their slots stay the same."""
    same_ranks = (unlimited.ep_size, unlimited.slots_per_rank) == (previous.ep_size, previous.slots_per_rank)
    return 0 if same_ranks else int(incoming(unlimited, previous).sum())


@FEW
@given(case=planner_cases(), seed=SEEDS)
def test_without_a_budget_for_moves_only_shares_change(case, seed):
    previous = plan(case.load, **case.sizes)
    load = random_load(np.random.default_rng(seed), "lognormal", case.load.shape)
    placement = plan(load, **case.sizes, previous=previous, slot_budget=0)
    np.testing.assert_array_equal(placement.expert_of_slot, previous.expert_of_slot)
