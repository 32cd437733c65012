"""Plans from rows bring experts of a token together, within the limits of loads, and cost what is counted."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rayserve_moe.balancing.coactivation import (
    ServedGroup,
    gather_pairs,
    loads_of,
    pair_counts,
    plan_from_rows,
)
from rayserve_moe.balancing.layout import layout_of
from rayserve_moe.balancing.placement import ExpertPlacement, PlacementError, identity_placement
from rayserve_moe.balancing.planner import plan
from rayserve_moe.balancing.planning import PlacementState, cheaper_for_rows, rank_loads
from rayserve_moe.balancing.traffic import CostRates, traffic_of
from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.rank_rows import sends_once
from rayserve_moe.experts.router_spec import RouterSpec
from rayserve_moe.kernels.table import CPU

LINKS = CostRates(slot_s=0, row_s=1e-9, ici_s=1e-6, dcn_s=1e-5)
WORK = CostRates(slot_s=0, row_s=1e-6, ici_s=0, dcn_s=0)


def grouped_rows(
    num_tokens: int, *, layers: int = 2, experts: int = 32, per_group: int = 4, top_k: int = 4, seed: int = 0
) -> np.ndarray:
    """Rows of a router that prefers the experts of one of its groups; groups are drawn for each layer."""
    generator = np.random.default_rng(seed)
    group_of = np.stack([generator.permutation(experts) // per_group for _ in range(layers)])
    odds = generator.lognormal(sigma=0.5, size=experts // per_group)
    groups = generator.choice(len(odds), (num_tokens, layers), p=odds / odds.sum())
    scores = generator.gumbel(size=(num_tokens, layers, experts)) + 4.0 * (group_of == groups[..., None])
    return np.argsort(-scores, axis=2)[:, :, :top_k].astype(np.uint8)


def test_pairs_and_loads_are_those_of_the_rows():
    rows = grouped_rows(50)
    chosen = (rows[..., None] == np.arange(32)).any(axis=2).astype(np.int64)
    np.testing.assert_array_equal(loads_of(rows, 32), chosen.sum(axis=0))
    expected = np.einsum("tle,tlf->lef", chosen, chosen)
    expected[:, np.arange(32), np.arange(32)] = 0
    np.testing.assert_array_equal(pair_counts(rows, 32), expected)


def together(experts: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Pairs of a placement without replicas that share a rank, per layer."""
    return np.array(
        [sum(pairs[layer][np.ix_(rank, rank)].sum() for rank in ranks) for layer, ranks in enumerate(experts)]
    )


@pytest.mark.parametrize("ranks", [2, 4, 5, 8])
@pytest.mark.parametrize("limit", [1.0, 1.2])
def test_exchanges_bring_pairs_together_and_keep_to_the_limit(ranks, limit):
    experts = 40
    rows = grouped_rows(2000, experts=experts)
    load, pairs = loads_of(rows, experts).astype(np.float64), pair_counts(rows, experts)
    start = plan(load, ep_size=ranks, num_redundant=0)
    layout = layout_of(start.expert_of_slot.reshape(2, ranks, -1).astype(np.int64), experts)
    before, peaks = together(layout.experts, pairs), layout.peaks(layout.even_amounts(load))
    gather_pairs(layout, load, pairs=pairs, limit=limit * peaks)
    layout.check_integrity()
    after = together(layout.experts, pairs)
    assert (after >= before).all() and after.sum() > before.sum()
    assert (layout.peaks(layout.even_amounts(load)) <= limit * peaks * (1 + 1e-6)).all()


def test_no_exchange_is_left_that_would_bring_more_pairs_together():
    """A small case against all single exchanges."""
    rows = grouped_rows(500, layers=1, experts=12, per_group=3, top_k=3)
    pairs, load = pair_counts(rows, 12), loads_of(rows, 12).astype(np.float64)
    layout = layout_of(np.arange(12).reshape(1, 4, 3), 12)
    gather_pairs(layout, load, pairs=pairs, limit=np.array([np.inf]))
    best = together(layout.experts, pairs)[0]
    flat = layout.experts.reshape(-1)
    for i in range(12):
        for j in range(i):
            swapped = flat.copy()
            swapped[[i, j]] = swapped[[j, i]]
            assert together(swapped.reshape(1, 4, 3), pairs)[0] <= best + 1e-3


