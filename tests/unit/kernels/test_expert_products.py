"""Every way to multiply experts equals the dense definition, for any split of assignments over slots."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.kernels.reference.activations import SILU, Activation, activate
from rayserve_moe.kernels.reference.expert_products import (
    ExpertWeights,
    LayerExperts,
    ProductConfig,
    multiply_by_ragged_dot,
    multiply_in_blocks,
)
from tests.support.experts.expert_reference import activation_by_hand
from tests.support.session.hypothesis_examples import examples

COMPILED = {kernel.__name__: jax.jit(kernel) for kernel in (multiply_in_blocks, multiply_by_ragged_dot)}
"""The native one takes packed bfloat16 only; `test_cpu_native.py` holds it to these."""
KERNEL = pytest.mark.parametrize("kernel", COMPILED.values(), ids=COMPILED.keys())
WIDTH, INNER, NUM_LAYERS = 6, 4, 3
CLAMPED = Activation("clamped_swiglu", slope=1.5, limit=5.0)


def weights_for(num_slots: int, *, biased: bool = False) -> ExpertWeights:
    generator = np.random.default_rng(num_slots)
    shapes = [(WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH), *[(INNER,), (INNER,), (WIDTH,)] * biased]
    stacked = (generator.standard_normal((NUM_LAYERS * num_slots, *shape)).astype(np.float32) for shape in shapes)
    return ExpertWeights(*(jnp.asarray(array) for array in stacked))


def dense(hidden: np.ndarray, slots: np.ndarray, weights: ExpertWeights, *, first_slot: int, num_slots: int):
    """Assignment by assignment, in float64."""
    out = np.zeros((*slots.shape, hidden.shape[1]))
    gates, ups, downs, *biases = (np.asarray(array, np.float64) for array in weights if array is not None)
    gate_biases, up_biases, down_biases = biases or np.zeros((3, len(gates), 1))
    for token, pick in np.ndindex(slots.shape):
        if slots[token, pick] < num_slots:
            expert, row = first_slot + slots[token, pick], hidden[token].astype(np.float64)
            gate, up = row @ gates[expert] + gate_biases[expert], row @ ups[expert] + up_biases[expert]
            inner = activation_by_hand(gate, up, activation=CLAMPED if biases else SILU)
            out[token, pick] = inner @ downs[expert] + down_biases[expert]
    return out


def check(kernel, slots: np.ndarray, num_slots: int, layer: int, *, biased: bool = False) -> None:
    """With biases, the activation is the clamped one, and rows are large enough for both of its limits."""
    size, drawn = 1 + 4 * biased, np.random.default_rng(slots.size).standard_normal((len(slots), WIDTH))
    hidden = drawn.astype(np.float32) * size
    weights, first_slot = weights_for(num_slots, biased=biased), layer * num_slots
    config = ProductConfig(num_slots, slots.size / num_slots, CLAMPED if biased else SILU)
    experts = LayerExperts(weights, jnp.asarray(first_slot, jnp.int32), config)
    found = kernel(jnp.asarray(hidden), jnp.asarray(slots, jnp.int32), experts)
    expected = dense(hidden, slots, weights, first_slot=first_slot, num_slots=num_slots)
    assert found.shape == expected.shape
    here = slots < num_slots
    np.testing.assert_allclose(np.asarray(found)[here], expected[here], atol=2e-5 * size)


@KERNEL
def test_biases_are_added_once_to_every_result(kernel):
    check(kernel, np.random.default_rng(5).integers(0, 5, (50, 3)), 4, NUM_LAYERS - 1, biased=True)


@KERNEL
def test_experts_without_a_gate_square_what_is_positive(kernel):
    generator, slots = np.random.default_rng(6), np.array([[0, 1], [2, 0], [1, 3]])
    hidden = generator.standard_normal((3, WIDTH)).astype(np.float32)
    weights = weights_for(3)._replace(gate_XDF=None)
    experts = LayerExperts(weights, jnp.int32(3), ProductConfig(3, 2.0, Activation("relu2")))
    found = kernel(jnp.asarray(hidden), jnp.asarray(slots, jnp.int32), experts)
    for token, pick in zip(*np.nonzero(slots < 3), strict=True):
        expert = 3 + slots[token, pick]
        inner = np.maximum(hidden[token] @ np.asarray(weights.up_XDF[expert], np.float64), 0) ** 2
        np.testing.assert_allclose(found[token, pick], inner @ weights.down_XFD[expert], atol=2e-5)


@KERNEL
@pytest.mark.parametrize("which", [3, 4, 5])
def test_every_bias_shows(kernel, which):
    hidden, slots, weights = jnp.ones((3, WIDTH)), jnp.zeros((3, 1), jnp.int32), weights_for(1, biased=True)
    zeroed = ExpertWeights(*(jnp.zeros_like(w) if i == which else w for i, w in enumerate(weights)))
    one, other = (kernel(hidden, slots, LayerExperts(w, 1, ProductConfig(1, 3.0))) for w in (weights, zeroed))
    assert np.abs(np.asarray(one - other)).max() > 1e-4


def test_both_limits_of_the_clamped_activation_show():
    gate, up = np.array([9.0, 9.0, -9.0, 1.0]), np.array([1.0, 9.0, -9.0, -9.0])
    activation = Activation("clamped_swiglu")
    expected = activation_by_hand(gate, up, activation=activation)
    np.testing.assert_allclose(activate(jnp.asarray(gate), jnp.asarray(up), activation), expected, rtol=1e-5)
    assert expected[0] == pytest.approx(14, abs=1e-3) and expected[1] == pytest.approx(56, abs=1e-3)


@KERNEL
@pytest.mark.parametrize("layer", range(NUM_LAYERS))
@pytest.mark.parametrize(("num_tokens", "top_k", "num_slots"), [(1, 1, 1), (1, 4, 8), (200, 2, 4)])
def test_it_is_the_dense_product(kernel, layer, num_tokens, top_k, num_slots):
    generator = np.random.default_rng([num_tokens, layer])
    slots = np.argsort(generator.random((num_tokens, num_slots)), axis=1)[:, :top_k]
    check(kernel, slots, num_slots, layer)


@KERNEL
def test_all_tokens_may_go_to_one_expert(kernel):
    check(kernel, np.full((130, 1), 3), 8, 1)


@KERNEL
def test_no_assignment_may_lie_here(kernel):
    check(kernel, np.full((9, 2), 4), 4, 0)


@KERNEL
def test_slots_beyond_the_local_ones_lie_elsewhere(kernel):
    check(kernel, np.array([[0, 4], [5, 1], [100, 2], [3, 4]]), 4, 2)


@KERNEL
@given(shape=st.sampled_from([(1, 2), (24, 2)]), num_slots=st.sampled_from([1, 8]), seed=st.integers(0, 999))
@examples(25)
def test_it_is_the_dense_product_for_any_spread(kernel, shape, num_slots, seed):
    generator = np.random.default_rng(seed)
    check(kernel, generator.integers(0, num_slots + 1, shape), num_slots, int(generator.integers(NUM_LAYERS)))


@KERNEL
def test_a_token_does_not_depend_on_its_company(kernel):
    generator = np.random.default_rng(8)
    hidden = generator.standard_normal((12, WIDTH)).astype(np.float32)
    slots, weights = generator.integers(0, 4, (12, 2)), weights_for(4)

    is_other = np.arange(12)[:, None] != 5

    def run(other_hidden: np.ndarray, other_slots: np.ndarray) -> np.ndarray:
        arguments = np.where(is_other, other_hidden, hidden), np.where(is_other, other_slots, slots)
        arrays = (jnp.asarray(arguments[0], jnp.float32), jnp.asarray(arguments[1], jnp.int32))
        return np.asarray(kernel(*arrays, LayerExperts(weights, jnp.asarray(0), ProductConfig(4, 6.0))))[5]

    alone = run(hidden, np.full((12, 2), 4))
    for other_slots in (slots, np.full((12, 2), 1), np.full((12, 2), 4)):
        np.testing.assert_allclose(run(hidden * 2, other_slots), alone, atol=1e-6)
        np.testing.assert_allclose(run(hidden * np.nan, other_slots), alone, atol=1e-6)


@KERNEL
def test_rows_may_come_in_parts(kernel):
    generator = np.random.default_rng(9)
    hidden = jnp.asarray(generator.standard_normal((12, WIDTH)), jnp.float32)
    slots = jnp.asarray(generator.integers(0, 4, (12, 2)), jnp.int32)
    experts = LayerExperts(weights_for(4), 4, ProductConfig(4, 6.0))
    in_parts = kernel(hidden.reshape(12, 2, WIDTH // 2), slots, experts)
    assert in_parts.shape == (12, 2, 2, WIDTH // 2)
    whole = kernel(hidden, slots, experts)
    np.testing.assert_array_equal(in_parts.reshape(12, 2, WIDTH), whole)


@KERNEL
def test_the_gate_has_the_activation_of_the_config(kernel):
    hidden, weights = jnp.full((3, WIDTH), 0.5), weights_for(1)
    experts = LayerExperts(weights, 2, ProductConfig(1, 3.0, Activation("gelu_tanh")))
    found = kernel(hidden, jnp.zeros((3, 1), jnp.int32), experts)
    gate, up, down = (array[2] for array in weights[:3])
    expected = (jax.nn.gelu(hidden @ gate) * (hidden @ up)) @ down
    np.testing.assert_allclose(np.asarray(found)[:, 0], expected, atol=1e-5)
