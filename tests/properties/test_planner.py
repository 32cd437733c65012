"""What every plan is held to, whatever the loads, sizes and number types."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.balancing.planner import first_layout, first_placement, lower_bound, plan
from tests.support.experts.eplb_planner import (
    PlannerCase,
    assert_fits,
    even_rank_loads,
    least_peak,
    optimal_peak,
    planner_cases,
    rank_loads,
    same,
)
from tests.support.session.hypothesis_examples import examples

SEEDS = st.integers(0, 1 << 30)
TINY = st.sampled_from([(4, 2, 2), (4, 2, 3), (3, 3, 1), (3, 3, 2), (4, 4, 1), (4, 4, 2), (5, 2, 3), (4, 3, 2)])
FEW = examples(30)  # each example is several searches


@FEW
@given(case=planner_cases())
def test_a_plan_fits_its_case_is_repeatable_and_leaves_its_input_alone(case):
    before = case.load.copy()
    for planned in (plan, first_placement):
        placement = planned(case.load, **case.sizes)
        assert_fits(placement, case)
        assert same(placement, planned(case.load.copy(), **case.sizes))
    np.testing.assert_array_equal(case.load, before)


@FEW
@given(case=planner_cases())
def test_search_does_not_make_the_first_placement_worse(case):
    """Neither with equal shares nor, even less, with its own."""
    first = even_rank_loads(first_placement(case.load, **case.sizes), case.load).max(axis=1)
    found = rank_loads(plan(case.load, **case.sizes), case.load).max(axis=1)
    assert (found <= first * (1 + 1e-5)).all()


@FEW
@given(seed=SEEDS, sizes=TINY, num_dead=st.integers(0, 2))
def test_no_placement_is_better_than_the_bound(seed, sizes, num_dead):
    num_experts, ep_size, slots_per_rank = sizes
    load = np.exp(np.random.default_rng(seed).normal(0, 1.5, num_experts))
    load[:num_dead] = 0
    num_redundant = ep_size * slots_per_rank - num_experts
    bound = lower_bound(load[None], ep_size=ep_size, num_redundant=num_redundant)[0]
    best = optimal_peak(load, ep_size=ep_size, slots_per_rank=slots_per_rank)
    assert bound <= best * (1 + 1e-12)
    planned = plan(load[None], ep_size=ep_size, num_redundant=num_redundant)
    assert rank_loads(planned, load[None]).max() >= best * (1 - 1e-5)


@FEW
@given(seed=SEEDS, sizes=TINY)
def test_shares_are_as_good_as_shares_can_be(seed, sizes):
    num_experts, ep_size, slots_per_rank = sizes
    load = np.exp(np.random.default_rng(seed).normal(0, 1, (1, num_experts)))
    placement = plan(load, ep_size=ep_size, num_redundant=ep_size * slots_per_rank - num_experts)
    ranks = [tuple(held) for held in placement.expert_of_slot.reshape(ep_size, -1).tolist()]
    assert rank_loads(placement, load).max() <= 1.01 * least_peak(ranks, load[0])


@FEW
@given(case=planner_cases(), seed=SEEDS)
def test_layers_do_not_know_each_other(case, seed):
    order = np.random.default_rng(seed).permutation(len(case.load))
    placement, permuted = plan(case.load, **case.sizes), plan(case.load[order], **case.sizes)
    np.testing.assert_array_equal(permuted.expert_of_slot, placement.expert_of_slot[order])
    np.testing.assert_allclose(permuted.share_of_slot, placement.share_of_slot[order], rtol=0, atol=1e-6)


@FEW
@given(case=planner_cases(), seed=SEEDS)
def test_numbering_experts_anew_numbers_the_plan_anew(case, seed):
    generator = np.random.default_rng(seed)
    load = generator.permuted(np.exp(np.linspace(0, 2, case.load.shape[1])) + np.zeros_like(case.load, float), axis=1)
    order = generator.permutation(load.shape[1])
    placement, permuted = plan(load, **case.sizes), plan(load[:, order], **case.sizes)
    if placement.slots_per_rank < placement.num_experts:
        np.testing.assert_array_equal(order[permuted.expert_of_slot], placement.expert_of_slot)
    np.testing.assert_allclose(rank_loads(permuted, load[:, order]).max(), rank_loads(placement, load).max())


@FEW
@given(case=planner_cases(), exponent=st.integers(-30, 30))
def test_the_unit_of_the_load_does_not_matter(case, exponent):
    load = case.load.astype(np.float64)
    assert same(plan(load, **case.sizes), plan(load * 2.0**exponent, **case.sizes))


@FEW
@given(case=planner_cases())
def test_rounds_of_dealing_keep_replicas_apart(case):
    placement = first_placement(case.load, **case.sizes)
    if placement.slots_per_rank < placement.num_experts:
        load = np.maximum(case.load.astype(np.float64), 1)
        first_layout(load, ep_size=case.ep_size, slots_per_rank=placement.slots_per_rank).check_integrity()


@FEW
@given(case=planner_cases())
def test_more_slots_never_raise_the_bound(case):
    load = case.load.astype(np.float64)
    bounds = [lower_bound(load, ep_size=case.ep_size, num_redundant=r) for r in range(case.ep_size, 3 * case.ep_size)]
    assert (np.diff(bounds, axis=0) <= 1e-9 * load.sum()).all()


def test_cases_reach_forced_duplicates_and_single_slots():
    """The sizes that the strategy draws from contain both extremes."""
    doubled = plan(np.ones((1, 2)), ep_size=2, num_redundant=4)
    assert doubled.slots_per_rank > doubled.num_experts
    single = PlannerCase(np.ones((2, 8), np.uint32), 8, 0)
    assert_fits(plan(single.load, **single.sizes), single)
