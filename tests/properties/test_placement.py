"""Whatever the sizes: identity placements are valid, and one slot per rank serves every expert."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.balancing.placement import (
    MAX_REDUNDANT,
    PlacementError,
    identity_placement,
    lowered_redundancy,
    placement_from,
)

SIZES = {"num_experts": st.integers(1, 40), "ep_size": st.integers(1, 12)}


@given(**SIZES, num_redundant=st.integers(0, 30))
def test_identity_is_even_wherever_slots_divide(num_experts, ep_size, num_redundant):
    num_slots = num_experts + num_redundant
    if num_slots % ep_size:
        return
    placement = identity_placement(2, num_experts, ep_size=ep_size, num_redundant=num_redundant)
    counts = np.bincount(placement.expert_of_slot[0], minlength=num_experts)
    assert counts.max() - counts.min() <= 1
    by_rank = placement.expert_of_slot[0].reshape(ep_size, -1)
    assert all(len(set(row)) == min(len(row), num_experts) for row in by_rank.tolist())


@given(**SIZES, seed=st.integers(0, 1 << 30))
def test_the_one_slot_of_a_rank_is_its_own_where_it_has_one(num_experts, ep_size, seed):
    """And the ranks without one are spread over the replicas."""
    generator = np.random.default_rng(seed)
    slots_per_rank = -(-num_experts // ep_size) + int(generator.integers(0, 3))
    if slots_per_rank > num_experts:
        return
    experts = np.concatenate([generator.permutation(num_experts) for _ in range(ep_size)])
    by_rank = np.zeros((ep_size, slots_per_rank), np.int32)
    queue = list(range(num_experts))
    for rank in range(ep_size):
        chosen = queue[:slots_per_rank]
        rest = [e for e in experts[rank * num_experts : (rank + 1) * num_experts] if e not in chosen]
        by_rank[rank] = (chosen + rest)[:slots_per_rank]
        queue = queue[slots_per_rank:]
    placement = placement_from(by_rank.reshape(1, -1), None, num_experts=num_experts, ep_size=ep_size)
    for expert, rank in np.ndindex(num_experts, ep_size):
        slot = placement.slot_for[0, expert, rank]
        assert placement.expert_of_slot[0, slot] == expert
        if expert in by_rank[rank]:
            assert slot // slots_per_rank == rank
    totals = np.bincount(placement.expert_of_slot[0], weights=placement.share_of_slot[0], minlength=num_experts)
    np.testing.assert_allclose(totals, 1, atol=1e-6)


@given(**SIZES, wanted=st.integers(0, MAX_REDUNDANT))
def test_lowering_keeps_as_much_as_divides(num_experts, ep_size, wanted):
    fitting = [r for r in range(wanted + 1) if (num_experts + r) % ep_size == 0]
    try:
        assert lowered_redundancy(num_experts, ep_size=ep_size, wanted=wanted) == fitting[-1]
    except PlacementError as error:
        assert not fitting
        smallest = int(str(error).rsplit(" ", 1)[1])
        assert (num_experts + smallest) % ep_size == 0 and 0 <= smallest < ep_size
