"""Planners of peers, written from their descriptions: valid placements that do as they are described."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.peer_planners import swaps, variance_aware, window_loads
from benchmarks.planner_loads import skewed
from rayserve_moe.balancing.placement import ExpertPlacement, identity_placement, placement_from
from rayserve_moe.balancing.planning import rank_loads

EXPERTS, RANKS, REDUNDANT = 32, 8, 8


def placed(experts: np.ndarray) -> ExpertPlacement:
    """Return a placement; it refuses missing experts, and experts twice on a rank."""
    return placement_from(experts.reshape(len(experts), -1), None, num_experts=EXPERTS, ep_size=RANKS)


def peaks(placement: ExpertPlacement, load: np.ndarray) -> np.ndarray:
    loads = rank_loads(placement, load)
    return loads.max(axis=1) / loads.mean(axis=1)


@pytest.mark.parametrize("skew", ["lognormal", "zipf"])
def test_both_level_a_skewed_load(skew):
    load = skewed(skew, layers=2, experts=EXPERTS)
    start = peaks(identity_placement(2, EXPERTS, ep_size=RANKS, num_redundant=REDUNDANT), load)
    windows = np.repeat(load[:, None], 4, axis=1)
    flash = placed(variance_aware(windows, ep_size=RANKS, num_redundant=REDUNDANT))
    swift = placed(swaps(load, ep_size=RANKS, num_redundant=REDUNDANT))
    assert (peaks(flash, load) < 1.05).all() and (peaks(swift, load) < 0.95 * start).all()


def test_experts_that_are_hot_together_are_parted():
    """Two pairs of equal means: the experts of a pair are hot in the same windows, so a rank gets one of each."""
    windows = np.array([[9.0, 9, 1, 1], [1, 1, 9, 9]] * 4)[None]
    (experts,) = variance_aware(windows, ep_size=2, num_redundant=0)
    assert sorted(sorted(rank // 2) for rank in experts) == [[0, 1], [0, 1]]


def test_swaps_leave_a_level_load_alone():
    load = np.full((1, EXPERTS), 7)
    start = identity_placement(1, EXPERTS, ep_size=RANKS)
    np.testing.assert_array_equal(swaps(load, ep_size=RANKS, num_redundant=0).reshape(1, -1), start.expert_of_slot)


def test_windows_count_every_token_once():
    rows = np.random.default_rng(0).integers(EXPERTS, size=(1000, 2, 4))
    windows = window_loads(rows, EXPERTS)
    assert windows.shape == (2, 62, EXPERTS)
    np.testing.assert_array_equal(windows.sum(axis=1)[1], np.bincount(rows[:, 1].reshape(-1), minlength=EXPERTS))
