"""A placement that can be built holds its invariants; anything else is refused with the fact that does not hold."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.balancing.placement import (
    ExpertPlacement,
    PlacementError,
    identity_placement,
    lowered_redundancy,
    placement_from,
)


def changed(placement: ExpertPlacement, **arrays: np.ndarray) -> ExpertPlacement:
    names = ("expert_of_slot", "share_of_slot", "slot_for")
    return ExpertPlacement(**{name: arrays.get(name, getattr(placement, name)) for name in names})


def with_value(array: np.ndarray, place: tuple[int, ...], value: float) -> np.ndarray:
    copy = array.copy()
    copy[place] = value
    return copy


@pytest.fixture
def placement() -> ExpertPlacement:
    """Two layers, four experts and four replicas over four ranks of two slots."""
    return identity_placement(2, 4, ep_size=4, num_redundant=4)


def test_identity_is_the_experts_own_order():
    placement = identity_placement(3, 8, ep_size=4)
    np.testing.assert_array_equal(placement.expert_of_slot, np.tile(np.arange(8), (3, 1)))
    np.testing.assert_array_equal(placement.slot_for, np.broadcast_to(np.arange(8)[:, None], (3, 8, 4)))
    assert (placement.share_of_slot == 1).all()
    assert (placement.num_layers, placement.num_experts, placement.num_slots) == (3, 8, 8)
    assert (placement.ep_size, placement.slots_per_rank, placement.num_redundant) == (4, 2, 0)


def test_replicas_are_spread_evenly_and_share_equally(placement):
    np.testing.assert_array_equal(placement.expert_of_slot[0], [0, 1, 2, 3, 0, 1, 2, 3])
    assert (placement.share_of_slot == 0.5).all()


def test_a_rank_uses_its_own_replica_and_replicas_serve_as_many_ranks_each(placement):
    np.testing.assert_array_equal(placement.slot_for[0], [[0, 0, 4, 4], [1, 1, 5, 5], [2, 2, 6, 6], [3, 2 + 1, 7, 7]])


def test_more_slots_than_experts_force_an_expert_twice_on_a_rank():
    placement = identity_placement(1, 2, ep_size=2, num_redundant=4)
    np.testing.assert_array_equal(placement.expert_of_slot[0], [0, 1, 0, 1, 0, 1])


def test_nobody_writes_to_a_placement_and_a_placement_writes_to_nothing():
    experts = np.array([[1, 0]], np.int32)
    shares = np.ones((1, 2), np.float32)
    placement = placement_from(experts, shares, num_experts=2, ep_size=2)
    with pytest.raises(ValueError, match="read-only"):
        placement.expert_of_slot[0, 0] = 0
    experts[0, 0] = 1
    assert experts.flags.writeable and shares.flags.writeable


def test_other_integers_and_floats_are_taken_as_they_are():
    placement = placement_from(np.array([[1, 0]]), np.ones((1, 2)), num_experts=2, ep_size=1)
    assert (placement.expert_of_slot.dtype, placement.share_of_slot.dtype) == (np.int32, np.float32)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"expert_of_slot": [[0, 1, 2, 3, 0, 1, 2, 4]] * 2}, "outside of 0..3"),
        ({"expert_of_slot": [[0, 1, 2, 3, 0, 1, 2, -1]] * 2}, "outside of 0..3"),
        ({"expert_of_slot": [[0, 1, 2, 1, 0, 1, 2, 1]] * 2}, "expert 3 of layer 0 has no slot"),
        ({"expert_of_slot": [[0, 1, 2, 2, 0, 1, 3, 3]] * 2}, "rank 1 of layer 0 holds expert 2 twice"),
        ({"expert_of_slot": [[0, 1, 2, 3, 0, 1, 3, 2]] * 2}, "slot of layer 0 that holds another expert"),
        ({"expert_of_slot": [[0, 1, 2, 3] * 2]}, "different layers or slots"),
        ({"expert_of_slot": [0, 1]}, "of 1 dimensions"),
        ({"share_of_slot": [[0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.4]] * 2}, "expert 3 of layer 0 add up to 0.9"),
        ({"share_of_slot": [[1.5, 0.5, 0.5, 0.5, -0.5, 0.5, 0.5, 0.5]] * 2}, "negative or not a number"),
        ({"share_of_slot": [[np.nan] * 8] * 2}, "negative or not a number"),
        ({"slot_for": np.full((2, 4, 4), 8)}, "outside of 0..7"),
        ({"slot_for": np.zeros((2, 4, 3))}, "8 slots do not spread evenly over 3 ranks"),
    ],
)
def test_what_does_not_hold_is_named(placement, arrays, message):
    dtypes = {"expert_of_slot": np.int32, "share_of_slot": np.float32, "slot_for": np.int32}
    with pytest.raises(PlacementError, match=message):
        changed(placement, **{name: np.asarray(array, dtypes[name]) for name, array in arrays.items()})


def test_another_dtype_is_refused(placement):
    with pytest.raises(PlacementError, match="share_of_slot is float64"):
        changed(placement, share_of_slot=placement.share_of_slot.astype(np.float64))


@pytest.mark.parametrize("ep_size", [0, 3])
def test_slots_that_do_not_divide_are_refused(ep_size):
    with pytest.raises(PlacementError, match=f"do not spread evenly over {ep_size} ranks"):
        identity_placement(1, 8, ep_size=ep_size)


@pytest.mark.parametrize(
    ("num_experts", "ep_size", "wanted", "fits"),
    [(8, 4, 0, 0), (8, 4, 4, 4), (8, 4, 7, 4), (60, 8, 4, 4), (60, 8, 128, 124), (128, 64, 32, 0), (5, 1, 3, 3)],
)
def test_redundancy_is_lowered_until_slots_divide(num_experts, ep_size, wanted, fits):
    assert lowered_redundancy(num_experts, ep_size=ep_size, wanted=wanted) == fits


@pytest.mark.parametrize("wanted", [0, 3])
def test_where_nothing_lower_fits_the_smallest_that_does_is_named(wanted):
    with pytest.raises(PlacementError, match=r"60 experts .* 8 devices .* fits is 4"):
        lowered_redundancy(60, ep_size=8, wanted=wanted)


@pytest.mark.parametrize("wanted", [-1, 129])
def test_redundancy_has_limits(wanted):
    with pytest.raises(PlacementError, match=r"not in 0\.\.128"):
        lowered_redundancy(64, ep_size=8, wanted=wanted)