@pytest.mark.parametrize("redundant", [0, 16])
@pytest.mark.parametrize("batch", [8, 32])
def test_links_that_cost_most_bring_ranks_per_token_down(redundant, batch):
    rows = grouped_rows(4096)
    train, later = rows[:2048], rows[2048:]
    by_counts = plan(loads_of(train, 32), ep_size=8, num_redundant=redundant)
    planned = plan_from_rows(train, ServedGroup(8, redundant, batch), num_experts=32, rates=LINKS)
    today = traffic_of(by_counts, later, batch=batch, near=False)
    after = traffic_of(planned, later, batch=batch)
    assert after.distinct_ranks.mean() < 0.85 * today.distinct_ranks.mean()
    assert (after.remote_rows <= 1.02 * today.remote_rows).all()


def test_work_that_costs_most_leaves_the_balance_of_counts():
    rows = grouped_rows(8192)
    load = loads_of(rows, 32)
    by_counts = plan(load, ep_size=8, num_redundant=16)
    planned = plan_from_rows(rows, ServedGroup(8, 16, 1024), num_experts=32, rates=WORK)
    peaks = [rank_loads(each, load).max(axis=1) for each in (planned, by_counts)]
    assert (peaks[0] <= 1.03 * peaks[1]).all()


def test_replicas_spread_over_slices_where_links_between_slices_cost_most():
    rows = grouped_rows(4096)
    group = ServedGroup(8, 16, 32, num_slices=2)
    planned = plan_from_rows(rows, group, num_experts=32, rates=LINKS)
    by_counts = plan(loads_of(rows, 32), ep_size=8, num_redundant=16)

    def far_rows(placement: ExpertPlacement, *, near: bool) -> float:
        return float(traffic_of(placement, rows, batch=32, num_slices=2, near=near).far_rows.mean())

    assert far_rows(planned, near=True) < 0.9 * far_rows(by_counts, near=True) < 0.8 * far_rows(by_counts, near=False)
    for experts in planned.expert_of_slot.reshape(2, 2, -1):
        both = np.intersect1d(*experts)
        assert len(both) == 16, "every replica is on the other slice"


def test_the_same_rows_give_the_same_plan_and_stay_as_they_are():
    rows = grouped_rows(1000)
    kept = rows.copy()
    group = ServedGroup(8, 16, 32)
    plans = [plan_from_rows(rows, group, num_experts=32, rates=LINKS) for _ in range(2)]
    np.testing.assert_array_equal(plans[0].expert_of_slot, plans[1].expert_of_slot)
    np.testing.assert_array_equal(plans[0].share_of_slot, plans[1].share_of_slot)
    np.testing.assert_array_equal(rows, kept)


@pytest.mark.parametrize(("ranks", "redundant", "experts"), [(1, 0, 8), (4, 24, 8), (2, 8, 8), (3, 1, 8)], ids=str)
def test_groups_that_hold_everything_or_a_single_rank(ranks, redundant, experts):
    rows = grouped_rows(100, experts=experts, top_k=2, per_group=2)
    placement = plan_from_rows(rows, ServedGroup(ranks, redundant, 8), num_experts=experts)
    assert placement.ep_size == ranks and placement.num_experts == experts
    assert traffic_of(placement, rows, batch=8).distinct_ranks.max() <= min(ranks, 2)


def test_without_rows_the_loads_alone_decide():
    load = np.random.default_rng(0).lognormal(size=(2, 32))
    planned = plan_from_rows(np.zeros((0, 2, 4), np.uint8), ServedGroup(8, 16, 8), num_experts=32, load=load)
    np.testing.assert_array_equal(planned.expert_of_slot, plan(load, ep_size=8, num_redundant=16).expert_of_slot)


