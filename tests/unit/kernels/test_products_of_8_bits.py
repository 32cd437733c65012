"""Products of two operands of 8 bits lie within the bound of their roundings, and planted faults leave it."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from rayserve_moe.kernels import narrow_weights
from rayserve_moe.kernels.narrow_weights import held_product, operand_of, quantized_rows
from rayserve_moe.kernels.reference.expert_products import LayerExperts, ProductConfig, multiply_in_blocks
from rayserve_moe.kernels.tpu import grouped_ffn
from tests.support.experts.quantized_experts import random_experts

NORMAL, SUBNORMAL = 2.0**-4, 2.0**-10
"""Maximum error of a number in e4m3, relative to itself, and to the scale of its row."""
ROUNDING = 1e-5
"""Share of the sum of all magnitudes that sums in float32 may be off."""
ROWS, WIDTH, COLUMNS = 24, 512, 256


def rows_of(seed: int = 0) -> np.ndarray:
    """Rows of magnitudes from 2**-90 to 2**60, of numbers that are far apart, and of zeros."""
    generator = np.random.default_rng(seed)
    rows = generator.standard_normal((ROWS, WIDTH)) * np.exp2(generator.integers(-12, 3, (ROWS, WIDTH)))
    rows *= np.exp2(generator.integers(-90, 60, (ROWS, 1)))
    rows[3] = 0
    rows[4, 1:] = 0
    return np.asarray(jnp.asarray(rows, jnp.bfloat16).astype(jnp.float32))


def matrix_of(*, has_blocks: bool) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """A matrix in e4m3 with its scales, and the numbers that it stands for."""
    form = {"dtype": "float8_e4m3fn", "has_blocks": has_blocks}
    quantized, plain = random_experts(1, WIDTH, COLUMNS, seed=3, **form)
    return quantized.up_XDF[0], quantized.up_scale_XZF[0], np.asarray(plain.up_XDF[0], np.float64)


def product_of(rows: np.ndarray, *, has_blocks: bool) -> np.ndarray:
    """The product of a kernel, interpreted."""
    matrix, scales, _ = matrix_of(has_blocks=has_blocks)

    def multiply(rows_ref, matrix_ref, scale_ref, out_ref) -> None:
        out_ref[...] = held_product(operand_of(rows_ref[...], narrows_rows=True), matrix_ref[...], scale_ref)

    shape = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)
    call = pl.pallas_call(multiply, out_shape=shape, interpret=True)
    return np.asarray(call(jnp.asarray(rows, jnp.bfloat16), matrix, scales), np.float64)


def excess(rows: np.ndarray, *, has_blocks: bool) -> float:
    """Return the largest error divided by its bound: at most 1 if all are within it, NaN if a result is NaN."""
    *_, numbers = matrix_of(has_blocks=has_blocks)
    scales = np.abs(rows).max(axis=1, keepdims=True) / 448
    off = np.maximum(NORMAL * np.abs(rows), SUBNORMAL * scales)
    bound = off @ np.abs(numbers) + ROUNDING * np.abs(rows) @ np.abs(numbers)
    error = np.abs(product_of(rows, has_blocks=has_blocks) - rows @ numbers)
    return float((error / np.where(bound > 0, bound, 1)).max())


def test_a_rounded_number_is_off_by_at_most_a_sixteenth_or_a_part_of_the_scale():
    rows = rows_of()
    narrow, scales = (np.asarray(array, np.float64) for array in quantized_rows(jnp.asarray(rows)))
    off = np.abs(narrow * scales - rows)
    assert (off <= np.maximum(NORMAL * np.abs(rows), SUBNORMAL * scales) * (1 + 1e-6)).all()
    assert (narrow[3] == 0).all() and (scales > 0).all() and np.abs(narrow).max() == 448
    assert (off / np.where(rows != 0, np.abs(rows), 1)).max() > 0.02


@pytest.mark.sampled(2)
@pytest.mark.parametrize("has_blocks", [False, True])
def test_a_product_is_within_the_bound_of_its_roundings(has_blocks):
    assert excess(rows_of(), has_blocks=has_blocks) <= 1


def scale_of_another_row(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    narrow, scales = quantized_rows(rows)
    return narrow, jnp.roll(scales, 1)


def scale_of_all_rows(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    wide = rows.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide)) / 448
    return (wide / scale).astype(jnp.float8_e4m3fn), jnp.full((len(rows), 1), scale)


def scale_too_small(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Planted fault: scale rows so that their maximum overflows e4m3."""
    _, scales = quantized_rows(rows)
    return (rows.astype(jnp.float32) / (scales * 0.9)).astype(jnp.float8_e4m3fn), scales * 0.9


