"""Slots of limited capacity in a sharded layer are what the sequential definition says on every mesh and backend."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from rayserve_moe.balancing.placement import ExpertPlacement
from rayserve_moe.experts.balanced_acceptance import SlotOrder, reject_by_counting, reject_by_sorting
from rayserve_moe.experts.balanced_layer import distances, spread_over_replicas
from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.router_spec import RouterSpec
from rayserve_moe.experts.routing import rank_experts
from rayserve_moe.kernels.reference.layers import router_scores
from rayserve_moe.kernels.table import CPU
from tests.support.experts.balanced_reference import Selected, balanced_oracle, oracle_capacity, ranked
from tests.support.experts.moe_layer import GROUPED, MoeCase, MoeRun, dense, placements_for, plan_of, sums_of
from tests.support.experts.placements import SIZES

CASE = MoeCase(num_tokens=22, width=128, inner=16)
LAYER = 1
SAMPLED = [
    ("replicated", (2, 2), 8, "global"),
    ("all_to_all", (2, 2), 8, "data_rank"),
]


def matrix():
    for backend in ("local", "replicated", "all_to_all", "fused"):
        for mesh in SIZES:
            for num_redundant in (0, 8, 16):
                for scope in ("global", "data_rank"):
                    if backend == "local" and mesh != (1, 1):
                        continue
                    marks = () if (backend, mesh, num_redundant, scope) in SAMPLED else pytest.mark.slow
                    yield pytest.param(backend, mesh, num_redundant, scope, marks=marks)


@cache
def compiled(backend: str, mesh: tuple[int, int] = (2, 2), num_redundant: int = 8, **config) -> MoeRun:
    return MoeRun(CASE, plan_of(*mesh), backend=backend, num_redundant=num_redundant, **config)


def devices_of(num_tokens: int, config: ExpertConfig) -> np.ndarray:
    """The rank that dispatches each token of all data ranks."""
    part = -(-num_tokens // config.plan.tensor_size)
    within = np.arange(num_tokens) // part
    return np.concatenate([rank * config.plan.tensor_size + within for rank in range(config.plan.data_size)])


def priorities(placement: ExpertPlacement, config: ExpertConfig) -> np.ndarray:
    """Slots of each expert for each rank [R, E, M]: its own, then those of its host, then the others."""
    held, ranks = placement.expert_of_slot[LAYER], range(placement.ep_size)
    table = np.full((placement.ep_size, placement.num_experts, config.num_slots), -1, np.int32)
    hosts = [device.process_index for device in config.plan.mesh.devices.flat]
    for rank in ranks:
        for expert in range(placement.num_experts):
            slots = np.flatnonzero(held == expert).tolist()
            homes = {slot: slot // placement.slots_per_rank for slot in slots}
            slots.sort(key=lambda slot: (homes[slot] != rank, hosts[homes[slot]] != hosts[rank], slot))
            table[rank, expert, : len(slots)] = slots
    return table


def defined(run: MoeRun, placement: ExpertPlacement, factor: float) -> list[tuple[Selected, np.ndarray]]:
    """What each group of competing tokens gets, with the part of them that is valid."""
    data, case, router = run.plan.data_size, run.case, run.config.router
    scores, choice = scores_of(case, data)
    table, devices = priorities(placement, run.config), devices_of(case.num_tokens, run.config)
    groups = 1 if run.config.capacity_scope == "global" else data
    return [
        (
            balanced_oracle(
                choice_W,
                table,
                factor,
                k=case.top_k,
                num_slots=run.config.num_slots,
                gate_scores=scores_W,
                valid=valid_W,
                renormalize=router.renormalize,
                scale=router.scale,
                device_index=devices_W,
            ),
            valid_W,
        )
        for scores_W, choice_W, devices_W, valid_W in zip(
            *(np.split(array, groups) for array in (scores, choice, devices, case.valid(data))), strict=True
        )
    ]


def scores_of(case: MoeCase, data: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores of the router, and what it chooses by, to the last bit."""
    (of_logits, of_choice), router = case.router_biases, case.router_spec

    @jax.jit
    def score(hidden, matrix):
        scores = router_scores(hidden, matrix, bias_E=of_logits, score=router.score)
        return rank_experts(scores, router=router, selection_bias_E=of_choice)

    scores, choice, *_ = score(case.hidden(data), case.router)
    return np.asarray(scores), np.asarray(scores if choice is None else choice)


