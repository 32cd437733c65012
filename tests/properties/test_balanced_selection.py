"""Balanced selection on the device is the sequential definition, bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from rayserve_moe.experts.balanced_layer import balanced_expert_selection, capacity_of
from tests.support.experts.balanced_cases import Case, Shape, cases, make_scores, make_table
from tests.support.experts.balanced_reference import oracle_capacity
from tests.support.session.hypothesis_examples import examples

FULL = Shape(512, 256, 8, 384, 16)
RELAXED = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)


def assert_as_defined(case: Case) -> None:
    expected = case.oracle()
    slots, weights, kept_share = case.on_device()
    np.testing.assert_array_equal(slots, expected.slots)
    np.testing.assert_array_equal(weights.view(np.int32), expected.weights.astype(np.float32).view(np.int32))
    assert kept_share == expected.kept_share and kept_share.dtype == np.float32


@settings(RELAXED, max_examples=examples(100).max_examples)
@given(case=cases())
def test_it_is_the_sequential_definition(case):
    assert_as_defined(case)


@pytest.mark.slow
@settings(RELAXED, max_examples=2000)
@given(case=cases())
def test_it_is_the_sequential_definition_in_many_cases(case):
    assert_as_defined(case)


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        pytest.param(kind, factor, marks=() if (kind, factor) == ("skewed", 1.25) else pytest.mark.slow)
        for kind in ("normal", "skewed", "ties")
        for factor in (1.0, 1.25, 2.0)
    ],
)
def test_at_full_size(kind, factor):
    generator = np.random.default_rng(5)
    table, scores = make_table(FULL, "replicas", generator), make_scores(FULL, kind, generator)
    assert_as_defined(Case(FULL, scores, table, {"factor": factor}, ()))


def test_capacity_is_computed_in_float32_from_left_to_right():
    compute = jax.jit(
        lambda factor, count, divisor: capacity_of(factor, jnp.arange(4096) < count, k=8, num_slots=divisor),
        static_argnums=2,
    )
    generator = np.random.default_rng(0)
    for num_slots in (7, 24, 48, 96, 160, 384):
        for factor in [0.1, 0.3, 0.7, 1.1, 1.2, *generator.uniform(0.25, 4.0, 30)]:
            count = int(generator.integers(0, 4096))
            expected = min(oracle_capacity(np.float32(factor), count, k=8, num_slots=num_slots), 4096)
            assert int(compute(np.float32(factor), count, num_slots)) == expected


def test_one_program_serves_every_factor_and_mapping():
    generator, shape = np.random.default_rng(1), Shape(16, 8, 2, 12, 3)
    with jax.log_compiles(False):
        select = jax.jit(lambda *arrays: balanced_expert_selection(*arrays, k=2, num_slots=12))
        for factor in (0.5, 1.0, 4.0):
            select(
                make_scores(shape, "normal", generator), make_table(shape, "replicas", generator), jnp.float32(factor)
            )
    assert select._cache_size() == 1


def test_nobody_gets_an_expert_twice_and_no_slot_more_than_its_capacity():
    generator, shape = np.random.default_rng(2), Shape(300, 16, 6, 24, 4)
    table, scores = make_table(shape, "replicas", generator), make_scores(shape, "skewed", generator)
    case = Case(shape, scores, table, {"factor": 0.8, "capacity": np.int32(40)}, ())
    slots, _, _ = case.on_device()
    taken = np.bincount(slots[slots >= 0], minlength=shape.slots)
    assert taken.max() == 40 and (slots < 0).any()
    expert_of_slot = np.full(shape.slots, -1)
    for expert, row in enumerate(table):
        expert_of_slot[row[row >= 0]] = expert
    for row in slots:
        experts = expert_of_slot[row[row >= 0]]
        assert len(set(experts.tolist())) == len(experts)
        assert shape.experts not in experts, "nobody selects the expert that is shared"


def test_a_dimension_of_devices_and_a_device_go_together():
    for table, device in ((np.zeros((2, 3, 1), np.int32), None), (np.zeros((3, 1), np.int32), 0)):
        with pytest.raises(ValueError, match="device_index"):
            balanced_expert_selection(jnp.zeros((1, 3)), jnp.asarray(table), 1.0, k=1, num_slots=3, device_index=device)
