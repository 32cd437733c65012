"""Pieces of a migration bring every expert where the placement says, a few slots at a time, layer by layer."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.balancing.migration import Migration, MigrationPiece
from rayserve_moe.balancing.placement import ExpertPlacement, PlacementError, identity_placement, placement_from
from rayserve_moe.balancing.planner import plan

LAYERS, EXPERTS, RANKS, REDUNDANT = 5, 24, 4, 8
START = identity_placement(LAYERS, EXPERTS, ep_size=RANKS, num_redundant=REDUNDANT)


def placement(seed: int) -> ExpertPlacement:
    load = np.random.default_rng(seed).lognormal(sigma=2.0, size=(LAYERS, EXPERTS))
    return plan(load, ep_size=RANKS, num_redundant=REDUNDANT)


class Devices:
    """Slots that hold numbers of experts, and the staging areas of all ranks."""

    def __init__(self) -> None:
        self.experts, self.shares = START.expert_of_slot.copy(), START.share_of_slot.copy()
        self.staging = np.full((RANKS, START.slots_per_rank), -1)

    def run(self, piece: MigrationPiece) -> None:
        if piece.fetch is not None:
            for rank, (sources, places) in enumerate(zip(piece.fetch.sources, piece.fetch.places, strict=True)):
                wanted = sources >= 0
                self.staging[rank, places[wanted]] = self.experts[piece.fetch.layer, sources[wanted]]
        if piece.swap is not None:
            layer, moved = piece.swap.layer, piece.swap.is_moved
            self.experts[layer, moved] = self.staging.reshape(-1)[moved]
            self.shares[layer] = piece.swap.placement.share_of_slot[0]

    def assert_hold(self, expected: ExpertPlacement) -> None:
        np.testing.assert_array_equal(self.experts, expected.expert_of_slot)
        np.testing.assert_array_equal(self.shares, expected.share_of_slot)


@pytest.mark.parametrize("slots_per_step", [1, 3, 8])
def test_every_slot_holds_what_the_placement_says_after_every_piece(slots_per_step):
    devices, migration = Devices(), Migration(START, hosts=2, slots_per_step=slots_per_step)
    for seed in range(6):
        migration.begin(placement(seed))
        # Half of them are left unfinished.
        for _ in range(1000 if seed % 2 else 7):
            if (piece := migration.next_piece()) is None:
                break
            assert piece.version == seed + 1
            devices.run(piece)
            devices.assert_hold(migration.placement)
        assert migration.progress.is_done == (seed % 2 == 1)
    devices.assert_hold(placement(5))
    assert migration.progress.num_slots_done == migration.progress.num_slots > 0


@pytest.mark.parametrize("slots_per_step", [1, 2, 5])
def test_no_rank_receives_or_sends_more_than_its_budget(slots_per_step):
    migration = Migration(START, hosts=1, slots_per_step=slots_per_step)
    migration.begin(placement(3))
    while (piece := migration.next_piece()) is not None:
        if piece.fetch is not None:
            sources = piece.fetch.sources
            assert sources.shape == (RANKS, slots_per_step) and (sources >= 0).any()
            senders = sources[sources >= 0] // START.slots_per_rank
            assert np.bincount(senders).max() <= slots_per_step


def test_shares_alone_travel_without_weights():
    shares = np.random.default_rng(0).uniform(0.5, 1.0, START.share_of_slot.shape)
    for layer, experts in enumerate(START.expert_of_slot):
        shares[layer] /= np.bincount(experts, weights=shares[layer])[experts]
    levelled = placement_from(START.expert_of_slot, shares, num_experts=EXPERTS, ep_size=RANKS)
    devices, migration = Devices(), Migration(START, hosts=1, slots_per_step=4)
    migration.begin(levelled)
    for _ in range(LAYERS):
        piece = migration.next_piece()
        assert piece is not None and piece.fetch is None and piece.swap is not None
        devices.run(piece)
    assert migration.next_piece() is None
    devices.assert_hold(levelled)


def test_a_placement_that_is_there_already_takes_no_piece():
    migration = Migration(START, hosts=1, slots_per_step=4)
    assert migration.progress.is_done and migration.next_piece() is None
    migration.begin(identity_placement(LAYERS, EXPERTS, ep_size=RANKS, num_redundant=REDUNDANT))
    assert migration.progress.is_done and migration.next_piece() is None


def test_a_placement_that_does_not_fit_changes_nothing():
    migration = Migration(START, hosts=1, slots_per_step=4)
    migration.begin(placement(1))
    migration.next_piece()
    before = migration.progress
    with pytest.raises(PlacementError, match="different layers, slots or ranks"):
        migration.begin(identity_placement(LAYERS, EXPERTS, ep_size=RANKS))
    assert migration.progress == before and migration.next_piece() is not None
