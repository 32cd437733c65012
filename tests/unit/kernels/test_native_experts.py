"""Knobs of experts, routers and rotations by the native CPU kernels: those of the pure JAX path, row by row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.cpu_native import calls
from rayserve_moe.kernels.narrow_weights import NARROW
from rayserve_moe.kernels.reference import layers
from rayserve_moe.kernels.reference.activations import ACTIVATIONS, SILU, Activation, activate
from rayserve_moe.kernels.reference.expert_products import (
    ExpertWeights,
    LayerExperts,
    ProductConfig,
    multiply_in_blocks,
)
from tests.support.experts.quantized_experts import random_experts
from tests.support.kernels.native_kernels import laid_out, need_native_kernels

in_blocks, natively = jax.jit(multiply_in_blocks), jax.jit(calls.expert_results)
"""One program each, not one for every operation."""
TOKENS, INNER, SLOTS, TOP_K = 9, 96, 5, 2
WIDTH = 74
"""No whole panels of 32: the last one is narrower."""
ANY_ACTIVATION = pytest.mark.parametrize(
    "activation",
    [
        *map(Activation, ACTIVATIONS),
        Activation("clamped_swiglu", slope=0.8, limit=1.5),
        Activation("clipped_silu", limit=0.5),
    ],
    ids=lambda activation: f"{activation.name}-{activation.limit}",
)


@pytest.fixture(autouse=True, scope="module")
def _kernels():
    need_native_kernels()


def draw(generator: np.random.Generator, *shape: int, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(generator.standard_normal(shape) * scale, jnp.bfloat16)


def weights_of(generator: np.random.Generator, *, has_biases: bool, activation: Activation = SILU) -> ExpertWeights:
    """Of two layers; gates reach beyond 7, where one activation clips."""
    shapes = [(WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH)]
    biases = [(INNER,), (INNER,), (WIDTH,)] if has_biases else []
    weights = ExpertWeights(*(draw(generator, 2 * SLOTS, *shape, scale=0.5) for shape in (*shapes, *biases)))
    return weights._replace(gate_XDF=None, gate_bias_XF=None) if activation.name == "relu2" else weights


def packed(weights: ExpertWeights) -> ExpertWeights:
    matrices = (matrix if matrix is None else laid_out(matrix) for matrix in weights[:3])
    return ExpertWeights(*matrices, *weights[3:])


def experts_of(weights: ExpertWeights, activation: Activation) -> LayerExperts:
    """Those of the second layer."""
    return LayerExperts(weights, SLOTS, ProductConfig(SLOTS, TOKENS * TOP_K / SLOTS, activation))


def rounding_of(weights: ExpertWeights, hidden: jax.Array, slots: np.ndarray, activation: Activation) -> np.ndarray:
    """Results [T, K, D] in float64, the inner rows rounded to bfloat16 as both kernels round them."""
    wide = [None if array is None else np.asarray(array, np.float64)[SLOTS:][slots] for array in weights[:6]]
    gate, up, down, *biases = wide
    gate_bias, up_bias, down_bias = (0.0 if bias is None else bias for bias in biases)
    rows = np.asarray(hidden, np.float64)
    gate, up = (
        each if each is None else jnp.asarray(np.einsum("TD,TKDF->TKF", rows, each) + bias, jnp.float32)
        for each, bias in ((gate, gate_bias), (up, up_bias))
    )
    inner = activate(gate, up, activation).astype(jnp.bfloat16)
    return np.einsum("TKF,TKFD->TKD", np.asarray(inner, np.float64), down) + down_bias


@pytest.mark.sampled(3)
@pytest.mark.parametrize("has_biases", [False, True])
@ANY_ACTIVATION
def test_experts_with_biases_and_any_activation_are_those_of_the_blocks(activation, has_biases):
    generator = np.random.default_rng(len(activation.name))
    weights = weights_of(generator, has_biases=has_biases, activation=activation)
    hidden = draw(generator, TOKENS, WIDTH)
    slots = np.stack([generator.permutation(SLOTS)[:TOP_K] for _ in range(TOKENS)]).astype(np.int32)
    exact = rounding_of(weights, hidden, slots, activation)
    blocks = in_blocks(hidden, jnp.asarray(slots), experts_of(weights, activation))
    native = natively(hidden, jnp.asarray(slots), experts_of(packed(weights), activation))
    for found in (blocks, native):
        # An inner number at the middle of two is rounded to either side.
        np.testing.assert_allclose(np.asarray(found, np.float64), exact, atol=2**-7 * np.abs(exact).max())
    row = natively(hidden[3:4], jnp.asarray(slots[3:4]), experts_of(packed(weights), activation))
    np.testing.assert_array_equal(row[0], native[3])


@ANY_ACTIVATION
def test_an_mlp_has_the_activation_of_its_call(activation):
    generator = np.random.default_rng(4)
    weights = weights_of(generator, has_biases=False, activation=activation)
    hidden = draw(generator, TOKENS, WIDTH)
    found = calls.gated_mlp(hidden, packed(weights)[:3], layer=jnp.int32(SLOTS), activation=activation)
    wide = hidden.astype(jnp.float32), jax.tree.map(lambda each: each.astype(jnp.float32), weights[:3])
    expected = layers.gated_mlp(*wide, layer=jnp.int32(SLOTS), activation=activation)
    np.testing.assert_allclose(found, expected, atol=2**-6 * np.abs(expected).max())


@ANY_ACTIVATION
def test_columns_of_zeros_add_nothing(activation):
    """Weights and biases whose inner width is padded give the same bits."""
    generator = np.random.default_rng(1)
    weights = weights_of(generator, has_biases=True, activation=activation)
    hidden = draw(generator, TOKENS, WIDTH)
    slots = jnp.asarray(generator.integers(0, SLOTS, (TOKENS, TOP_K)), jnp.int32)
    inner = [(0, 0), (0, 32)]
    columns, rows = [(0, 0), *inner], [*inner, (0, 0)]
    padding = ExpertWeights(columns, columns, rows, inner, inner, [(0, 0), (0, 0)])
    pairs = zip(weights, padding, strict=True)
    more = ExpertWeights(*(array if array is None else jnp.pad(array, widths) for array, widths in pairs))
    once, again = (natively(hidden, slots, experts_of(packed(each), activation)) for each in (weights, more))
    np.testing.assert_array_equal(once, again)


@ANY_ACTIVATION
def test_what_is_no_number_stays_none(activation):
    generator = np.random.default_rng(2)
    weights = weights_of(generator, has_biases=True, activation=activation)
    hidden = draw(generator, TOKENS, WIDTH)
    slots = jnp.asarray(generator.integers(0, SLOTS, (TOKENS, TOP_K)), jnp.int32)
    experts = experts_of(packed(weights), activation)
    found = np.asarray(natively(hidden.at[4, 7].set(jnp.nan), slots, experts), np.float32)
    assert np.isnan(found[4]).all()
    np.testing.assert_array_equal(np.delete(found, 4, 0), np.delete(natively(hidden, slots, experts), 4, 0))


@pytest.mark.parametrize("activation", [Activation("relu"), Activation("")])
def test_other_activations_are_refused(activation):
    generator = np.random.default_rng(3)
    experts = experts_of(weights_of(generator, has_biases=False), activation)
    with pytest.raises(Exception, match="no such activation"):
        jax.block_until_ready(
            calls.expert_results(draw(generator, TOKENS, WIDTH), jnp.zeros((TOKENS, 1), jnp.int32), experts)
        )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("score", layers.SCORES)
@pytest.mark.parametrize(("is_biased", "num_experts"), [(False, 1), (True, 8), (True, 40), (False, 200)])
def test_scores_are_those_of_jax_row_by_row(score, is_biased, num_experts):
    generator = np.random.default_rng(num_experts)
    rows, router = draw(generator, 7, WIDTH), jnp.asarray(generator.standard_normal((WIDTH, num_experts)), jnp.float32)
    bias = jnp.asarray(generator.standard_normal(num_experts) * 3, jnp.float32) if is_biased else None
    found = calls.router_scores(rows, router, bias_E=bias, score=score)
    expected = layers.router_scores(rows, router, bias_E=bias, score=score)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-30)
    np.testing.assert_array_equal(calls.router_scores(rows[2:3], router, bias_E=bias, score=score)[0], found[2])
    poisoned = calls.router_scores(rows.at[2, 3].set(jnp.nan), router, bias_E=bias, score=score)
    assert np.isnan(poisoned[2]).all() and np.isfinite(np.delete(poisoned, 2, axis=0)).all()


def test_other_scores_are_refused():
    with pytest.raises(Exception, match="no such score"):
        jax.block_until_ready(calls.router_scores(jnp.ones((2, 4), jnp.bfloat16), jnp.ones((4, 3)), score="tanh"))


def test_the_factor_of_a_rotation_multiplies_cosine_and_sine():
    positions, frequencies = jnp.asarray([0, 1, 50, 1000], jnp.int32), np.float32([1.0, 0.25, 1e-3])
    found = calls.rotation_of(positions, frequencies, factor=1.3)
    for ours, theirs in zip(found, layers.rotation_of(positions, frequencies, factor=1.3), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
@pytest.mark.parametrize("has_blocks", [False, True])
@pytest.mark.parametrize("dtype", NARROW)
def test_experts_in_8_bits_have_the_bits_of_the_numbers_that_they_stand_for(dtype, has_blocks, num_tokens):
    """Of a few rows, and of many. Columns with scales that are powers of two, whose products are exact in both."""
    generator = np.random.default_rng(num_tokens)
    form = {"powers_of_two": not has_blocks, "dtype": dtype, "has_blocks": has_blocks}
    quantized, plain = random_experts(2 * SLOTS, 3 * WIDTH, INNER + 64, seed=7, **form)
    plain = ExpertWeights(*(laid_out(array.astype(jnp.bfloat16)) for array in plain[:3]))
    hidden = draw(generator, num_tokens, 3 * WIDTH)
    slots = jnp.asarray(generator.integers(0, SLOTS, (num_tokens, TOP_K)), jnp.int32)
    biases = [draw(generator, 2 * SLOTS, size) for size in (INNER + 64, INNER + 64, 3 * WIDTH)]
    for added in ({}, dict(zip(("gate_bias_XF", "up_bias_XF", "down_bias_XD"), biases, strict=True))):
        both = (each._replace(**added) for each in (packed(quantized), plain))
        found, wanted = (natively(hidden, slots, experts_of(each, SILU)) for each in both)
        np.testing.assert_array_equal(found, wanted)
        assert np.abs(wide(found)).max() > 0.1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", NARROW)
def test_any_scales_are_those_of_the_blocks(dtype):
    generator = np.random.default_rng(8)
    quantized, _ = random_experts(2 * SLOTS, WIDTH, INNER, seed=8, dtype=dtype)
    hidden, slots = draw(generator, TOKENS, WIDTH), jnp.asarray(generator.integers(0, SLOTS, (TOKENS, 2)), jnp.int32)
    found = wide(natively(hidden, slots, experts_of(packed(quantized), SILU)))
    wanted = wide(in_blocks(hidden, slots, experts_of(quantized, SILU)))
    np.testing.assert_allclose(found, wanted, atol=2**-7 * np.abs(wanted).max())


def test_integers_without_scales_are_refused():
    quantized, _ = random_experts(2 * SLOTS, WIDTH, INNER, seed=9)
    experts = experts_of(packed(quantized)._replace(up_scale_XZF=jnp.zeros((0, 1, INNER))), SILU)
    with pytest.raises(Exception, match=r"columns of 8 bits have scales|weights are no experts"):
        jax.block_until_ready(calls.expert_results(jnp.ones((2, WIDTH), jnp.bfloat16), jnp.zeros((2, 1), int), experts))


def wide(array: jax.Array) -> np.ndarray:
    return np.asarray(array, np.float32)
