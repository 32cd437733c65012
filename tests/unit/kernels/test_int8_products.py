"""Products with experts in int8 are those with the numbers that they stand for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.expert_products import (
    ExpertWeights,
    LayerExperts,
    ProductConfig,
    multiply_by_ragged_dot,
    multiply_in_blocks,
    take_scales,
)
from tests.support.int8 import random_experts

COMPILED = {kernel.__name__: jax.jit(kernel) for kernel in (multiply_in_blocks, multiply_by_ragged_dot)}
KERNEL = pytest.mark.parametrize("kernel", COMPILED.values(), ids=COMPILED.keys())
WIDTH, INNER, SLOTS, TOP_K = 32, 64, 4, 2


def product(kernel, weights: ExpertWeights, dtype: str, *, num_tokens: int = 9) -> np.ndarray:
    """Of the second of two layers, whose results lie here."""
    generator = np.random.default_rng(num_tokens)
    hidden = jnp.asarray(generator.standard_normal((num_tokens, WIDTH)), dtype)
    slots = generator.integers(0, SLOTS + 1, (num_tokens, TOP_K)).astype(np.int32)
    config = ProductConfig(SLOTS, num_tokens * TOP_K / SLOTS)
    found = kernel(hidden, jnp.asarray(slots), LayerExperts(weights, jnp.asarray(SLOTS), config))
    assert found.dtype == dtype
    return np.asarray(found, np.float32)[slots < SLOTS]


@KERNEL
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_scales_that_are_powers_of_two_leave_every_bit(kernel, dtype, num_tokens):
    """Integers up to 127 and such multiples of them are exact in both dtypes, and rounding commutes with the scale."""
    quantized, plain = random_experts(2 * SLOTS, WIDTH, INNER, seed=1, powers_of_two=True)
    plain = jax.tree.map(lambda array: array.astype(dtype), plain)
    found, wanted = (product(kernel, each, dtype, num_tokens=num_tokens) for each in (quantized, plain))
    np.testing.assert_array_equal(found, wanted)
    assert np.abs(found).max() > 0.1


@KERNEL
def test_any_scales_are_within_the_rounding_of_float32(kernel):
    quantized, plain = random_experts(2 * SLOTS, WIDTH, INNER, seed=2)
    found, wanted = (product(kernel, each, "float32") for each in (quantized, plain))
    np.testing.assert_allclose(found, wanted, atol=4e-6 * np.abs(wanted).max())


def test_scales_of_rows_have_every_bit():
    generator = np.random.default_rng(8)
    scales = np.exp2(generator.uniform(-60, 60, (5, 1, 200))).astype(np.float32)
    slots = generator.integers(0, 6, 40).astype(np.int32)
    found = np.asarray(jax.jit(take_scales)(jnp.asarray(scales), jnp.asarray(slots)))
    np.testing.assert_array_equal(found, np.concatenate([scales[:, 0], np.zeros((1, 200), np.float32)])[slots])


@KERNEL
def test_biases_are_not_scaled(kernel):
    quantized, plain = random_experts(2 * SLOTS, WIDTH, INNER, seed=3)
    generator = np.random.default_rng(3)
    biases = [jnp.asarray(generator.standard_normal((2 * SLOTS, size)), jnp.float32) for size in (INNER, INNER, WIDTH)]
    names = ("gate_bias_XF", "up_bias_XF", "down_bias_XD")
    biased = (each._replace(**dict(zip(names, biases, strict=True))) for each in (quantized, plain))
    found, wanted = (product(kernel, each, "float32") for each in biased)
    np.testing.assert_allclose(found, wanted, atol=4e-6 * np.abs(wanted).max())


@KERNEL
@pytest.mark.parametrize("name", ["gate_scale_X1F", "up_scale_X1F", "down_scale_X1D"])
def test_every_scale_shows(kernel, name):
    quantized, _ = random_experts(2 * SLOTS, WIDTH, INNER, seed=4)
    doubled = quantized._replace(**{name: 2 * getattr(quantized, name)})
    found, wanted = (product(kernel, each, "float32") for each in (doubled, quantized))
    assert (np.abs(found - wanted) > 1e-4 * np.abs(wanted).max()).mean() > 0.9