@pytest.mark.parametrize(("backend", "mesh", "num_redundant", "scope"), list(matrix()))
def test_balanced_selection_is_the_definition(backend, mesh, num_redundant, scope):
    run = compiled(backend, mesh, num_redundant, selection="balanced", capacity_scope=scope)
    for placement in placements_for(CASE, run.plan, num_redundant)[1:]:
        for factor in (0.5, 1.0, 2.0):
            assert_defined(run, placement, factor)
    assert run.compiled._cache_size() == 1, "factor and mapping come at run time"


def assert_defined(run: MoeRun, placement: ExpertPlacement, factor: float) -> np.ndarray:
    """Experts, sums, counts and tallies are those of the definition; returns the experts."""
    case, data = run.case, run.plan.data_size
    result, parts = run(placement, capacity_factor=factor), defined(run, placement, factor)
    experts = np.concatenate([selected.experts for selected, _ in parts])
    weights = np.concatenate([selected.weights for selected, _ in parts])
    np.testing.assert_array_equal(result.ids, experts)
    expected = sums_of(case, case.hidden(data), experts, weights)
    np.testing.assert_allclose(result.out, expected, atol=1e-5, rtol=1e-5)
    counts = np.bincount(experts[experts >= 0], minlength=case.num_experts)
    np.testing.assert_array_equal(result.counts.sum(axis=0), counts)
    slots = np.concatenate([selected.slots for selected, _ in parts])
    loads = np.bincount(slots[slots >= 0] // run.config.num_local_slots, minlength=run.plan.num_expert_ranks)
    kept = sum(float(s.kept_share) * v.sum() * case.top_k for s, v in parts)
    wanted = [case.valid(data).sum() * case.top_k, round(kept), (slots >= 0).sum(), loads.max()]
    np.testing.assert_array_equal(result.tally.sum(axis=0), wanted)
    return experts


@pytest.mark.parametrize("scope", ["global", pytest.param("data_rank", marks=pytest.mark.slow)])
def test_a_biased_router_with_groups_is_balanced_by_what_it_chooses_by(scope):
    """Weights are unbiased, and an expert outside of the groups that a token keeps is never taken instead."""
    case = replace(GROUPED, num_tokens=22)
    run = MoeRun(case, plan_of(2, 2), backend="replicated", num_redundant=8, selection="balanced", capacity_scope=scope)
    kept = np.isfinite(scores_of(case, 2)[1])
    for factor in (2.0, 0.5):
        experts = assert_defined(run, placements_for(case, run.plan, 8)[1], factor)
        tokens, picks = np.nonzero(experts >= 0)
        assert kept[tokens, experts[tokens, picks]].all()
    assert (experts[case.valid(2)] < 0).any(), "some groups are full before every token has its experts"


def assert_same_bits(found, expected) -> None:
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.out.view(np.int32), expected.out.view(np.int32))
    np.testing.assert_array_equal(found.counts, expected.counts)


@pytest.mark.parametrize("backend", ["all_to_all", pytest.param("fused", marks=pytest.mark.slow)])
@pytest.mark.parametrize("choice", [pytest.param("shares", marks=pytest.mark.slow), "capacity"])
def test_another_replica_changes_no_bit(backend, choice):
    """`topk` uses one slot of each expert, and what it gives does not depend on the placement."""
    topk = compiled(backend, num_redundant=8, selection="topk", slot_choice="first")
    run = compiled(backend, num_redundant=8, slot_choice=choice)
    for placement in placements_for(CASE, run.plan, 8):
        expected = topk(placement)
        for factor in (0.25, 1.0, 4.0):
            assert_same_bits(run(placement, capacity_factor=factor), expected)
        assert_same_bits(expected, topk(placements_for(CASE, run.plan, 8)[0]))