def scale_too_large(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Planted fault: scale rows so that most numbers become subnormal."""
    _, scales = quantized_rows(rows)
    return (rows.astype(jnp.float32) / (scales * 2.0**12)).astype(jnp.float8_e4m3fn), scales * 2.0**12


def truncated(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Numbers are cut off towards zero."""
    _, scales = quantized_rows(rows)
    bits = jax.lax.bitcast_convert_type(rows.astype(jnp.float32) / scales, jnp.uint32) & jnp.uint32(0xFFF00000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.float8_e4m3fn), scales


FAULTS: dict[str, Callable[[jax.Array], tuple[jax.Array, jax.Array]]] = {
    "the scale of another row": scale_of_another_row,
    "a scale of all rows": scale_of_all_rows,
    "a scale that is too small": scale_too_small,
    "a scale that is too large": scale_too_large,
    "numbers that are truncated": truncated,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_planted_fault_of_the_rows_leaves_the_bound(fault, monkeypatch):
    """The elementwise bound, which the product's sums may hide."""
    rows = rows_of()
    narrow, scales = (np.asarray(array, np.float64) for array in fault(jnp.asarray(rows)))
    true_scales = np.abs(rows).max(axis=1, keepdims=True) / 448
    bound = np.maximum(NORMAL * np.abs(rows), SUBNORMAL * true_scales) * (1 + 1e-6)
    assert not (np.abs(narrow * scales - rows) <= bound).all()
    if fault in (scale_of_another_row, scale_too_small):
        monkeypatch.setattr(narrow_weights, "quantized_rows", fault)
        assert not excess(rows, has_blocks=False) <= 1


def test_scales_of_the_next_block_leave_the_bound(monkeypatch):
    """And so do blocks that are left out."""
    narrow = narrow_weights._product_of_8_bits

    def shifted(rows, matrix, scales, *, first):
        return narrow(rows, matrix, scales, first=first + 1)

    monkeypatch.setattr(narrow_weights, "_product_of_8_bits", shifted)
    assert excess(rows_of(), has_blocks=True) > 1
    monkeypatch.setattr(
        narrow_weights,
        "_product_of_8_bits",
        lambda rows, *others, **first: narrow(rows.at[:, 128:].set(0), *others, **first),
    )
    assert excess(rows_of(), has_blocks=True) > 1


SLOTS = 4


def grouped(weights, *, narrows_rows: bool, kernel=None) -> np.ndarray:
    """Results of the grouped kernel, interpreted, or of the reference: those of the rows that are here."""
    generator = np.random.default_rng(1)
    hidden = jnp.asarray(generator.standard_normal((40, WIDTH)), jnp.bfloat16)
    slots = generator.integers(0, SLOTS + 1, (40, 2)).astype(np.int32)
    config = ProductConfig(SLOTS, 8.0, narrows_rows=narrows_rows)
    experts = LayerExperts(weights, jnp.asarray(SLOTS, jnp.int32), config)
    run = jax.jit(multiply_in_blocks) if kernel is None else kernel
    return np.asarray(run(hidden, jnp.asarray(slots), experts), np.float32)[slots < SLOTS]


def by_kernel(*arguments) -> jax.Array:
    assert not grouped_ffn.unsupported_reason(*arguments, interpret=True)
    return grouped_ffn.multiply_grouped(*arguments, interpret=True)


@pytest.mark.slow
@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("has_blocks", [False, True])
def test_the_grouped_kernel_is_the_reference_and_near_the_exact_product(has_blocks, num_parts, monkeypatch):
    """In parts of the width rows of the operand of down have a scale for each part."""
    monkeypatch.setattr(grouped_ffn, "inner_block", lambda *_, **__: 256 // num_parts)
    form = {"dtype": "float8_e4m3fn", "has_blocks": has_blocks}
    weights, _ = random_experts(2 * SLOTS, WIDTH, 256, seed=1, **form)
    found = grouped(weights, narrows_rows=True, kernel=by_kernel)
    wanted, exact = (grouped(weights, narrows_rows=narrows) for narrows in (True, False))
    size = np.linalg.norm(exact)
    assert np.linalg.norm(found - wanted) < (0.01 if num_parts == 1 else 0.05) * size
    assert 0.01 * size < np.linalg.norm(found - exact) < 0.07 * size


def test_rows_are_rounded_only_if_requested():
    weights, _ = random_experts(2 * SLOTS, WIDTH, 256, seed=1, dtype="float8_e4m3fn")
    assert not ProductConfig(SLOTS, 8.0).narrows_rows
    plain, rounded = (grouped(weights, narrows_rows=narrows) for narrows in (False, True))
    assert not np.array_equal(plain, rounded)