@pytest.mark.parametrize(
    ("rows", "group", "message"),
    [
        (np.zeros((3, 2)), ServedGroup(4, 0, 8), "not integers"),
        (np.full((3, 2, 1), 32), ServedGroup(4, 0, 8), "outside"),
        (np.full((3, 2, 1), -1), ServedGroup(4, 0, 8), "outside"),
        (np.zeros((3, 2, 1), int), ServedGroup(4, 0, 0), "steps of 0"),
        (np.zeros((3, 2, 1), int), ServedGroup(4, 0, 8, num_slices=3), "3 slices"),
        (np.zeros((3, 2, 1), int), ServedGroup(5, 0, 8), "do not spread"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(rows, group, message):
    with pytest.raises(PlacementError, match=message):
        plan_from_rows(rows, group, num_experts=32)


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("batch", [8, 8192, 8193])
def test_rows_leave_once_for_a_rank_in_small_steps_on_several_slices_else_once_for_an_expert(batch, slices):
    """A token has 4 assignments."""
    found = traffic_of(identity_placement(2, 32, ep_size=4), grouped_rows(16400), batch=batch, num_slices=slices)
    config = ExpertConfig(RouterSpec(32, 4, True), CPU, SimpleNamespace(num_expert_ranks=4, num_slices=slices))
    is_small = slices > 1 and batch <= 8192
    assert is_small == sends_once(-(-batch // 4), 4096, config=config), "devices do so too"
    np.testing.assert_array_equal(found.rows_out, found.remote_ranks if is_small else found.remote_rows)
    assert (found.far_rows_out == found.far_rows).all() == (slices == 1 or not is_small)


def test_traffic_is_what_is_counted_token_by_token():
    rows, placement = grouped_rows(64), identity_placement(2, 32, ep_size=4)
    found = traffic_of(placement, rows, batch=16, num_slices=2)
    ranks = rows.astype(int) // 8
    for layer in range(2):
        own = np.arange(64) % 16 % 4
        sets = [set(row) for row in ranks[:, layer]]
        assert found.distinct_ranks[layer] == np.mean([len(one) for one in sets])
        assert found.remote_ranks[layer] == np.mean([len(one - {me}) for one, me in zip(sets, own, strict=True)])
        assert found.remote_rows[layer] == np.mean((ranks[:, layer] != own[:, None]).sum(axis=1))
        assert found.far_rows[layer] == np.mean((ranks[:, layer] // 2 != own[:, None] // 2).sum(axis=1))
        far = [sum(rank // 2 != me // 2 for rank in one) for one, me in zip(sets, own, strict=True)]
        assert found.far_rows_out[layer] == np.mean(far)
        by_batch = ranks[:, layer].reshape(4, -1)
        assert found.hottest_rows[layer] == np.mean([np.bincount(one, minlength=4).max() for one in by_batch])
        used = [
            max(len(set(batch[batch // 8 == rank])) for rank in range(4))
            for batch in rows[:, layer].reshape(4, -1).astype(int)
        ]
        assert found.used_slots[layer] == np.mean(used)
        np.testing.assert_array_equal(found.loads[layer], np.bincount(ranks[:, layer].reshape(-1), minlength=4))


def test_time_is_the_hottest_rank_and_rows_out_and_back():
    found = traffic_of(identity_placement(2, 32, ep_size=4), grouped_rows(64), batch=16)
    np.testing.assert_array_equal(found.rows_out, found.remote_rows)
    rates = CostRates(slot_s=7.0, row_s=5.0, ici_s=3.0, dcn_s=100.0)
    work = 7 * found.used_slots + 5 * found.hottest_rows
    links = 2 * 3.0 * found.remote_rows * 16 / 4
    np.testing.assert_allclose(found.seconds(rates, batch=16, num_ranks=4), work + links)
    found = traffic_of(identity_placement(2, 32, ep_size=4), grouped_rows(64), batch=16, num_slices=2)
    work = 7 * found.used_slots + 5 * found.hottest_rows
    far, whole = found.far_rows + found.far_rows_out, found.remote_ranks + found.remote_rows
    links = (3.0 * (whole - far) + 100.0 * far) * 16 / 4
    np.testing.assert_allclose(found.seconds(rates, batch=16, num_ranks=4), work + links)


def test_an_online_planner_spreads_replicas_over_slices_by_sampled_rows_and_then_leaves_them():
    rows = grouped_rows(2048)
    load = loads_of(rows, 32)
    by_counts = plan(load, ep_size=8, num_redundant=16)
    state = PlacementState(0, 0, by_counts, num_slices=2, rows=rows, batch=32)
    found = cheaper_for_rows(by_counts, state, load=load, rates=LINKS)
    far = [traffic_of(each, rows, batch=32, num_slices=2).far_rows.mean() for each in (found, by_counts)]
    assert far[0] < 0.97 * far[1]
    peaks = [rank_loads(each, load).max(axis=1) for each in (found, by_counts)]
    assert (peaks[0] <= 1.05 * peaks[1]).all()
    assert cheaper_for_rows(found, replace(state, placement=found), load=load, rates=LINKS) is found
    few = replace(state, rows=rows[:10])
    assert cheaper_for_rows(by_counts, few, load=load) is by_counts, "too few rows to know"
