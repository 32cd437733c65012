"""Nothing that comes as a plan is believed: whatever is wrong with it, it is refused, with the reason."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.balancing.placement import identity_placement
from rayserve_moe.balancing.planning import PlacementState, RefusedPlanError, checked_placement
from tests.support.experts.eplb_proposals import GARBAGE, proposal_for

STATE = PlacementState(1, 7, identity_placement(2, 8, ep_size=4, num_redundant=4))


def test_a_good_plan_is_the_placement_that_was_planned():
    proposal = proposal_for(STATE, seed=3)
    placement = checked_placement(proposal, STATE)
    np.testing.assert_array_equal(placement.expert_of_slot, proposal.expert_of_slot)
    np.testing.assert_array_equal(placement.share_of_slot, proposal.share_of_slot)


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_refused(name):
    spoil, reason = GARBAGE[name]
    with pytest.raises(RefusedPlanError) as refusal:
        checked_placement(spoil(proposal_for(STATE, seed=3)), STATE)
    assert refusal.value.reason == reason
