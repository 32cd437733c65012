"""Ranks that lie over several slices: experts move within slices as far as that balances the load."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.planner_loads import skewed
from rayserve_moe.balancing.migration import transfer_sources
from rayserve_moe.balancing.placement import ExpertPlacement, PlacementError, identity_placement, placement_from
from rayserve_moe.balancing.planner import plan, replan
from rayserve_moe.balancing.planning import imbalance, rank_loads
from rayserve_moe.config.load import settings_from
from rayserve_moe.engine.eplb.steps import eplb_steps_for
from rayserve_moe.requests.records import RoutingLayout
from rayserve_moe.scheduling.step_plan import StartReport

LAYERS, EXPERTS, RANKS, REDUNDANT, SLICES = 8, 64, 16, 16, 2


def num_far(old: ExpertPlacement, new: ExpertPlacement) -> int:
    """Slots whose next expert comes from another slice."""
    sources = transfer_sources(old, new, hosts=RANKS // 4, slices=SLICES)
    per_slice = old.num_slots // SLICES
    return int((sources // per_slice != np.arange(old.num_slots) // per_slice).sum())


def peaks(placement: ExpertPlacement, load: np.ndarray) -> np.ndarray:
    return imbalance(rank_loads(placement, load))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("skew", ["lognormal", "zipf", "drift"])
def test_fewer_experts_cross_slices_and_the_load_is_as_even(skew, seed):
    load = skewed(skew, layers=LAYERS, experts=EXPERTS, seed=seed)
    before = identity_placement(LAYERS, EXPERTS, ep_size=RANKS, num_redundant=REDUNDANT)
    anywhere, within = (replan(load, before, num_slices=slices) for slices in (1, SLICES))
    assert 3 * num_far(before, within) < 2 * num_far(before, anywhere)
    assert (peaks(within, load) <= np.maximum(peaks(anywhere, load), 1.02) + 1e-5).all()


def test_a_load_that_slices_cannot_even_out_moves_between_them():
    load = np.ones((1, 32))
    load[:, :16] = 20.0
    before = identity_placement(1, 32, ep_size=8, num_redundant=0)
    after = replan(load, before, num_slices=2)
    assert peaks(before, load).max() > 1.8 and peaks(after, load).max() < 1.1


def test_one_slice_is_planned_as_ever():
    load = skewed("zipf", layers=LAYERS, experts=EXPERTS)
    before = identity_placement(LAYERS, EXPERTS, ep_size=RANKS, num_redundant=REDUNDANT)
    expected = plan(load, ep_size=RANKS, num_redundant=REDUNDANT, previous=before)
    found = replan(load, before)
    assert (found.expert_of_slot == expected.expert_of_slot).all()
    assert (found.share_of_slot == expected.share_of_slot).all()


def test_the_own_slice_is_asked_before_another():
    """Expert 0 lies on ranks 0 and 5; rank 6, on a host of its own, gets it from the one on its slice."""
    old = np.array([[0], [1], [2], [3], [4], [0], [5], [6]]).reshape(1, -1)
    new = old.copy()
    new[0, 6], new[0, 5] = 0, 5
    before, after = (placement_from(each, None, num_experts=7, ep_size=8) for each in (old, new))
    assert transfer_sources(before, after, hosts=8, slices=1)[0, 6] == 0
    assert transfer_sources(before, after, hosts=8, slices=2)[0, 6] == 5


def test_slices_have_equally_many_ranks():
    before = identity_placement(1, 8, ep_size=8)
    with pytest.raises(PlacementError, match="8 ranks do not spread evenly over 3 slices"):
        replan(np.ones((1, 8)), before, num_slices=3)
    with pytest.raises(PlacementError, match="8 ranks do not spread evenly over 3 slices"):
        transfer_sources(before, before, hosts=1, slices=3)


def test_a_server_migrates_by_the_slices_of_its_settings():
    settings = settings_from({"model_path": "m", "num_hosts": 4, "num_slices": 2, "data_parallel_size": 4})
    report = StartReport(2, num_expert_ranks=4)
    layout = RoutingLayout(1, (0,), 4, 1)
    steps = eplb_steps_for(layout, report, settings=settings.balancing, parallel=settings.parallel)
    assert steps.migration.num_slices == 2
