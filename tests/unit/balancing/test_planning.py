"""Loads of ranks are those that tokens make there; plans come when they are due, and only where they gain."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.balancing.load_window import LoadReading
from rayserve_moe.balancing.placement import identity_placement
from rayserve_moe.balancing.planning import (
    MIN_TOKENS_PER_EXPERT,
    LocalPlanner,
    PlacementState,
    PlanningConfig,
    chance,
    checked_placement,
    has_enough,
    imbalance,
    is_worth,
    rank_loads,
)
from tests.support.experts.placements import random_placement

LAYERS, EXPERTS, RANKS, REDUNDANT = 3, 16, 4, 4
START = identity_placement(LAYERS, EXPERTS, ep_size=RANKS, num_redundant=REDUNDANT)
RULES = PlanningConfig(interval=100, window=1000)


def skewed(seed: int = 0, tokens: int = 40_000) -> np.ndarray:
    odds = np.random.default_rng(seed).lognormal(sigma=1.0, size=(LAYERS, EXPERTS))
    return np.floor(tokens * odds / odds.sum(axis=1, keepdims=True))


@pytest.mark.parametrize("dispatch", ["shares", "static", "first"])
def test_loads_of_ranks_are_those_of_tokens_sent_one_by_one(dispatch):
    placement, tokens = random_placement(START, seed=1), skewed(tokens=2000)
    expected = np.zeros((LAYERS, RANKS))
    for layer, expert in np.ndindex(LAYERS, EXPERTS):
        slots = np.flatnonzero(placement.expert_of_slot[layer] == expert)
        for sender in range(RANKS):
            sent = tokens[layer, expert] / RANKS
            parts = {
                "shares": placement.share_of_slot[layer, slots],
                "static": slots == placement.slot_for[layer, expert, sender],
                "first": slots == slots[0],
            }[dispatch]
            np.add.at(expected[layer], slots // placement.slots_per_rank, sent * parts)
    np.testing.assert_allclose(rank_loads(placement, tokens, dispatch=dispatch), expected, rtol=1e-6)


def test_imbalance_is_the_hottest_rank_over_the_mean_and_1_where_nothing_was_counted():
    np.testing.assert_allclose(imbalance(np.array([[1.0, 3.0], [0.0, 0.0], [2.0, 2.0]])), [1.5, 1.0, 1.0])


def test_a_plan_needs_tokens_enough_in_every_layer():
    enough = np.full((2, 8), MIN_TOKENS_PER_EXPERT)
    assert has_enough(enough)
    assert not has_enough(enough - [[0], [1]])
    assert not has_enough(np.zeros((0, 0)))


@pytest.mark.parametrize("short", [0, 1])
@pytest.mark.parametrize("steps", [RULES.interval - 1, RULES.interval])
def test_a_plan_is_due_after_the_interval_and_with_tokens_enough(short, steps):
    advisor, enough = LocalPlanner(RULES), np.full((LAYERS, EXPERTS), MIN_TOKENS_PER_EXPERT, np.int32)
    assert not advisor.observe(LoadReading(0, 0, np.zeros_like(enough)))
    is_due = advisor.observe(LoadReading(0, steps, enough - np.eye(LAYERS, EXPERTS, dtype=np.int32) * short))
    assert is_due == (not short and steps == RULES.interval)


def test_flat_loads_that_differ_by_chance_alone_are_not_worth_a_plan():
    for seed in range(20):
        tokens = np.random.default_rng(seed).multinomial(600, np.full(EXPERTS, 1 / EXPERTS), LAYERS).astype(float)
        apparent = imbalance(tokens.reshape(LAYERS, RANKS, -1).sum(axis=2))
        assert not is_worth(apparent, np.ones(LAYERS), noise=chance(tokens, ep_size=RANKS))
    tokens = skewed()
    loads = rank_loads(START, tokens)
    assert is_worth(imbalance(loads), np.ones(LAYERS), noise=chance(tokens, ep_size=RANKS))


def advisor_that_saw(tokens: np.ndarray, *, steps: int = 128, rules: PlanningConfig = RULES) -> LocalPlanner:
    advisor = LocalPlanner(rules)
    advisor.observe(LoadReading(0, 0, np.zeros(tokens.shape, np.int32)))
    advisor.observe(LoadReading(0, steps, tokens.astype(np.int32)))
    return advisor


def test_what_is_proposed_holds_up_and_keeps_its_promise():
    tokens, state = skewed(), PlacementState(0, 4, START)
    proposal = advisor_that_saw(tokens).propose(state)
    assert proposal is not None and (proposal.version, proposal.made_from, proposal.generation) == (5, 4, 0)
    placement = checked_placement(proposal, state)
    before, after = (imbalance(rank_loads(each, tokens)) for each in (START, placement))
    np.testing.assert_allclose([before.mean(), after.mean()], [proposal.imbalance_before, proposal.imbalance_after])
    assert after.mean() < 1.05 < before.mean() and proposal.plan_seconds > 0
    assert advisor_that_saw(tokens).propose(PlacementState(0, 5, placement)) is None, "it is balanced now"


@pytest.mark.parametrize("dispatch", ["shares", "static", "first"])
def test_what_is_promised_is_what_the_dispatch_there_is_makes_of_it(dispatch):
    tokens, state = skewed(), PlacementState(0, 0, START)
    proposal = advisor_that_saw(tokens, rules=PlanningConfig(100, 1000, dispatch)).propose(state)
    assert proposal is not None
    after = imbalance(rank_loads(checked_placement(proposal, state), tokens, dispatch=dispatch))
    assert after.mean() == pytest.approx(proposal.imbalance_after) and after.mean() < proposal.imbalance_before


def test_plans_follow_each_other_at_the_interval():
    tokens = skewed()
    advisor = LocalPlanner(RULES)
    asked_at = []
    for step in range(0, 520, 16):
        if advisor.observe(LoadReading(0, step, (tokens * step / 16).astype(np.int32))):
            asked_at.append(step)
            advisor.propose(PlacementState(0, 0, START))
    assert asked_at == [112, 224, 336, 448]


def test_counts_of_other_weights_are_waited_for_and_plans_of_old_ones_not_made():
    tokens = skewed()
    advisor = advisor_that_saw(tokens)
    assert not advisor.observe(LoadReading(1, 200, np.zeros(tokens.shape, np.int32)))
    assert not advisor.observe(LoadReading(1, 299, tokens.astype(np.int32)))
    assert advisor.propose(PlacementState(0, 0, START)) is None
    assert not advisor.observe(LoadReading(1, 315, (2 * tokens).astype(np.int32))), "a proposal was asked for at 299"
    assert advisor.observe(LoadReading(1, 400, (2 * tokens).astype(np.int32)))
    assert advisor.propose(PlacementState(1, 0, START)) is not None
