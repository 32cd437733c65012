"""Who sends what to whom, on placements small enough to read."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.balancing.migration import transfer_sources
from rayserve_moe.balancing.placement import ExpertPlacement, PlacementError, identity_placement, placement_from


def placement(*ranks: list[int], num_experts: int = 4) -> ExpertPlacement:
    return placement_from(np.array(ranks).reshape(1, -1), None, num_experts=num_experts, ep_size=len(ranks))


def test_what_stays_is_neither_copied_nor_sent():
    here = placement([0, 1], [2, 3])
    assert transfer_sources(here, here, hosts=1).tolist() == [[0, 1, 2, 3]]


def test_two_slots_of_a_rank_that_swap_are_copies_and_two_ranks_that_swap_are_sends():
    start = placement([0, 1], [2, 3])
    assert transfer_sources(start, placement([1, 0], [2, 3]), hosts=1).tolist() == [[1, 0, 2, 3]]
    assert transfer_sources(start, placement([2, 1], [0, 3]), hosts=1).tolist() == [[2, 1, 0, 3]]


def test_the_own_host_is_asked_before_another():
    old = placement([0, 1], [2, 3], [0, 2], [1, 3])
    new = placement([0, 1], [2, 3], [0, 2], [0, 1])
    assert transfer_sources(old, new, hosts=2).tolist() == [[0, 1, 2, 3, 4, 5, 4, 6]]


def test_equally_near_ranks_take_turns():
    old = placement([0, 1], [0, 1], [2, 3], [2, 3])
    new = placement([0, 1], [0, 1], [2, 0], [3, 0])
    assert transfer_sources(old, new, hosts=1).tolist() == [[0, 1, 2, 3, 4, 0, 7, 2]]


def test_placements_of_other_shapes_and_uneven_hosts_are_refused():
    with pytest.raises(PlacementError, match="different layers, slots or ranks"):
        transfer_sources(identity_placement(1, 4, ep_size=2), identity_placement(1, 4, ep_size=4), hosts=1)
    with pytest.raises(PlacementError, match="4 ranks do not spread evenly over 3 hosts"):
        transfer_sources(identity_placement(1, 4, ep_size=4), identity_placement(1, 4, ep_size=4), hosts=3)
