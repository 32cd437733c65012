"""Tokens use the slots of their expert in the planned shares, with nothing random, and padding uses none."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.balancing.placement import ExpertPlacement, identity_placement, placement_from
from rayserve_moe.balancing.traffic import LayerMaps, nearest_slots, share_keys
from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.router_spec import RouterSpec
from rayserve_moe.experts.slot_mapping import choose_slots, experts_of_slots, placement_arrays
from rayserve_moe.kernels.table import CPU
from tests.support.experts.moe_layer import plan_of, shuffled
from tests.support.experts.placements import random_placement
from tests.support.session.hypothesis_examples import examples

NUM_EXPERTS, TOP_K, RANKS = 8, 3, 4


def rule_for(placement: ExpertPlacement, choice: str = "shares") -> ExpertConfig:
    redundant = placement.num_redundant
    return ExpertConfig(
        RouterSpec(placement.num_experts, TOP_K, True), CPU, plan_of(1, 1), redundant, slot_choice=choice
    )


@partial(jax.jit, static_argnames=("config", "layer", "near"))
def chosen(ids, valid, maps, rank, config, layer=0, near=False):
    return choose_slots(ids, valid, maps, layer=layer, rank=rank, config=config, near=near)


def picks(num_tokens: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return np.argsort(generator.random((num_tokens, NUM_EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)


@pytest.fixture(scope="module")
def placement() -> ExpertPlacement:
    return shuffled(identity_placement(2, NUM_EXPERTS, ep_size=RANKS, num_redundant=8), 3)


def test_maps_name_the_expert_of_each_slot(placement):
    maps = placement_arrays(placement)
    np.testing.assert_array_equal(experts_of_slots(maps.bounds_LP, maps.slots_LP), placement.expert_of_slot)


@pytest.mark.parametrize("choice", ["shares", "static", "first"])
def test_a_slot_holds_the_expert_that_was_picked(placement, choice):
    ids, valid = picks(50, 1), np.arange(50) % 7 != 3
    for layer in (0, 1):
        for rank in range(RANKS):
            slots = np.asarray(
                chosen(ids, valid, placement_arrays(placement), rank, rule_for(placement, choice), layer)
            )
            np.testing.assert_array_equal(placement.expert_of_slot[layer][slots[valid]], ids[valid])
            assert (slots[~valid] == placement.num_slots).all(), "padding uses no slot"


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize("num_redundant", [0, 4, 8])
def test_devices_choose_the_slots_that_plans_count_on(num_redundant, near, slices):
    start = identity_placement(2, NUM_EXPERTS, ep_size=RANKS, num_redundant=num_redundant)
    placement = random_placement(start, seed=num_redundant)
    rule = rule_for(placement)
    rule = replace(rule, plan=replace(rule.plan, num_slices=slices))
    for rank in range(RANKS):
        ids, ranks = picks(17, rank), np.full(17, rank)
        for layer in (0, 1):
            maps = LayerMaps.of(placement)[layer]
            experts, num_ranks = maps.slot_on.shape
            keys = share_keys(ids.astype(np.int64), ranks=ranks, groups=ranks, num_experts=experts, num_ranks=num_ranks)
            expected = maps.slots_at(keys)
            if near:
                expected = nearest_slots(maps, ids.astype(np.int64), ranks=ranks, by_shares=expected, num_slices=slices)
            slots = chosen(ids, np.ones(17, bool), placement_arrays(placement), rank, rule, layer, near)
            np.testing.assert_array_equal(np.asarray(slots), expected)


def test_the_nearest_slot_is_the_own_one_then_on_the_slice_then_beside_other_experts():
    """Experts 0 and 1 have no replica; expert 2 is on every second rank, expert 3 on ranks 1 and 3."""
    slots = np.array([[0, 2, 3, 1, 2, 4, 3, 5]])
    placement = placement_from(slots, None, num_experts=6, ep_size=4)
    maps, rule = placement_arrays(placement), rule_for(placement)

    def ranks_of(ids, rank, slices=1):
        config = replace(rule, plan=replace(rule.plan, num_slices=slices))
        found = chosen(np.array([ids]), np.ones(1, bool), maps, rank, config, 0, near=True)
        return (np.asarray(found)[0] // 2).tolist()

    assert ranks_of([2, 3, 0], rank=2) == [2, 1, 0] or ranks_of([2, 3, 0], rank=2) == [2, 3, 0]
    assert ranks_of([3, 0, 4], rank=3) == [3, 0, 2], "its own"
    assert ranks_of([2, 0, 1], rank=3) == [0, 0, 1], "where it goes for expert 0 anyway"
    assert ranks_of([2, 4, 1], rank=3) == [2, 2, 1], "where it goes for expert 4 anyway"
    assert ranks_of([2, 0, 1], rank=3, slices=2) == [2, 0, 1], "on its slice, although expert 0 is elsewhere"


def test_every_rank_keeps_the_shares_to_within_a_token(placement):
    ids, valid = picks(200, 2), np.arange(200) % 5 != 0
    counts = np.bincount(ids[valid].reshape(-1), minlength=NUM_EXPERTS)
    for rank in range(RANKS):
        slots = np.asarray(chosen(ids, valid, placement_arrays(placement), rank, rule_for(placement)))
        used = np.bincount(slots[valid].reshape(-1), minlength=placement.num_slots)
        planned = placement.share_of_slot[0] * counts[placement.expert_of_slot[0]]
        assert (abs(used - planned) <= 1 + 1e-3).all()


def test_ranks_with_a_single_token_use_the_slots_in_proportion():
    shares = np.array([[0.25, 1, 1, 1, 0.75, 0.0]], np.float32)
    placement = placement_from(np.array([[0, 1, 2, 3, 0, 3]]), shares, num_experts=4, ep_size=1)
    many = placement_from(np.tile(placement.expert_of_slot, 1), shares, num_experts=4, ep_size=1)
    slot_for = np.broadcast_to(many.slot_for, (1, 4, 64))
    maps = placement_arrays(placement)
    maps = type(maps)(maps.bounds_LP, maps.slots_LP, np.ascontiguousarray(slot_for))
    config = rule_for(placement)
    used = [int(chosen(np.array([[0]]), np.ones(1, bool), maps, rank, config)[0, 0]) for rank in range(64)]
    assert used.count(0) == 16 and used.count(4) == 48
    assert all(int(chosen(np.array([[3]]), np.ones(1, bool), maps, rank, config)[0, 0]) == 3 for rank in range(64))


def test_where_all_ranks_see_the_same_tokens_each_may_have_a_home(placement):
    """Shares and the static slot follow the rank given per token, not the rank that asks."""
    ids, valid = picks(40, 4), np.ones(40, bool)
    homes = (np.arange(40) // 10)[:, None]
    static = np.asarray(chosen(ids, valid, placement_arrays(placement), homes, rule_for(placement, "static")))
    np.testing.assert_array_equal(static, placement.slot_for[0][ids, homes])
    slots = np.asarray(chosen(ids, valid, placement_arrays(placement), homes, rule_for(placement)))
    np.testing.assert_array_equal(placement.expert_of_slot[0][slots], ids)


def test_first_is_the_lowest_slot_even_with_a_share_of_zero():
    shares = np.array([[0, 1, 1, 1]], np.float32)
    placement = placement_from(np.array([[0, 1, 0, 2]]), shares, num_experts=3, ep_size=1)
    slots = chosen(
        np.array([[0, 1, 2]]), np.ones(1, bool), placement_arrays(placement), 0, rule_for(placement, "first")
    )
    np.testing.assert_array_equal(slots, [[0, 1, 3]])


def test_without_redundancy_it_is_a_look_up():
    placement = shuffled(identity_placement(1, NUM_EXPERTS, ep_size=4), 5)
    slot_of = np.argsort(placement.expert_of_slot[0])
    ids, valid = picks(9, 6), np.ones(9, bool)
    for rank in (0, 3):
        slots = chosen(ids, valid, placement_arrays(placement), rank, rule_for(placement))
        np.testing.assert_array_equal(slots, slot_of[ids])


def test_without_maps_expert_i_lies_in_slot_i():
    ids, valid = picks(9, 7), np.arange(9) < 5
    config = rule_for(identity_placement(1, NUM_EXPERTS, ep_size=1))
    slots = np.asarray(chosen(ids, valid, None, 0, config))
    np.testing.assert_array_equal(slots, np.where(valid[:, None], ids, NUM_EXPERTS))


def test_maps_keep_their_shapes_whatever_they_hold():
    first = placement_arrays(identity_placement(2, NUM_EXPERTS, ep_size=RANKS, num_redundant=8))
    for seed in range(3):
        other = placement_arrays(shuffled(identity_placement(2, NUM_EXPERTS, ep_size=RANKS, num_redundant=8), seed))
        shapes = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), first, other)
        assert all(jax.tree.leaves(shapes))


@given(
    shares=st.lists(st.floats(0, 1), min_size=5, max_size=5).filter(lambda s: max(s) > 0.05), seed=st.integers(0, 99)
)
@examples(50)
def test_a_slot_without_a_share_gets_no_token(shares, seed):
    """Shares of exactly zero too, wherever they stand, and shares that do not add up exactly."""
    parts = np.array(shares)
    parts = np.where(parts < 0.05, 0.0, parts)
    parts = np.concatenate([parts / parts.sum(), [1.0]]).astype(np.float32)
    experts = np.array([[0] * len(shares) + [1]])
    placement = placement_from(experts, parts[None], num_experts=2, ep_size=1)
    ids, valid = np.zeros((97, 1), np.int32), np.random.default_rng(seed).random(97) < 0.9
    slots = chosen(ids, valid, placement_arrays(placement), seed, rule_for(placement))
    used = np.bincount(np.asarray(slots)[valid].reshape(-1), minlength=len(parts))
    assert (used[parts == 0] == 0).all()
    assert (abs(used[:-1] - parts[:-1] * valid.sum()) <= 1 + 1e-3).all()
