"""Who sends what to whom, on placements small enough to read."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.balancing.placement import ExpertPlacement, PlacementError, identity_placement, placement_from
from rayserve_moe.balancing.transfer_plan import transfer_plan


def placement(*ranks: list[int], num_experts: int = 4) -> ExpertPlacement:
    return placement_from(np.array(ranks).reshape(1, -1), None, num_experts=num_experts, ep_size=len(ranks))


def test_what_stays_is_neither_copied_nor_sent():
    here = placement([0, 1], [2, 3])
    transfers = transfer_plan(here, here, hosts=1)
    assert transfers.source_of_slot.tolist() == [[0, 1, 2, 3]]
    assert not transfers.is_copied.any() and not transfers.is_sent.any()


def test_two_slots_of_a_rank_that_swap_are_copies_and_two_ranks_that_swap_are_sends():
    transfers = transfer_plan(placement([0, 1], [2, 3]), placement([1, 0], [2, 3]), hosts=1)
    assert [slots.tolist() for slots in transfers.copies(0)] == [[1, 0], [0, 1]]
    assert not transfers.is_sent.any()
    transfers = transfer_plan(placement([0, 1], [2, 3]), placement([2, 1], [0, 3]), hosts=1)
    assert [slots.tolist() for slots in transfers.sends(0)] == [[0, 2], [2, 0]]
    assert transfers.send_sizes(0).tolist() == [[0, 1], [1, 0]]


def test_the_own_host_is_asked_before_another():
    old = placement([0, 1], [2, 3], [0, 2], [1, 3])
    new = placement([0, 1], [2, 3], [0, 2], [0, 1])
    sources, targets = transfer_plan(old, new, hosts=2).sends(0)
    assert (sources.tolist(), targets.tolist()) == ([4], [6])


def test_equally_near_ranks_take_turns():
    old = placement([0, 1], [0, 1], [2, 3], [2, 3])
    new = placement([0, 1], [0, 1], [2, 0], [3, 0])
    sources, targets = transfer_plan(old, new, hosts=1).sends(0)
    assert (sources.tolist(), targets.tolist()) == ([0, 2], [5, 7])


def test_placements_of_other_shapes_and_uneven_hosts_are_refused():
    with pytest.raises(PlacementError, match="different layers, slots or ranks"):
        transfer_plan(identity_placement(1, 4, ep_size=2), identity_placement(1, 4, ep_size=4), hosts=1)
    with pytest.raises(PlacementError, match="4 ranks do not spread evenly over 3 hosts"):
        transfer_plan(identity_placement(1, 4, ep_size=4), identity_placement(1, 4, ep_size=4), hosts=3)
