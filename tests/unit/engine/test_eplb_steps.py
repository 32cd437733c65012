"""Whatever is asked for between steps, and whichever fetch fails, slots hold what the engine takes them to hold."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.balancing.migration import Migration
from rayserve_moe.balancing.placement import (
    ExpertPlacement,
    PlacementConflictError,
    PlacementError,
    identity_placement,
    placement_from,
)
from rayserve_moe.engine.eplb.steps import COUNTS_EVERY, EplbSteps, placement_elsewhere
from rayserve_moe.engine.executor import GroupLayout
from tests.support.experts.eplb_proposals import CountedSteps
from tests.support.experts.placements import random_placement

START = identity_placement(3, 12, ep_size=4, num_redundant=4)
ODDS = np.ones((3, 12))


def moving() -> tuple[EplbSteps, CountedSteps]:
    eplb = EplbSteps(Migration(START, hosts=2, slots_per_step=1))
    return eplb, CountedSteps(eplb, ODDS, tokens_per_step=10)


def arrive(eplb: EplbSteps, steps: CountedSteps, seed: int) -> None:
    """Head for a placement and get there, all of it."""
    wanted = random_placement(START, seed)
    eplb.set_target(wanted)
    arrive_at(eplb, steps, wanted)


def arrive_at(eplb: EplbSteps, steps: CountedSteps, wanted: ExpertPlacement) -> None:
    steps.run(60)
    assert eplb.migration.placement is wanted and eplb.state() is not None
    steps.assert_hold(wanted)


@pytest.mark.parametrize("fails_at", range(1, 16, 2))
def test_a_failed_fetch_leaves_whole_layers_and_the_next_migration_arrives(fails_at):
    eplb, steps = moving()
    wanted, steps.fails_at = random_placement(START, seed=1), fails_at
    eplb.set_target(wanted)
    steps.run(60)
    placement, progress = eplb.migration.placement, eplb.migration.progress
    steps.assert_hold(placement)
    for layer in range(3):
        assert any(
            (placement.expert_of_slot[layer] == whole.expert_of_slot[layer]).all()
            and (placement.share_of_slot[layer] == whole.share_of_slot[layer]).all()
            for whole in (START, wanted)
        )
    assert eplb.migration.given_up_version == 1 and progress.is_done
    assert progress.num_slots == (placement.expert_of_slot != START.expert_of_slot).sum()
    arrive(eplb, steps, seed=2)


@pytest.mark.parametrize("num_steps", range(1, 14))
def test_another_migration_begins_only_when_it_is_known_what_came_of_the_one_before(num_steps):
    """Asked for around the very step whose fetch fails, when the engine cannot know of it yet."""
    eplb, steps = moving()
    steps.fails_at = 6
    eplb.set_target(random_placement(START, seed=1))
    steps.run(num_steps)
    eplb.set_target(random_placement(START, seed=3))
    steps.run(60)
    steps.assert_hold(eplb.migration.placement)
    assert eplb.migration.given_up_version in (1, 2) and eplb.migration.progress.version == 2
    arrive(eplb, steps, seed=4)


@pytest.mark.parametrize("num_steps", [0, 3])
def test_no_other_target_replaces_an_order_before_experts_are_there(num_steps: int) -> None:
    """Requested, or under way; the same order again moves experts once."""
    eplb, steps = moving()
    ordered, other = random_placement(START, seed=1), random_placement(START, seed=3)
    eplb.set_target(other)
    assert eplb.order(ordered) == 1, "a plan of the server is replaced"
    steps.run(num_steps)
    for request in (eplb.order, eplb.set_target):
        with pytest.raises(PlacementConflictError, match="still moving to placement 1"):
            request(other)
    again = placement_from(ordered.expert_of_slot, ordered.share_of_slot, num_experts=12, ep_size=4)
    assert eplb.order(again) == 1
    steps.run(60)
    assert eplb.migration.placement is ordered and eplb.migration.progress.version == 1
    steps.assert_hold(ordered)
    assert eplb.order(other) == 2
    arrive_at(eplb, steps, other)


def test_an_order_outlives_the_loss_of_hosts() -> None:
    eplb, steps = moving()
    ordered = random_placement(START, seed=1)
    eplb.order(ordered)
    steps.run(3)
    eplb.restart(GroupLayout(num_expert_ranks=4, num_redundant_experts=4, num_hosts=2))
    with pytest.raises(PlacementConflictError):
        eplb.order(random_placement(START, seed=2))
    arrive_at(eplb, CountedSteps(eplb, ODDS, tokens_per_step=10), ordered)


def test_a_failed_order_makes_way_for_the_next() -> None:
    eplb, steps = moving()
    steps.fails_at = 2
    eplb.order(random_placement(START, seed=1))
    steps.run(60)
    assert eplb.migration.given_up_version == 1
    wanted = random_placement(START, seed=2)
    assert eplb.order(wanted) == 2
    arrive_at(eplb, steps, wanted)


def test_readings_tell_steps_and_counts_and_nobody_plans_from_what_moves():
    eplb, steps = moving()
    assert (eplb.reading.counts == 0).all() and eplb.state() is not None
    steps.run(2 * COUNTS_EVERY + 1)
    reading = eplb.reading
    assert (reading.generation, reading.step) == (0, 2 * COUNTS_EVERY + 1)
    assert (reading.counts.sum(axis=1) == 10 * 2 * COUNTS_EVERY).all()
    eplb.forget_counts()
    assert eplb.reading.generation == 1
    eplb.set_target(random_placement(START, seed=1))
    assert eplb.state() is None, "asked for"
    steps.run(3)
    assert eplb.state() is None, "under way"
    steps.run(60)
    state = eplb.state()
    assert state is not None and (state.generation, state.version) == (1, 1)


@pytest.mark.parametrize("was_wanted", [False, True])
def test_plans_for_ranks_that_are_gone_are_dropped(was_wanted: bool) -> None:
    """One that came before the loss, and one that a planner hands in after it."""
    eplb = EplbSteps(Migration(START, hosts=2, slots_per_step=1))
    if was_wanted:
        eplb.set_target(random_placement(START, seed=1))
    generation = eplb.reading.generation
    eplb.restart(GroupLayout(num_expert_ranks=3, num_redundant_experts=3, num_hosts=3))
    now = eplb.migration.placement
    assert (now.ep_size, now.num_slots, now.num_experts) == (3, START.num_experts + 3, START.num_experts)
    assert eplb.state() is not None and eplb.reading.generation > generation
    with pytest.raises(PlacementError):
        eplb.set_target(random_placement(START, seed=1))
    eplb._wanted.append(random_placement(START, seed=1))  # between a check and a loss
    assert eplb._next_piece() is None
    wanted = random_placement(now, seed=2)
    eplb.set_target(wanted)
    after = CountedSteps(eplb, np.ones((now.num_layers, now.num_experts)), tokens_per_step=10)
    after.run(200)
    after.assert_hold(wanted)


def num_taken(placement: ExpertPlacement, former_ranks: list[int | None]) -> int:
    """Return the slots whose expert was not on their rank at START."""
    had, has = (each.expert_of_slot.reshape(each.num_layers, each.ep_size, -1) for each in (START, placement))
    return sum(
        expert not in (() if former is None else had[layer, former])
        for rank, former in enumerate(former_ranks)
        for layer in range(START.num_layers)
        for expert in has[layer, rank]
    )


@pytest.mark.parametrize(
    ("former_ranks", "num_redundant"),
    [([0, 2, 3], 3), ([3, 1, 0], 3), ([None, 1, 2, 0, 3], 3), ([1, 0, 3, 2, None, None], 0)],
)
def test_hosts_of_another_number_begin_with_experts_that_they_have(
    former_ranks: list[int | None], num_redundant: int
) -> None:
    eplb, steps = moving()
    steps.run(64)
    wanted = placement_elsewhere(eplb, former_ranks, num_redundant=num_redundant)
    assert wanted is not None and wanted.num_redundant == num_redundant
    had = START.expert_of_slot.reshape(START.num_layers, START.ep_size, -1)
    staying = [rank for rank in former_ranks if rank is not None]
    num_lost = sum(START.num_experts - len(set(layer[staying].flat)) for layer in had)
    num_empty = START.num_layers * former_ranks.count(None) * wanted.slots_per_rank
    assert num_taken(wanted, former_ranks) <= 4 / 3 * max(num_lost, num_empty)
    layout = GroupLayout(num_expert_ranks=len(former_ranks), num_redundant_experts=num_redundant, placement=wanted)
    eplb.restart(layout)
    assert eplb.migration.placement is wanted and eplb.first is wanted
    eplb.change_weights()
    assert eplb.first is wanted, "hosts that replace others read a checkpoint in this order"


def test_experts_that_never_move_are_in_their_own_order_on_any_number_of_hosts() -> None:
    eplb = EplbSteps(Migration(START, hosts=2, slots_per_step=1), moves_experts=False)
    assert placement_elsewhere(eplb, [0, 1], num_redundant=0) is None
