"""Ranks that stay are named by whoever knows; their contents come first then, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.balancing.placement import PlacementError
from rayserve_moe.balancing.planner import plan
from rayserve_moe.balancing.previous import survivors_first


@pytest.fixture
def placement():
    return plan(np.exp(np.random.default_rng(0).normal(0, 1, (2, 16))), ep_size=4, num_redundant=4)


def test_survivors_come_first_in_their_order(placement):
    reordered = survivors_first(placement, [3, 1])
    by_rank = placement.expert_of_slot.reshape(2, 4, 5)
    np.testing.assert_array_equal(reordered.expert_of_slot.reshape(2, 4, 5), by_rank[:, [3, 1, 0, 2]])
    shares = placement.share_of_slot.reshape(2, 4, 5)
    np.testing.assert_array_equal(reordered.share_of_slot.reshape(2, 4, 5), shares[:, [3, 1, 0, 2]])


@pytest.mark.parametrize("ranks", [[0, 0], [4], [-1]])
def test_other_numbers_are_refused(placement, ranks):
    with pytest.raises(PlacementError, match=r"not different numbers in 0\.\.3"):
        survivors_first(placement, ranks)
