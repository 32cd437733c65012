"""Products with experts in 8 bits are those with the numbers that they stand for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas as pl

from rayserve_moe.kernels.narrow_weights import NARROW, held_product
from rayserve_moe.kernels.reference.expert_products import (
    ExpertWeights,
    LayerExperts,
    ProductConfig,
    multiply_by_ragged_dot,
    multiply_in_blocks,
    take_scales,
)
from tests.support.experts.quantized_experts import random_experts

COMPILED = {kernel.__name__: jax.jit(kernel) for kernel in (multiply_in_blocks, multiply_by_ragged_dot)}
KERNEL = pytest.mark.parametrize("kernel", COMPILED.values(), ids=COMPILED.keys())
FORM = pytest.mark.parametrize(
    "form",
    [{"dtype": dtype, "has_blocks": has} for dtype in NARROW for has in (False, True)],
    ids=lambda form: str([*form.values()]),
)
WIDTH, INNER, SLOTS, TOP_K = 160, 136, 4, 2


def product(kernel, weights: ExpertWeights, dtype: str, *, num_tokens: int = 9) -> np.ndarray:
    """Of the second of two layers, whose results lie here; of plain weights the kernel has that layer's alone."""
    generator = np.random.default_rng(num_tokens)
    hidden = jnp.asarray(generator.standard_normal((num_tokens, WIDTH)), dtype)
    slots = generator.integers(0, SLOTS + 1, (num_tokens, TOP_K)).astype(np.int32)
    config, first = ProductConfig(SLOTS, num_tokens * TOP_K / SLOTS), SLOTS
    if weights.gate_scale_XZF is None:
        weights, first = jax.tree.map(lambda array: array[SLOTS:], weights), 0
    found = kernel(hidden, jnp.asarray(slots), LayerExperts(weights, jnp.asarray(first), config))
    assert found.dtype == dtype
    return np.asarray(found, np.float32)[slots < SLOTS]


@pytest.mark.sampled(5)
@KERNEL
@FORM
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_scales_that_are_powers_of_two_leave_every_bit(kernel, form, dtype, num_tokens):
    """Such multiples of numbers of 8 bits are exact in both dtypes, and rounding commutes with the scale."""
    quantized, plain = random_experts(2 * SLOTS, WIDTH, INNER, seed=1, powers_of_two=True, **form)
    plain = jax.tree.map(lambda array: array.astype(dtype), plain)
    found, wanted = (product(kernel, each, dtype, num_tokens=num_tokens) for each in (quantized, plain))
    np.testing.assert_array_equal(found, wanted)
    assert np.abs(found).max() > 0.1


@pytest.mark.sampled(4)
@KERNEL
@FORM
@pytest.mark.parametrize("has_biases", [False, True])
def test_any_scales_are_within_the_rounding_of_float32(kernel, form, has_biases):
    """And biases are not scaled."""
    quantized, plain = random_experts(2 * SLOTS, WIDTH, INNER, seed=2, **form)
    generator = np.random.default_rng(3)
    biases = [jnp.asarray(generator.standard_normal((2 * SLOTS, size)), jnp.float32) for size in (INNER, INNER, WIDTH)]
    added = dict(zip(("gate_bias_XF", "up_bias_XF", "down_bias_XD"), biases, strict=True)) if has_biases else {}
    found, wanted = (product(kernel, each._replace(**added), "float32") for each in (quantized, plain))
    np.testing.assert_allclose(found, wanted, atol=4e-6 * np.abs(wanted).max())


@KERNEL
@pytest.mark.parametrize("dtype", NARROW)
def test_blocks_have_the_bits_of_what_they_stand_for_in_bfloat16(kernel, dtype):
    """With any scales: numbers are rounded as those of a matrix are that is read as bfloat16."""
    quantized, plain = random_experts(2 * SLOTS, WIDTH, INNER, seed=5, dtype=dtype, has_blocks=True)
    plain = jax.tree.map(lambda array: array.astype("bfloat16"), plain)
    np.testing.assert_array_equal(*(product(kernel, each, "bfloat16") for each in (quantized, plain)))


def test_the_kernels_conversion_of_e4m3_is_exact_for_every_number():
    """Subnormal ones too, by the product with a matrix that leaves them as they are."""
    bits = np.arange(256, dtype=np.uint8)
    bits[[0x7F, 0x80, 0xFF]] = 0
    numbers = jnp.asarray(np.tile(bits, (128, 1)).view(ml_dtypes.float8_e4m3fn))

    def multiply(rows_ref, matrix_ref, scale_ref, out_ref) -> None:
        out_ref[...] = held_product((rows_ref[...], None), matrix_ref[...], scale_ref)

    for num_scales in (1, 8):
        given = jnp.eye(128, dtype=jnp.bfloat16), numbers, jnp.ones((num_scales, 256))
        shape = jax.ShapeDtypeStruct(numbers.shape, jnp.float32)
        found = pl.pallas_call(multiply, out_shape=shape, interpret=True)(*given)
        np.testing.assert_array_equal(found, numbers.astype(jnp.float32))


def test_scales_of_rows_have_every_bit():
    generator = np.random.default_rng(8)
    scales = np.exp2(generator.uniform(-60, 60, (5, 1, 200))).astype(np.float32)
    slots = generator.integers(0, 6, 40).astype(np.int32)
    found = np.asarray(jax.jit(take_scales)(jnp.asarray(scales), jnp.asarray(slots)))
    np.testing.assert_array_equal(found, np.concatenate([scales[:, 0], np.zeros((1, 200), np.float32)])[slots])


@KERNEL
@pytest.mark.parametrize("name", ["gate_scale_XZF", "up_scale_XZF", "down_scale_XZD"])
def test_every_scale_shows(kernel, name):
    quantized, _ = random_experts(2 * SLOTS, WIDTH, INNER, seed=4)
    doubled = quantized._replace(**{name: 2 * getattr(quantized, name)})
    found, wanted = (product(kernel, each, "float32") for each in (doubled, quantized))
    assert (np.abs(found - wanted) > 1e-4 * np.abs(wanted).max()).mean() > 0.9