def test_where_capacity_is_enough_for_all_balanced_selection_is_top_k():
    placement, expected = placements_for(CASE, plan_of(2, 2), 8)[1], dense(CASE, 2)
    result = compiled("replicated", selection="balanced", capacity_scope="global")(placement, capacity_factor=100.0)
    valid = CASE.valid(2)
    np.testing.assert_array_equal(result.ids[valid], expected.ids[valid])
    assert (result.ids[~valid] == -1).all()
    np.testing.assert_allclose(result.out, expected.out, atol=1e-5, rtol=1e-5)
    wanted = valid.sum() * CASE.top_k
    np.testing.assert_array_equal(result.tally.sum(axis=0)[:3], [wanted] * 3)


@pytest.mark.parametrize("factor", [0.25, 1.0, 1.5])
def test_replicas_are_filled_in_turn_and_then_evenly(factor):
    generator = np.random.default_rng(4)
    num_slots, num_experts, num_tokens, k = 24, 10, 60, 3
    expert_of_slot = np.concatenate([np.arange(num_experts), generator.integers(0, 3, num_slots - num_experts)])
    places = generator.permuted(np.tile(np.arange(num_slots), (num_tokens, 1)), axis=1)
    scores = generator.standard_normal((num_tokens, num_experts)) - np.arange(num_experts)
    ids = np.array([best[:k] for best in ranked(scores)], np.int32)
    valid = generator.random(num_tokens) < 0.9
    capacity = oracle_capacity(factor, int(valid.sum()), k=k, num_slots=num_slots)

    expected, taken, dealt = np.full((k, num_tokens), -1), np.zeros(num_slots, int), np.zeros(num_experts, int)
    for rank in range(k):
        for token in np.flatnonzero(valid):
            slots = np.flatnonzero(expert_of_slot == ids[token, rank])
            free = [slot for slot in slots[np.argsort(places[token, slots])] if taken[slot] < capacity]
            if free:
                expected[rank, token] = free[0]
                taken[free[0]] += 1
    for rank in range(k):
        for token in np.flatnonzero(valid & (expected[rank] < 0)):
            slots = np.flatnonzero(expert_of_slot == ids[token, rank])
            expected[rank, token] = slots[dealt[ids[token, rank]] % len(slots)]
            dealt[ids[token, rank]] += 1

    place_NB = (expert_of_slot[:, None] * num_slots + places.T) * num_slots + np.arange(num_slots)[:, None]
    order = SlotOrder(jax.numpy.asarray(expert_of_slot, jax.numpy.int32), jax.numpy.asarray(place_NB, jax.numpy.int32))
    slots, tokens = jax.jit(spread_over_replicas)(ids.T, valid, order, capacity=np.int32(capacity))
    np.testing.assert_array_equal(slots, expected)
    np.testing.assert_array_equal(tokens, np.bincount(expected[expected >= 0], minlength=num_slots))


@pytest.mark.parametrize("num_tokens", [1, 37, 512, 1030])
def test_counting_rejects_the_same_tokens_as_sorting(num_tokens):
    """Devices differ in which of the two they run."""
    generator = np.random.default_rng(num_tokens)
    by_sorting, by_counting = jax.jit(reject_by_sorting), jax.jit(reject_by_counting)
    for _ in range(5):
        limits = generator.integers(0, num_tokens + 1, 12).astype(np.int32)
        free = generator.integers(0, 1 + num_tokens // 6, 12).astype(np.int32)
        slots = generator.integers(0, 13, num_tokens).astype(np.int32)
        for found, expected in zip(by_counting(slots, limits, free), by_sorting(slots, limits, free), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_near_slots_come_first():
    config = ExpertConfig(RouterSpec(8, 2, True), CPU, plan_of(2, 2), num_redundant=4)
    found = distances(config)
    assert found.shape == (12, 4)
    for slot in range(12):
        assert found[slot, slot // 3] == 0 and (np.delete(found[slot], slot // 3) == 1).all(), "all on one host here"


def test_the_dense_layer_would_notice():
    """The laws above can fail: other factors give other experts."""
    run = compiled("replicated", selection="balanced", capacity_scope="global")
    placement = placements_for(CASE, run.plan, 8)[1]
    assert (run(placement, capacity_factor=0.5).ids != dense(CASE, 2).ids).any()
